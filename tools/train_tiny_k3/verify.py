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

LARGEST_DIFFERENCE = 1e-2
"""Allowed between the logits of torch and of mlx-lm when both compute in float32."""

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


def compare_logits(out: Path) -> tuple[float, float]:
    """Largest logit difference in float32, and mean divergence in the stored data types.

    The second is not judged: bfloat16 rounds router scores, a token near a tie then goes to another
    expert, and a model that hardly learned yet has ties everywhere.
    """
    model, tokenizer = mlx_lm.load(str(out / "model"))
    text = "def main():\n    return 1 + 2\n"
    if tokenizer.decode(tokenizer.encode(text)) != text:
        raise ValueError("the tokenizer does not give back what it got")

    probe = mx.load(str(out / "work" / "probe.safetensors"))
    expected = log_softmax(probe["logits"])
    found = log_softmax(model(probe["tokens"]).astype(mx.float32))
    divergence = (mx.exp(expected) * (expected - found)).sum(-1).mean().item()
    model.set_dtype(mx.float32)  # the packed experts stay as they are
    return mx.abs(model(probe["tokens"]) - probe["logits"]).max().item(), divergence


def log_softmax(logits: mx.array) -> mx.array:
    """Log probabilities over the last axis."""
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


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
    largest, divergence = compare_logits(options.out)
    print(f"logits: largest difference {largest:.1e} in float32")
    print(f"logits: mean divergence {divergence:.1e} in the stored data types")
    failed |= not largest <= LARGEST_DIFFERENCE
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
