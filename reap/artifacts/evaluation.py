"""What a checkpoint lost, measured: perplexity per domain and divergence from the reference.

Every figure is derived from sums per document, so that errors are clustered by document (tokens
of one document are not independent) and two evaluations of the same text can be compared in
pairs.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from reap.artifacts.files import read_json, write_json
from reap.artifacts.provenance import Provenance
from reap.errors import ArtifactError

FORMAT = "reap.evaluation"
VERSION = 2


@dataclass(frozen=True)
class DocumentScore:
    """Sums over the predicted tokens of one document, in nats.

    nll: -ln p of the actual token, base_nll the reference's; nll_squared, base_nll_squared and
    nll_cross their second moments; kl: KL(reference ‖ checkpoint) over the vocabulary; same_top:
    how often both prefer the same token; dp, dp_squared: p(actual) minus the reference's. All but
    tokens, nll and nll_squared are 0 without a reference.
    """

    domain: str
    tokens: int
    nll: float
    nll_squared: float
    base_nll: float = 0.0
    base_nll_squared: float = 0.0
    nll_cross: float = 0.0
    kl: float = 0.0
    same_top: int = 0
    dp: float = 0.0
    dp_squared: float = 0.0


@dataclass(frozen=True)
class Estimate:
    """A mean and its standard error, clustered by document."""

    value: float
    error: float


@dataclass(frozen=True)
class DomainScore:
    """The figures of one domain, or of the average over domains."""

    domain: str
    documents: int
    tokens: int
    perplexity: Estimate
    base_perplexity: Estimate | None
    kl: Estimate | None
    same_top: Estimate | None


def clustered_mean(sums: np.ndarray, counts: np.ndarray) -> Estimate:
    """Ratio estimate Σsums/Σcounts with the standard error over clusters (documents).

    Cochran, Sampling Techniques, 1977, eq. 2.39 (without the finite population correction).
    """
    total = counts.sum()
    mean = sums.sum() / total
    n = len(sums)
    if n < 2:
        return Estimate(float(mean), math.nan)
    spread = np.square(sums - mean * counts).sum() * n / (n - 1)
    return Estimate(float(mean), float(math.sqrt(spread) / total))


def domain_average(estimates: list[Estimate]) -> Estimate:
    """Mean over domains, each with the same weight, of independent estimates."""
    count = len(estimates)
    return Estimate(
        sum(e.value for e in estimates) / count,
        math.sqrt(sum(e.error**2 for e in estimates)) / count,
    )


@dataclass(frozen=True)
class Evaluation:
    """See the module docstring. `kl_quantiles` maps a percentage to nats over all tokens.

    `weight_bytes` are the checkpoint's loaded weights, `expert_bytes` those of routed experts,
    `base_expert_bytes` the reference's; `sequence_length` the tokens a prediction could look back.
    """

    provenance: Provenance
    checkpoint: str
    reference: str | None
    label: str
    sequence_length: int
    weight_bytes: int
    expert_bytes: int
    base_expert_bytes: int
    documents: tuple[DocumentScore, ...]
    kl_quantiles: dict[str, float]

    @property
    def domains(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(document.domain for document in self.documents))

    def _sums(self, name: str, domain: str) -> np.ndarray:
        return np.array(
            [getattr(d, name) for d in self.documents if d.domain == domain], dtype=np.float64
        )

    def mean(self, name: str, domain: str) -> Estimate:
        """Mean per token of a DocumentScore field in one domain."""
        return clustered_mean(self._sums(name, domain), self._sums("tokens", domain))

    def domain_score(self, domain: str) -> DomainScore:
        has_base = self.reference is not None
        tokens = self._sums("tokens", domain)
        return DomainScore(
            domain=domain,
            documents=len(tokens),
            tokens=int(tokens.sum()),
            perplexity=_perplexity(self.mean("nll", domain)),
            base_perplexity=_perplexity(self.mean("base_nll", domain)) if has_base else None,
            kl=self.mean("kl", domain) if has_base else None,
            same_top=self.mean("same_top", domain) if has_base else None,
        )

    @property
    def mean_kl(self) -> Estimate:
        """KL to the reference, averaged over domains with equal weight."""
        return domain_average([self.mean("kl", domain) for domain in self.domains])

    @property
    def perplexity(self) -> Estimate:
        """exp of the token-weighted mean over all domains' documents."""
        nll = np.array([d.nll for d in self.documents])
        tokens = np.array([d.tokens for d in self.documents], dtype=np.float64)
        return _perplexity(clustered_mean(nll, tokens))

    def summary(self) -> dict[str, Estimate]:
        """The block that `llama-perplexity --kl-divergence` prints, over all tokens.

        Same names; errors are clustered by document instead of treating tokens as independent.
        """
        tokens = np.array([d.tokens for d in self.documents], dtype=np.float64)

        def mean(name: str) -> Estimate:
            values = np.array([getattr(d, name) for d in self.documents], dtype=np.float64)
            return clustered_mean(values, tokens)

        nll = mean("nll")
        figures = {"Mean PPL(Q)": _perplexity(nll)}
        if self.reference is None:
            return figures
        base = mean("base_nll")
        log_ratio = clustered_mean(np.array([d.nll - d.base_nll for d in self.documents]), tokens)
        ratio = math.exp(log_ratio.value)
        moments = {
            name: mean(name).value for name in ("nll_squared", "base_nll_squared", "nll_cross")
        }
        covariance = moments["nll_cross"] - nll.value * base.value
        variances = (moments["nll_squared"] - nll.value**2) * (
            moments["base_nll_squared"] - base.value**2
        )
        correlation = covariance / math.sqrt(variances) if variances > 0 else math.nan
        figures |= {
            "Mean PPL(base)": _perplexity(base),
            "Cor(ln(PPL(Q)), ln(PPL(base)))": Estimate(100 * correlation, math.nan),
            "Mean ln(PPL(Q)/PPL(base))": log_ratio,
            "Mean PPL(Q)/PPL(base)": Estimate(ratio, ratio * log_ratio.error),
            "Mean KLD": mean("kl"),
            "Mean Δp": _scaled(mean("dp"), 100),
            "RMS Δp": Estimate(100 * math.sqrt(mean("dp_squared").value), math.nan),
            "Same top p": _scaled(mean("same_top"), 100),
        }
        return figures

    def kl_difference(self, other: Evaluation) -> Estimate:
        """Mean KL of this minus `other`'s, paired by document, averaged over domains.

        Raises ArtifactError if the two did not score the same documents.
        """
        shape = [(d.domain, d.tokens) for d in self.documents]
        if shape != [(d.domain, d.tokens) for d in other.documents]:
            raise ArtifactError(
                f"{self.label} and {other.label} were not evaluated on the same documents."
            )
        return domain_average(
            [
                clustered_mean(
                    self._sums("kl", domain) - other._sums("kl", domain),
                    self._sums("tokens", domain),
                )
                for domain in self.domains
            ]
        )

    def save(self, path: Path, *, force: bool = False) -> None:
        data = {
            "format": FORMAT,
            "format_version": VERSION,
            **asdict(self),
            "provenance": self.provenance.to_json(),
            "documents": [asdict(document) for document in self.documents],
        }
        write_json(path, data, force=force)

    @classmethod
    def load(cls, path: Path) -> Evaluation:
        """Raises ArtifactError for a missing, damaged, foreign or newer file."""
        data: dict[str, Any] = read_json(path, format=FORMAT, version=VERSION)
        try:
            data["provenance"] = Provenance.from_json(data["provenance"])
            data["documents"] = tuple(DocumentScore(**d) for d in data["documents"])
            del data["format"], data["format_version"]
            return cls(**data)
        except (KeyError, TypeError) as error:
            raise ArtifactError(f"{path} is damaged: {error!r}") from None


def _perplexity(nll: Estimate) -> Estimate:
    value = math.exp(nll.value)
    return Estimate(value, value * nll.error)


def _scaled(estimate: Estimate, factor: float) -> Estimate:
    return Estimate(estimate.value * factor, estimate.error * factor)
