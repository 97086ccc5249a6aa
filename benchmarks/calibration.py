"""Memory, reading and speed of `reap calibrate` on K3-layout checkpoints with random weights.

Writes checkpoints of 10, 20 and 40 layers, one shard a layer, calibrates each in a process of its
own and prints peak resident memory and bytes read against one layer's bytes and the checkpoint's;
then the time against mlx-lm's plain forward pass of the same tokens, both in one process; then how
the time grows with tokens and layers. --full takes the sizes of a several-GB checkpoint.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.utils import load_model

from reap.calibrate import CalibrationSettings, calibrate
from reap.data import embedded_model
from reap.models.source import open_source
from reap.models.text import batches, load_texts, load_tokenizer, sequences

VOCABULARY = 2048


def write_checkpoint(path: Path, layers: int, *, hidden: int, experts: int, inner: int) -> Path:
    """K3's names, types and layout: mxfp4 experts apart, KDA and MLA, attention residuals."""
    path.mkdir(parents=True)
    config = json.loads((embedded_model() / "config.json").read_text(encoding="utf-8"))
    heads, dim, latent = hidden // 64, 64, hidden // 2
    full = sorted({*range(4, layers, 4), layers - 1, layers})
    config["text_config"] |= {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": 4 * hidden,
        "moe_intermediate_size": inner,
        "num_experts": experts,
        "num_experts_per_token": 4,
        "num_shared_experts": 1,
        "routed_expert_hidden_size": latent,
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": dim,
        "attn_res_block_size": 12,
        "linear_attn_config": {
            "num_heads": heads,
            "head_dim": dim,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
            "use_full_rank_gate": True,
            "full_attn_layers": full,
            "kda_layers": [i for i in range(1, layers + 1) if i not in full],
        },
    }
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded_model() / name, path / name)
    random = np.random.default_rng(0)
    map_: dict[str, str] = {}

    def matrix(rows: int, columns: int) -> mx.array:
        values = random.standard_normal((rows, columns), dtype=np.float32) / columns**0.5
        return mx.array(values).astype(mx.bfloat16)

    def ones(*shape: int, dtype: mx.Dtype = mx.bfloat16) -> mx.array:
        return mx.ones(shape, dtype=dtype)

    def packed(rows: int, columns: int) -> dict[str, mx.array]:
        exponent = 127 - 2 - round(np.log2(columns) / 2)
        codes = random.integers(0, 256, (rows, columns // 2), dtype=np.uint8)
        return {
            "weight_packed": mx.array(codes),
            "weight_scale": mx.full((rows, columns // 32), exponent, dtype=mx.uint8),
        }

    wide = heads * dim

    def layer(index: int) -> dict[str, mx.array]:
        at = f"language_model.model.layers.{index}."
        t = {f"{n}.weight": ones(hidden) for n in ("input_layernorm", "post_attention_layernorm")}
        for name in ("self_attention_res", "mlp_res"):
            t[f"{name}_norm.weight"] = ones(hidden)
            t[f"{name}_proj.weight"] = matrix(1, hidden)
        a = "self_attn."
        t[f"{a}o_proj.weight"] = matrix(hidden, wide)
        t[f"{a}g_proj.weight"] = matrix(wide, hidden)
        if index + 1 in full:
            t[f"{a}q_a_proj.weight"] = matrix(128, hidden)
            t[f"{a}q_a_layernorm.weight"] = ones(128)
            t[f"{a}q_b_proj.weight"] = matrix(heads * 96, 128)
            t[f"{a}kv_a_proj_with_mqa.weight"] = matrix(160, hidden)
            t[f"{a}kv_a_layernorm.weight"] = ones(128)
            t[f"{a}kv_b_proj.weight"] = matrix(heads * (64 + dim), 128)
        else:
            for name in "qkv":
                t[f"{a}{name}_proj.weight"] = matrix(wide, hidden)
                t[f"{a}{name}_conv1d.weight"] = ones(wide, 1, 4, dtype=mx.float32) / 4
            t[f"{a}f_a_proj.weight"] = matrix(dim, hidden)
            t[f"{a}f_b_proj.weight"] = matrix(wide, dim)
            t[f"{a}b_proj.weight"] = matrix(heads, hidden)
            t[f"{a}A_log"] = mx.zeros((heads,), dtype=mx.float32)
            t[f"{a}dt_bias"] = mx.zeros((wide,), dtype=mx.float32)
            t[f"{a}o_norm.weight"] = ones(dim, dtype=mx.float32)
        if index == 0:
            for name in ("gate_proj", "up_proj"):
                t[f"mlp.{name}.weight"] = matrix(4 * hidden, hidden)
            t["mlp.down_proj.weight"] = matrix(hidden, 4 * hidden)
        else:
            m = "block_sparse_moe."
            t[f"{m}gate.weight"] = matrix(experts, hidden)
            t[f"{m}gate.e_score_correction_bias"] = mx.zeros((experts,), dtype=mx.float32)
            t[f"{m}routed_expert_down_proj.weight"] = matrix(latent, hidden)
            t[f"{m}routed_expert_up_proj.weight"] = matrix(hidden, latent)
            t[f"{m}routed_expert_norm.weight"] = ones(latent)
            for name in ("gate_proj", "up_proj"):
                t[f"{m}shared_experts.{name}.weight"] = matrix(inner, hidden)
            t[f"{m}shared_experts.down_proj.weight"] = matrix(hidden, inner)
            for expert in range(experts):
                for name, rows, columns in (
                    ("w1", inner, latent),
                    ("w3", inner, latent),
                    ("w2", latent, inner),
                ):
                    for key, array in packed(rows, columns).items():
                        t[f"{m}experts.{expert}.{name}.{key}"] = array
        return {at + name: array for name, array in t.items()}

    def save(number: int, tensors: dict[str, mx.array]) -> None:
        file = f"model-{number:05d}-of-{layers + 1:05d}.safetensors"
        mx.save_safetensors(str(path / file), tensors)
        map_.update(dict.fromkeys(tensors, file))

    for index in range(layers):
        save(index + 1, layer(index))
    prefix = "language_model."
    save(
        layers + 1,
        {
            f"{prefix}lm_head.weight": matrix(VOCABULARY, hidden),
            f"{prefix}model.embed_tokens.weight": matrix(VOCABULARY, hidden) * 8,
            f"{prefix}model.norm.weight": ones(hidden),
            f"{prefix}model.output_attn_res_norm.weight": ones(hidden),
            f"{prefix}model.output_attn_res_proj.weight": matrix(1, hidden),
        },
    )
    index_file = path / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"metadata": {}, "weight_map": map_}), encoding="utf-8")
    return path


def settings(tokens: int, probe: int = 0) -> CalibrationSettings:
    return CalibrationSettings(tokens, 256, 1024, probe)


def child(path: Path, tokens: int, probe: int, spill: bool) -> None:
    """One calibration; what it took, as JSON on stdout."""
    source = open_source(str(path))
    texts = load_texts((), split="calibration")
    mx.eval(mx.ones(1) + 1)
    # Linux keeps the peak of the process that started this one (it is taken over by fork).
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    base, start = _peak_bytes(), time.perf_counter()
    read = _read_bytes()
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        calibrate(
            source,
            texts,
            settings(tokens, probe),
            partial=Path(scratch) / "partial",
            memory=0 if spill else None,
        )
    layers = len(source.layers)
    figures = {
        "layers": layers,
        "tokens": tokens,
        "checkpoint_bytes": source.checkpoint.nbytes,
        "layer_bytes": max(source.layer_bytes(i) for i in range(layers)),
        "peak_bytes": _peak_bytes(),
        "before_bytes": base,
        "read_bytes": None if read is None else _read_bytes() - read,
        "mlx_peak_bytes": mx.get_peak_memory(),
        "seconds": time.perf_counter() - start,
    }
    print(json.dumps(figures))


def _peak_bytes() -> int:
    with suppress(OSError):
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.partition("VmHWM:")[2].split()[0])
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else 1024 * used


def _read_bytes() -> Any:
    """Bytes through read calls, also from the system's cache; None where no one counts them."""
    with suppress(OSError):
        fields = Path("/proc/self/io").read_text().split()
        return int(fields[fields.index("rchar:") + 1])
    return None


def calibrated(path: Path, tokens: int, probe: int = 0, spill: bool = False) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", str(path), str(tokens), str(probe)]
    done = subprocess.run(
        command + (["spill"] if spill else []), check=True, stdout=subprocess.PIPE, text=True
    )
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
        path, tokens, probe, *spill = options.child
        child(Path(path), int(tokens), int(probe), bool(spill))
        return
    shape = {"hidden": 512, "experts": 64, "inner": 512}
    if options.full:
        shape = {"hidden": 1024, "experts": 192, "inner": 512}
    tokens = options.tokens or (4000 if options.full else 500)

    def say(text: str) -> None:
        print(text, file=sys.stderr if options.json else sys.stdout, flush=True)

    result: dict[str, Any] = {"shape": shape, "memory": [], "linear": []}
    with tempfile.TemporaryDirectory(dir=options.scratch, prefix="reap-benchmark-") as folder:
        paths = {}
        for layers in options.layers:
            paths[layers] = write_checkpoint(Path(folder) / str(layers), layers, **shape)
        say("layers  checkpoint  one layer  peak memory  over start  in layers  read/checkpoint  s")
        for layers, path in paths.items():
            found = calibrated(path, tokens)
            result["memory"].append(found)
            over = found["peak_bytes"] - found["before_bytes"]
            read = found["read_bytes"]
            share = "-" if read is None else f"{read / found['checkpoint_bytes']:.3f}"
            say(
                f"{layers:6d} {found['checkpoint_bytes'] / 1e6:8.0f} MB"
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
    if options.json:
        print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
