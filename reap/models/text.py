"""Documents into batches of token sequences.

Every sequence is part of one document and attends to nothing else: documents are never packed
into one sequence.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import numpy as np
import yaml

from reap.artifacts import Corpus
from reap.artifacts.files import sha256
from reap.data import data_directory
from reap.errors import CalibrationError
from reap.models.chat import ChatRenderer
from reap.models.rows import (
    HUB_NAME,
    KINDS,
    Chat,
    Rows,
    TextOption,
    directory_rows,
    file_rows,
    hub_rows,
)

Cut = Literal["split", "truncate"]
"""A document longer than a sequence gives several sequences, or only its first."""


@dataclass(frozen=True)
class TextSet:
    """The documents of one domain, as text or as tokens.

    `source` is what the user named; `sha256` is of the file's bytes, or of the text that was read
    from a dataset. `limit` is the domain's own number of tokens; without one it has a share of
    what is left by `weight`.
    """

    domain: str
    source: str
    sha256: str
    documents: tuple[str | tuple[int, ...], ...]
    weight: Fraction = Fraction(1)
    limit: int | None = None


@dataclass(frozen=True)
class RowSet:
    """A domain whose documents are still to be read, as many as its tokens need: see TextSet.
    `sha256` is "" until a dataset is read."""

    domain: str
    source: str
    sha256: str
    rows: Rows
    weight: Fraction = Fraction(1)
    limit: int | None = None


Text = TextSet | RowSet


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


def load_texts(names: Sequence[str], *, split: str) -> list[Text]:
    """Open what the user named: shipped sets (all if `names` is empty), files, datasets.

    `split` is "calibration" or "evaluation" and selects the file of a named set. Raises
    CalibrationError for unknown names, and for text whose first row cannot be used.
    """
    texts = [_open(TextOption.parse(name), split) for name in names or list(named_sets())]
    domains = [text.domain for text in texts]
    twice = {domain for domain in domains if domains.count(domain) > 1}
    if twice:
        raise CalibrationError(
            f"two text sets are called {twice.pop()}.", "give one a name of its own: NAME:SOURCE"
        )
    return texts


def _open(option: TextOption, split: str) -> Text:
    known = named_sets()
    path = Path(option.name).expanduser()
    amount = (option.weight, option.tokens)
    file = path.is_file() or (option.name not in known and path.name.endswith(KINDS))
    if option.name in known and not option.rest:
        description = known[option.name]["splits"][split]
        path = data_directory("calibration") / description["file"]
        if sha256(path) != description["sha256"]:
            raise CalibrationError(f"{path} does not have the checksum of its description.")
        documents = tuple(text for _, text in file_rows(path).documents() if isinstance(text, str))
        domain = option.domain or known[option.name]["domain"]
        return TextSet(domain, option.given, description["sha256"], documents, *amount)
    if len(option.rest) > (1 if file else 2):
        raise CalibrationError(
            f"{option.given} has too many colons.",
            "write FILE:COLUMN or DIRECTORY:SPLIT:COLUMN or ORG/NAME/CONFIG:SPLIT:COLUMN",
        )
    if path.is_file():
        domain = option.domain or path.name.split(".")[0] or path.name
        if path.suffix == ".txt":
            if option.rest:
                raise CalibrationError(f"{path} is plain text and has no columns.")
            return TextSet(domain, option.given, sha256(path), (_plain(path),), *amount)
        rows = file_rows(path, *option.rest)
        digest = sha256(path)
    elif option.name and path.is_dir():
        domain = option.domain or path.resolve().name
        rows, digest = directory_rows(path, *option.rest), ""
    elif not file and HUB_NAME.fullmatch(option.name):
        domain = option.domain or option.name.split("@")[0].split("/")[1]
        rows, digest = hub_rows(option.name, *option.rest), ""
    else:
        raise CalibrationError(
            f"{option.name} is neither a shipped text set nor a file.",
            f"shipped: {', '.join(known)}; or give a file ({', '.join(KINDS)}), a directory of a "
            "dataset or the ORG/NAME of one on the hub",
        )
    _ = rows.shape  # reads the first row
    return RowSet(domain, option.given, digest, rows, *amount)


def _plain(path: Path) -> str:
    try:
        text = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(f"{path} cannot be read: {error}") from None
    if not text.strip():
        raise CalibrationError(f"{path} has no text: 0 tokens to work on.", "give text")
    return text


def shares(texts: Sequence[Text], tokens: int | None) -> list[int | None]:
    """Tokens of each domain; None for all it has.

    Domains with a limit of their own have that; what is left of `tokens` is divided by weight.
    """
    own = sum(text.limit for text in texts if text.limit is not None)
    weights = [text.weight for text in texts if text.limit is None]
    if tokens is None:
        if len(set(weights)) > 1:
            raise CalibrationError("weights divide a number of tokens.", "give --tokens")
        return [text.limit for text in texts]
    left = tokens - own
    if left < (1 if weights else 0):
        raise CalibrationError(
            f"the domains' own limits are {own:,} tokens, which leaves {left:,} of {tokens:,}.",
            "raise --tokens",
        )
    return [
        max(1, int(left * text.weight / sum(weights))) if text.limit is None else text.limit
        for text in texts
    ]


def read_texts(
    texts: Sequence[Text],
    tokenizer: Any,
    *,
    sequence_length: int,
    tokens: int | None = None,
    documents: Cut = "split",
) -> list[TextSet]:
    """Read of every file and dataset the documents that `sequences` will use, and no more.

    Raises CalibrationError for a row without usable text, and for a dataset on the hub that has
    no limit of tokens.
    """
    return [
        text
        if isinstance(text, TextSet)
        else _read(text, tokenizer, sequence_length, share, documents)
        for text, share in zip(texts, shares(texts, tokens))
    ]


def read_sequences(
    texts: Sequence[Text],
    tokenizer: Any,
    *,
    sequence_length: int,
    tokens: int | None,
    documents: Cut,
    vocab_size: int,
) -> tuple[list[TextSet], list[TokenSequence]]:
    """What `read_texts` reads, and the `sequences` of it."""
    read = read_texts(
        texts, tokenizer, sequence_length=sequence_length, tokens=tokens, documents=documents
    )
    parts = sequences(
        read,
        tokenizer,
        sequence_length=sequence_length,
        tokens=tokens,
        documents=documents,
        vocab_size=vocab_size,
    )
    return read, parts


def _read(
    text: RowSet, tokenizer: Any, sequence_length: int, share: int | None, documents: Cut
) -> TextSet:
    rows = text.rows
    if rows.endless and share is None:
        raise CalibrationError(
            f"{rows.name} would be downloaded whole.",
            f"give --tokens, or {text.source}=20000tok",
        )
    render: ChatRenderer | None = None
    found: list[tuple[int, ...]] = []
    digest = hashlib.sha256()
    taken = 0
    for place, content in rows.documents():
        if isinstance(content, Chat):
            render = render or ChatRenderer(tokenizer)
            try:
                content, ids = render(content.messages, content.tools)
            # Templates and the code of tokenizers raise nearly anything.
            except Exception as error:
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                raise CalibrationError(
                    f"the model's chat template refuses {place} of {rows.name}: {reason}"
                ) from None
        elif content.strip():
            ids = tokenizer.encode(content)
        else:
            continue
        raw = content.encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(8, "little") + raw)
        found.append(tuple(ids[:sequence_length] if documents == "truncate" else ids))
        # As `sequences`: first come the beginnings of all documents.
        taken += min(len(ids), sequence_length)
        if share is not None and taken >= share:
            break
    if not found:
        raise CalibrationError(f"{rows.name} has no text: 0 tokens to work on.", "give text")
    return TextSet(
        text.domain,
        text.source,
        text.sha256 or digest.hexdigest(),
        tuple(found),
        text.weight,
        text.limit,
    )


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
    # ImportError: code beside a tokenizer that needs another version or a missing library.
    except (ValueError, OSError, ImportError) as error:
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
    documents: Cut = "split",
    vocab_size: int,
) -> list[TokenSequence]:
    """Cut every document into sequences of at most `sequence_length` tokens.

    `tokens` limits the total, a share for each domain by weight (a domain with less text gives
    what it has); first come the beginnings of all documents, then what follows, so that a small
    share still spans many documents. Sequences of a single token are dropped: nothing can be
    predicted from them. Raises CalibrationError if the tokenizer does not belong to the model.
    """
    found: list[TokenSequence] = []
    for domain, (text, share) in enumerate(zip(texts, shares(texts, tokens))):
        encoded = [
            tokenizer.encode(content) if isinstance(content, str) else content
            for content in text.documents
        ]
        if documents == "truncate":
            encoded = [ids[:sequence_length] for ids in encoded]
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
