"""The architecture file of an exported checkpoint, as stock mlx-lm loads and runs it.

Every checkpoint here is cut by hand from a small random model of mlx-lm and has two references
that share no code with ``reap_model.py``: the uncut model, whose router is kept from choosing the
dropped experts and whose kept experts hold the dequantized weights; and a loop over tokens in
numpy, in float64, on the weights of the file.
"""

import ast
import copy
import importlib.util
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.nn.layers.distributed import shard_inplace
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.kimi_k3 import SiTU
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchMLP
from mlx_lm.utils import _get_classes, load_model

SOURCE = Path(__file__).parents[1] / "reap" / "models" / "reap_model.py"

MXFP4 = {"bits": 4, "group_size": 32, "mode": "mxfp4"}
AFFINE2_64 = {"bits": 2, "group_size": 64, "mode": "affine"}
AFFINE2_128 = {"bits": 2, "group_size": 128, "mode": "affine"}

EXPERTS = "mlp.switch_mlp"
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
ROUTERS = {
    "kimi_k3": ["mlp.gate.weight", "mlp.e_score_correction_bias"],
    "qwen3_moe": ["mlp.gate.weight"],
    "deepseek_v3": ["mlp.gate.weight", "mlp.gate.e_score_correction_bias"],
}
PREFIX = {"kimi_k3": "language_model.model", "qwen3_moe": "model", "deepseek_v3": "model"}
NUM_EXPERTS = 8


def _base_config(family, **changes):
    """A configuration with 4 layers, of which the first is dense, and 8 experts, 2 per token."""
    attention = {
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "moe_intermediate_size": 128,
        "vocab_size": 64,
        "rms_norm_eps": 1e-5,
    }
    mla = {
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "first_k_dense_replace": 1,
    }
    if family == "kimi_k3":
        text = (
            attention
            | mla
            | {
                "model_type": "kimi_linear",
                "num_experts": NUM_EXPERTS,
                "num_experts_per_token": 2,
                "num_shared_experts": 1,
                "routed_expert_hidden_size": 128,
                "latent_moe_use_norm": True,
                "attn_res_block_size": 2,
                "activation_situ_beta": 4.0,
                "activation_situ_linear_beta": 25.0,
                "linear_attn_config": {
                    "num_heads": 2,
                    "head_dim": 32,
                    "short_conv_kernel_size": 4,
                    "gate_lower_bound": -5.0,
                    "use_full_rank_gate": True,
                    "kda_layers": [1, 2, 4],
                },
                # As in the released checkpoint. It must not win over the exporter's "quantization".
                "quantization_config": {
                    "quant_method": "compressed-tensors",
                    "format": "mxfp4-pack-quantized",
                },
            }
        )
        return {"model_type": family, "text_config": text | changes}
    if family == "qwen3_moe":
        return (
            attention
            | {
                "model_type": family,
                "num_experts": NUM_EXPERTS,
                "num_experts_per_tok": 2,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [0],
                "head_dim": 64,
                "rope_theta": 10000.0,
                "tie_word_embeddings": False,
                "max_position_embeddings": 128,
                "norm_topk_prob": True,
            }
            | changes
        )
    return (
        attention
        | mla
        | {
            "model_type": family,
            "n_routed_experts": NUM_EXPERTS,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "routed_scaling_factor": 1.5,
            "n_group": 1,
            "topk_group": 1,
        }
        | changes
    )


class _MaskedGate(nn.Module):
    """A linear router that never chooses the dropped experts."""

    def __init__(self, gate, dropped):
        super().__init__()
        self.gate = gate
        self.penalty = mx.zeros(NUM_EXPERTS)
        self.penalty[mx.array(dropped)] = -mx.inf

    def __call__(self, x):
        return self.gate(x) + self.penalty


def _quantize(weight, quantization):
    """Return the tensors to store, by suffix, and the weight that they stand for."""
    if quantization is None:
        return {"weight": weight}, weight
    parts = dict(zip(("weight", "scales", "biases"), mx.quantize(weight, **quantization)))
    return parts, mx.dequantize(*parts.values(), **quantization).astype(mx.float32)


def _keep(rng, count, groups):
    """Draw experts to keep, the same number of each group, in the order of the groups."""
    size = NUM_EXPERTS // groups
    return np.concatenate(
        [g * size + rng.permutation(size)[: count // groups] for g in range(groups)]
    ).tolist()


def _cut(path, family, counts, splits, high=None, low=None, router=None, **changes):
    """Write a pruned checkpoint to ``path`` and return the uncut model that it must equal."""
    config = _base_config(family, **changes)
    model_class, args_class = _get_classes(config)
    mx.random.seed(7)
    rng = np.random.default_rng(7)
    model = model_class(args_class.from_dict(copy.deepcopy(config)))
    for name, value in tree_flatten(model.parameters()):
        if name.endswith("e_score_correction_bias"):
            # Positive: mlx-lm gives dropped groups the score 0, which beats a negative one.
            model.update(tree_unflatten([(name, mx.random.uniform(0.1, 0.4, value.shape))]))
        elif name.endswith("mlp.gate.weight"):  # spread the scores, so that no choice is a tie
            model.update(tree_unflatten([(name, mx.random.normal(value.shape) * 0.5)]))

    weights = dict(tree_flatten(model.parameters()))
    reference = dict(weights)
    quantization = {"group_size": 64, "bits": 4}
    groups = changes.get("n_group", 1)

    def store(name, quantized_as):
        """Put ``weights[name + '.weight']`` into its stored form and return what it stands for."""
        parts, value = _quantize(weights.pop(f"{name}.weight"), quantized_as)
        weights.update({f"{name}.{suffix}": part for suffix, part in parts.items()})
        if quantized_as:
            quantization[name] = quantized_as
        return value

    for number, (count, split) in enumerate(zip(counts, splits)):
        if not count:
            continue
        layer = f"{PREFIX[family]}.layers.{number}"
        kept = _keep(rng, count, groups)
        for router_path in ROUTERS[family]:
            name = f"{layer}.{router_path}"
            weights[name] = weights[name][mx.array(kept)]
        if router:
            name = f"{layer}.mlp.gate"
            reference[f"{name}.weight"][mx.array(kept)] = store(name, router)
        banks = {"": (kept, high)}
        if split:
            banks = {".high": (kept[:split], high), ".low": (kept[split:], low)}
        for projection in PROJECTIONS:
            full = f"{layer}.{EXPERTS}.{projection}.weight"
            source = weights.pop(full)
            for bank, (ids, quantized_as) in banks.items():
                name = f"{layer}.{EXPERTS}{bank}.{projection}"
                weights[f"{name}.weight"] = source[mx.array(ids)]
                reference[full][mx.array(ids)] = store(name, quantized_as)

        dropped = [e for e in range(NUM_EXPERTS) if e not in kept]
        if family == "qwen3_moe":
            if dropped:
                block = model.layers[number].mlp
                block.gate = _MaskedGate(block.gate, dropped)
                gate = reference.pop(f"{layer}.mlp.gate.weight")
                reference[f"{layer}.mlp.gate.gate.weight"] = gate
                reference[f"{layer}.mlp.gate.penalty"] = block.gate.penalty
        elif dropped:
            reference[f"{layer}.{ROUTERS[family][1]}"][mx.array(dropped)] = -1e9
    model.load_weights(list(reference.items()))

    path.mkdir(parents=True, exist_ok=True)
    shutil.copy(SOURCE, path)
    mx.save_safetensors(str(path / "model.safetensors"), weights)
    if any((high, low, router)):
        config["quantization"] = quantization
    elif family == "kimi_k3":
        del config["text_config"]["quantization_config"]
    config |= _layout(family, counts, splits)
    (path / "config.json").write_text(json.dumps(config))
    return model


def _layout(family, counts, splits):
    return {
        "model_file": SOURCE.name,
        "expert_counts": counts,
        "expert_bank_split": splits,
        "reap": {"experts": EXPERTS, "router": ROUTERS[family], "layout": "test"},
    }


def _load(path):
    return load_model(path, trust_remote_code=True)[0]


@pytest.fixture(scope="module")
def reap_model():
    """The file, executed as mlx-lm does it: without a package and not in sys.modules."""
    spec = importlib.util.spec_from_file_location("custom_model", SOURCE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LAYOUTS = {
    "k3-per-layer": ("kimi_k3", [0, 5, 3, 8], [0, 0, 0, 0], {}),
    "k3-per-layer-quantized": ("kimi_k3", [0, 5, 3, 8], [0, 0, 0, 0], {"high": MXFP4}),
    "k3-two-bank": (
        "kimi_k3",
        [0, 7, 4, 6],
        [0, 3, 0, 5],
        {"high": MXFP4, "low": AFFINE2_64, "router": {"bits": 8, "group_size": 64}},
    ),
    "qwen3-per-layer": ("qwen3_moe", [0, 2, 6, 5], [0, 0, 0, 0], {}),
    "qwen3-two-bank": (
        "qwen3_moe",
        [0, 6, 8, 3],
        [0, 2, 4, 1],
        {"high": MXFP4, "low": AFFINE2_128, "router": {"bits": 8, "group_size": 64}},
    ),
    "deepseek-two-bank": (
        "deepseek_v3",
        [0, 6, 3, 7],
        [0, 1, 0, 6],
        {"high": MXFP4, "low": AFFINE2_128},
    ),
    "deepseek-groups": (
        "deepseek_v3",
        [0, 4, 8, 6],
        [0, 0, 0, 0],
        {"high": AFFINE2_64, "n_group": 2, "topk_group": 1},
    ),
}


@pytest.fixture(scope="module", params=LAYOUTS)
def checkpoint(request, tmp_path_factory):
    """Path, loaded model and uncut reference of one layout. No test changes them."""
    family, counts, splits, options = LAYOUTS[request.param]
    path = tmp_path_factory.mktemp("checkpoint") / request.param
    reference = _cut(path, family, counts, splits, **options)
    return SimpleNamespace(
        path=path,
        model=_load(path),
        reference=reference,
        family=family,
        counts=counts,
        splits=splits,
        options=options,
    )


@pytest.fixture(scope="module")
def tokens():
    return mx.array(np.random.default_rng(3).integers(0, 64, (2, 11)))


def _close(a, b, tolerance=2e-5):
    a, b = np.array(a), np.array(b)
    assert a.shape == b.shape and np.isfinite(a).all()
    scale = np.abs(b).max()
    assert np.abs(a - b).max() <= tolerance * scale, np.abs(a - b).max() / scale


def test_imports_nothing_but_mlx():
    modules = set()
    for node in ast.walk(ast.parse(SOURCE.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add("." * node.level + node.module)
    roots = {module.partition(".")[0] for module in modules}
    assert roots == {"dataclasses", "typing", "mlx", "mlx_lm"}


def test_is_the_architecture_that_the_config_names(checkpoint):
    base, args_class = _get_classes(json.loads((checkpoint.path / "config.json").read_text()))
    model = checkpoint.model
    assert isinstance(model, base)
    assert type(model.args) is args_class
    assert len(model.layers) == 4
    stored = mx.load(str(checkpoint.path / "model.safetensors"))
    parameters = dict(tree_flatten(model.parameters()))
    assert {k: v.shape for k, v in stored.items()} == {k: v.shape for k, v in parameters.items()}
    for layer, count, split in zip(model.layers, checkpoint.counts, checkpoint.splits):
        if count:
            banks = ["high", "low"] if split else []
            assert [k for k in ("high", "low") if k in layer.mlp.switch_mlp] == banks
            sizes = [layer.mlp.switch_mlp[b].up_proj.num_experts for b in banks]
            assert (sizes or layer.mlp.switch_mlp.up_proj.num_experts) == (
                [split, count - split] if split else count
            )


def test_equals_the_uncut_model_that_cannot_choose_dropped_experts(checkpoint, tokens):
    _close(checkpoint.model(tokens), checkpoint.reference(tokens))


def test_the_masked_path_of_a_model_equals_the_split_path(checkpoint, tokens, monkeypatch):
    expected = checkpoint.model(tokens)
    for layer, split in zip(checkpoint.model.layers, checkpoint.splits):
        if split:
            monkeypatch.setattr(type(layer.mlp.switch_mlp), "path", "masked")
    assert mx.array_equal(checkpoint.model(tokens), expected)


def test_decoding_after_a_prefill_equals_the_full_forward(checkpoint, tokens):
    full = checkpoint.model(tokens)
    cache = make_prompt_cache(checkpoint.model)
    steps = [checkpoint.model(tokens[:, :6], cache=cache)]
    steps += [checkpoint.model(tokens[:, i : i + 1], cache=cache) for i in range(6, 11)]
    _close(mx.concatenate(steps, axis=1), full, 1e-4)


def test_moe_blocks_equal_a_loop_over_tokens_in_float64(checkpoint):
    x = np.random.default_rng(1).normal(size=(1, 9, 128)).astype(np.float32)
    stored = mx.load(str(checkpoint.path / "model.safetensors"))
    for number, count in enumerate(checkpoint.counts):
        if count:
            y = checkpoint.model.layers[number].mlp(mx.array(x))
            _close(y[0], _block(checkpoint, stored, number, x[0].astype(np.float64)), 1e-4)


def _block(checkpoint, stored, number, x):
    """One MoE block from the checkpoint's tensors, token by token."""
    base = f"{PREFIX[checkpoint.family]}.layers.{number}.mlp"
    config = json.loads((checkpoint.path / "config.json").read_text())
    text = config.get("text_config", config)
    k3 = checkpoint.family == "kimi_k3"
    split = checkpoint.splits[number]

    def read(name):
        names = [f"{name}.{suffix}" for suffix in ("weight", "scales", "biases")]
        parts = [stored[n] for n in names if n in stored]
        if len(parts) > 1:
            parts = [mx.dequantize(*parts, **config["quantization"][name]).astype(mx.float32)]
        return np.array(parts[0], np.float64)

    def sigmoid(v):
        return 1 / (1 + np.exp(-v))

    def glu(gate, up):
        if k3:
            beta, linear = text["activation_situ_beta"], text["activation_situ_linear_beta"]
            return beta * np.tanh(gate / beta) * sigmoid(gate) * linear * np.tanh(up / linear)
        return gate * sigmoid(gate) * up

    def mlp(v, gate, up, down):
        return down @ glu(gate @ v, up @ v)

    banks = [
        [read(f"{base}.switch_mlp{bank}.{p}") for p in PROJECTIONS]
        for bank in ((".high", ".low") if split else ("",))
    ]
    experts = [[w[e] for w in bank] for bank in banks for e in range(len(bank[0]))]
    bias_name = f"{PREFIX[checkpoint.family]}.layers.{number}.{ROUTERS[checkpoint.family][-1]}"
    out = []
    for v in x:
        logits = read(f"{base}.gate") @ v
        if checkpoint.family == "qwen3_moe":
            scores = np.exp(logits - logits.max())
            scores = choice = scores / scores.sum()
        else:
            scores = sigmoid(logits)
            choice = scores + np.array(stored[bias_name], np.float64)
            groups = text.get("n_group", 1)
            if groups > 1:
                choice = choice.reshape(groups, -1)
                best = np.sort(choice)[:, -2:].sum(-1).argmax()
                choice[np.arange(groups) != best] = -np.inf
                choice = choice.ravel()
        chosen = np.argsort(-choice)[:2]
        coefficients = scores[chosen] / scores[chosen].sum() * text.get("routed_scaling_factor", 1)
        latent = read(f"{base}.routed_expert_down_proj") @ v if k3 else v
        y = sum(c * mlp(latent, *experts[e]) for c, e in zip(coefficients, chosen))
        if k3:
            y = y / np.sqrt((y * y).mean() + 1e-5) * read(f"{base}.routed_expert_norm")
            y = read(f"{base}.routed_expert_up_proj") @ y
        if f"{base}.shared_experts.up_proj.weight" in stored:
            y = y + mlp(v, *(read(f"{base}.shared_experts.{p}") for p in PROJECTIONS))
        out.append(y)
    return np.stack(out)


def test_sharding_reaches_both_banks_and_keeps_the_result(tmp_path, tokens):
    family, counts, splits, options = LAYOUTS["qwen3-two-bank"]
    _cut(tmp_path, family, counts, splits, **options)
    model = _load(tmp_path)
    expected = model(tokens)
    model.shard(mx.distributed.init())
    _close(model(tokens), expected)


@pytest.mark.parametrize("layout", ["k3-two-bank", "qwen3-two-bank"])
def test_a_decode_step_of_a_whole_model_compiles(tmp_path, tokens, layout):
    """The step, cache included, is traced on placeholders: an evaluation in it would raise."""
    family, counts, splits, options = LAYOUTS[layout]
    _cut(tmp_path, family, counts, splits, **options)
    model = _load(tmp_path)
    banks = type(next(layer.mlp.switch_mlp for layer, n in zip(model.layers, splits) if n))
    cache = make_prompt_cache(model)
    model(tokens[:, :6], cache=cache)
    states = [entry.state for entry in cache]
    mx.eval(states)

    def fresh(leaf):  # caches write in place
        return mx.array(leaf) if isinstance(leaf, mx.array) else leaf

    def step(token, states):
        after = make_prompt_cache(model)
        for entry, state in zip(after, states):
            entry.state = tree_map(fresh, state)
        return model(token, cache=after), [entry.state for entry in after]

    token = tokens[:, 6:7]
    expected, _ = step(token, states)
    with pytest.raises(ValueError, match="eval"):
        mx.compile(step)(token, states)
    banks.path = "masked"
    compiled = mx.compile(step)
    logits, _ = compiled(token, states)
    if family != "kimi_k3":  # whose many fused kernels a C++ compiler would build for 20 seconds
        _close(logits, expected)
        other = tokens[::-1, 6:7]
        _close(compiled(other, states)[0], step(other, states)[0])  # the graph that was traced


def _experts(kind, count, **options):
    bank = kind(64, 128, count, **options)
    for name, value in tree_flatten(bank.parameters()):
        if name.endswith("bias"):
            bank.update(tree_unflatten([(name, mx.random.normal(value.shape))]))
    return bank


def _two_banks(reap_model, whole, split):
    """Cut a plain experts module in two."""
    count = whole[next(k for k in whole if k != "activation")].num_experts
    halves = []
    for ids in (slice(0, split), slice(split, count)):
        half = copy.deepcopy(whole)
        for name, value in tree_flatten(whole.parameters()):
            half.update(tree_unflatten([(name, mx.contiguous(value[ids]))]))
        halves.append(half)
    return reap_model.TwoBankExperts(*halves, split).eval()


KINDS = {
    "k3": (SwitchGLU, {"activation": SiTU(4.0, 25.0)}, MXFP4, mx.bfloat16),
    "glu": (SwitchGLU, {}, None, mx.float32),  # the CPU has no gather_mm in bfloat16
    "glu-mxfp4": (SwitchGLU, {}, MXFP4, mx.bfloat16),
    "glu-affine": (SwitchGLU, {}, AFFINE2_64, mx.bfloat16),
    "glu-bias": (SwitchGLU, {"bias": True}, MXFP4, mx.float32),
    "mlp-bias": (SwitchMLP, {"bias": True}, None, mx.float32),
}


ROUTING = {"both": (0, 7), "only-high": (0, 3), "only-low": (3, 7), "one-expert": (6, 7)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", ["split", "masked"])
@pytest.mark.parametrize("routing", ROUTING)
def test_two_banks_of_one_format_are_bit_identical_to_one_bank(reap_model, kind, path, routing):
    mx.random.seed(0)
    cls, options, quantization, dtype = KINDS[kind]
    whole = _experts(cls, 7, **options)
    whole.set_dtype(dtype)
    if quantization:
        nn.quantize(whole, **quantization)
    two = _two_banks(reap_model, whole, 3)
    two.path = path
    # Few pairs in one token, few, many enough to be sorted; leading dimensions as in a model.
    for shape in ((64,), (1, 1, 64), (2, 5, 64), (2, 40, 64)):
        x = mx.random.normal(shape).astype(dtype)
        indices = mx.random.randint(*ROUTING[routing], (*shape[:-1], 4)).astype(mx.uint32)
        expected, y = whole(x, indices), two(x, indices)
        assert y.shape == expected.shape and y.dtype == expected.dtype
        assert mx.array_equal(y, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_bank_is_like_the_experts_it_was_cut_from(reap_model, kind):
    cls, options, *_ = KINDS[kind]
    whole = cls(64, 128, 7, **options | {"activation": nn.Tanh()})
    bank = reap_model._bank(whole, 2)
    assert type(bank) is cls and bank.activation is whole.activation
    shapes = {name: (2, *v.shape[1:]) for name, v in tree_flatten(whole.parameters())}
    assert {name: v.shape for name, v in tree_flatten(bank.parameters())} == shapes


@pytest.fixture
def mixed(reap_model):
    """Banks of 3 experts in mxfp4 and 4 in 2 bit."""
    mx.random.seed(1)
    high, low = _experts(SwitchGLU, 3), _experts(SwitchGLU, 4)
    nn.quantize(high, **MXFP4)
    nn.quantize(low, **AFFINE2_64)
    mx.eval(high.parameters(), low.parameters())  # or they would be part of what is compiled
    return reap_model.TwoBankExperts(high, low, 3).eval()


def _pair_by_pair(two, x, indices):
    """Send every pair alone through its bank."""
    rows = []
    for token, chosen in zip(x.reshape(-1, x.shape[-1]), np.array(indices).reshape(-1, 4)):
        for e in chosen.tolist():
            bank, e = (two.high, e) if e < two.split else (two.low, e - two.split)
            rows.append(bank(token[None], mx.array([[e]], mx.uint32)).flatten())
    return mx.stack(rows).reshape(*indices.shape, -1)


def _spy(bank):
    """Record the rows and the experts of each call of a bank."""
    calls = []

    def call(self, x, indices):
        calls.append((x.size // x.shape[-1], indices))
        return SwitchGLU.__call__(self, x, indices)

    bank.__class__ = type("Spy", (SwitchGLU,), {"__call__": call})
    return calls


@pytest.mark.parametrize("path", ["split", "masked"])
@pytest.mark.parametrize("routing", ROUTING)
def test_mixed_banks_equal_running_each_pair_through_its_bank(mixed, routing, path):
    mixed.path = path
    for tokens in (1, 5, 30):
        x = mx.random.normal((1, tokens, 64))
        indices = mx.random.randint(*ROUTING[routing], (1, tokens, 4)).astype(mx.uint32)
        _close(mixed(x, indices), _pair_by_pair(mixed, x, indices), 1e-6)


def test_an_empty_bank_is_not_called(mixed):
    high, low = _spy(mixed.high), _spy(mixed.low)
    x = mx.random.normal((9, 64))
    mixed(x, mx.array([[2, 0, 1, 1]] * 9, mx.uint32))
    assert ([rows for rows, _ in high], low) == ([36], [])
    mixed(x, mx.array([[3, 4, 6, 6]] * 9, mx.uint32))
    assert ([rows for rows, _ in high], [rows for rows, _ in low]) == ([36], [36])


@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_masked_compiles_and_equals_split(mixed, tokens):
    masked = copy.copy(mixed)
    mixed.path, masked.path = "split", "masked"
    compiled = mx.compile(lambda x, indices: masked(x, indices))
    for _ in range(2):  # the second call runs the graph that was traced
        indices = mx.random.randint(0, 7, (2, tokens, 4)).astype(mx.uint32)
        x = mx.random.normal((2, tokens, 64))
        assert mx.array_equal(compiled(x, indices), mixed(x, indices))


def test_split_reads_back_and_masked_does_not(mixed):
    x = mx.random.normal((1, 1, 64))
    indices = mx.array([[[0, 6, 2, 1]]], mx.uint32)
    mixed.path = "split"
    with pytest.raises(ValueError, match="eval"):
        mx.compile(lambda x, indices: mixed(x, indices))(x, indices)
    mixed.path = "masked"
    mx.compile(lambda x, indices: mixed(x, indices))(x, indices)


def test_gradients_through_masked_are_those_of_one_bank(reap_model):
    mx.random.seed(2)
    whole = _experts(SwitchGLU, 7)
    two = _two_banks(reap_model, whole, 3).train()
    x = mx.random.normal((1, 9, 64))
    indices = mx.random.randint(0, 7, (1, 9, 4)).astype(mx.uint32)

    def gradients(experts):
        def loss(parameters, x):
            experts.update(parameters)
            return (experts(x, indices) ** 2).sum()

        return mx.grad(loss, (0, 1))(experts.parameters(), x)

    (expected, of_x), (found, of_x_found) = gradients(whole), gradients(two)
    _close(of_x_found, of_x)
    for name in PROJECTIONS:
        banks = [found[bank][name]["weight"] for bank in ("high", "low")]
        _close(mx.concatenate(banks), expected[name]["weight"])


def _spy_on_matrices(two):
    """Record the experts of the router, by projection, whose matrices are read."""
    seen = {}
    for bank, first in ((two.high, 0), (two.low, two.split)):
        for name in PROJECTIONS:

            def call(self, x, indices, sorted_indices=False, *, name=name, first=first):
                seen.setdefault(name, set()).update((first + indices).flatten().tolist())
                return QuantizedSwitchLinear.__call__(self, x, indices, sorted_indices)

            bank[name].__class__ = type("Spy", (QuantizedSwitchLinear,), {"__call__": call})
    return seen


@pytest.mark.parametrize(
    ("chosen", "additional"),
    [
        ([[0, 1, 2, 1]], {3}),
        ([[3, 4, 5, 6]], {0}),
        ([[2, 4, 1, 6]], set()),
        ([[0, 6, 5, 3]], set()),
        ([[1, 0, 1, 0], [4, 5, 5, 4]], set()),  # each token reads one bank
        ([[1, 2, 1, 2], [2, 1, 1, 2], [1, 2, 2, 1]], {3}),
        ([[5, 6, 6, 5]] * 20, {0}),  # sorted by the banks
        ([[5, 6, 1, 5]] * 20, set()),
    ],
)
def test_masked_reads_no_expert_but_one_that_was_not_chosen(mixed, chosen, additional):
    mixed.path = "masked"
    seen = _spy_on_matrices(mixed)
    indices = mx.array([chosen], mx.uint32)
    mx.eval(mixed(mx.random.normal((*indices.shape[:2], 64)), indices))
    wanted = {expert for token in chosen for expert in token} | additional
    assert seen == dict.fromkeys(PROJECTIONS, wanted)
    if len(chosen) == 1:
        assert len(wanted) <= len(chosen[0]) + 1


def test_a_stand_in_that_is_not_finite_does_not_leak(mixed):
    mixed.path = "masked"
    mixed.high.down_proj.scales = mx.full(mixed.high.down_proj.scales.shape, 255, mx.uint8)
    x = mx.random.normal((2, 64))
    assert not mx.isfinite(mixed(x, mx.array([[0, 4, 5, 6]] * 2, mx.uint32))[:, 0]).any()
    assert mx.isfinite(mixed(x, mx.array([[0, 4, 5, 6]] * 2, mx.uint32))[:, 1:]).all()
    assert mx.isfinite(mixed(x, mx.array([[3, 4, 5, 6]] * 2, mx.uint32))).all()


def test_no_call_of_a_bank_exceeds_the_rows_that_are_safe(reap_model):
    whole = SwitchGLU(8, 8, 3)
    two = _two_banks(reap_model, whole, 1)
    high, low = _spy(two.high), _spy(two.low)
    x = mx.random.normal((17_000, 8))
    indices = mx.array([[2, 1]] * 16_999 + [[0, 1]], mx.uint32)
    assert mx.array_equal(two(x, indices), whole(x, indices))
    assert [rows for rows, _ in high] == [1]
    assert [rows for rows, _ in low] == [32_768, 33_999 - 32_768]
    two.path = "masked"
    high.clear()
    low.clear()
    assert mx.array_equal(two(x, indices), whole(x, indices))
    for calls in (high, low):  # rows of x, each with two experts
        assert [chosen.size for _, chosen in calls] == [32_768, 34_000 - 32_768]


@pytest.mark.parametrize(
    ("device", "training", "tokens", "path"),
    [
        ("cpu", False, 1, "split"),
        ("cpu", False, 65, "split"),
        ("gpu", False, 1, "masked"),
        ("gpu", False, 64, "masked"),
        ("gpu", False, 65, "split"),
        ("cpu", True, 65, "masked"),  # mlx-lm compiles the training step
        ("gpu", True, 65, "masked"),
    ],
)
def test_one_rule_chooses_the_path(mixed, monkeypatch, device, training, tokens, path):
    monkeypatch.setattr(mx, "default_device", lambda: getattr(mx, device))
    for name in ("split", "masked"):
        monkeypatch.setattr(type(mixed), f"_{name}", lambda *_, name=name: name)
    mixed.train(training)
    assert mixed(None, mx.zeros((tokens, 4), mx.uint32)) == path


def test_the_dtype_does_not_depend_on_the_routing(mixed):
    x = mx.random.normal((2, 64)).astype(mx.bfloat16)  # scales of the low bank are float32
    for path in ("split", "masked"):
        mixed.path = path
        for chosen in ([0, 1, 2, 0], [3, 4, 5, 6], [0, 4, 1, 5]):
            assert mixed(x, mx.array([chosen] * 2, mx.uint32)).dtype == mx.bfloat16


def test_shards_of_two_banks_add_up(mixed):
    x = mx.random.normal((6, 64))
    indices = mx.random.randint(0, 7, (6, 4)).astype(mx.uint32)
    expected = mixed(x, indices)
    total = 0
    for rank in range(2):
        shard = copy.deepcopy(mixed)
        group = SimpleNamespace(size=lambda: 2, rank=lambda rank=rank: rank)
        shard_inplace(shard.gate_proj, "all-to-sharded", group=group)
        shard_inplace(shard.up_proj, "all-to-sharded", group=group)
        shard_inplace(shard.down_proj, "sharded-to-all", group=group)
        assert shard.low.up_proj.output_dims == 64
        total = total + shard(x, indices)
    _close(total, expected, 1e-5)


def _build(reap_model, family="qwen3_moe", counts=(0, 4, 4, 4), splits=(0, 0, 0, 0), **changes):
    config = _base_config(family, **changes) | _layout(family, list(counts), list(splits))
    return reap_model.Model(reap_model.ModelArgs.from_dict(config))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"counts": (0, 4, 4)}, "4 layers, expert_counts 3, expert_bank_split 4"),
        ({"splits": (0, 0, 0, 0, 0)}, "4 layers, expert_counts 4, expert_bank_split 5"),
        ({"splits": (0, 0, 4, 0)}, "layer 2: expert_bank_split 4 is not between 0 and 3"),
        ({"splits": (0, 0, 0, -1)}, "layer 3: expert_bank_split -1 is not between 0 and 3"),
        ({"counts": (0, 4, 4, 1)}, "layer 3: the router chooses 2 of 1 experts"),
        ({"counts": (3, 4, 4, 4)}, "layer 0: expert_counts is 3 .* no experts at mlp.switch_mlp"),
        ({"splits": (1, 0, 0, 0)}, "layer 0: .*expert_bank_split 1, .*has no experts"),
        ({"counts": (0, 0, 4, 4)}, "layer 1: expert_counts is 0 .* has experts at mlp.switch_mlp"),
        (
            {"family": "kimi_k3", "counts": (0, 4, 4, 3), "num_experts_per_token": 4},
            "layer 3: the router chooses 4 of 3 experts",
        ),
        (
            {"family": "deepseek_v3", "n_group": 2, "topk_group": 1, "splits": (0, 0, 2, 0)},
            r"layer 2: two banks \(2 \+ 2 experts\) .* limited to 1 of 2 groups",
        ),
        (
            {"family": "deepseek_v3", "n_group": 2, "topk_group": 1, "counts": (0, 5, 4, 4)},
            "layer 1: 5 experts do not divide into the router's 2 groups",
        ),
        (
            {"family": "deepseek_v3", "n_group": 4, "topk_group": 1},
            r"layer 1: the router chooses 2 of 1 experts \(4 kept\)",
        ),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(reap_model, options, message):
    with pytest.raises(ValueError, match=message):
        _build(reap_model, **options)


def test_experts_of_another_kind_are_refused(reap_model):
    config = _base_config("qwen3_moe") | _layout("qwen3_moe", [0, 4, 4, 4], [0] * 4)
    config["reap"]["experts"] = "mlp.gate"
    with pytest.raises(ValueError, match="layer 1: experts are Linear, not SwitchGLU"):
        reap_model.Model(reap_model.ModelArgs.from_dict(config))


def test_experts_that_only_derive_from_a_known_kind_are_refused(reap_model):
    other = type("OtherGLU", (SwitchGLU,), {})(8, 8, 2)
    with pytest.raises(ValueError, match="experts are OtherGLU, not SwitchGLU"):
        reap_model._bank(other, 1)


def test_a_router_that_ignores_its_groups_takes_two_banks(reap_model):
    settings = {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 4}
    reap_model._check_router(SimpleNamespace(**settings, topk_method="greedy"), 5, 2)
    with pytest.raises(ValueError, match="two banks"):
        limited = SimpleNamespace(**settings, topk_method="group_limited_greedy")
        reap_model._check_router(limited, 5, 2)


@pytest.mark.parametrize("path", ["mlp.gate.bias", "mlp.gate", "self_attn.q_norm.weight"])
def test_a_router_tensor_without_a_row_for_every_expert_is_refused(reap_model, path):
    config = _base_config("qwen3_moe") | _layout("qwen3_moe", [0, 4, 4, 4], [0] * 4)
    config["reap"]["router"] = [path]
    with pytest.raises(ValueError, match=f"layer 1: router {path} is .*expected 8 rows"):
        reap_model.Model(reap_model.ModelArgs.from_dict(config))


def test_a_config_without_the_layout_is_refused(reap_model):
    config = _base_config("qwen3_moe") | {"reap": {"experts": EXPERTS}, "expert_counts": []}
    with pytest.raises(ValueError, match=r"lacks expert_bank_split, reap\.router"):
        reap_model.ModelArgs.from_dict(config)


def test_building_a_big_model_allocates_nothing(reap_model):
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    splits = (0, 100, 0, 1)
    model = _build(
        reap_model, "kimi_k3", (0, 896, 400, 2), splits, num_experts=896, hidden_size=7168
    )
    size = sum(v.nbytes for _, v in tree_flatten(model.parameters()))
    assert size > 2**28
    assert mx.get_peak_memory() - before < 2**20
