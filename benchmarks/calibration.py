"""Memory, reading and speed of `reap calibrate` on K3-layout checkpoints with random weights.

Writes checkpoints of 10, 20 and 40 layers, one shard a layer, calibrates each in a process of its
own and prints peak resident memory and bytes read against one layer's bytes and the checkpoint's;
then the time against mlx-lm's plain forward pass of the same tokens, both in one process; then how
the time grows with tokens and layers; then what the sensitivity adds, on smaller layers. --full
takes the sizes of a several-GB checkpoint.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from checkpoints import SMALL, peak_bytes, read_bytes, start_measuring, write_checkpoint
from mlx_lm.utils import load_model

from reap.calibrate import CalibrationSettings, calibrate
from reap.models.source import open_source
from reap.models.text import batches, load_texts, load_tokenizer, sequences


def settings(tokens: int, probe: int = 0) -> CalibrationSettings:
    return CalibrationSettings(
        tokens=tokens, sequence_length=256, batch_tokens=1024, probe_tokens=probe
    )


def child(path: Path, tokens: int, probe: int) -> None:
    """One calibration; what it took, as JSON on stdout."""
    source = open_source(str(path))
    texts = load_texts((), split="calibration")
    mx.eval(mx.ones(1) + 1)
    start_measuring()
    base, start = peak_bytes(), time.perf_counter()
    read = read_bytes()
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        calibrate(
            source,
            texts,
            settings(tokens, probe),
            partial=Path(scratch) / "partial",
        )
    layers = len(source.layers)
    figures = {
        "layers": layers,
        "tokens": tokens,
        "probe_tokens": probe,
        "checkpoint_bytes": source.checkpoint.nbytes,
        "layer_bytes": max(source.layer_bytes(i) for i in range(layers)),
        "peak_bytes": peak_bytes(),
        "before_bytes": base,
        "read_bytes": None if read is None else read_bytes() - read,
        "mlx_peak_bytes": mx.get_peak_memory(),
        "seconds": time.perf_counter() - start,
    }
    print(json.dumps(figures))


def calibrated(path: Path, tokens: int, probe: int = 0) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", str(path), str(tokens), str(probe)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return dict(json.loads(done.stdout))


def overhead(path: Path, tokens: int, repeats: int) -> dict[str, float]:
    """Seconds of mlx-lm's forward over all batches, weights resident, and of a calibration.

    The calibration's time without reading: the checkpoint lies in the system's cache, and the time
    to load all layers, measured alone, is taken off.
    """
    source = open_source(str(path))
    texts = load_texts((), split="calibration")
    tokenizer = load_tokenizer(path)
    chosen = settings(tokens)
    parts = sequences(
        texts,
        tokenizer,
        sequence_length=chosen.sequence_length,
        tokens=tokens,
        vocab_size=source.vocabulary,
    )
    made = batches(parts, tokens_per_batch=chosen.batch_tokens)
    model, _ = load_model(path)
    mx.eval(model(made[0].tokens))
    plain, loading, whole = [], [], []
    for _ in range(repeats):
        start = time.perf_counter()
        for batch in made:
            mx.eval(model(batch.tokens))
        plain.append(time.perf_counter() - start)
        start = time.perf_counter()
        source.spec()
        for index in range(len(source.layers)):
            source.load_layer(index)
            source.release_layer(index)
        sequences(
            texts,
            tokenizer,
            sequence_length=chosen.sequence_length,
            tokens=tokens,
            vocab_size=source.vocabulary,
        )
        load_tokenizer(path)
        loading.append(time.perf_counter() - start)
        start = time.perf_counter()
        calibrate(source, texts, chosen)
        whole.append(time.perf_counter() - start)
    best = min(whole) - min(loading)
    return {
        "plain_seconds": min(plain),
        "loading_seconds": min(loading),
        "calibration_seconds": min(whole),
        "overhead": best / min(plain) - 1,
    }


TINY = {"hidden": 128, "experts": 16, "inner": 64}


def sensitivity(path: Path) -> dict[str, Any]:
    """Seconds without it, on as many tokens as reap chooses, and on all probes."""
    source = open_source(str(path))
    texts = load_texts(["math"], split="calibration")
    chosen = replace(settings(1000, 500), low_formats=())
    seconds, found = [], None
    for changes in ({"sensitivity": False}, {"sensitivity_tokens": 500}, {}):
        start = time.perf_counter()
        found = calibrate(source, texts, replace(chosen, **changes)).measurement
        seconds.append(time.perf_counter() - start)
    assert found is not None
    return {
        "layers": len(source.layers),
        "probe_tokens": int(found.tokens[0]),
        "sensitivity_tokens": int(found.kl_tokens[0]),
        "seconds": dict(zip(("without", "all_probes", "default"), seconds)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="layers of 90 MB, 40 of them 3.6 GB")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--layers", type=int, nargs="+", default=[10, 20, 40])
    parser.add_argument("--tokens", type=int, default=0, help="default: 500, --full 4,000")
    parser.add_argument("--repeats", type=int, default=2, help="of the overhead; the best counts")
    parser.add_argument("--scratch", type=Path, help="where checkpoints are written and removed")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        path, tokens, probe = options.child
        child(Path(path), int(tokens), int(probe))
        return
    shape = SMALL
    if options.full:
        shape = {"hidden": 1024, "experts": 192, "inner": 512}
    tokens = options.tokens or (4000 if options.full else 500)

    def say(text: str) -> None:
        print(text, file=sys.stderr if options.json else sys.stdout, flush=True)

    result: dict[str, Any] = {"shape": shape, "memory": [], "linear": [], "sensitivity": []}
    with tempfile.TemporaryDirectory(dir=options.scratch, prefix="reap-benchmark-") as folder:
        paths = {}
        for layers in options.layers:
            paths[layers] = write_checkpoint(Path(folder) / str(layers), layers, **shape)
        say(
            "layers  probes  checkpoint  one layer  peak memory  over start  in layers"
            "  read/checkpoint  s"
        )
        # With measurements once: rounding every expert to low bits takes minutes.
        for probe, some in ((0, options.layers), (tokens // 2, options.layers[:1])):
            for layers in some:
                found = calibrated(paths[layers], tokens, probe)
                result["memory"].append(found)
                over = found["peak_bytes"] - found["before_bytes"]
                read = found["read_bytes"]
                share = "-" if read is None else f"{read / found['checkpoint_bytes']:.3f}"
                say(
                    f"{layers:6d} {probe:7,} {found['checkpoint_bytes'] / 1e6:8.0f} MB"
                    f" {found['layer_bytes'] / 1e6:7.1f} MB {found['peak_bytes'] / 1e6:9.0f} MB"
                    f" {over / 1e6:8.0f} MB {over / found['layer_bytes']:10.2f} {share:>16}"
                    f" {found['seconds']:6.1f}"
                )
        smallest = paths[options.layers[0]]
        say("\nlayers  tokens  seconds (without the measurements on probes)")
        for factor in (1, 2, 4):
            found = calibrated(smallest, factor * tokens)
            result["linear"].append(found)
            say(f"{options.layers[0]:6d} {factor * tokens:7,} {found['seconds']:8.1f}")
        result["overhead"] = overhead(smallest, tokens, options.repeats)
        say(
            "\nplain forward {plain_seconds:.1f} s, calibration {calibration_seconds:.1f} s of "
            "which loading {loading_seconds:.1f} s: overhead {overhead:.1%}".format(
                **result["overhead"]
            )
        )
        say("\nlayers  probes  sensitivity on  s without  on all probes  default")
        for layers in options.layers:
            path = write_checkpoint(Path(folder) / f"tiny-{layers}", layers, **TINY)
            result["sensitivity"].append(found := sensitivity(path))
            say(
                "{layers:6d} {probe_tokens:7,} {sensitivity_tokens:15,}".format(**found)
                + "{without:11.1f} {all_probes:14.1f} {default:8.1f}".format(**found["seconds"])
            )
    if options.json:
        print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
