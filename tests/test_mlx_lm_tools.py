"""An export in mlx-lm's own tools: caches, batches, command line, server, sharding, adapters.

The tools are the installed ones, called by their commands or documented functions; what they say is
compared with a plain forward pass without any cache, and fused weights with mx.quantize.
"""

from __future__ import annotations

import functools
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import exports
import mlx.core as mx
import mlx.nn as nn
import models
import numpy as np
import pytest
import yaml
from mlx.utils import tree_flatten
from mlx_lm import fuse, generate, lora, perplexity
from mlx_lm.generate import batch_generate
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load

from reap.data import embedded_model

KINDS = ("kimi_k3-two-bank", "qwen3_moe-per-layer", "qwen3_moe-two-bank", "qwen3_moe-stock")
TWO_BANK = KINDS[0], KINDS[2]
TOLERANCE = 1e-4
PROMPT = "The quick brown fox"


@functools.cache
def checkpoint(kind: str, layers: int = 4) -> Path:
    """An export whose matrices divide by two: widths of 256, or groups of 64 in the low bank.

    `layers` of the qwen3_moe; the embedded K3 has 6.
    """
    family, _, shape = kind.partition("-")
    if family == "kimi_k3":
        source, low = embedded_model(), "2bit-g64"
    else:
        source, low = exports.ROOT / "tools" / f"{family}-{layers}", "2bit"
        if not source.exists():  # in float32: the CPU multiplies no other dense experts
            models.write_qwen3_moe(source, experts=12, layers=layers, intermediate=256)
    spec = exports.open_source(str(source)).spec()
    plan = exports.hand_plan(spec, exports.kept_experts(spec, shape), low=low)
    out = exports.ROOT / "tools" / f"{kind}-{layers}"
    exports.write(source, plan, out)
    return out


@functools.cache
def loaded(kind: str) -> tuple[nn.Module, Any]:
    """Model and tokenizer as stock mlx-lm loads them, trusting code only where it is needed."""
    model, tokenizer = load(str(checkpoint(kind)), trust_remote_code=not kind.endswith("stock"))
    return model, tokenizer


def greedy(kind: str, prompt: Sequence[int], count: int) -> list[int]:
    """The most likely continuation, by a plain forward pass for every token."""
    model, _ = loaded(kind)
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(mx.argmax(model(mx.array([tokens]))[0, -1]).item()))
    return tokens[len(prompt) :]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Call a command of mlx-lm as its entry point does, and return what it printed."""

    def call(command: Any, *arguments: Any) -> str:
        monkeypatch.setattr(sys, "argv", [command.__name__, *map(str, arguments)])
        command.main()
        return capsys.readouterr().out

    return call


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_cache_survives_a_file(kind: str, tmp_path: Path) -> None:
    model, _ = loaded(kind)
    wanted = exports.logits(model)
    cache = make_prompt_cache(model)
    model(mx.array([exports.TOKENS[:9]]), cache=cache)
    save_prompt_cache(str(tmp_path / "cache.safetensors"), cache)
    again = load_prompt_cache(str(tmp_path / "cache.safetensors"))
    rest = model(mx.array([exports.TOKENS[9:]]), cache=again)[0]
    np.testing.assert_allclose(np.array(rest), wanted[9:], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_of_different_lengths_in_one_batch(kind: str) -> None:
    model, tokenizer = loaded(kind)
    prompts = [list(exports.TOKENS[:n]) for n in (3, 11, 6)]
    said = batch_generate(model, tokenizer, prompts, max_tokens=5, return_token_ids=True)
    for prompt, ids in zip(prompts, said.token_ids or []):
        wanted = greedy(kind, prompt, 5)
        assert ids == wanted[: len(ids)]
        assert len(ids) == 5 or wanted[len(ids)] in tokenizer.eos_token_ids


@pytest.mark.parametrize("kind", KINDS)
def test_the_generate_command(kind: str, run: Any) -> None:
    flag = [] if kind.endswith("stock") else ["--trust-remote-code"]
    prompt = ["--prompt", PROMPT, "--ignore-chat-template", "--max-tokens", 4]
    said = run(generate_command(), "--model", checkpoint(kind), *flag, *prompt)
    assert continuation(kind) in said
    assert "Generation: 4 tokens" in said
    if flag:
        with pytest.raises(ValueError, match="trust_remote_code"):
            run(generate_command(), "--model", checkpoint(kind), *prompt)


def generate_command() -> Any:
    return sys.modules[generate.__module__]  # mlx_lm.generate is also a function


def continuation(kind: str) -> str:
    _, tokenizer = loaded(kind)
    return tokenizer.decode(greedy(kind, tokenizer.encode(PROMPT), 4))


@pytest.mark.parametrize("kind", TWO_BANK)
def test_the_perplexity_command(
    kind: str, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    text = " ".join(f"{PROMPT} jumps over {n} lazy dogs." for n in range(40))
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "train.jsonl").write_text(json.dumps({"text": text}) + "\n")
    path = checkpoint(kind)
    sizes = ["--sequence-length", 32, "--num-samples", 3]
    data = ["--data-path", tmp_path / "text"]
    said = run(perplexity, "--model", path, "--trust-remote-code", *data, *sizes)
    model, tokenizer = loaded(kind)
    rows = np.array(tokenizer.encode(text))[: 3 * 32].reshape(3, 32)
    losses = []
    for row in rows:
        logits = exports.logits(model, row[:-1].tolist()).astype(np.float64)
        chosen = logits[np.arange(31), row[1:]]
        losses.append(np.log(np.exp(logits).sum(-1)) - chosen)
    found = re.search(r"Perplexity: ([\d.]+)", said)
    assert found and float(found[1]) == pytest.approx(np.exp(np.mean(losses)), rel=1e-5)


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture
def server(port: int, tmp_path: Path) -> Iterator[str]:
    """The URL of mlx_lm.server, started with the two-bank K3."""
    log = tmp_path / "log"
    command = [sys.executable, "-m", "mlx_lm", "server", "--port", str(port)]
    command += ["--model", str(checkpoint(KINDS[0])), "--trust-remote-code"]
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            for _ in range(600):
                assert process.poll() is None, log.read_text()
                try:
                    urllib.request.urlopen(f"{url}/health", timeout=5).close()
                    break
                except (urllib.error.URLError, ConnectionError):
                    time.sleep(0.1)
            yield url
        finally:
            process.kill()


@pytest.mark.slow
def test_the_server_completes_a_prompt(server: str) -> None:
    body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    request = urllib.request.Request(
        f"{server}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        said = json.load(answer)
    assert said["choices"][0]["text"] == continuation(KINDS[0])


# Run by two processes. Every job is a checkpoint, how it is shared out, and where its logits go.
RANK = """
import json, sys
import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.utils import sharded_load

group = mx.distributed.init(strict=True, backend="ring")
assert group.size() == 2
tokens = mx.array([json.loads(sys.argv[1])])
for job in sys.argv[2:]:
    path, how, out = json.loads(job)
    model, _ = sharded_load(path, **{how: group}, trust_remote_code=True)
    model.set_dtype(mx.float32)
    experts = sum(
        array.nbytes
        for name, array in tree_flatten(model.parameters())
        if ".switch_mlp." in name
    )
    logits = np.array(model(tokens)[0])
    np.savez(f"{out}-{group.rank()}.npz", logits=logits, experts=experts)
"""


@pytest.mark.slow
def test_two_processes_share_a_model(port: int, tmp_path: Path) -> None:
    """By tensors and by layers, over mlx.launch's ring; both processes end with all logits."""
    (tmp_path / "rank.py").write_text(RANK)
    jobs = {
        (kind, how): tmp_path / f"{kind}-{how}"
        for kind in TWO_BANK
        for how in ("tensor_group", "pipeline_group")
    }
    arguments = [
        json.dumps([str(checkpoint(kind)), how, str(out)]) for (kind, how), out in jobs.items()
    ]
    launcher = Path(sys.executable).with_name("mlx.launch")
    command = [launcher, "-n", "2", "--backend", "ring", "--starting-port", str(port)]
    command += ["--python", sys.executable, "rank.py", json.dumps(exports.TOKENS)]
    done = subprocess.run(
        [*command, *arguments],
        cwd=tmp_path,
        env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    for (kind, _), out in jobs.items():
        model = exports.load(checkpoint(kind))
        wanted = exports.logits(model)
        sizes = []
        for rank in range(2):
            file = Path(f"{out}-{rank}.npz")
            assert file.exists(), done.stdout + done.stderr
            found = np.load(file)
            np.testing.assert_allclose(found["logits"], wanted, rtol=0, atol=TOLERANCE)
            sizes.append(int(found["experts"]))
        parameters = tree_flatten(model.parameters())
        whole = sum(array.nbytes for name, array in parameters if ".switch_mlp." in name)
        assert sum(sizes) == whole and all(sizes)


ADAPTED = ("self_attn.o_proj", "mlp.switch_mlp.high.up_proj", "mlp.switch_mlp.low.down_proj")
LORA = {"rank": 4, "scale": 2.0, "dropout": 0.0, "keys": list(ADAPTED)}


@pytest.mark.parametrize("kind", TWO_BANK)
def test_adapters_of_both_banks_are_fused_into_a_checkpoint(
    kind: str, run: Any, tmp_path: Path
) -> None:
    path = checkpoint(kind)
    model, _ = load(str(path), trust_remote_code=True)
    before = dict(tree_flatten(model.parameters()))
    linear_to_lora_layers(model, len(model.layers), LORA)
    adapters = {
        name: mx.random.normal(array.shape) * 0.05
        for name, array in tree_flatten(model.parameters())
        if name.endswith((".lora_a", ".lora_b"))
    }
    assert {part for part in ADAPTED if any(f".{part}." in name for name in adapters)} == {*ADAPTED}
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), adapters)
    settings = {"num_layers": len(model.layers), "lora_parameters": LORA}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))

    out = tmp_path / "fused"
    arguments = ["--adapter-path", tmp_path, "--save-path", out, "--trust-remote-code"]
    run(fuse, "--model", path, *arguments)
    fused, _ = load(str(out), trust_remote_code=True)
    after = dict(tree_flatten(fused.parameters()))
    assert {k: (v.shape, v.dtype) for k, v in after.items()} == {
        k: (v.shape, v.dtype) for k, v in before.items()
    }
    quantization = json.loads((path / "config.json").read_text())["quantization"]
    changed = {name.rpartition(".")[0] for name in adapters}
    for name, array in before.items():
        if name.rpartition(".")[0] not in changed:
            assert mx.array_equal(after[name], array), name
    for name in sorted(changed):
        a, b = adapters[f"{name}.lora_a"], adapters[f"{name}.lora_b"]
        delta = LORA["scale"] * (b @ a if a.ndim == 3 else (a @ b).T)
        stored = ("weight", "scales", "biases")
        old = [before[f"{name}.{leaf}"] for leaf in stored if f"{name}.{leaf}" in before]
        new = [after[f"{name}.{leaf}"] for leaf in stored if f"{name}.{leaf}" in after]
        if len(old) == 1:
            wanted = [old[0] + delta.astype(old[0].dtype)]
        else:
            format = quantization[name]
            dense = mx.dequantize(*old, **format)
            wanted = mx.quantize(dense + delta.astype(dense.dtype), **format)
        for array, other in zip(new, wanted):
            np.testing.assert_allclose(
                np.array(array.astype(mx.float32)), np.array(other.astype(mx.float32)), rtol=1e-2
            )
    assert np.isfinite(exports.logits(fused)).all()


def test_the_lora_command_trains_both_banks(run: Any, tmp_path: Path) -> None:
    line = json.dumps({"text": PROMPT * 3}) + "\n"
    for name in ("train", "valid"):
        (tmp_path / f"{name}.jsonl").write_text(line)
    (tmp_path / "lora.yaml").write_text(yaml.safe_dump({"lora_parameters": LORA}))
    # Little to fuse: on a CPU every kernel of the compiled step goes through the C++ compiler.
    path = checkpoint("qwen3_moe-two-bank", layers=1)
    arguments = ["--data", tmp_path, "--adapter-path", tmp_path / "adapters", "--num-layers", -1]
    arguments += ["--config", tmp_path / "lora.yaml", "--iters", 2, "--batch-size", 1]
    arguments += ["--optimizer", "sgd"]
    run(lora, "--model", path, "--trust-remote-code", "--train", *arguments)
    adapters = dict(mx.load(str(tmp_path / "adapters" / "adapters.safetensors")))
    for part in ADAPTED:
        learned = [v for k, v in adapters.items() if f".{part}.lora_b" in k]
        assert learned and all(bool((v != 0).any()) for v in learned), part
