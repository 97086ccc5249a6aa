"""Trains the tokenizer and turns documents into token ids."""

from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from .corpus import Domain

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Their ids are 0, 1 and 2."""


def train_tokenizer(domains: Iterable[Domain], vocabulary_size: int) -> Tokenizer:
    """Byte-level BPE, learned from the training documents only."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    documents = (document for domain in domains for document in domain.training)
    tokenizer.train_from_iterator(documents, trainer)
    if tokenizer.get_vocab_size() != vocabulary_size:
        raise ValueError(f"too little text for {vocabulary_size} tokens")
    return tokenizer


def load_or_train_tokenizer(
    path: Path, domains: Iterable[Domain], vocabulary_size: int
) -> Tokenizer:
    """Reuse the tokenizer of an interrupted run, or train one and keep it at `path`."""
    if path.is_file():
        return Tokenizer.from_file(str(path))
    tokenizer = train_tokenizer(domains, vocabulary_size)
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
    return tokenizer


def encode(tokenizer: Tokenizer, documents: Iterable[str]) -> Tensor:
    """Token ids [tokens] of all documents, each opened by `<|endoftext|>`."""
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(list(documents)):
        ids.append(0)
        ids.extend(encoding.ids)
    return torch.tensor(ids)
