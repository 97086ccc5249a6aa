"""What two banks cost at the shape of Kimi-K3's experts, against one bank.

One MoE layer's routed experts (latent 3584 → 3072 → 3584, top-16, K3's activation) with random
codes, the high bank in mxfp4, the low one in affine 2 bit; routing is uniform. Every path is timed
against the pair-weighted mean of a bank that is all mxfp4 and one that is all 2 bit, each with as
many experts as both banks together: what the same pairs would cost if there were no second bank.
Both references and all paths run once in every repetition, in changing order; `ratio` is the
median over the repetitions, `least` the ratio of the shortest times. Prints a table (with --json
one JSON object on stdout). Exits with 1 if the path that the runtime chooses misses the target.

On a CPU, times are those of the processor, so that other processes count little, and a prefill of
256 tokens takes about six minutes. A decode step on a GPU is a chain of --layers calls and one
wait, as in a model: a path that reads something back waits in every layer.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from mlx_lm.models.kimi_k3 import SiTU
from mlx_lm.models.switch_layers import SwitchGLU

from reap.models.reap_model import TwoBankExperts

LATENT, INTERMEDIATE, TOP_K = 3584, 3072, 16
TARGET = 1.10
MXFP4 = {"bits": 4, "group_size": 32, "mode": "mxfp4"}


@dataclass(frozen=True)
class Row:
    """One path at one number of tokens; milliseconds are medians of one call."""

    tokens: int
    path: str
    chosen: bool
    high_pairs: float
    milliseconds: float
    reference: float
    ratio: float
    least: float

    @property
    def missed(self) -> bool:
        return self.chosen and self.ratio > TARGET


def make_bank(count: int, format: dict[str, Any]) -> SwitchGLU:
    """Experts with random codes and constant scales that keep the activations near 1."""
    bank = SwitchGLU(LATENT, INTERMEDIATE, count, activation=SiTU(4.0, 25.0))
    nn.quantize(bank, **format)
    for name, array in tree_flatten(bank.parameters()):
        if name.endswith("weight"):
            array = mx.random.randint(0, 2**32, array.shape, mx.uint32)
        elif array.dtype == mx.uint8:
            array = mx.full(array.shape, 127 - 7, mx.uint8)  # 2^-7
        else:  # codes 0 to 3, centred
            value = -0.03 if name.endswith("biases") else 0.02
            array = mx.full(array.shape, value, mx.bfloat16)
        bank.update(tree_unflatten([(name, array)]))
        mx.eval(array)
    return bank


def cut(bank: SwitchGLU, part: slice) -> SwitchGLU:
    """A bank of its own with some of the experts."""
    count = len(range(*part.indices(bank.up_proj.num_experts)))
    out = SwitchGLU(LATENT, INTERMEDIATE, count, activation=bank.activation)
    first = bank.up_proj
    nn.quantize(out, bits=first.bits, group_size=first.group_size, mode=first.mode)
    out.update(tree_map(lambda array: mx.contiguous(array[part]), bank.parameters()))
    mx.eval(out.parameters())
    return out


def chain(experts: nn.Module, layers: int) -> Callable[[mx.array, mx.array], mx.array]:
    """`layers` calls of the experts, each on the normalized mean of what the one before gave."""

    def step(x: mx.array, indices: mx.array) -> mx.array:
        for _ in range(layers):
            x = mx.fast.rms_norm(experts(x, indices).mean(axis=-2), None, 1e-5)
        return x

    return step


def seconds(step: Callable[[mx.array, mx.array], mx.array], x: mx.array, pairs: mx.array) -> float:
    clock = time.perf_counter if mx.default_device() == mx.gpu else time.process_time
    start = clock()
    mx.eval(step(x, pairs))
    return clock() - start


def measure(
    two: TwoBankExperts,
    one: dict[str, SwitchGLU],
    paths: Sequence[str],
    tokens: int,
    repeats: int,
    layers: int,
    dtype: mx.Dtype,
) -> list[Row]:
    experts = one["high"].up_proj.num_experts
    steps = {name: chain(bank, layers) for name, bank in one.items()}
    steps |= {path: chain(_on_path(two, path), layers) for path in paths}
    if tokens == 1:  # kernels are compiled, and pages touched, before anything is timed
        repeats += 1
    times: list[dict[str, float]] = []
    shares = []
    for _ in range(repeats):
        x = mx.random.normal((1, tokens, LATENT)).astype(dtype)
        order = mx.argsort(mx.random.uniform(shape=(1, tokens, experts)), axis=-1)
        pairs = order[..., :TOP_K].astype(mx.uint32)
        shares.append((pairs < two.split).mean().item())
        mx.eval(x, pairs)
        taken = {}
        for name in random.sample(list(steps), len(steps)):
            taken[name] = seconds(steps[name], x, pairs) / layers
        times.append(taken)
    if tokens == 1:
        times, shares = times[1:], shares[1:]

    def reference(part: dict[str, float], share: float) -> float:
        return share * part["high"] + (1 - share) * part["low"]

    references = [reference(*both) for both in zip(times, shares)]
    share = statistics.fmean(shares)
    best = {name: min(part[name] for part in times) for name in steps}
    chosen = two.choose(pairs)
    return [
        Row(
            tokens=tokens,
            path=path,
            chosen=path == chosen,
            high_pairs=share,
            milliseconds=1e3 * statistics.median(part[path] for part in times),
            reference=1e3 * statistics.median(references),
            ratio=statistics.median(part[path] / r for part, r in zip(times, references)),
            least=best[path] / reference(best, share),
        )
        for path in paths
    ]


def _on_path(two: TwoBankExperts, path: str) -> TwoBankExperts:
    fixed = TwoBankExperts(two.high, two.low, two.split)
    fixed.path = path
    return fixed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--experts", type=int, default=56, help="in both banks, about 40 MB each")
    parser.add_argument("--high", type=int, help="of them in the high bank (default: half)")
    parser.add_argument("--group-size", type=int, default=128, help="of the low bank")
    parser.add_argument("--tokens", type=int, default=256, help="of the prefill; 0: decode only")
    parser.add_argument("--repeats", type=int, default=11, help="of a decode step")
    parser.add_argument("--prefill-repeats", type=int, help="default: 1, on a GPU 11")
    parser.add_argument("--layers", type=int, help="calls of a step (default: 1, on a GPU 24)")
    options = parser.parse_args()
    split = options.experts // 2 if options.high is None else options.high
    if not 0 < split < options.experts or options.experts < TOP_K:
        parser.error(f"at least {TOP_K} experts, some in each bank")

    on_gpu = mx.default_device() == mx.gpu
    # The CPU multiplies quantized matrices ten times faster in float32. It is also what stock
    # mlx-lm computes Kimi-K3 in, whose convolutions are stored in float32.
    dtype = mx.bfloat16 if on_gpu else mx.float32
    layers = options.layers or (24 if on_gpu else 1)
    mx.random.seed(options.seed)
    random.seed(options.seed)
    low_format = {"bits": 2, "group_size": options.group_size, "mode": "affine"}
    one = {"high": make_bank(options.experts, MXFP4), "low": make_bank(options.experts, low_format)}
    high, low = cut(one["high"], slice(0, split)), cut(one["low"], slice(split, None))
    two = TwoBankExperts(high, low, split).eval()
    rows = measure(two, one, ("split", "masked"), 1, options.repeats, layers, dtype)
    if options.tokens:
        # Nothing chooses "masked" for a prefill on a CPU, where it takes minutes.
        paths = ("split", "masked") if on_gpu else ("split",)
        repeats = options.prefill_repeats or (11 if on_gpu else 1)
        rows += measure(two, one, paths, options.tokens, repeats, 1, dtype)

    out = sys.stderr if options.json else sys.stdout
    print(
        f"{'tokens':>6} {'path':7} {'chosen':6} {'high':>5} {'ms':>9} {'one bank':>9} "
        f"{'ratio':>6} {'least':>6}",
        file=out,
    )
    for row in rows:
        print(
            f"{row.tokens:6} {row.path:7} {'yes' if row.chosen else 'no':6} "
            f"{row.high_pairs:5.0%} {row.milliseconds:9.1f} {row.reference:9.1f} "
            f"{row.ratio:6.3f} {row.least:6.3f}" + ("  MISSED" if row.missed else ""),
            file=out,
        )
    met = not any(row.missed for row in rows)
    if options.json:
        figures = {
            "device": "gpu" if on_gpu else "cpu",
            "dtype": str(dtype).removeprefix("mlx.core."),
            "experts": options.experts,
            "split": split,
            "layers": layers,
            "peak_bytes": mx.get_peak_memory(),
            "target": TARGET,
            "met": met,
            "rows": [asdict(row) for row in rows],
        }
        print(json.dumps(figures, indent=2))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
