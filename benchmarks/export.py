"""Memory, reading and speed of `reap export` on K3-layout checkpoints with random weights.

Memory: checkpoints of 10, 20 and 40 layers, one shard a layer, each exported in a process of its
own with all experts (identity) and with half of them (half); the first also with half of them in 2
bits, found by weighted search (two banks). Peak resident memory stands against twice the largest
layer's output and 400 MB, bytes read of the source against what is kept of it.

Speed: a checkpoint in K3's proportions (an expert is a quarter of one of K3's; 2 of 128 are routed
to, of K3's 16 of 896) is by turns copied, copied and hashed (an export has checksums), and exported
with all experts; the copies end on the disk, as exports do. mlx-lm converts it once. All files lie
in the system's cache when their turn comes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from checkpoints import peak_bytes, read_bytes, start_measuring, write_checkpoint

from reap.artifacts import (
    Format,
    LayerPlan,
    ModelSpec,
    Plan,
    Provenance,
    Saliency,
    SecondMoments,
)
from reap.artifacts.files import sha256
from reap.artifacts.plan import Layout, Rounding
from reap.models.source import open_source
from reap.planning import PlanSettings, make_plan

KINDS = ("identity", "half", "two banks")
SMALL = {"hidden": 512, "latent": 896, "inner": 768, "experts": 64}
LARGE = {"hidden": 512, "latent": 1792, "inner": 1536, "experts": 128, "top_k": 2}


Say = Callable[[str], None]


def made_up(spec: ModelSpec) -> Saliency:
    """Random sums of the shapes that a calibration gives; layers alike, so that plans are even."""
    random = np.random.default_rng(0)
    shape = (2, 1, len(spec.moe_layers), spec.num_experts)
    count = random.integers(50, 200, shape)
    energy = random.gamma(1.0, 1.0, shape) * count
    ones = np.ones(shape[:3])
    sums = {
        p.name: np.broadcast_to(random.gamma(1.0, 1.0, p.columns), (shape[2], p.columns)).copy()
        for p in spec.moe_layers[0].projections
    }
    return Saliency(
        provenance=Provenance("", "", spec.model, "", spec.model_sha256, {}),
        spec=spec,
        domains=("all",),
        count=count,
        gate=count * 0.5,
        norm=np.sqrt(energy * count),
        gate_norm=np.sqrt(energy * count) / 2,
        gate2_norm2=energy / 4,
        norm2=energy,
        max_norm=np.sqrt(energy),
        tokens=count.sum(axis=-1) // spec.top_k,
        residual_energy=ones * 1e4,
        output_energy=ones * energy.sum(axis=-1),
        moments=SecondMoments(sums, {name: np.ones(shape[2], np.int64) for name in sums}),
    )


def make_files(path: Path, kind: str, folder: Path) -> tuple[Path, Path]:
    """A plan of one kind, by hand, and the saliency file that it is made from."""
    spec = open_source(str(path)).spec()
    saliency, file = folder / "saliency.safetensors", folder / "plan.json"
    measured = made_up(spec)
    measured.save(saliency, force=True)
    inputs = {"saliency": sha256(saliency)}
    provenance = Provenance("", "", spec.model, "", spec.model_sha256, inputs)
    size = spec.trunk_bytes() + 2 * spec.experts_bytes
    plan = make_plan(measured, PlanSettings(size=size, low="2bit"), provenance=provenance)
    count = spec.num_experts
    kept = tuple(range(0, count, 2)) if kind == "half" else tuple(range(count))
    layers = tuple(LayerPlan(layer.layer, kept, len(kept)) for layer in plan.layers)
    low = {}
    if kind == "two banks":
        layers = tuple(replace(layer, high=count // 2) for layer in layers)
        low = {p.name: Format.parse("2bit") for p in spec.moe_layers[0].projections}
    water = replace(
        plan.waterfall,
        router=sum(len(kept) * spec.router_row_bytes(moe) for moe in spec.moe_layers),
        high=sum(layers[0].high * spec.expert_bytes(moe) for moe in spec.moe_layers),
        low=sum(layers[0].low * spec.expert_bytes(moe, low) for moe in spec.moe_layers),
    )
    layout: Layout = "two-bank" if low else "stock"
    rounding: Rounding = "weighted" if low else "plain"
    replace(
        plan, layers=layers, low=low, layout=layout, waterfall=water, low_rounding=rounding
    ).save(file, force=True)
    return file, saliency


def child(path: Path, plan_file: Path, saliency: Path, out: Path) -> None:
    """One export; what it took, as JSON on stdout."""
    from reap.export import export, outline

    source, plan = open_source(str(path)), Plan.load(plan_file)
    made = outline(source, plan, saliency=saliency)
    mx.eval(mx.ones(1) + 1)
    writing = _counted(sys.modules["reap.export.export"], "write_shards")
    checking = _counted(sys.modules["reap.export.export"], "verify")
    start_measuring()
    base, start = peak_bytes(), time.perf_counter()
    export(source, plan, out, plan_file=plan_file, saliency=saliency)
    seconds = time.perf_counter() - start
    layers: dict[int, int] = {}
    for shard in made.shards:
        for part, sizes in shard.parts.items():
            if part is not None:
                layers[part] = layers.get(part, 0) + sum(t.nbytes for t in sizes.values())
    figures = {
        "layers": len(source.layers),
        "layout": plan.layout,
        "written_bytes": made.nbytes,
        "kept_bytes": made.read_bytes,
        "source_read_bytes": writing["bytes"],
        "check_read_bytes": checking["bytes"],
        "largest_layer_bytes": max(layers.values()),
        "shards": len(made.shards),
        "peak_bytes": peak_bytes(),
        "before_bytes": base,
        "seconds": seconds,
        "writing_seconds": writing["seconds"],
        "check_seconds": checking["seconds"],
    }
    print(json.dumps(figures))


def _counted(owner: Any, name: str) -> dict[str, Any]:
    """Seconds in a function and bytes read meanwhile, by all threads; None where none counts."""
    found: dict[str, Any] = {"bytes": 0, "seconds": 0.0}
    real = getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        before, start = read_bytes(), time.perf_counter()
        result = real(*args, **kwargs)
        found["seconds"] += time.perf_counter() - start
        found["bytes"] = None if before is None else found["bytes"] + read_bytes() - before
        return result

    setattr(owner, name, counted)
    return found


def exported(path: Path, kind: str, folder: Path) -> dict[str, Any]:
    plan, saliency = make_files(path, kind, folder)
    out = folder / "out"
    command = [sys.executable, __file__, "--child", *map(str, (path, plan, saliency, out))]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    shutil.rmtree(out)
    return {"kind": kind, **json.loads(done.stdout)}


def copied(path: Path, out: Path, *, hashed: bool = False) -> float:
    """Seconds of a plain copy, every file of which is on the disk in the end."""
    start = time.perf_counter()
    shutil.copytree(path, out)
    for file in out.iterdir():
        if hashed:
            sha256(file)
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    seconds = time.perf_counter() - start
    shutil.rmtree(out)
    return seconds


def converted(path: Path, out: Path) -> dict[str, Any] | None:
    """`mlx_lm.convert` in a process of its own; None if it cannot convert the checkpoint."""
    code = (
        "import json, sys, time; from checkpoints import *; start_measuring();"
        "from mlx_lm import convert; start = time.perf_counter();"
        "convert(sys.argv[1], sys.argv[2]);"
        "print(json.dumps([time.perf_counter() - start, peak_bytes()]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path), str(out)],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    shutil.rmtree(out, ignore_errors=True)
    if done.returncode:
        print(done.stderr.strip().rpartition("\n")[2], file=sys.stderr)
        return None
    seconds, peak = json.loads(done.stdout.strip().rpartition("\n")[2])
    return {"seconds": seconds, "peak_bytes": peak}


def warm(path: Path) -> None:
    for file in path.iterdir():
        with open(file, "rb") as opened:
            while opened.read(2**24):
                pass


def memory(folder: Path, layer_counts: Sequence[int], say: Say) -> list[dict[str, Any]]:
    say(
        "layers  export     written  largest layer  peak memory  of 2 layers + 400 MB"
        "  read/kept  checks read"
    )
    found = []
    for layers in layer_counts:
        path = write_checkpoint(folder / "source", layers, **SMALL)
        warm(path)
        for kind in KINDS if layers == layer_counts[0] else KINDS[:2]:
            found.append(exported(path, kind, folder))
            say(_line(found[-1]))
        shutil.rmtree(path)
    return found


def speed(folder: Path, repeats: int, say: Say) -> dict[str, Any]:
    path = write_checkpoint(folder / "source", 5, **LARGE)
    size = sum(file.stat().st_size for file in path.iterdir())
    warm(path)
    runs: dict[str, list[float]] = {"copy": [], "copy and sha256": [], "identity export": []}
    exports = []
    for _ in range(repeats):
        runs["copy"].append(copied(path, folder / "copy"))
        runs["copy and sha256"].append(copied(path, folder / "copy", hashed=True))
        exports.append(exported(path, "identity", folder))
        runs["identity export"].append(exports[-1]["seconds"])
    converting = converted(path, folder / "converted")
    if converting:
        runs["mlx_lm.convert"] = [converting["seconds"]]
    say(f"\n{size / 1e6:,.0f} MB, fastest of {repeats}       s   copy's speed, of the medians")
    best, median = ({n: f(times) for n, times in runs.items()} for f in (min, statistics.median))
    for name in runs:
        ratios = f"{best['copy'] / best[name]:9.2f} {median['copy'] / median[name]:16.2f}"
        say(f"{name:24} {best[name]:7.2f} {ratios}")
    fastest = min(exports, key=lambda run: run["seconds"])
    say(
        f"of the export: writing {fastest['writing_seconds']:.2f} s, final check "
        f"{fastest['check_seconds']:.2f} s; peak memory {fastest['peak_bytes'] / 1e6:.0f} MB"
        + (f", of mlx_lm.convert {converting['peak_bytes'] / 1e6:,.0f} MB" if converting else "")
    )
    shutil.rmtree(path)
    return {"bytes": size, "seconds": runs, "export": fastest, "convert": converting}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--layers", type=int, nargs="+", default=[10, 20, 40])
    parser.add_argument("--repeats", type=int, default=5, help="of copies and exports")
    parser.add_argument("--scratch", type=Path, help="where checkpoints are written and removed")
    parser.add_argument("--child", nargs=4, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(*options.child)
        return

    def say(text: str) -> None:
        print(text, file=sys.stderr if options.json else sys.stdout, flush=True)

    with tempfile.TemporaryDirectory(dir=options.scratch, prefix="reap-benchmark-") as name:
        folder = Path(name)
        found = {
            "memory": memory(folder, options.layers, say),
            "speed": speed(folder, options.repeats, say),
        }
    if options.json:
        print(json.dumps(found, indent=1))


def _line(found: dict[str, Any]) -> str:
    bound = 2 * found["largest_layer_bytes"] + 400e6
    read, checks = found["source_read_bytes"], found["check_read_bytes"]
    share = "-" if read is None else f"{read / found['kept_bytes']:.3f}"
    checked = "-" if checks is None else f"{checks / 1e6:.0f} MB"
    return (
        f"{found['layers']:6d}  {found['kind']:9} {found['written_bytes'] / 1e6:6.0f} MB"
        f" {found['largest_layer_bytes'] / 1e6:10.1f} MB {found['peak_bytes'] / 1e6:9.0f} MB"
        f" {found['peak_bytes'] / bound:20.2f} {share:>11} {checked:>12}"
    )


if __name__ == "__main__":
    main()
