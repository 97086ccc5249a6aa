"""A model whose weights come and go one decoder layer at a time.

The module tree is mlx-lm's own, built without weights; each layer's tensors go through mlx-lm's
own `sanitize`, so names and packing are what `mlx_lm.load` would give.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from mlx_lm import utils as mlx_lm_utils

from reap.artifacts import Format, ModelSpec, ModuleSpec, MoeLayer, Projection
from reap.artifacts.files import sha256
from reap.artifacts.spec import Role
from reap.errors import CheckpointError
from reap.models import formats
from reap.models.checkpoint import Checkpoint, Range, mlx_dtype, open_checkpoint
from reap.models.families import Family, family_of, text_config
from reap.models.hooks import hooked, submodule
from reap.models.prefetch import Prefetch

RUNTIME = Path(__file__).with_name("reap_model.py")
"""The architecture file that exports with uneven counts or two banks carry with them."""

Stacked = dict[str, dict[str, mx.array]]
"""Weight, scales, … [experts, …] by projection."""

ROWS_PER_CALL = 32_768
"""Most routed rows in one call of the experts."""


class SourceModel:
    """A checkpoint as an mlx-lm model with no weights resident until they are asked for.

    `model` is the mlx-lm module tree, `layers` its decoder layers, `moe_layers` the indices of
    those with routed experts.
    """

    def __init__(self, checkpoint: Checkpoint, *, trust_remote_code: bool = False) -> None:
        self.checkpoint = checkpoint
        self.config = mlx_lm_utils.load_config(checkpoint.path)
        self.family: Family = family_of(self.config)
        model_class, args_class = self._classes(trust_remote_code)
        try:
            self.model: nn.Module = model_class(args_class.from_dict(self.config))
        except (ValueError, TypeError, KeyError) as error:
            raise CheckpointError(
                f"mlx-lm cannot build {checkpoint.name} from its config.json: {error}"
            ) from error
        self.model.eval()
        self.layers: list[nn.Module] = self.model.layers
        self._names = checkpoint.by_layer(self.family.carried)
        self._fp8 = formats.fp8_block(checkpoint, self.config, self.family, self.loaded_names())
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._prefetched: Prefetch | None = None
        self._checked: set[int] = set()
        self._known_origins: dict[int, dict[str, dict[str, tuple[str, str]]]] = {}
        self._expert_names: dict[str, tuple[str, int, str] | None] = {}
        if not 0 < self.top_k <= self.num_experts:
            raise CheckpointError(
                f"{checkpoint.path / 'config.json'} routes each token to {self.top_k} of "
                f"{self.num_experts} experts."
            )
        absent = [i for i in range(len(self.layers)) if i not in self._names]
        if absent:
            raise CheckpointError(f"{checkpoint.path} has no tensors for layer {absent[0]}.")
        self._check_prediction()
        self.moe_layers = [i for i in range(len(self.layers)) if self._has_experts(i)]
        if not self.moe_layers:
            raise CheckpointError(
                f"{checkpoint.name} is dense: none of its {len(self.layers)} layers has experts."
            )

    def _check_prediction(self) -> None:
        """Refuse layers beyond those of the language model that config.json does not announce."""
        count, key = len(self.layers), "num_nextn_predict_layers"
        announced = text_config(self.config).get(key) or 0
        if not isinstance(announced, int):
            raise CheckpointError(
                f"{self.checkpoint.path / 'config.json'}: {key} is {announced!r}, not a number.",
                "correct it, or download the checkpoint again",
            )
        if self.prediction_layers and self.prediction_layers[-1] >= count + announced:
            raise CheckpointError(
                f"{self.checkpoint.path} has tensors of layer {self.prediction_layers[-1]}, its "
                f"config.json announces {count} layers and {announced} for multi-token prediction.",
                f"correct num_hidden_layers or {key} in config.json, or download it again",
            )

    def _classes(self, trust_remote_code: bool) -> tuple[Callable[..., nn.Module], Any]:
        model_file = self.config.get("model_file")
        if model_file is None:
            classes: tuple[Callable[..., nn.Module], Any] = mlx_lm_utils._get_classes(self.config)
            return classes
        shipped = self.checkpoint.path / model_file
        # Our own runtime is run from the package; anything else is somebody's code.
        own = shipped.exists() and sha256(shipped) == sha256(RUNTIME)
        if not own and not trust_remote_code:
            raise CheckpointError(
                f"{self.checkpoint.path} brings its own architecture code ({model_file}).",
                "pass --trust-remote-code if you trust it",
            )
        module = _import_file(RUNTIME if own else shipped)
        return module.Model, module.ModelArgs

    @property
    def top_k(self) -> int:
        return int(text_config(self.config)[self.family.top_k])

    @property
    def num_experts(self) -> int:
        return int(text_config(self.config)[self.family.num_experts])

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding matrix."""
        return int(self._args().vocab_size)

    @property
    def tokens_per_call(self) -> int:
        """Most tokens in one forward call: gather_qmm is wrong above 32,768 routed rows on some
        GPUs (mlx issue 3856)."""
        return ROWS_PER_CALL // self.top_k

    def groups(self) -> tuple[int, int]:
        """(router groups, groups a token may use)."""
        config = text_config(self.config)
        if not self.family.n_group:
            return 1, 1
        return (
            int(config.get(self.family.n_group) or 1),
            int(config.get(self.family.topk_group) or 1),
        )

    def _has_experts(self, index: int) -> bool:
        try:
            submodule(self.layers[index], self.family.experts)
        except AttributeError:
            return False
        return True

    def experts(self, index: int) -> nn.Module:
        return submodule(self.layers[index], self.family.experts)

    def block(self, index: int) -> nn.Module:
        return submodule(self.layers[index], self.family.block)

    def layer_prefix(self, index: int) -> str:
        """Path of a decoder layer in the module tree, e.g. `language_model.model.layers.3`."""
        if not hasattr(self, "_prefixes"):
            wanted = {id(layer): i for i, layer in enumerate(self.layers)}
            self._prefixes = {
                wanted[id(module)]: path
                for path, module in self.model.named_modules()
                if id(module) in wanted
            }
        return self._prefixes[index]

    def _args(self) -> Any:
        args = self.model.args
        return getattr(args, "text_config", args)

    @contextmanager
    def _pretend_experts(self, count: int) -> Iterator[None]:
        """mlx-lm's sanitize stacks as many experts as its arguments say."""
        args, name = self._args(), self.family.num_experts
        before = getattr(args, name)
        setattr(args, name, count)
        try:
            yield
        finally:
            setattr(args, name, before)

    def layer_weights(
        self,
        index: int,
        kept: tuple[int, ...] | None = None,
        *,
        some: tuple[int, ...] | None = None,
    ) -> dict[str, mx.array]:
        """Lazy weights of one decoder layer by module path relative to the layer.

        `kept`: the experts to take, in that order, renumbered from 0; router tensors follow.
        `some`: other experts to take in their place, while router tensors follow `kept`.
        Experts that the source stores apart and that are not taken are never read.
        """
        names = self._names[index]
        if index not in self._checked:
            self._check_experts(index, names)
            self._checked.add(index)
        if kept is None or index not in self.moe_layers:
            return self._sanitized(self.checkpoint.load(names), self.layer_prefix(index))
        taken = kept if some is None else some
        position = {expert: slot for slot, expert in enumerate(taken)}
        renamed: dict[str, str] = {}
        apart = False
        for name in names:
            parts = self._expert_name(name)
            if parts is None:
                renamed[name] = name
                continue
            apart = True
            head, expert, tail = parts
            slot = position.get(expert)
            if slot is not None:
                renamed[name] = f"{head}{slot}{tail}"
        arrays = {renamed[n]: array for n, array in self.checkpoint.load(renamed).items()}
        with self._pretend_experts(len(taken) if apart else self.num_experts):
            weights = self._sanitized(arrays, self.layer_prefix(index))
        for name, array in weights.items():
            stacked = not apart and name.startswith(f"{self.family.experts}.")
            if stacked or self._is_router(name):
                rows = mx.array(taken if stacked else kept)
                weights[name] = mx.contiguous(mx.take(array, rows, axis=0))
        return weights

    def experts_apart(self, index: int) -> bool:
        """Whether a layer's experts are tensors of their own, so that some can be read alone."""
        return any(self._expert_name(name) for name in self._names[index])

    def experts_of(self, weights: Mapping[str, mx.array]) -> Stacked:
        """The experts among the weights of a layer."""
        head = f"{self.family.experts}."
        found: Stacked = {}
        for name, array in weights.items():
            if name.startswith(head):
                projection, _, leaf = name.removeprefix(head).rpartition(".")
                found.setdefault(projection, {})[leaf] = array
        return found

    def some_experts(self, index: int, ids: tuple[int, ...], projections: Sequence[str]) -> Stacked:
        """Some experts' projections as `layer_weights` has them; nothing else is read if
        `read_apart`."""
        if self.experts_apart(index) or not self.read_apart(index):
            found = self.experts_of(self.layer_weights(index, ids))
            return {projection: found[projection] for projection in projections}
        return {
            projection: {
                leaf: self.checkpoint.rows(name, ids)
                for leaf, name in self._stacked_names(index, projection).items()
            }
            for projection in projections
        }

    def expert_bytes(
        self, index: int, projection: str, ids: Sequence[int]
    ) -> dict[str, list[Range]]:
        """Where the bytes of some experts' weight, scales, … are, by leaf, in the order of `ids`.

        Empty if what mlx-lm makes of the experts' tensors is not their bytes one after the other.
        """
        if not self.experts_apart(index):
            stacked = self._stacked_names(index, projection)
            return {leaf: self.checkpoint.row_ranges(n, ids) for leaf, n in stacked.items()}
        origins = self._origins(index)
        if projection not in origins:
            return {}
        return {
            leaf: [r for e in ids for r in self.checkpoint.ranges([f"{head}{e}{tail}"])]
            for leaf, (head, tail) in origins[projection].items()
        }

    def _origins(self, index: int) -> dict[str, dict[str, tuple[str, str]]]:
        """What stands before and after an expert's number in the name of the tensor that mlx-lm
        stacks, by projection and leaf; only of projections whose bytes it does not change.

        mlx-lm's own `sanitize` tells: it is given an expert of random bytes.
        """
        if index not in self._known_origins:
            self._known_origins[index] = {} if self._fp8 else self._find_origins(index)
        return self._known_origins[index]

    def _find_origins(self, index: int) -> dict[str, dict[str, tuple[str, str]]]:
        arrays = self.checkpoint.load(n for n in self._names[index] if not self._expert_name(n))
        random = np.random.default_rng(0)
        names: dict[bytes, tuple[str, str]] = {}
        for name in self._names[index]:
            parts = self._expert_name(name)
            if parts and parts[1] == 0:
                info = self.checkpoint.tensors[name]
                content = random.bytes(info.nbytes)
                bits = mx.array(np.frombuffer(content, np.uint8)).view(mlx_dtype(info.dtype))
                arrays[name] = bits.reshape(info.shape)
                names[content] = parts[0], parts[2]
        with self._pretend_experts(1):
            made = self.experts_of(self._sanitized(arrays, self.layer_prefix(index)))
        found = {}
        for projection, leaves in made.items():
            flat = {leaf: mx.contiguous(a).reshape(-1) for leaf, a in leaves.items()}
            contents = {leaf: np.array(a.view(mx.uint8)).tobytes() for leaf, a in flat.items()}
            if names.keys() >= set(contents.values()):
                found[projection] = {leaf: names[content] for leaf, content in contents.items()}
        return found

    def read_apart(self, index: int) -> bool:
        """Whether some experts of a layer can be read without the others: they are tensors of their
        own, or rows of tensors as mlx-lm has them."""
        head = self._experts_head(index)
        own = any(name.startswith(head) and name.endswith(".weight") for name in self._names[index])
        return own or self.experts_apart(index)

    def _stacked_names(self, index: int, projection: str) -> dict[str, str]:
        """By leaf, of a projection that is stored as mlx-lm has it; empty if it is not."""
        path = f"{self._experts_head(index)}{projection}"
        parts = ((name, *name.rpartition(".")) for name in self._names[index])
        return {leaf: name for name, owner, _, leaf in parts if owner == path}

    def _experts_head(self, index: int) -> str:
        return f"{self.layer_prefix(index)}.{self.family.experts}."

    def read_bytes(self, index: int | None, kept: Sequence[int] | None = None) -> int:
        """Bytes that are read for a layer with the `kept` experts, or all; of None, what is outside
        the layers."""
        sizes = {name: self.checkpoint.tensors[name].nbytes for name in self._names[index]}
        if index is None or kept is None:
            return sum(sizes.values())
        head, stacked = self._experts_head(index), self.read_apart(index)
        total, chosen = 0, set(kept)
        for name, nbytes in sizes.items():
            if parts := self._expert_name(name):
                total += nbytes if parts[1] in chosen else 0
            elif stacked and name.startswith(head):
                total += nbytes // self.num_experts * len(kept)
            else:
                total += nbytes
        return total

    def _expert_name(self, name: str) -> tuple[str, int, str] | None:
        """What is before and after the number of an expert in a tensor's name, and the number."""
        if name not in self._expert_names:
            match = self.family.source_expert.fullmatch(name)
            parts = None if match is None else (match["head"], int(match["expert"]), match["tail"])
            self._expert_names[name] = parts
        return self._expert_names[name]

    def _check_experts(self, index: int, names: Sequence[str]) -> None:
        """Whether all experts that are stored apart are there and alike, by the headers."""
        found: dict[tuple[str, str], dict[int, tuple[str, tuple[int, ...]]]] = defaultdict(dict)
        for name in names:
            if parts := self._expert_name(name):
                info = self.checkpoint.tensors[name]
                found[parts[0], parts[2]][parts[1]] = info.dtype, info.shape
        held = {expert for kinds in found.values() for expert in kinds}
        if held and held != set(range(self.num_experts)):
            raise CheckpointError(
                f"{self.checkpoint.path}: {self.layer_prefix(index)} has {len(held)} experts, "
                f"config.json says {self.num_experts}."
            )
        for (head, tail), kinds in found.items():
            usual = Counter(kinds.values()).most_common(1)[0][0]
            for expert in sorted(held):
                name = f"{head}{expert}{tail}"
                if expert not in kinds:
                    raise CheckpointError(f"{self.checkpoint.path} lacks {name}.")
                for what, own, others in zip(("type", "shape"), kinds[expert], usual):
                    if own != others:
                        raise CheckpointError(
                            f"{self.checkpoint.path}: {name} has {what} {own}, those of the other "
                            f"experts have {others}."
                        )

    def _is_router(self, name: str) -> bool:
        """A router tensor, or the scales and biases of a quantized one; `name` from the layer."""
        stem, _, leaf = name.rpartition(".")
        return any(
            name == router or (leaf in ("scales", "biases") and f"{stem}.weight" == router)
            for router in self.family.router
        )

    def trunk_weights(self) -> dict[str, mx.array]:
        """Lazy weights outside the decoder layers (embeddings, norm, head) by module path."""
        return self._sanitized(self.checkpoint.load(self._names[None]), "")

    def _sanitized(self, arrays: dict[str, mx.array], prefix: str) -> dict[str, mx.array]:
        if self._fp8 is not None:
            arrays = formats.dense(arrays, self._fp8)
        if hasattr(self.model, "sanitize"):
            try:
                arrays = self.model.sanitize(arrays)
            except (KeyError, ValueError) as error:
                raise CheckpointError(
                    f"{self.checkpoint.path}: {prefix or 'the part outside the layers'} does not "
                    f"have the tensors that mlx-lm expects: {error}"
                ) from error
        if not prefix:
            return arrays
        foreign = [name for name in arrays if not name.startswith(f"{prefix}.")]
        if foreign:
            raise CheckpointError(f"{foreign[0]} does not belong to {prefix}.")
        return {name.removeprefix(f"{prefix}."): array for name, array in arrays.items()}

    def load_layer(self, index: int, *, experts: bool = True) -> None:
        """Read one decoder layer's weights and make them resident; its `experts`, if not, only when
        they are used."""
        weights = self._runnable(self.layer_weights(index))
        self._place(self.layers[index], weights, self.layer_prefix(index))
        # One after the other, lest all experts be in memory twice, apart and stacked.
        for name in list(weights):
            array = weights.pop(name)
            if experts or not name.startswith(f"{self.family.experts}."):
                mx.eval(array)
        mx.clear_cache()

    def _runnable(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """MLX's gather_mm takes only float32 on the CPU; widening 16-bit experts is exact."""
        if mx.default_device() != mx.cpu:
            return weights
        experts = f"{self.family.experts}."
        return {
            name: a.astype(mx.float32)
            if name.startswith(experts)
            and a.dtype in (mx.bfloat16, mx.float16)
            and f"{name.rpartition('.')[0]}.scales" not in weights
            else a
            for name, a in weights.items()
        }

    @contextmanager
    def reading_experts(self, index: int, see: Callable[[Stacked], None]) -> Iterator[None]:
        """While the block runs, a layer that was loaded without its experts reads those that are
        called, at each call of a projection; `see` is shown them."""
        with ExitStack() as stack:
            for name, part in self.experts(index).named_modules():
                if "weight" in part:
                    stack.enter_context(hooked(part, self._called(index, name, part, see)))
            yield

    def _called(
        self, index: int, name: str, part: nn.Module, see: Callable[[Stacked], None]
    ) -> Callable[..., Any]:
        cls: Any = type(part)

        def call(_: Any, x: mx.array, indices: mx.array, *more: Any, **options: Any) -> Any:
            chosen, places = np.unique(np.array(indices), return_inverse=True)
            found = self.some_experts(index, tuple(chosen.tolist()), [name])
            see(found)
            few = cls.__new__(cls)
            nn.Module.__init__(few)
            few.__dict__.update(part.__dict__)
            head = f"{self.family.experts}.{name}."
            arrays = self._runnable({f"{head}{leaf}": a for leaf, a in found[name].items()})
            for key, value in part.items():
                few[key] = arrays.get(f"{head}{key}", value)
            return few(x, mx.array(places.reshape(indices.shape), mx.uint32), *more, **options)

        return call

    def prefetch(self, index: int) -> None:
        """Ask the system to read a layer's bytes into its cache while other work goes on."""
        self._prefetched = None
        if index < len(self.layers):
            self._prefetched = Prefetch(self.checkpoint.ranges(self._names[index]))

    def layer_bytes(self, index: int) -> int:
        """Bytes of one decoder layer in the checkpoint."""
        return sum(self.checkpoint.tensors[name].nbytes for name in self._names[index])

    def load_trunk(self) -> None:
        """Make embeddings, final norm and head resident."""
        self._place(self.model, self.trunk_weights(), "")

    def _place(self, module: nn.Module, weights: dict[str, mx.array], prefix: str) -> None:
        def predicate(path: str, part: nn.Module) -> bool | dict[str, Any]:
            if not hasattr(part, "to_quantized") or f"{path}.scales" not in weights:
                return False
            return dict(mlx_lm_utils.infer_quant_config(path, part, weights))

        nn.quantize(module, class_predicate=predicate)
        module.eval()
        self._check_complete(module, weights, prefix)
        module.update(tree_unflatten(list(weights.items())))

    def _check_complete(self, module: nn.Module, weights: dict[str, mx.array], prefix: str) -> None:
        """Names and shapes against the module tree; load_weights(strict) would need all layers."""
        start = f"{prefix}." if prefix else ""
        inside: tuple[str, ...] = ()
        if not prefix:
            inside = tuple(f"{self.layer_prefix(i)}." for i in range(len(self.layers)))
        wanted = {
            f"{start}{name}": array
            for name, array in tree_flatten(module.parameters())
            if not name.startswith(inside)
        }
        # Of the first time: later the arrays of a released layer are empty.
        for name, array in wanted.items():
            self._shapes.setdefault(name, array.shape)
        given = {f"{start}{name}": array for name, array in weights.items()}
        missing = sorted(set(wanted) - set(given))
        extra = sorted(set(given) - set(wanted))
        if missing or extra:
            parts = [f"lacks {missing[0]}"] if missing else []
            parts += [f"has an unexpected {extra[0]}"] if extra else []
            what = " and ".join(parts)
            raise CheckpointError(f"{self.checkpoint.path} {what}.")
        for name, array in given.items():
            if array.shape != self._shapes[name]:
                raise CheckpointError(
                    f"{self.checkpoint.path}: {name} has shape {array.shape}, the model expects "
                    f"{self._shapes[name]}."
                )

    def release_layer(self, index: int) -> None:
        """Drop one layer's weights; MLX keeps their memory until the next layer is loaded.

        That is mostly alike, and memory that the system need not clear again is had faster.
        """
        layer = self.layers[index]
        layer.update(tree_map(lambda _: mx.array([]), layer.parameters()))
        # What a layer computed once from its weights (K3's `_attn_res_w_eff`) must not keep them.
        mx.eval([a for part in layer.modules() for a in _private_arrays(part)])
        if index == len(self.layers) - 1:
            mx.clear_cache()

    def loaded_names(self) -> list[str]:
        """Tensors that the language model loads; not those of layers it does not have (MTP)."""
        inside = (None, *range(len(self.layers)))
        return [name for layer in inside for name in self._names.get(layer, ())]

    @property
    def prediction_layers(self) -> list[int]:
        """Multi-token-prediction layers in the checkpoint, rising; mlx-lm does not load them."""
        return sorted(i for i in self._names if i is not None and i >= len(self.layers))

    @property
    def prediction_bytes(self) -> int:
        return sum(self.layer_bytes(index) for index in self.prediction_layers)

    def carried_names(self) -> list[str]:
        """Tensors that the language model does not load and the export copies as they are."""
        return [n for n in self.checkpoint.tensors if n.startswith(self.family.carried)]

    def spec(self) -> ModelSpec:
        """Shapes, formats and bytes of everything; reads headers only."""
        if self.config.get("model_file") == RUNTIME.name:
            raise CheckpointError(
                f"{self.checkpoint.path} is pruned already, with counts that differ by layer.",
                f"start from its source, {self.config.get('reap', {}).get('source', 'unpruned')}",
            )
        modules: list[ModuleSpec] = []
        moe_layers: list[MoeLayer] = []
        self.load_trunk()
        inside = tuple(f"{self.layer_prefix(i)}." for i in range(len(self.layers)))
        modules += self._module_specs(self.model, "", None, apart=inside)
        for index, layer in enumerate(self.layers):
            prefix = self.layer_prefix(index)
            self._place(layer, self.layer_weights(index), prefix)
            experts = f"{prefix}.{self.family.experts}"
            modules += self._module_specs(layer, prefix, index, apart=(f"{experts}.",))
            if index in self.moe_layers:
                moe_layers.append(self._moe_layer(index, experts))
            self.release_layer(index)
        self._check_formats(moe_layers)
        fixed, per_token = self.family.state(text_config(self.config))
        n_group, topk_group = self.groups()
        return ModelSpec(
            model=self.checkpoint.name,
            revision=self.checkpoint.revision,
            model_sha256=self.checkpoint.model_sha256,
            model_type=self.family.model_type,
            parameters=sum(m.elements for m in modules)
            + sum(
                self.num_experts * p.rows * p.columns for moe in moe_layers for p in moe.projections
            ),
            num_layers=len(self.layers),
            num_experts=self.num_experts,
            top_k=self.top_k,
            n_group=n_group,
            topk_group=topk_group,
            modules=tuple(modules),
            moe_layers=tuple(moe_layers),
            state_bytes_fixed=fixed,
            state_bytes_per_token=per_token,
            carried_bytes=sum(self.checkpoint.tensors[n].nbytes for n in self.carried_names()),
            prediction_layers=len(self.prediction_layers),
            prediction_bytes=self.prediction_bytes,
        )

    def _check_formats(self, moe_layers: Sequence[MoeLayer]) -> None:
        """Refuse what no plan could keep: formats that differ by layer, some below 4 bits."""
        stored: dict[str, dict[Format, str]] = defaultdict(dict)
        for layer in moe_layers:
            for part in layer.projections:
                stored[part.name].setdefault(part.format, f"{layer.experts}.{part.name}")
        for formats_of in stored.values():
            first, *others = sorted(formats_of, key=lambda format: format.bits)
            if others and first.bits < 4:
                raise CheckpointError(
                    f"{self.checkpoint.path} stores {formats_of[first]} as {first.label} and "
                    f"{formats_of[others[-1]]} as {others[-1].label}: a bank has one format for "
                    "all layers, the high one of at least 4 bits.",
                    "start from the model as it was before mlx_lm.convert",
                )

    def _moe_layer(self, index: int, path: str) -> MoeLayer:
        projections = []
        for name, part in self.experts(index).named_modules():
            if "weight" not in part:
                continue
            scale = part.get("scales")
            dense = part["weight"].dtype if scale is None else _unpacked_dtype(part)
            projections.append(
                Projection(
                    name=name,
                    rows=part["weight"].shape[1],
                    columns=part.input_dims,
                    dtype=_dtype(dense),
                    format=_format(part),
                    bias_bytes=part["bias"][0].nbytes if "bias" in part else 0,
                )
            )
        layer = self.layers[index]
        loose = 0
        for name in self.family.router:
            owner = name.rpartition(".")[0]
            # The bias of a router matrix is in its own ModuleSpec.
            if not _is_matrix(submodule(layer, owner)):
                loose += submodule(layer, name)[0].nbytes
        return MoeLayer(
            index, path, tuple(sorted(projections, key=lambda p: p.name)), router_row_bytes=loose
        )

    def _module_specs(
        self, root: nn.Module, prefix: str, layer: int | None, *, apart: tuple[str, ...]
    ) -> Iterator[ModuleSpec]:
        """One spec per module that owns arrays, except router tensors that are loose arrays.

        Modules below one of the paths `apart` are left out.
        """
        keep_dense = getattr(self.model, "quant_predicate", None) or (lambda path, module: True)
        for name, module in root.named_modules():
            path = ".".join(part for part in (prefix, name) if part)
            arrays = {
                key: value
                for key, value in module.items()
                if isinstance(value, mx.array) and not key.startswith("_")
            }
            relative = [f"{name}.{key}" if name else key for key in arrays]
            if f"{path}.".startswith(apart) or not arrays:
                continue
            matrix = _is_matrix(module)
            is_router = layer is not None and f"{name}.weight" in self.family.router
            if not matrix:
                routers = [k for k, r in zip(arrays, relative) if r in self.family.router]
                for key in routers if layer is not None else []:
                    del arrays[key]
                if not arrays:
                    continue
            role: Role = "fixed"
            if matrix and is_router:
                role = "router"
            elif matrix and keep_dense(path, module) is not False:
                role = "embedding" if layer is None else "trunk"
            packed = ("weight", "scales", "biases") if matrix and role != "fixed" else ()
            other = sum(v.nbytes for key, v in arrays.items() if key not in packed)
            weight = arrays.get("weight")
            yield ModuleSpec(
                path=path,
                layer=layer,
                role=role,
                elements=_elements(module) if packed else 0,
                width=_width(module) if packed else 0,
                dtype=_dtype(_unpacked_dtype(module)) if weight is not None else "float32",
                format=_format(module) if packed else Format(32, 1, "dense"),
                other_bytes=other,
            )


def open_source(model: str, *, trust_remote_code: bool = False) -> SourceModel:
    """Open a checkpoint directory or hub id. Raises CheckpointError; reads headers only."""
    return SourceModel(open_checkpoint(model), trust_remote_code=trust_remote_code)


def _import_file(path: Path) -> ModuleType:
    name = f"reap_runtime_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _private_arrays(module: nn.Module) -> list[mx.array]:
    own = {**module, **vars(module)}
    return [a for name, a in own.items() if name.startswith("_") and isinstance(a, mx.array)]


def _is_matrix(module: nn.Module) -> bool:
    """A module whose weight MLX quantizes or has quantized."""
    return "weight" in module and (hasattr(module, "to_quantized") or "scales" in module)


def _format(module: nn.Module) -> Format:
    if "scales" in module:
        return Format(module.bits, module.group_size, module.mode)
    return Format(8 * module["weight"].dtype.size, 1, "dense")


def _elements(module: nn.Module) -> int:
    size = int(module["weight"].size)
    return size * 32 // module.bits if "scales" in module else size


def _width(module: nn.Module) -> int:
    columns = int(module["weight"].shape[-1])
    return columns * 32 // module.bits if "scales" in module else columns


def _unpacked_dtype(module: nn.Module) -> mx.Dtype:
    """The dtype that scales and biases of an affine requantization would have."""
    if "scales" not in module:
        return module["weight"].dtype
    scales = module["scales"].dtype
    return scales if mx.issubdtype(scales, mx.floating) else mx.bfloat16


def _dtype(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")
