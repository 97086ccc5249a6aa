"""Raw sums of what the experts did on the calibration text; every criterion is derived later."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from reap.artifacts.files import check_envelope, written_whole
from reap.artifacts.moments import SecondMoments
from reap.artifacts.provenance import Provenance
from reap.artifacts.spec import Format, ModelSpec
from reap.errors import ArtifactError, CalibrationError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

FORMAT = "reap.saliency"
VERSION = 2

CRITERIA: dict[str, str] = {
    "reap": "Σ g‖f‖ / count: mean over the routed tokens (REAP, arXiv 2510.13999)",
    "reap-all-tokens": "Σ g‖f‖ / tokens: the same sum over all tokens",
    "energy": "Σ g²‖f‖² / tokens: squared output the block would lose",
    "frequency": "count / tokens: how often the router picks the expert",
    "soft-frequency": "Σ g / tokens: router weight (weighted_frequency_sum of REAP's code)",
    "ean": "Σ ‖f‖: expert activation norm (EAN, arXiv 2504.05586)",
    "man": "Σ ‖f‖ / count: mean activation norm (MAN, arXiv 2606.15716)",
    "msan": "Σ ‖f‖² / count: mean squared activation norm (MSAN, arXiv 2606.15716)",
}
"""Formula and source of every criterion; sums run over the tokens routed to the expert, f is its
output before weighting, g the weight the block multiplies it by (renormalised where the router
does that).

`energy` is what the planner's damage is made of: dropping an expert loses E g²‖f‖², and squared
errors of independent experts add up. `reap-all-tokens` ranks as `weighted_ean_sum` does in
CerebrasResearch/reap. That code's `reap_l2`, Σ g‖f‖² / count, is in no paper and needs a sum that
is not kept; `max_activations` finds super experts, see reap.planning.protect.
"""


@dataclass(frozen=True)
class Measurement:
    """What dropping and low bits really cost, at the MoE block's output on real inputs.

    Dropped experts are removed from the router, which picks again; errors are sums over the
    measured tokens of ‖y' - y‖², y the block's output. Shapes: L layers, G grid points, F formats,
    E experts.

    tokens int64 [L]; kept int64 [G] experts kept at each grid point, falling; order int64 [L, E]
    experts by falling energy, the nested order in which the grid keeps them; output_energy
    float64 [L] Σ‖y‖²; drop_error float64 [L, G]; low_error float64 [F, L] every expert stored in
    the format; low_expert_error float64 [F, L, E] Σ g²‖f' - f‖² of one expert before the sum over
    experts; formats: the F low-bit formats.

    What such errors do to the model's answer, changing one layer alone: drop_kl float64 [L] is
    the mean KL(full ‖ changed) per token, in nats, when the layer keeps kl_kept (int64 [1], a grid
    point) experts, low_kl float64 [L] when its experts are stored in formats[0]. kl_tokens int64
    [1]: over how many tokens, of each domain the first that were measured. All are of length 0 if
    not measured; kl_tokens also in files that do not say it, where it was all of `tokens`.

    low_rounding: how the experts were rounded to the formats (see Plan).
    """

    formats: tuple[Format, ...]
    tokens: Ints
    kept: Ints
    order: Ints
    output_energy: Floats
    drop_error: Floats
    low_error: Floats
    low_expert_error: Floats
    kl_kept: Ints
    drop_kl: Floats
    low_kl: Floats
    kl_tokens: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    low_rounding: str = "plain"

    @property
    def sensitivity_tokens(self) -> int:
        """Tokens that the divergences are over; 0 if they were not measured."""
        if not self.drop_kl.size:
            return 0
        return int(self.kl_tokens[0] if self.kl_tokens.size else self.tokens.max())


@dataclass(frozen=True)
class Saliency:
    """Sums per (half, domain, MoE layer, expert), f an expert's output, g its router weight.

    Arrays of shape [2, D, L, E]: count int64, and float64 gate Σg, norm Σ‖f‖, gate_norm Σg‖f‖,
    gate2_norm2 Σg²‖f‖², norm2 Σ‖f‖², max_norm max‖f‖. Arrays of shape [2, D, L]: tokens int64,
    residual_energy Σ‖h‖² (h the decoder layer's output) and output_energy Σ‖y‖² (y the MoE block's
    output), float64. The first axis splits the documents into two halves, for stability. `layers`
    are the indices of the L MoE layers. `moments`: Σx² of the inputs of the experts' projections.
    """

    provenance: Provenance
    spec: ModelSpec
    domains: tuple[str, ...]
    count: Ints
    gate: Floats
    norm: Floats
    gate_norm: Floats
    gate2_norm2: Floats
    norm2: Floats
    max_norm: Floats
    tokens: Ints
    residual_energy: Floats
    output_energy: Floats
    measurement: Measurement | None = None
    moments: SecondMoments | None = None

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(layer.layer for layer in self.spec.moe_layers)

    def score(
        self, criterion: str = "energy", *, domain: str | None = None, half: int | None = None
    ) -> Floats:
        """Saliency of every expert, float64 [L, E]; 0 for experts that were never routed.

        Sums run over both halves and all domains unless one is named. Raises KeyError for an
        unknown criterion (see CRITERIA for the formulas).
        """

        def total(array: NDArray) -> NDArray:
            halves = array if half is None else array[half : half + 1]
            if domain is not None:
                index = self.domains.index(domain)
                halves = halves[:, index : index + 1]
            return halves.sum(axis=(0, 1))

        count = total(self.count)
        tokens = np.maximum(total(self.tokens), 1)[:, None]
        routed = np.maximum(count, 1)
        formulas = {
            "reap": lambda: total(self.gate_norm) / routed,
            "reap-all-tokens": lambda: total(self.gate_norm) / tokens,
            "energy": lambda: total(self.gate2_norm2) / tokens,
            "frequency": lambda: count / tokens,
            "soft-frequency": lambda: total(self.gate) / tokens,
            "ean": lambda: total(self.norm),
            "man": lambda: total(self.norm) / routed,
            "msan": lambda: total(self.norm2) / routed,
        }
        return np.asarray(formulas[criterion](), dtype=np.float64)

    def check(self) -> None:
        """Raise CalibrationError if a layer saw no token or a sum is not finite."""
        unseen = np.flatnonzero(self.count.sum(axis=(0, 1, 3)) == 0)
        if unseen.size:
            raise CalibrationError(
                f"layer {self.layers[unseen[0]]} saw no tokens: there is nothing to rank by.",
                "give calibration text, e.g. --calibration code",
            )
        for name in _SUMS:
            bad = np.argwhere(~np.isfinite(getattr(self, name)))
            if bad.size:
                _, domain, layer, *expert = bad[0]
                where = f"layer {self.layers[layer]}" + (f", expert {expert[0]}" if expert else "")
                raise CalibrationError(
                    f"{name} is not finite in {where} (domain {self.domains[domain]}).",
                    "the model's weights or its forward pass are broken there",
                )

    def merged(self, other: Saliency, *, provenance: Provenance) -> Saliency:
        """The sums of two runs of one model; a domain that both have is added up.

        A measurement cannot be added (each run drops in its own order): the one on more tokens is
        kept, of two on equally many that whose KL is on more. Second moments are added, or taken
        from the run that has them. Raises ArtifactError if the runs are not of the same model.
        """
        for name in ("model_sha256", "num_experts", "top_k"):
            mine, theirs = getattr(self.spec, name), getattr(other.spec, name)
            if mine != theirs:
                raise ArtifactError(
                    f"{self.spec.model} and {other.spec.model} are not the same model: {name} is "
                    f"{mine} and {theirs}."
                )
        domains = tuple(sorted({*self.domains, *other.domains}))

        def placed(one: Saliency, name: str) -> NDArray:
            array = getattr(one, name)
            shape = (array.shape[0], len(domains), *array.shape[2:])
            out = np.zeros(shape, array.dtype)
            out[:, [domains.index(domain) for domain in one.domains]] = array
            return out

        sums = {
            name: (np.maximum if name == "max_norm" else np.add)(
                placed(self, name), placed(other, name)
            )
            for name in ("count", "tokens", *_SUMS)
        }
        moments = self.moments or other.moments
        if self.moments and other.moments:
            moments = self.moments.merged(other.moments)
        measured = [m for m in (self.measurement, other.measurement) if m is not None]
        return Saliency(
            provenance=provenance,
            spec=self.spec,
            domains=domains,
            measurement=max(
                measured,
                key=lambda m: (m.tokens.sum(), m.kl_tokens.sum(), m.drop_error.tobytes()),
                default=None,
            ),
            moments=moments,
            **sums,
        )

    def save(self, path: Path, *, force: bool = False) -> None:
        """Write a safetensors file: arrays as they are, the rest as JSON in the metadata."""
        arrays = {name: getattr(self, name) for name in ("count", "tokens", *_SUMS)}
        extra: dict[str, object] = {}
        if self.measurement is not None:
            for name in (field.name for field in fields(Measurement)):
                if name not in _NOT_ARRAYS:
                    arrays[f"measurement.{name}"] = getattr(self.measurement, name)
            extra["measured_formats"] = [vars(f) for f in self.measurement.formats]
            extra["measured_rounding"] = self.measurement.low_rounding
        if self.moments is not None:
            arrays |= self.moments.to_arrays()
        header = {
            "format": FORMAT,
            "format_version": VERSION,
            "provenance": self.provenance.to_json(),
            "spec": self.spec.to_json(),
            "domains": list(self.domains),
            **extra,
        }
        arrays = {name: np.ascontiguousarray(array) for name, array in sorted(arrays.items())}
        with written_whole(path, force=force) as partial:
            # save_file would leave a file that only its owner can read.
            partial.write_bytes(save(arrays, {"reap": json.dumps(header, sort_keys=True)}))

    @classmethod
    def load(cls, path: Path) -> Saliency:
        """Raises ArtifactError for a missing, damaged, foreign or newer file."""
        if not path.exists():
            raise ArtifactError(f"{path} does not exist.", "run `reap calibrate` first")
        try:
            with safe_open(path, "np") as file:
                header = json.loads((file.metadata() or {}).get("reap", "null"))
                check_envelope(path, header, format=FORMAT, version=VERSION)
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, json.JSONDecodeError, OSError) as error:
            raise ArtifactError(f"{path} is not a readable safetensors file: {error}") from None
        measured = {
            name.removeprefix("measurement."): arrays.pop(name)
            for name in list(arrays)
            if name.startswith("measurement.")
        }
        try:
            moments = SecondMoments.from_arrays(arrays)
            arrays = {n: a for n, a in arrays.items() if not n.startswith("moments.")}
            measurement = None
            if measured:
                formats = tuple(Format(**f) for f in header["measured_formats"])
                measurement = Measurement(
                    formats=formats, low_rounding=header["measured_rounding"], **measured
                )
            return cls(
                provenance=Provenance.from_json(header["provenance"]),
                spec=ModelSpec.from_json(header["spec"]),
                domains=tuple(header["domains"]),
                measurement=measurement,
                moments=moments,
                **arrays,
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ArtifactError(f"{path} is damaged: {error!r}") from None


_NOT_ARRAYS = ("formats", "low_rounding")

_SUMS = (
    "gate",
    "norm",
    "gate_norm",
    "gate2_norm2",
    "norm2",
    "max_norm",
    "residual_energy",
    "output_energy",
)
