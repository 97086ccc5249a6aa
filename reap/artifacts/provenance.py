"""Where a file comes from: part of every file that a stage writes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Corpus:
    """Text of one domain as it was used. `tokens` counts positions that were scored or observed."""

    domain: str
    source: str
    sha256: str
    documents: int
    tokens: int


@dataclass(frozen=True)
class Provenance:
    """What a file was computed from.

    `inputs` maps the name of an input file to its sha256; `model_sha256` identifies the model
    (see `reap.models.checkpoint.Checkpoint`); `revision` is the hub commit or "" for a local
    directory; `settings` are the choices the stage ran with (a plan has its own), empty where they
    were not recorded.
    """

    reap_version: str
    command: str
    model: str
    revision: str
    model_sha256: str
    inputs: dict[str, str]
    corpora: tuple[Corpus, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"corpora": [asdict(corpus) for corpus in self.corpora]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Provenance:
        return cls(**{**data, "corpora": tuple(Corpus(**corpus) for corpus in data["corpora"])})
