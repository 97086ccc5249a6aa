"""The tensors of an export: their names and bytes beforehand, and how they come from the source."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx

from reap.artifacts import Format, LayerPlan, ModelSpec, Plan, Projection
from reap.export.finite import check_finite
from reap.export.low_bank import LowBank
from reap.models.checkpoint import Range, dtype_name
from reap.models.quantize import quantized, stored_as
from reap.models.source import SourceModel, Stacked

Part = int | None
"""A decoder layer, or what is outside all of them."""

# Dense bytes of the experts that are rounded at once.
_DENSE_BYTES = 2**28


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor to write, as its header states it; `dtype` in safetensors' spelling (BF16, …)."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Copied:
    """A tensor whose bytes are the source's, those of one range after the other."""

    ranges: list[Range]

    @property
    def nbytes(self) -> int:
        return sum(size for _, _, size in self.ranges)


Module = Mapping[str, mx.array] | Mapping[str, Copied]
"""The tensors of a module by name, all made or all copied."""


class Content:
    """What `plan` makes of `source`, one part at a time.

    Nothing is read before it is asked for, and nothing is kept.
    """

    def __init__(self, source: SourceModel, plan: Plan, spec: ModelSpec, low_bank: LowBank) -> None:
        self.source = source
        self.plan = plan
        self.spec = spec
        self._low_bank = low_bank
        self._layers = {layer.layer: layer for layer in plan.layers}
        self._moe = {moe.layer: moe for moe in spec.moe_layers}

    @property
    def parts(self) -> list[Part]:
        return [*range(len(self.source.layers)), None]

    @cached_property
    def foreseen(self) -> dict[Part, dict[str, Tensor]]:
        """Every tensor, by part and name, in the order of `modules`. Reads headers only."""
        return {part: self._foreseen(part) for part in self.parts}

    def _foreseen(self, part: Part) -> dict[str, Tensor]:
        others = (self._as_planned(path, module) for path, module in self._others(part))
        found = {n: tensor_of(a) for module in others for n, a in module.items()}
        if part is None:
            infos = {n: self.source.checkpoint.tensors[n] for n in self.source.carried_names()}
            return found | {n: Tensor(i.dtype, i.shape, i.nbytes) for n, i in infos.items()}
        if part not in self._layers:
            return found
        one = self._experts(part, self._layers[part].kept[:1])
        for bank, ids in banks(self._layers[part]).items():
            for projection in self._moe[part].projections:
                path = self._path(part, bank, projection)
                arrays = stored_as(one[projection.name], projection.format, self._formats[path])
                found |= {f"{path}.{leaf}": tensor_of(a, len(ids)) for leaf, a in arrays.items()}
        return found

    def modules(self, part: Part, wanted: Iterable[str]) -> Iterator[Module]:
        """The tensors of a part, lazily, one module after the other: those with a wanted one."""
        paths = {name.rpartition(".")[0] for name in wanted}
        for path, module in self._others(part):
            if path in paths:
                if path in self.plan.trunk:
                    check_finite(module, f"{path}.")
                yield self._as_planned(path, module)
        if part is None:
            carried, ranges = self.source.carried_names(), self.source.checkpoint.ranges
            for path, names in by_module(carried).items():
                if path in paths:
                    yield {name: Copied(ranges([name])) for name in names}
        if part is None or part not in self._layers:
            return
        for bank, ids in banks(self._layers[part]).items():
            found = {self._path(part, bank, p): p for p in self._moe[part].projections}
            if paths.isdisjoint(found):
                continue
            experts = self._experts(part, ids)
            for path, projection in found.items():
                arrays = experts.pop(projection.name)
                if path not in paths:
                    continue
                if self._formats[path] != projection.format:
                    arrays = self._rounded(arrays, part, path, projection, ids)
                elif copied := self.source.expert_bytes(part, projection.name, ids):
                    yield {f"{path}.{leaf}": Copied(copied[leaf]) for leaf in arrays}
                    continue
                yield {f"{path}.{leaf}": array for leaf, array in arrays.items()}

    def read_bytes(self) -> int:
        """Bytes that are read of the source: all that is written, and what is stored with it."""
        source = self.source
        carried = (source.checkpoint.tensors[name].nbytes for name in source.carried_names())
        total = sum(carried) + source.read_bytes(None)
        for index in range(len(source.layers)):
            layer = self._layers.get(index)
            total += source.read_bytes(index, layer.kept if layer else None)
        return total

    def _others(self, part: Part) -> Iterator[tuple[str, dict[str, mx.array]]]:
        """What is loaded and no routed expert, lazily and as in the source, by module path."""
        if part is None:
            arrays = self.source.trunk_weights()
        else:
            layer = self._layers.get(part)
            experts = f"{self.source.family.experts}."
            kept = layer.kept if layer else None
            weights = self.source.layer_weights(part, kept, some=kept and kept[:1])
            prefix = self.source.layer_prefix(part)
            arrays = {
                f"{prefix}.{name}": array
                for name, array in weights.items()
                if layer is None or not name.startswith(experts)
            }
            del weights
        for path, names in by_module(arrays).items():
            yield path, {name.rpartition(".")[2]: arrays.pop(name) for name in names}

    def _as_planned(self, path: str, module: dict[str, mx.array]) -> dict[str, mx.array]:
        trunk = self.plan.trunk
        if path in trunk and "weight" in module:
            module = stored_as(module, self._stored[path], trunk[path])
        return {f"{path}.{leaf}" if path else leaf: array for leaf, array in module.items()}

    @cached_property
    def _stored(self) -> dict[str, Format]:
        return {module.path: module.format for module in self.spec.modules}

    @cached_property
    def _formats(self) -> dict[str, Format]:
        return self.plan.quantization

    def _path(self, part: int, bank: str, projection: Projection) -> str:
        return f"{self._moe[part].experts}{bank}.{projection.name}"

    def _experts(self, part: int, ids: tuple[int, ...]) -> Stacked:
        """Some experts of a layer, lazily and as in the source, by projection."""
        return self.source.experts_of(self.source.layer_weights(part, ids))

    def _rounded(
        self,
        arrays: dict[str, mx.array],
        part: int,
        path: str,
        projection: Projection,
        ids: tuple[int, ...],
    ) -> dict[str, mx.array]:
        """Stacked experts in the format that is planned for `path`.

        Read in chunks of experts, lest all of their wider matrices be in memory.
        """
        layer = self._layers[part]
        low = ids[0] in layer.kept[layer.high :]
        quantize = self._low_bank.quantizer(part, projection.name) if low else quantized
        size = max(1, _DENSE_BYTES // (2 * projection.rows * projection.columns))
        alone = self.source.read_apart(part)
        name, chunks = projection.name, []
        for start in range(0, len(ids), size):
            chunk = slice(start, start + size)
            some = {leaf: array[chunk] for leaf, array in arrays.items()}
            if alone:
                some = self.source.some_experts(part, ids[chunk], [name])[name]
            check_finite(some, f"{path}.")  # rounding hides NaN, in the MX formats infinity, too
            stored = stored_as(some, projection.format, self._formats[path], quantize)
            mx.eval(stored)
            chunks.append(stored)
        return {leaf: mx.concatenate([c.pop(leaf) for c in chunks]) for leaf in list(chunks[0])}


def tensor_of(array: mx.array, count: int | None = None) -> Tensor:
    """Of an array, or of `count` times what is the first axis' only entry."""
    shape, nbytes = tuple(array.shape), array.nbytes
    if count is not None:
        shape, nbytes = (count, *shape[1:]), count * nbytes
    return Tensor(dtype_name(array.dtype), shape, nbytes)


def by_module(names: Iterable[str]) -> dict[str, list[str]]:
    """Tensor names by the path of the module that they belong to, in the order they come in."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(name.rpartition(".")[0], []).append(name)
    return found


def banks(layer: LayerPlan) -> dict[str, tuple[int, ...]]:
    """The ids of a layer's experts by what stands for their bank in a path, "" if it has one."""
    if not layer.split:
        return {"": layer.kept}
    return {".high": layer.kept[: layer.high], ".low": layer.kept[layer.high :]}
