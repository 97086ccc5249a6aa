"""The tensors of an export: their names and bytes beforehand, and how they come from the source."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import mlx.core as mx

from reap.artifacts import Format, LayerPlan, ModelSpec, Plan, Projection
from reap.export.low_bank import LowBank
from reap.models.quantize import dequantized, quantized, requantized
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
        for projection in self._moe[part].projections if part in self._layers else ():
            for path, ids in self._banks(part, projection).items():
                one = self._experts(part, projection, ids[:1])
                format = self._formats[path]
                if format != projection.format:
                    bias = {"bias": one["bias"]} if "bias" in one else {}
                    one = quantized(dequantized(one, projection.format), format) | bias
                found |= {f"{path}.{leaf}": len(ids) * a.nbytes for leaf, a in one.items()}
        return found

    def tensors(self, part: Part, wanted: Sequence[str]) -> dict[str, mx.array]:
        """The wanted tensors of a part, read and computed one module after the other."""
        found: dict[str, mx.array] = {}
        for arrays in self._modules(part, {name.rpartition(".")[0] for name in wanted}):
            found |= {name: array for name, array in arrays.items() if name in wanted}
            arrays.clear()
            mx.eval(found)
            mx.clear_cache()
        return found

    def _modules(self, part: Part, paths: set[str]) -> Iterator[dict[str, mx.array]]:
        yield from self._others(part)
        for projection in self._moe[part].projections if part in self._layers else ():
            yield from self._projection(part, projection, paths)

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
            weights = self.source.layer_weights(part, layer.kept if layer else None)
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

    def _banks(self, part: Part, projection: Projection) -> dict[str, tuple[int, ...]]:
        """Expert ids of every stacked matrix that a projection becomes, by path."""
        assert part is not None
        experts = self._moe[part].experts
        return {
            f"{experts}{bank}.{projection.name}": ids
            for bank, ids in banks(self._layers[part]).items()
        }

    def _experts(
        self, part: Part, projection: Projection, ids: tuple[int, ...]
    ) -> dict[str, mx.array]:
        """One projection of some experts, lazily and as in the source."""
        assert part is not None
        head = f"{self.source.family.experts}.{projection.name}."
        weights = self.source.layer_weights(part, ids)
        return {n.removeprefix(head): a for n, a in weights.items() if n.startswith(head)}

    def _projection(
        self, part: Part, projection: Projection, paths: set[str]
    ) -> Iterator[dict[str, mx.array]]:
        """The banks of one projection, of those in `paths`."""
        assert part is not None
        layer = self._layers[part]
        stacked = None
        if not self.source.experts_apart(part):
            stacked = self._experts(part, projection, layer.kept)
        for path, ids in self._banks(part, projection).items():
            if path not in paths:
                continue
            format = self._formats[path]
            first = layer.kept.index(ids[0])
            if stacked is not None:
                pieces = iter([{n: a[first : first + len(ids)] for n, a in stacked.items()}])
            elif format == projection.format:
                pieces = iter([self._experts(part, projection, ids)])
            else:  # so that few of the source's, wider matrices are in memory
                size = max(1, _DENSE_BYTES // (2 * projection.rows * projection.columns))
                chunks = [ids[start : start + size] for start in range(0, len(ids), size)]
                pieces = (self._experts(part, projection, chunk) for chunk in chunks)
            low = first >= layer.high
            quantize = self._low_bank.quantizer(part, projection.name) if low else quantized
            made = [requantized(piece, projection.format, format, quantize) for piece in pieces]
            yield {
                f"{path}.{leaf}": mx.concatenate([one[leaf] for one in made])
                if len(made) > 1
                else made[0][leaf]
                for leaf in made[0]
            }


def banks(layer: LayerPlan) -> dict[str, tuple[int, ...]]:
    """The ids of a layer's experts by what stands for their bank in a path, "" if it has one."""
    if not layer.split:
        return {"": layer.kept}
    return {".high": layer.kept[: layer.high], ".low": layer.kept[layer.high :]}
