"""Architecture file of a pruned Mixture-of-Experts checkpoint.

An exported checkpoint carries a copy of this file (``"model_file": "reap_model.py"``), and mlx-lm
runs it when it is told to trust remote code. It builds the mlx-lm architecture that the config
names, then fits each decoder layer to the experts that were kept: fewer of them, another number in
every layer, in one bank or in two banks of different precision. It is executed outside any
package on machines without ``reap``, so it imports nothing but mlx and mlx-lm.
"""

# No `from __future__ import annotations`: mlx-lm does not register this module in sys.modules,
# and dataclasses look there to resolve annotations that are strings.
from dataclasses import dataclass
from typing import Any, TypeAlias

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP
from mlx_lm.utils import _get_classes

Experts: TypeAlias = SwitchGLU | SwitchMLP


class TwoBankExperts(nn.Module):
    """Routed experts in two banks that may be stored in different formats.

    Expert ``e`` of the router is expert ``e`` of the high bank if ``e < split``, and expert
    ``e - split`` of the low bank otherwise. A call is one of a ``SwitchGLU``: ``x`` of shape
    [..., D] and ``indices`` of shape [..., K] give [..., K, D_out]. The result has the dtype of
    ``x``, so that it cannot depend on which of the banks a token happens to be routed to.

    Class attributes select how a call is executed; assign them on the class or on an instance.
    All paths give equal results.

    path
        "split" sorts the pairs and runs every bank on its own slice, but reads their number back
        to the host. "masked" runs both banks on all pairs: no read-back and fixed shapes, so it
        can be compiled (for one shape, like mlx-lm's experts). A pair of the other bank is masked
        out; it stands on one expert that the step reads from this bank anyway, the same for all
        tokens of the step. So a step reads the experts that its tokens chose and no other, or
        one more if all pairs are in one bank: at most K + 1 for one token. "auto" is "masked" for
        few pairs on a GPU, where waiting costs more than the additional arithmetic, and in
        training, which mlx-lm compiles; it is "split" otherwise.
    few_pairs
        Most pairs of a token and an expert that "auto" runs "masked".
    max_rows
        Most rows in one call of a bank: some GPUs compute wrong results for more
        (mlx issue 3856).
    """

    path = "auto"
    few_pairs = 256
    max_rows = 32_768

    def __init__(self, high: Experts, low: Experts, split: int):
        super().__init__()
        self.high = high
        self.low = low
        self.split = split

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        indices = mx.stop_gradient(indices)
        run = {"masked": self._masked, "split": self._split}[self.choose(indices)]
        return run(x, indices)

    def choose(self, indices: mx.array) -> str:
        """Return the path that a call with these indices takes: the one rule for all layers."""
        if self.path != "auto":
            return self.path
        few = mx.default_device() == mx.gpu and indices.size <= self.few_pairs
        return "masked" if few or self.training else "split"

    def _split(self, x: mx.array, indices: mx.array) -> mx.array:
        flat = indices.flatten()
        order = mx.argsort(flat)
        flat = flat[order]
        tokens = order // indices.shape[-1]
        rows = x.reshape(-1, x.shape[-1])
        boundary: Any = mx.sum(flat < self.split).item()

        outputs = []
        for bank, first, start, stop in (
            (self.high, 0, 0, boundary),
            (self.low, self.split, boundary, flat.size),
        ):
            for begin in range(start, stop, self.max_rows):
                part = slice(begin, min(begin + self.max_rows, stop))
                y = bank(rows[tokens[part]], (flat[part] - first)[:, None])
                outputs.append(y.astype(x.dtype))
        y = mx.concatenate(outputs)[mx.argsort(order)]
        return y.reshape(*indices.shape, -1)

    def _masked(self, x: mx.array, indices: mx.array) -> mx.array:
        rows = x.reshape(-1, x.shape[-1])
        pairs = indices.reshape(-1, indices.shape[-1])
        step = max(1, self.max_rows // pairs.shape[-1])
        outputs = [
            self._both(rows[begin : begin + step], pairs[begin : begin + step])
            for begin in range(0, len(rows), step)
        ]
        return mx.concatenate(outputs).reshape(*indices.shape, -1)

    def _both(self, x: mx.array, indices: mx.array) -> mx.array:
        in_high = indices < self.split
        high = mx.where(in_high, indices, 0)
        # Indices are unsigned: raise them to the split before it is subtracted.
        low = mx.maximum(indices, self.split) - self.split
        # The last expert in use stands in, one for the whole step; expert 0 if none is in use.
        high = mx.where(in_high, high, high.max())
        low = mx.where(in_high, low.max(), low)
        # Selected, not multiplied by 0: a stand-in may be infinite.
        y = mx.where(in_high[..., None], self.high(x, high), self.low(x, low))
        return y.astype(x.dtype)

    def __getattr__(self, name: str) -> Any:
        # shard() of the architectures reaches for experts.gate_proj and so on.
        high, low = self.get("high"), self.get("low")
        if high is not None and low is not None and isinstance(high.get(name), nn.Module):
            return _BothBanks(high[name], low[name])
        return super().__getattr__(name)


class _BothBanks(nn.Module):
    """The same projection of both banks, for code that changes parameters in place."""

    def __init__(self, high: nn.Module, low: nn.Module):
        super().__init__()
        self.high = high
        self.low = low


@dataclass(frozen=True)
class ModelArgs:
    """Arguments of the architecture, and what was kept of it."""

    base_class: type[nn.Module]
    base_args: Any
    counts: list[int]
    splits: list[int]
    experts: str
    router: list[str]

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> "ModelArgs":
        """Read the arguments from the contents of config.json."""
        values = {**config, **{f"reap.{k}": v for k, v in config.get("reap", {}).items()}}
        keys = ("expert_counts", "expert_bank_split", "reap.experts", "reap.router")
        if missing := [key for key in keys if key not in values]:
            raise ValueError(f"config.json of a pruned model lacks {', '.join(missing)}")
        base_class, base_args_class = _get_classes(config)
        return cls(base_class, base_args_class.from_dict(config), *(values[key] for key in keys))


class Model(nn.Module):
    """``Model(args)`` is an instance of a subclass of the architecture's own ``Model``."""

    def __new__(cls, args: ModelArgs) -> nn.Module:
        # The base is known only now. Python skips __init__ for an instance of another class.
        model = type("PrunedModel", (args.base_class,), {"__module__": __name__})(args.base_args)
        layers = model.layers
        if not len(layers) == len(args.counts) == len(args.splits):
            raise ValueError(
                f"the model has {len(layers)} layers, expert_counts {len(args.counts)}, "
                f"expert_bank_split {len(args.splits)}"
            )
        for number, layer in enumerate(layers):
            try:
                _fit_layer(layer, args, args.counts[number], args.splits[number])
            except ValueError as error:
                raise ValueError(f"layer {number}: {error}") from None
        return model


def _fit_layer(layer: nn.Module, args: ModelArgs, count: int, split: int) -> None:
    """Replace a layer's experts and router tensors by ones for ``count`` experts."""
    experts = _find(layer, args.experts)
    if count == 0 and split == 0 and experts is None:
        return
    if count == 0 or experts is None:
        found = "no experts" if experts is None else "experts"
        raise ValueError(
            f"expert_counts is {count} and expert_bank_split {split}, "
            f"but the architecture has {found} at {args.experts}"
        )
    if not 0 <= split < count:
        raise ValueError(f"expert_bank_split {split} is not between 0 and {count - 1}")
    _check_router(args.base_args, count, split)

    if split:
        kept = TwoBankExperts(_bank(experts, split), _bank(experts, count - split), split)
    else:
        kept = _bank(experts, count)
    _replace(layer, args.experts, kept)

    before = _first(experts).num_experts
    for path in args.router:
        old = _find(layer, path)
        if not isinstance(old, mx.array) or old.shape[0] != before:
            shape = old.shape if isinstance(old, mx.array) else "no tensor"
            raise ValueError(f"router {path} is {shape}, expected {before} rows")
        _replace(layer, path, mx.zeros((count, *old.shape[1:]), old.dtype))


def _check_router(base_args: Any, count: int, split: int) -> None:
    """Refuse a number of experts that the router cannot choose from."""
    names = "num_experts_per_tok num_experts_per_token moe_topk moe_top_k moe_k top_k_experts"
    top_k = _setting(base_args, *names.split())
    groups = _setting(base_args, "n_group", "num_expert_group") or 1
    if _setting(base_args, "topk_method") in ("greedy", "gready"):  # sic: mlx-lm's deepseek_v2
        groups = 1
    kept_groups = (_setting(base_args, "topk_group") or groups) if groups > 1 else 1

    if groups > 1 and split:
        raise ValueError(
            f"two banks ({split} + {count - split} experts) do not fit a router "
            f"that is limited to {kept_groups} of {groups} groups of experts"
        )
    if count % groups:
        raise ValueError(f"{count} experts do not divide into the router's {groups} groups")
    reach = count // groups * kept_groups
    if top_k is not None and reach < top_k:
        raise ValueError(f"the router chooses {top_k} of {reach} experts ({count} kept)")


def _setting(args: Any, *names: str) -> Any:
    """Return the first of the named settings that is set, also in a nested text config."""
    for holder in (args, getattr(args, "text_config", None)):
        for name in names:
            value = holder.get(name) if isinstance(holder, dict) else getattr(holder, name, None)
            if value is not None:
                return value
    return None


def _bank(experts: nn.Module, count: int) -> Experts:
    """Return experts like ``experts``, but ``count`` of them. Nothing is computed (lazy arrays)."""
    first = _first(experts)
    dims = first.input_dims, first.output_dims
    return type(experts)(*dims, count, activation=experts.activation, bias="bias" in first)


def _first(experts: nn.Module) -> nn.Module:
    # Exactly these classes: a subclass may compute something that two banks would not.
    if type(experts) is SwitchGLU:
        return experts.gate_proj
    if type(experts) is SwitchMLP:
        return experts.fc1
    raise ValueError(f"experts are {type(experts).__name__}, not SwitchGLU or SwitchMLP")


def _find(module: Any, path: str) -> Any:
    """Return what stands at a dotted path below a module, or None."""
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


def _replace(module: nn.Module, path: str, value: Any) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        module = getattr(module, parent)
    setattr(module, name, value)
