"""Documents into batches of token sequences."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import yaml

from reap.artifacts import Corpus
from reap.data import data_directory
from reap.errors import CalibrationError


@dataclass(frozen=True)
class TextSet:
    """The documents of one domain. `source` names the set or file, `sha256` is of its bytes."""

    domain: str
    source: str
    sha256: str
    documents: tuple[str, ...]


@dataclass(frozen=True)
class TokenSequence:
    """Up to a sequence length of consecutive tokens of one document."""

    domain: int
    document: int
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Batch:
    """Sequences of one domain and half, padded on the right.

    tokens int32 [sequences, length]; lengths int64 [sequences]; documents: for each sequence the
    index of its document within the domain; half 0 or 1: the parity of that index.
    """

    domain: int
    half: int
    tokens: mx.array
    lengths: np.ndarray
    documents: tuple[int, ...]

    @property
    def mask(self) -> np.ndarray:
        """True where there is a token, bool [sequences, length]."""
        return np.arange(self.tokens.shape[1])[None, :] < self.lengths[:, None]


def named_sets() -> dict[str, dict[str, Any]]:
    """The shipped text sets: name → their YAML description."""
    files = sorted(data_directory("calibration").glob("*.yaml"))
    return {file.stem: yaml.safe_load(file.read_text(encoding="utf-8")) for file in files}


def load_texts(names: Sequence[str], *, split: str) -> list[TextSet]:
    """Text sets by name (all shipped ones if `names` is empty) or local .jsonl / .txt files.

    `split` is "calibration" or "evaluation" and selects the file of a named set. Raises
    CalibrationError for unknown names, unreadable files and sets without text.
    """
    known = named_sets()
    texts = []
    for name in names or list(known):
        if name in known:
            description = known[name]["splits"][split]
            path = data_directory("calibration") / description["file"]
            text = _read(path, known[name]["domain"], name)
            if text.sha256 != description["sha256"]:
                raise CalibrationError(f"{path} does not have the checksum of its description.")
        else:
            path = Path(name)
            if not path.is_file():
                raise CalibrationError(
                    f"{name} is neither a shipped text set nor a file.",
                    f"shipped: {', '.join(known)}; or give a .jsonl or .txt file",
                )
            text = _read(path, path.name.split(".")[0], name)
        texts.append(text)
    domains = [text.domain for text in texts]
    twice = {domain for domain in domains if domains.count(domain) > 1}
    if twice:
        raise CalibrationError(
            f"two text sets are called {twice.pop()}.", "rename one of the files"
        )
    return texts


def _read(path: Path, domain: str, source: str) -> TextSet:
    try:
        raw = path.read_bytes()
        if path.suffix == ".jsonl":
            # Not splitlines(): JSON strings may hold U+2028 and other marks that it takes for ends.
            lines = [line for line in raw.decode("utf-8").split("\n") if line.strip()]
            documents = [json.loads(line)["text"] for line in lines]
            if not all(isinstance(document, str) for document in documents):
                raise TypeError("text is not a string")
        elif path.suffix == ".txt":
            documents = [raw.decode("utf-8")]
        else:
            raise CalibrationError(
                f"{path} is of a kind that reap cannot read.",
                'give .txt or .jsonl with a "text" field',
            )
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(f"{path} cannot be read: {error}") from None
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise CalibrationError(f'{path} is not JSON lines with a "text" field: {error!r}') from None
    documents = [document for document in documents if document.strip()]
    if not documents:
        raise CalibrationError(f"{path} has no text: 0 tokens to work on.", "give text")
    return TextSet(domain, source, hashlib.sha256(raw).hexdigest(), tuple(documents))


def load_tokenizer(path: Path, *, trust_remote_code: bool = False) -> Any:
    """mlx-lm's tokenizer of a model directory. Raises CalibrationError if it needs consent."""
    from mlx_lm.utils import load_tokenizer as load
    from transformers.utils import logging

    logging.set_verbosity_error()
    try:
        tokenizer = load(path, {"trust_remote_code": trust_remote_code})
        # Without files, transformers makes up an empty tokenizer for some architectures.
        if not tokenizer.encode("text"):
            raise ValueError("it gives no tokens; its files may be missing")
        return tokenizer
    except (ValueError, OSError) as error:
        wants_code = "trust_remote_code" in str(error)
        raise CalibrationError(
            f"the tokenizer of {path} cannot be loaded: {str(error).splitlines()[0]}",
            "pass --trust-remote-code if you trust the code beside it" if wants_code else None,
        ) from None


def sequences(
    texts: Sequence[TextSet],
    tokenizer: Any,
    *,
    sequence_length: int,
    tokens: int | None = None,
    vocab_size: int,
) -> list[TokenSequence]:
    """Cut every document into sequences of at most `sequence_length` tokens.

    `tokens` limits the total, an equal share for each domain (a domain with less text gives what
    it has); first come the beginnings of all documents, then what follows, so that a small share
    still spans many documents. Sequences of a single token are dropped: nothing can be predicted
    from them. Raises CalibrationError if the tokenizer does not belong to the model.
    """
    share = None if tokens is None else max(1, tokens // len(texts))
    found: list[TokenSequence] = []
    for domain, text in enumerate(texts):
        encoded = [tokenizer.encode(content) for content in text.documents]
        largest = max((max(ids) for ids in encoded if ids), default=0)
        if largest >= vocab_size:
            raise CalibrationError(
                f"the tokenizer gives id {largest}, the model has {vocab_size} embeddings.",
                "the tokenizer files do not belong to this model",
            )
        left = sum(map(len, encoded)) if share is None else share
        for start in range(0, max(map(len, encoded)), sequence_length):
            for document, ids in enumerate(encoded):
                part = ids[start : min(start + sequence_length, start + left)]
                left -= len(part)
                if len(part) > 1:
                    found.append(TokenSequence(domain, document, tuple(part)))
        if not any(part.domain == domain for part in found):
            raise CalibrationError(
                f"{text.domain} has 0 tokens to work on: no sequence of two or more.",
                "give more text or a larger --tokens",
            )
    return found


def check_length(sequence_length: int, tokens_per_call: int) -> None:
    """Raise CalibrationError if one sequence is more than the experts take in one call."""
    if sequence_length > tokens_per_call:
        raise CalibrationError(
            f"sequences of {sequence_length:,} tokens are too long: this model's experts take at "
            f"most {tokens_per_call:,} tokens at a time.",
            f"use --sequence-length {tokens_per_call} or less",
        )


def batches(parts: Sequence[TokenSequence], *, tokens_per_batch: int) -> list[Batch]:
    """Group sequences by domain and half, longest first to waste little on padding."""
    groups: dict[tuple[int, int], list[TokenSequence]] = defaultdict(list)
    for part in parts:
        groups[part.domain, part.document % 2].append(part)
    made = []
    for (domain, half), group in sorted(groups.items()):
        group = sorted(group, key=lambda part: -len(part.tokens))
        while group:
            rows = max(1, tokens_per_batch // len(group[0].tokens))
            made.append(_batch(domain, half, group[:rows]))
            group = group[rows:]
    return made


def _batch(domain: int, half: int, group: Sequence[TokenSequence]) -> Batch:
    lengths = np.array([len(part.tokens) for part in group])
    tokens = np.zeros((len(group), lengths.max()), dtype=np.int32)
    for row, part in zip(tokens, group):
        row[: len(part.tokens)] = part.tokens
    documents = tuple(part.document for part in group)
    return Batch(domain, half, mx.array(tokens), lengths, documents)


def corpora(texts: Sequence[TextSet], parts: Sequence[TokenSequence]) -> tuple[Corpus, ...]:
    """What was used of each text, for the provenance."""
    used = []
    for domain, text in enumerate(texts):
        mine = [part for part in parts if part.domain == domain]
        used.append(
            Corpus(
                domain=text.domain,
                source=text.source,
                sha256=text.sha256,
                documents=len({part.document for part in mine}),
                tokens=sum(len(part.tokens) for part in mine),
            )
        )
    return tuple(used)
