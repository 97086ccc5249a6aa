"""Which experts stay, in which bank, and how every matrix is stored: what export obeys."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from reap.artifacts.files import read_json, write_json
from reap.artifacts.provenance import Provenance
from reap.artifacts.spec import Format
from reap.errors import ArtifactError

FORMAT = "reap.plan"
VERSION = 2
"""1: without the rounding of the low bank."""

Layout = Literal["stock", "per-layer", "two-bank"]

Rounding = Literal["plain", "search", "weighted", "feedback"]

Bank = dict[str, Format]
"""Format of each projection of the experts in a bank, e.g. {"gate_proj": mxfp4, …}."""


@dataclass(frozen=True)
class LayerPlan:
    """One MoE layer: expert ids in bank order, of which the first `high` are in the high bank."""

    layer: int
    kept: tuple[int, ...]
    high: int

    @property
    def low(self) -> int:
        return len(self.kept) - self.high

    @property
    def split(self) -> int:
        """expert_bank_split as the checkpoint carries it: 0 if the layer has one bank."""
        return self.high if self.low else 0


@dataclass(frozen=True)
class Waterfall:
    """Where the budget goes, in bytes. weights + state + reserve + slack = budget.

    `budget` is the memory of `--budget`; with `--size` it is the weights' bytes and state and
    reserve are 0. `carried` bytes are in the checkpoint but not loaded, so not in `weights`.
    """

    budget: int
    trunk: int
    router: int
    high: int
    low: int
    state: int
    reserve: int
    carried: int
    context: int

    @property
    def weights(self) -> int:
        return self.trunk + self.router + self.high + self.low

    @property
    def slack(self) -> int:
        return self.budget - self.weights - self.state - self.reserve


@dataclass(frozen=True)
class Plan:
    """See the module docstring. `trunk` maps module paths to formats other than the source's.

    `damage` is the predicted damage of this plan, `lower_bound` no plan under the same
    constraints can be below it, `alternatives` the predicted damage of plain recipes at no more
    bytes. `settings` records the options the plan was made with. `low_rounding` is how experts get
    into the low bank's affine formats: "plain" by min and max, "search" by least error, "weighted"
    by least error with the second moments in the saliency file the plan was made from, "feedback"
    by least error of the outputs, with the covariances in that file.
    """

    provenance: Provenance
    model_type: str
    num_layers: int
    num_experts: int
    layout: Layout
    layers: tuple[LayerPlan, ...]
    high: Bank
    low: Bank
    trunk: dict[str, Format]
    experts_path: dict[int, str]
    waterfall: Waterfall
    damage: float
    lower_bound: float
    alternatives: dict[str, float] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    low_rounding: Rounding = "plain"

    @property
    def uncounted(self) -> str:
        """What costs something, but is no part of `damage`, in words; "" if nothing is."""
        bits = sorted({format.bits for format in self.trunk.values()})
        return f"rounding the trunk to {' and '.join(map(str, bits))} bits" if bits else ""

    @property
    def expert_counts(self) -> list[int]:
        """Experts kept in each decoder layer, 0 for dense layers."""
        kept = {layer.layer: len(layer.kept) for layer in self.layers}
        return [kept.get(index, 0) for index in range(self.num_layers)]

    @property
    def expert_bank_split(self) -> list[int]:
        """Experts in the high bank of each decoder layer, 0 where there is one bank."""
        split = {layer.layer: layer.split for layer in self.layers}
        return [split.get(index, 0) for index in range(self.num_layers)]

    @property
    def quantization(self) -> dict[str, Format]:
        """Format by module path of the exported model, for all experts and the changed trunk."""
        formats = dict(self.trunk)
        for layer in self.layers:
            base = self.experts_path[layer.layer]
            if layer.split:
                banks = {f"{base}.high": self.high, f"{base}.low": self.low}
            else:
                banks = {base: self.high if layer.high else self.low}
            for path, bank in banks.items():
                formats.update({f"{path}.{name}": fmt for name, fmt in bank.items()})
        return formats

    def save(self, path: Path, *, force: bool = False) -> None:
        def bank(formats: dict[str, Format]) -> dict[str, Any]:
            return {name: asdict(fmt) for name, fmt in formats.items()}

        data = {
            "format": FORMAT,
            "format_version": VERSION,
            "provenance": self.provenance.to_json(),
            "model_type": self.model_type,
            "num_layers": self.num_layers,
            "num_experts": self.num_experts,
            "layout": self.layout,
            "waterfall": asdict(self.waterfall),
            "damage": self.damage,
            "lower_bound": self.lower_bound,
            "alternatives": self.alternatives,
            "settings": self.settings,
            "high": bank(self.high),
            "low": bank(self.low),
            "low_rounding": self.low_rounding,
            "expert_counts": self.expert_counts,
            "expert_bank_split": self.expert_bank_split,
            "layers": [
                {
                    "layer": layer.layer,
                    "experts": self.experts_path[layer.layer],
                    "high": layer.high,
                    "kept": list(layer.kept),
                }
                for layer in self.layers
            ],
            "trunk": bank(self.trunk),
            "quantization": bank(self.quantization),
        }
        write_json(path, data, force=force)

    @classmethod
    def load(cls, path: Path) -> Plan:
        """Raises ArtifactError for a missing, damaged, foreign, newer or contradictory file."""
        data = read_json(path, format=FORMAT, version=VERSION)
        try:
            plan = cls._from_json(data)
            plan._check(path, data)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ArtifactError(f"{path} is damaged: {error!r}") from None
        return plan

    @classmethod
    def _from_json(cls, data: dict[str, Any]) -> Plan:
        def bank(formats: dict[str, Any]) -> dict[str, Format]:
            return {name: Format(**fmt) for name, fmt in formats.items()}

        return cls(
            provenance=Provenance.from_json(data["provenance"]),
            model_type=data["model_type"],
            num_layers=data["num_layers"],
            num_experts=data["num_experts"],
            layout=data["layout"],
            layers=tuple(
                LayerPlan(entry["layer"], tuple(entry["kept"]), entry["high"])
                for entry in data["layers"]
            ),
            high=bank(data["high"]),
            low=bank(data["low"]),
            trunk=bank(data["trunk"]),
            experts_path={entry["layer"]: entry["experts"] for entry in data["layers"]},
            waterfall=Waterfall(**data["waterfall"]),
            damage=data["damage"],
            lower_bound=data["lower_bound"],
            alternatives=data["alternatives"],
            settings=data["settings"],
            low_rounding=data["low_rounding"],
        )

    def _check(self, path: Path, data: dict[str, Any]) -> None:
        if self.layout not in get_args(Layout):
            raise ArtifactError(f"{path}: {self.layout!r} is not a layout.")
        for name, fmt in {**self.high, **self.low, **self.trunk}.items():
            if not fmt.known:
                raise ArtifactError(f"{path}: {name} has a format that MLX does not know: {fmt}.")
        if self.low_rounding not in get_args(Rounding):
            raise ArtifactError(
                f"{path}: low_rounding is {self.low_rounding!r}.",
                f"one of {', '.join(get_args(Rounding))}",
            )
        for layer in self.layers:
            where = f"{path}: layer {layer.layer}"
            if any(type(number) is not int for number in (layer.layer, layer.high, *layer.kept)):
                raise ArtifactError(f"{where} has numbers that are not whole.")
            if len(set(layer.kept)) != len(layer.kept):
                raise ArtifactError(f"{where} keeps an expert twice.")
            if any(not 0 <= expert < self.num_experts for expert in layer.kept):
                raise ArtifactError(f"{where} keeps an expert outside 0..{self.num_experts - 1}.")
            if not 0 <= layer.high <= len(layer.kept):
                raise ArtifactError(
                    f"{where}: {layer.high} experts in the high bank of {len(layer.kept)} kept."
                )
        for name in ("expert_counts", "expert_bank_split"):
            derived = getattr(self, name)
            if len(data[name]) != self.num_layers:
                raise ArtifactError(
                    f"{path}: {name} has {len(data[name])} entries for {self.num_layers} layers."
                )
            if data[name] != derived:
                index = next(
                    i for i, pair in enumerate(zip(data[name], derived)) if len({*pair}) > 1
                )
                raise ArtifactError(
                    f"{path}: {name}[{index}] is {data[name][index]}, but layer {index} "
                    f"lists {derived[index]}.",
                    "after editing `layers`, bring expert_counts and expert_bank_split in line",
                )
        written = {name: Format(**fmt) for name, fmt in data["quantization"].items()}
        if written != self.quantization:
            differing = {*written.items()} ^ {*self.quantization.items()}
            changed = min(name for name, _ in differing)
            raise ArtifactError(
                f"{path}: `quantization` disagrees with high, low and trunk at {changed}.",
                "edit `high`, `low` or `trunk`, and `quantization` with them",
            )
        if self.layout == "two-bank":
            return
        if any(layer.split for layer in self.layers):
            raise ArtifactError(f"{path}: layout {self.layout} has no room for two banks.")
        if self.layout == "stock" and len({len(layer.kept) for layer in self.layers}) > 1:
            raise ArtifactError(f"{path}: layout stock needs the same count in every layer.")
