"""Checks a packed model against mlx-lm and, optionally, against another checkpoint's layout.

Runs where mlx-lm is, without torch: `python -m tools.train_tiny_k3.verify OUT`. Training left
`work/probe.safetensors`, evaluation tokens with the logits of the torch model after packing.
"""

import argparse
import json
import struct
import sys
from pathlib import Path

import mlx.core as mx
import mlx_lm

MOST_DIVERGENCE = 1e-3
"""Mean Kullback-Leibler divergence allowed between torch (float32) and mlx-lm (partly bfloat16)."""

LEAST_AGREEMENT = 0.98
"""Share of positions at which both must find the same token likeliest."""

Layout = dict[str, tuple[str, tuple[int, ...], str]]


def read_layout(directory: Path) -> Layout:
    """Data type, shape and file of every tensor, from the safetensors headers alone."""
    layout: Layout = {}
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size))
        header.pop("__metadata__", None)
        for name, tensor in header.items():
            layout[name] = (tensor["dtype"], tuple(tensor["shape"]), path.name)
    return layout


def layout_differences(directory: Path, reference: Path) -> list[str]:
    """What differs in tensors, JSON files and file names; empty if nothing does."""
    mine, theirs = read_layout(directory), read_layout(reference)
    differences = [
        f"{name}: {mine.get(name)} instead of {theirs.get(name)}"
        for name in sorted(mine.keys() | theirs.keys())
        if mine.get(name) != theirs.get(name)
    ]
    files = {path.name for path in directory.iterdir()}
    expected = {path.name for path in reference.iterdir()}
    differences += [f"file {name} only on one side" for name in sorted(files ^ expected)]
    for name in sorted(files & expected):
        if name.endswith(".json") and name != "tokenizer.json":
            contents = [json.loads((side / name).read_text()) for side in (directory, reference)]
            if contents[0] != contents[1]:
                differences.append(f"{name} differs")
    return differences


def compare_logits(out: Path) -> tuple[float, float, float]:
    """Mean divergence, share of equal likeliest tokens and largest logit difference."""
    model, tokenizer = mlx_lm.load(str(out / "model"))
    probe = mx.load(str(out / "work" / "probe.safetensors"))
    expected = probe["logits"]
    found = model(probe["tokens"]).astype(mx.float32)
    log_expected = expected - mx.logsumexp(expected, -1, keepdims=True)
    log_found = found - mx.logsumexp(found, -1, keepdims=True)
    divergence = (mx.exp(log_expected) * (log_expected - log_found)).sum(-1).mean().item()
    agreement = (expected.argmax(-1) == found.argmax(-1)).astype(mx.float32).mean().item()
    text = "def main():\n    return 1 + 2\n"
    if tokenizer.decode(tokenizer.encode(text)) != text:
        raise ValueError("the tokenizer does not give back what it got")
    return divergence, agreement, mx.abs(expected - found).max().item()


def main() -> None:
    """Run the checks; exit with 1 if one fails."""
    parser = argparse.ArgumentParser(prog="python -m tools.train_tiny_k3.verify")
    parser.add_argument("out", type=Path, help="the --out directory of a finished run")
    parser.add_argument("--reference", type=Path, help="a checkpoint whose layout must be equal")
    options = parser.parse_args()

    failed = False
    if options.reference:
        differences = layout_differences(options.out / "model", options.reference)
        tensors = len(read_layout(options.reference))
        print(f"layout: {len(differences)} differences, {tensors} tensors in the reference")
        print("\n".join(differences[:20]), file=sys.stderr)
        failed |= bool(differences)
    divergence, agreement, largest = compare_logits(options.out)
    print(f"logits: divergence {divergence:.2e}, top-1 {agreement:.2%}, largest {largest:.3f}")
    failed |= not (divergence <= MOST_DIVERGENCE and agreement >= LEAST_AGREEMENT)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
