"""The tensors of an export: their names and bytes beforehand, and how they come from the source."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import mlx.core as mx

from reap.artifacts import Format, LayerPlan, ModelSpec, Plan, Projection
from reap.export.low_bank import LowBank
from reap.models.quantize import Quantizer, dequantized, quantized, requantized
from reap.models.source import SourceModel

Part = int | None
"""A decoder layer, or what is outside all of them."""

# Dense bytes of the experts that are rounded at once.
_DENSE_BYTES = 2**28


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
    def sizes(self) -> dict[Part, dict[str, int]]:
        """Bytes of every tensor, by part and name. Reads headers only."""
        return {part: self._sizes(part) for part in self.parts}

    def _sizes(self, part: Part) -> dict[str, int]:
        found = {n: a.nbytes for arrays in self._others(part) for n, a in arrays.items()}
        if part is None or part not in self._layers:
            return found
        layer = self._layers[part]
        one = self._experts(part, layer.kept[:1])
        for bank, ids in banks(layer).items():
            for projection in self._moe[part].projections:
                path, arrays = self._path(part, bank, projection), one[projection.name]
                format = self._formats[path]
                if format != projection.format:
                    bias = {"bias": arrays["bias"]} if "bias" in arrays else {}
                    arrays = quantized(dequantized(arrays, projection.format), format) | bias
                found |= {f"{path}.{leaf}": len(ids) * a.nbytes for leaf, a in arrays.items()}
        return found

    def tensors(self, part: Part, wanted: Sequence[str]) -> dict[str, mx.array]:
        """The wanted tensors of a part, read and computed one module after the other."""
        found: dict[str, mx.array] = {}
        for arrays in self._modules(part, {name.rpartition(".")[0] for name in wanted}):
            found |= {name: array for name, array in arrays.items() if name in wanted}
            arrays.clear()
            mx.eval(found)
        return found

    def _modules(self, part: Part, paths: set[str]) -> Iterator[dict[str, mx.array]]:
        yield from self._others(part)
        if part is not None and part in self._layers:
            apart = self.source.experts_apart(part)
            yield from (self._from_apart if apart else self._from_stacked)(part, paths)

    def read_bytes(self) -> int:
        """Bytes that are read of the source: all that is written, and what is stacked with it."""
        tensors = self.source.checkpoint.tensors
        names = [*self.source.carried_names(), *self.source.read_names(None)]
        for index in range(len(self.source.layers)):
            layer = self._layers.get(index)
            names += self.source.read_names(index, layer.kept if layer else None)
        return sum(tensors[name].nbytes for name in names)

    def _others(self, part: Part) -> Iterator[dict[str, mx.array]]:
        """What is no routed expert, lazily, one module after the other; as planned."""
        if part is None:
            arrays = self.source.trunk_weights()
            carried = self.source.checkpoint.load(self.source.carried_names())
        else:
            layer = self._layers.get(part)
            experts = f"{self.source.family.experts}."
            kept = layer.kept if layer else None
            weights = self.source.layer_weights(part, kept, some=kept and kept[:1])
            prefix, carried = self.source.layer_prefix(part), {}
            arrays = {
                f"{prefix}.{name}": array
                for name, array in weights.items()
                if layer is None or not name.startswith(experts)
            }
            del weights
        for path, format in self.plan.trunk.items():
            if f"{path}.weight" in arrays:
                leaves = [f"{path}.{leaf}" for leaf in ("weight", "scales", "biases")]
                parts = {n.rpartition(".")[2]: arrays.pop(n) for n in leaves if n in arrays}
                made = quantized(dequantized(parts, self._stored[path]), format)
                yield {f"{path}.{leaf}": array for leaf, array in made.items()}
        for rest in (arrays, carried):
            for name in list(rest):
                yield {name: rest.pop(name)}

    @cached_property
    def _stored(self) -> dict[str, Format]:
        return {module.path: module.format for module in self.spec.modules}

    @cached_property
    def _formats(self) -> dict[str, Format]:
        return self.plan.quantization

    def _path(self, part: int, bank: str, projection: Projection) -> str:
        return f"{self._moe[part].experts}{bank}.{projection.name}"

    def _experts(self, part: int, ids: tuple[int, ...]) -> dict[str, dict[str, mx.array]]:
        """Some experts of a layer, lazily and as in the source, by projection."""
        return experts_of(self.source, self.source.layer_weights(part, ids))

    def _quantizer(self, part: int, bank: str, projection: Projection) -> Quantizer:
        low = bank == ".low" or not (bank or self._layers[part].high)
        return self._low_bank.quantizer(part, projection.name) if low else quantized

    def _from_apart(self, part: int, paths: set[str]) -> Iterator[dict[str, mx.array]]:
        """The banks in `paths` of a layer whose experts can be read one by one."""
        for bank, ids in banks(self._layers[part]).items():
            wanted = {
                p: path
                for p in self._moe[part].projections
                if (path := self._path(part, bank, p)) in paths
            }
            copied = [p for p in wanted if self._formats[wanted[p]] == p.format]
            whole = self._experts(part, ids) if copied else {}
            for projection in copied:
                yield _named(wanted[projection], whole.pop(projection.name))
            del whole
            rounded = [p for p in wanted if p not in copied]
            if not rounded:
                continue
            # Few at once, so that few of the source's, wider matrices are in memory.
            widest = max(2 * p.rows * p.columns for p in rounded)
            size = max(1, _DENSE_BYTES // widest)
            quantizers = {p: self._quantizer(part, bank, p) for p in rounded}
            made: dict[Projection, list[dict[str, mx.array]]] = {p: [] for p in rounded}
            for start in range(0, len(ids), size):
                some = self._experts(part, ids[start : start + size])
                for p in rounded:
                    format = self._formats[wanted[p]]
                    stored = requantized(some.pop(p.name), p.format, format, quantizers[p])
                    mx.eval(stored)
                    made[p].append(stored)
                mx.clear_cache()
            for p in rounded:
                chunks = made.pop(p)
                joined = {n: [chunk.pop(n) for chunk in chunks] for n in list(chunks[0])}
                yield _named(wanted[p], {n: mx.concatenate(joined.pop(n)) for n in list(joined)})

    def _from_stacked(self, part: int, paths: set[str]) -> Iterator[dict[str, mx.array]]:
        """The same of a layer whose experts are one tensor, which is read whole, but once."""
        layer = self._layers[part]
        stacked = self._experts(part, layer.kept)
        for projection in self._moe[part].projections:
            arrays, first = stacked.pop(projection.name), 0
            for bank, ids in banks(layer).items():
                path = self._path(part, bank, projection)
                if path in paths:
                    rows = {n: array[first : first + len(ids)] for n, array in arrays.items()}
                    quantize = self._quantizer(part, bank, projection)
                    format = self._formats[path]
                    yield _named(path, requantized(rows, projection.format, format, quantize))
                first += len(ids)


def experts_of(source: SourceModel, weights: dict[str, mx.array]) -> dict[str, dict[str, mx.array]]:
    """The experts among the weights of a layer: weight, scales, … [experts, …] by projection."""
    head = f"{source.family.experts}."
    found: dict[str, dict[str, mx.array]] = {}
    for name, array in weights.items():
        if name.startswith(head):
            projection, _, leaf = name.removeprefix(head).rpartition(".")
            found.setdefault(projection, {})[leaf] = array
    return found


def _named(path: str, arrays: dict[str, mx.array]) -> dict[str, mx.array]:
    return {f"{path}.{leaf}": array for leaf, array in arrays.items()}


def banks(layer: LayerPlan) -> dict[str, tuple[int, ...]]:
    """The ids of a layer's experts by what stands for their bank in a path, "" if it has one."""
    if not layer.split:
        return {"": layer.kept}
    return {".high": layer.kept[: layer.high], ".low": layer.kept[layer.high :]}
