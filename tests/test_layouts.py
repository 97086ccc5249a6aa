"""What an export computes: the source with the dropped experts masked, in every layout.

The references are stock mlx-lm on the source checkpoint, the float64 forward in reference/, and
the bytes in the source's shards. Stock mlx-lm also runs every layout where there is no `reap`.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import exports
import mlx.core as mx
import models
import numpy as np
import pytest
from exports import CASES, Exported, Raw, exported, logits
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from reference import kimi_k3

from reap.models.source import open_source

TOLERANCE = 1e-4
"""Of logits that both sides compute in float32; their sums may differ in order."""

# Names of one expert's matrices in the released checkpoints, and of the router's tensors.
SOURCE_EXPERTS = {
    "kimi_k3": "language_model.model.layers.{layer}.block_sparse_moe.experts.{expert}.{name}",
    "qwen3_moe": "model.layers.{layer}.mlp.experts.{expert}.{name}",
    "deepseek_v3": "model.layers.{layer}.mlp.experts.{expert}.{name}",
    "glm4_moe": "model.layers.{layer}.mlp.experts.{expert}.{name}",
}
SOURCE_NAMES = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
ROUTERS = {
    "kimi_k3": {
        "mlp.gate.weight": "block_sparse_moe.gate.weight",
        "mlp.e_score_correction_bias": "block_sparse_moe.gate.e_score_correction_bias",
    },
    "qwen3_moe": {"mlp.gate.weight": "mlp.gate.weight"},
    "deepseek_v3": {
        "mlp.gate.weight": "mlp.gate.weight",
        "mlp.gate.e_score_correction_bias": "mlp.gate.e_score_correction_bias",
    },
}
ROUTERS["glm4_moe"] = ROUTERS["deepseek_v3"]


@pytest.mark.parametrize("family", exports.FAMILIES)
def test_a_plan_that_keeps_everything_changes_nothing(family: str) -> None:
    made = exported(family, "identity")
    before, after = models.load_plain(made.source), models.load_plain(made.path)
    was, now = dict(tree_flatten(before.parameters())), dict(tree_flatten(after.parameters()))
    assert was.keys() == now.keys()
    for name, array in was.items():
        assert now[name].dtype == array.dtype, name
        assert mx.array_equal(now[name], array), name
    tokens = mx.array([exports.TOKENS])
    assert mx.array_equal(after(tokens), before(tokens))


@pytest.mark.parametrize(("family", "shape"), CASES)
def test_pruned_is_the_source_with_dropped_experts_masked(family: str, shape: str) -> None:
    made = exported(family, shape)
    assert made.plan.layout == ("stock" if shape == "identity" else shape)
    pruned = logits(exports.load(made.path))
    wanted = logits(exports.masked_source(made.source, made.plan))
    np.testing.assert_allclose(pruned, wanted, rtol=0, atol=TOLERANCE)
    if shape != "identity":  # or the comparison above would say nothing
        assert np.abs(wanted - logits(exports.load(made.source))).max() > 100 * TOLERANCE


@pytest.mark.parametrize("shape", ["stock", "per-layer", "two-bank"])
def test_pruned_k3_is_the_float64_reference_without_the_dropped_experts(shape: str) -> None:
    made = exported("kimi_k3", shape)
    source = kimi_k3.load(made.source)
    for layer in made.plan.layers:
        for expert in layer.kept[layer.high :]:
            for name, format in made.plan.low.items():
                matrix = (
                    f"model.layers.{layer.layer}.block_sparse_moe.experts.{expert}."
                    f"{SOURCE_NAMES[name]}.weight"
                )
                source.tensors[matrix] = _low_values(source.tensors[matrix], format.group_size)
    keep = {layer.layer: layer.kept for layer in made.plan.layers}
    wanted = kimi_k3.forward(source, exports.TOKENS, keep=keep)
    pruned = logits(exports.load(made.path))
    np.testing.assert_allclose(pruned, wanted, rtol=0, atol=1e-3)


def _low_values(matrix: kimi_k3.Array, group: int) -> kimi_k3.Array:
    """What 2-bit codes of a matrix stand for, in float64 from MLX's own codes and scales."""
    weight = mx.array(matrix.astype(np.float32)).astype(mx.bfloat16)
    packed, scales, biases = mx.quantize(weight, group, 2)
    codes = (np.array(packed)[..., None] >> np.arange(0, 32, 2, dtype=np.uint32)) & 3
    codes = codes.reshape(len(matrix), -1, group).astype(np.float64)
    step, zero = (np.array(a.astype(mx.float32)).astype(np.float64) for a in (scales, biases))
    return (codes * step[..., None] + zero[..., None]).reshape(matrix.shape)


@pytest.mark.parametrize(("family", "shape"), CASES)
def test_decoding_with_a_cache_continues_a_prefill(family: str, shape: str) -> None:
    made = exported(family, shape)
    model = exports.load(made.path)
    cache = model.make_cache() if hasattr(model, "make_cache") else make_prompt_cache(model)
    steps = [exports.TOKENS[:8], *((token,) for token in exports.TOKENS[8:])]
    parts = [np.array(model(mx.array([step]), cache=cache)[0]) for step in steps]
    np.testing.assert_allclose(np.concatenate(parts), logits(model), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(("family", "shape"), CASES)
def test_router_rows_and_biases_follow_the_experts(family: str, shape: str) -> None:
    made = exported(family, shape)
    source, written = exports.raw_tensors(made.source), exports.raw_tensors(made.path)
    for layer in made.plan.layers:
        prefix = made.plan.experts_path[layer.layer].removesuffix("mlp.switch_mlp")
        for ours, theirs in ROUTERS[made.spec.model_type].items():
            router, original = written[prefix + ours], source[prefix + theirs]
            assert router.dtype == original.dtype
            assert router.shape == (len(layer.kept), *original.shape[1:])
            for row, expert in enumerate(layer.kept):
                assert router.row(row) == original.row(expert), (layer.layer, ours, expert)


@pytest.mark.parametrize(("family", "shape"), CASES)
def test_every_bank_holds_its_experts_in_the_order_of_the_plan(family: str, shape: str) -> None:
    made = exported(family, shape)
    source, written = exports.raw_tensors(made.source), exports.raw_tensors(made.path)
    seen = 0
    for layer, path, ids, low in _banks(made):
        for name, format in (made.plan.low if low else made.plan.high).items():
            stored = {
                leaf: written[f"{path}.{name}.{leaf}"]
                for leaf in ("weight", "scales", "biases")
                if f"{path}.{name}.{leaf}" in written
            }
            assert {tensor.shape[0] for tensor in stored.values()} == {len(ids)}
            for row, expert in enumerate(ids):
                wanted = _expert(made.spec.model_type, source, layer, expert, name)
                if low:
                    wanted = _requantized(wanted, format.group_size)
                assert {leaf: t.row(row) for leaf, t in stored.items()} == wanted, (layer, expert)
                seen += 1
    assert seen == 3 * sum(made.plan.expert_counts)
    assert (made.plan.waterfall.low > 0) == (shape in ("per-layer", "two-bank"))


def test_pruning_a_pruned_checkpoint_again_is_pruning_once(tmp_path: Path) -> None:
    once = exported("kimi_k3", "stock")
    spec = open_source(str(once.path)).spec()
    again = exports.hand_plan(
        spec, {p.layer: ((30, 2, 17, 11, 5), 2) for p in once.plan.layers}, trunk="8bit"
    )
    direct = exports.hand_plan(
        once.spec,
        {p.layer: ([p.kept[i] for i in (30, 2, 17, 11, 5)], 2) for p in once.plan.layers},
        trunk="8bit",
    )
    exports.write(once.path, again, tmp_path / "again")
    exports.write(once.source, direct, tmp_path / "direct")
    assert exports.raw_tensors(tmp_path / "again") == exports.raw_tensors(tmp_path / "direct")


def _banks(made: Exported) -> Iterator[tuple[int, str, tuple[int, ...], bool]]:
    for layer in made.plan.layers:
        path = made.plan.experts_path[layer.layer]
        if 0 < layer.high < len(layer.kept):
            yield layer.layer, f"{path}.high", layer.kept[: layer.high], False
            yield layer.layer, f"{path}.low", layer.kept[layer.high :], True
        else:
            yield layer.layer, path, layer.kept, layer.high == 0


def _expert(
    family: str, source: Mapping[str, Raw], layer: int, expert: int, name: str
) -> dict[str, bytes]:
    """One expert's matrix in the source's shards, by the leaf that holds it in an export."""
    stem = SOURCE_EXPERTS[family].format(layer=layer, expert=expert, name=name)
    if family == "kimi_k3":
        stem = stem.removesuffix(name) + SOURCE_NAMES[name]
        packed, scales = source[f"{stem}.weight_packed"], source[f"{stem}.weight_scale"]
        return {"weight": packed.data, "scales": scales.data}
    return {"weight": source[f"{stem}.weight"].data}


def _requantized(stored: Mapping[str, bytes], group: int) -> dict[str, bytes]:
    """128 columns of mxfp4, bfloat16 or float32 as MLX's 2-bit codes, scales and biases."""
    data = stored["weight"]
    if "scales" in stored:
        packed = mx.array(np.frombuffer(data, np.uint32).reshape(-1, 16))
        scales = mx.array(np.frombuffer(stored["scales"], np.uint8).reshape(-1, 4))
        weight = mx.dequantize(packed, scales, group_size=32, bits=4, mode="mxfp4")
    elif len(data) == 4 * 128 * 128:
        weight = mx.array(np.frombuffer(data, np.float32).reshape(-1, 128))
    else:
        weight = mx.array(np.frombuffer(data, np.uint16).reshape(-1, 128)).view(mx.bfloat16)
    arrays = dict(zip(("weight", "scales", "biases"), mx.quantize(weight, group, 2)))
    return {leaf: bytes(memoryview(array.view(mx.uint8))) for leaf, array in arrays.items()}


@pytest.mark.parametrize("family", exports.FAMILIES)
@pytest.mark.parametrize("shape", ["stock", "per-layer"])
def test_custom_code_is_asked_for_only_where_it_is_needed(family: str, shape: str) -> None:
    path = exported(family, shape).path
    assert (path / "reap_model.py").exists() == (shape in exports.TRUSTED)
    if shape == "stock":
        exports.load(path, trust=False)
    else:
        with pytest.raises(ValueError, match="trust_remote_code"):
            exports.load(path, trust=False)


# Run where `import reap` fails. MLX's CPU backend gathers float32 matrices only, hence `widen`.
GENERATE = """
import json, sys
import mlx.core as mx
from mlx_lm import generate, load

class NoReap:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "reap":
            raise ImportError("there is no reap here")

sys.meta_path.insert(0, NoReap())
tokens = json.loads(sys.argv[1])
for job in sys.argv[2:]:
    path, trust, widen = json.loads(job)
    model, tokenizer = load(path, trust_remote_code=trust)
    if widen:
        model.set_dtype(mx.float32)
    text = generate(model, tokenizer, prompt="Hello", max_tokens=6)
    logits = model(mx.array([tokens]))[0, -1].astype(mx.float32)
    print(json.dumps([text, logits.tolist()]))
assert "reap" not in sys.modules
"""


def test_mlx_lm_generates_from_every_layout_without_reap(tmp_path: Path) -> None:
    jobs = [
        (str(exported(*case).path), case[1] in exports.TRUSTED, case[0] != "kimi_k3")
        for case in CASES
    ]
    arguments = [json.dumps(exports.TOKENS), *map(json.dumps, jobs)]
    lines = _python(sys.executable, ["-c", GENERATE, *arguments], tmp_path).splitlines()
    found = [json.loads(line) for line in lines if line.startswith("[")]
    assert len(found) == len(jobs)
    for case, (text, last) in zip(CASES, found):
        assert isinstance(text, str) and text, case
        if case[0] != "kimi_k3":
            here = logits(exports.load(exported(*case).path))[-1]
            np.testing.assert_allclose(last, here, rtol=0, atol=TOLERANCE, err_msg=str(case))


@pytest.mark.slow
def test_mlx_lm_generates_in_an_environment_of_its_own(tmp_path: Path) -> None:
    """pip installs mlx-lm alone, 20 to 30 seconds; the commands are those of the model card."""
    _python(sys.executable, ["-m", "venv", "alone"], tmp_path)
    python = str(tmp_path / "alone" / "bin" / "python")
    extra = "[cpu]" if sys.platform == "linux" else ""
    wanted = [
        f"mlx{extra}=={importlib.metadata.version('mlx')}",
        f"mlx-lm=={importlib.metadata.version('mlx-lm')}",
    ]
    pip = ["-m", "pip", "install", "-q", "--disable-pip-version-check", "--retries", "0", *wanted]
    try:
        _python(python, pip, tmp_path)
    except AssertionError as error:
        if "Could not find a version" in str(error):
            pytest.skip("pip finds no mlx-lm: offline")
        raise
    with pytest.raises(AssertionError, match="No module named 'reap'"):
        _python(python, ["-c", "import reap"], tmp_path)
    for shape in ("stock", "per-layer", "two-bank"):
        path = exported("kimi_k3", shape).path
        flag = ["--trust-remote-code"] if shape in exports.TRUSTED else []
        card = (path / "README.md").read_text()
        command = ["mlx_lm.generate", "--model", "DIR", *flag, "--prompt", '"Hello"']
        assert " ".join(command) in card
        command[2], command[-1] = str(path), "Hello"
        program = [str(tmp_path / "alone" / "bin" / command[0])]
        said = _python(python, [*program, *command[1:], "--max-tokens", "4"], tmp_path)
        assert "Generation: 4 tokens" in said


def _python(python: str, arguments: list[str], directory: Path) -> str:
    done = subprocess.run(
        [python, *arguments], cwd=directory, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
