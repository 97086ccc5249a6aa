"""mlx-lm's Kimi-K3 forward pass against the independent float64 one in reference/kimi_k3.py.

Both read the embedded tiny-k3, which has the layout of the released checkpoint.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
import pytest
from mlx_lm.utils import load_model
from reference import kimi_k3
from tokenizers import Tokenizer

import reap

Array = npt.NDArray[np.float64]
Floats = npt.NDArray[np.float32]

CHECKPOINT = Path(reap.__file__).parent / "embedded" / "tiny-k3"
TEXTS = sorted((Path(__file__).parents[1] / "calibration").glob("*.evaluation.jsonl"))
TOKENS = 64
TOLERANCE = 1e-3
SHRUNK = ("q_proj.weight", "k_proj.weight", "q_a_proj.weight", "kv_a_proj_with_mqa.weight")
"""Projections in front of an l2norm or of a norm of MLA's latents."""
TIE = 1e-6
"""Routing margins below this are decided by float32 rounding."""


def load_mlx(path: Path) -> nn.Module:
    """mlx-lm's model with float32 activations throughout.

    The float32 convolutions promote everything after them, but the projections before the first
    one follow the bfloat16 embeddings, whose rounding moves logits by up to 1. Widening the
    embeddings loses nothing and leaves mlx-lm's code as it is.
    """
    model, _ = load_model(path, lazy=False)
    embeddings = model.language_model.model.embed_tokens
    embeddings.weight = embeddings.weight.astype(mx.float32)
    return model


def mlx_logits(model: nn.Module, tokens: Sequence[int]) -> Array:
    """mlx-lm's logits [T, V] of one sequence."""
    logits = model(mx.array([tokens]))
    assert logits.dtype == mx.float32
    return np.array(logits[0]).astype(np.float64)


def edit_checkpoint(source: Path, target: Path, edit: Callable[[str, Floats], Floats]) -> Path:
    """Copy a checkpoint, passing each F32 and BF16 tensor through `edit` on the way."""
    shutil.copytree(source, target)
    for shard in target.glob("*.safetensors"):
        content = bytearray(shard.read_bytes())
        start = 8 + int.from_bytes(content[:8], "little")
        for name, entry in json.loads(content[8:start]).items():
            if name == "__metadata__" or entry["dtype"] not in ("F32", "BF16"):
                continue
            where = slice(*(start + offset for offset in entry["data_offsets"]))
            if entry["dtype"] == "F32":
                values = np.frombuffer(bytes(content[where]), dtype=np.float32)
                content[where] = edit(name, values).tobytes()
            else:
                values = np.frombuffer(bytes(content[where]), dtype=np.uint16)
                bits = edit(name, (values.astype(np.uint32) << 16).view(np.float32)).view(np.uint32)
                assert not np.any(bits & 0xFFFF), f"{name}: the edit is not exact in bfloat16"
                content[where] = (bits >> 16).astype(np.uint16).tobytes()
        shard.write_bytes(content)
    return target


def decided_tokens(
    model: kimi_k3.Model,
    tokens: Sequence[int],
    keep: Mapping[int, Sequence[int]] | None = None,
) -> int:
    """How many leading tokens come before the first one routed by a near tie, in any layer.

    At a tie two correct implementations may choose different experts, there and from there on.
    """
    route = kimi_k3.route
    ties: list[bool] = []

    def record(
        logits: Array, bias: Array, config: kimi_k3.Config, allowed: Sequence[int]
    ) -> tuple[kimi_k3.Indices, Array]:
        ranked = np.sort((kimi_k3.sigmoid(logits) + bias)[list(allowed)])[::-1]
        chosen, rest = np.split(ranked, [config.num_experts_per_token])
        ties.append(len(rest) > 0 and chosen[-1] - rest[0] < TIE)
        return route(logits, bias, config, allowed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kimi_k3, "route", record)
        kimi_k3.forward(model, tokens, keep=keep)
    tied = np.reshape(ties, (-1, len(tokens))).any(axis=0)
    return int(np.argmax(tied)) if tied.any() else len(tokens)


def disagreement(reference: Sequence[Array], logits: Sequence[Array]) -> float:
    """The largest absolute difference of any logit."""
    return max(float(np.abs(a - b).max()) for a, b in zip(reference, logits, strict=True))


class Comparison:
    """One checkpoint in both implementations, and texts whose routing rounding does not decide."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reference = kimi_k3.load(path)
        self.mlx = load_mlx(path)
        tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        self.texts: list[list[int]] = []
        for text in TEXTS:
            document = json.loads(text.read_text().partition("\n")[0])["text"]
            tokens = tokenizer.encode(document).ids[:TOKENS]
            self.texts.append(tokens[: decided_tokens(self.reference, tokens)])
        self.mlx_logits = [mlx_logits(self.mlx, tokens) for tokens in self.texts]

    def disagreement(self, tokens: int = TOKENS) -> float:
        """Between mlx-lm and the reference as it is now, on the first tokens of each text."""
        reference = [kimi_k3.forward(self.reference, text[:tokens]) for text in self.texts]
        return disagreement(reference, [logits[:tokens] for logits in self.mlx_logits])


@pytest.fixture(scope="module")
def released() -> Comparison:
    """The checkpoint as it is."""
    return Comparison(CHECKPOINT)


@pytest.fixture(scope="module")
def small_vectors(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """Vectors in front of attention's inner norms so small that the epsilons matter."""

    def shrink(name: str, values: Floats) -> Floats:
        return values * np.float32(2**-10) if name.endswith(SHRUNK) else values

    target = tmp_path_factory.mktemp("small-vectors") / "model"
    return Comparison(edit_checkpoint(CHECKPOINT, target, shrink))


def test_the_texts_are_long_enough_to_mean_something(released: Comparison) -> None:
    assert len(released.texts) == 5
    assert sum(map(len, released.texts)) > 0.75 * 5 * TOKENS


def test_mlx_lm_agrees_with_the_reference(released: Comparison) -> None:
    assert max(float(np.abs(logits).max()) for logits in released.mlx_logits) > 10
    assert released.disagreement() < TOLERANCE


def test_mlx_lm_agrees_where_the_epsilons_matter(small_vectors: Comparison) -> None:
    assert small_vectors.disagreement() < TOLERANCE


def test_padding_of_a_log_is_never_read(released: Comparison, tmp_path: Path) -> None:
    heads = released.reference.config.kda_heads
    poisoned_tensors: list[str] = []

    def poison(name: str, values: Floats) -> Floats:
        if not name.endswith("A_log"):
            return values
        poisoned_tensors.append(name)
        assert len(values) > heads
        return np.where(np.arange(len(values)) < heads, values, np.float32(7.0))

    path = edit_checkpoint(CHECKPOINT, tmp_path / "model", poison)
    assert len(poisoned_tensors) == len(released.reference.config.kda_layers)
    reference, model = kimi_k3.load(path), load_mlx(path)
    for tokens, logits in zip(released.texts, released.mlx_logits, strict=True):
        assert np.array_equal(mlx_logits(model, tokens), logits)
        assert np.array_equal(
            kimi_k3.forward(reference, tokens), kimi_k3.forward(released.reference, tokens)
        )


def test_keep_is_a_router_without_the_other_experts(released: Comparison) -> None:
    config, generator = released.reference.config, np.random.default_rng(0)
    moe_layers = [layer for layer in range(config.num_hidden_layers) if config.is_moe(layer)]
    keep = {layer: sorted(generator.permutation(64)[:24].tolist()) for layer in moe_layers[1:]}
    model = load_mlx(released.path)
    for layer, kept in keep.items():
        mlp = model.language_model.model.layers[layer].mlp
        dropped = np.setdiff1d(np.arange(64), kept)
        mlp.e_score_correction_bias[mx.array(dropped)] = -1e9
    reference, logits = [], []
    for text in released.texts:
        tokens = text[: decided_tokens(released.reference, text, keep)]
        reference.append(kimi_k3.forward(released.reference, tokens, keep=keep))
        logits.append(mlx_logits(model, tokens))
    assert sum(map(len, reference)) > 0.75 * 5 * TOKENS
    assert disagreement(reference, logits) < TOLERANCE


def test_keep_of_every_expert_changes_nothing(released: Comparison) -> None:
    tokens = released.texts[0]
    everything = {layer: range(64) for layer in range(1, 6)}
    assert np.array_equal(
        kimi_k3.forward(released.reference, tokens, keep=everything),
        kimi_k3.forward(released.reference, tokens),
    )


def test_keep_of_too_few_experts_is_refused(released: Comparison) -> None:
    with pytest.raises(ValueError, match="3 experts to choose from, 4 needed"):
        kimi_k3.forward(released.reference, released.texts[0], keep={2: [5, 6, 7]})


def test_observe_sees_each_routed_expert_before_weighting(
    released: Comparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weighted sum of what it reports is what goes on through the network."""
    tokens, kept = released.texts[0][:8], range(10, 30)
    combine, combined = kimi_k3.combine, []

    def record(outputs: Array, weights: Array, norm_weight: Array, eps: float) -> Array:
        combined.append(weights @ outputs)
        return combine(outputs, weights, norm_weight, eps)

    seen: list[tuple[int, int]] = []

    def observe(
        layer: int, token: int, experts: kimi_k3.Indices, weights: Array, outputs: Array
    ) -> None:
        assert len(set(experts.tolist())) == 4
        assert layer != 3 or set(experts.tolist()) <= set(kept)
        assert weights.sum() == pytest.approx(2.5)
        assert outputs.shape == (4, 128)
        observed.append(sum(w * y for w, y in zip(weights, outputs, strict=True)))
        seen.append((layer, token))

    observed: list[Array] = []
    monkeypatch.setattr(kimi_k3, "combine", record)
    kimi_k3.forward(released.reference, tokens, keep={3: kept}, observe=observe)
    assert seen == [(layer, token) for layer in range(1, 6) for token in range(8)]
    np.testing.assert_allclose(observed, combined, rtol=1e-12, atol=1e-12)


def clamped_decay(raw: Array, a_log: Array, lower_bound: float) -> Array:
    """The softplus form clamped at the bound."""
    rate = np.exp(a_log[: raw.shape[1]])[:, None]
    return np.maximum(-rate * np.logaddexp(0, raw), lower_bound)


def decay_per_channel(raw: Array, a_log: Array, lower_bound: float) -> Array:
    """The padded A_log, as long as a head, taken for one value per channel of a head."""
    return lower_bound * kimi_k3.sigmoid(np.exp(a_log[: raw.shape[2]]) * raw)


def decay_from_padding(raw: Array, a_log: Array, lower_bound: float) -> Array:
    """The padding expected in front of the heads."""
    return lower_bound * kimi_k3.sigmoid(np.exp(a_log[-raw.shape[1] :])[:, None] * raw)


def l2norm_with(eps: float) -> Callable[[Array], Array]:
    """An l2norm with another epsilon."""

    def l2norm(x: Array) -> Array:
        return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + eps)

    return l2norm


def l2norm_without_epsilon(x: Array) -> Array:
    """x / |x|, and 0 for 0."""
    length = np.sqrt(np.sum(x * x, axis=-1, keepdims=True))
    return np.divide(x, length, out=np.zeros_like(x), where=length > 0)


Attend = Callable[[list[Array], Array], Array]


def push_before_mixing(
    stack: list[Array], prefix: Array, starts_block: bool, attend: Attend
) -> tuple[list[Array], Array]:
    """Attention of a block's first layer sees the finished sum twice."""
    if starts_block:
        stack = [*stack, prefix]
        return stack, attend(stack, prefix)
    return stack, prefix + attend(stack, prefix)


def push_after_attention(
    stack: list[Array], prefix: Array, starts_block: bool, attend: Attend
) -> tuple[list[Array], Array]:
    """The finished sum takes the attention output of the next block's first layer along."""
    output = attend(stack, prefix)
    if starts_block:
        return [*stack, prefix + output], output
    return stack, prefix + output


def biased_weights(
    logits: Array, bias: Array, config: kimi_k3.Config, allowed: Sequence[int]
) -> tuple[kimi_k3.Indices, Array]:
    """The correction bias left in the routing weights."""
    scores = kimi_k3.sigmoid(logits) + bias
    experts = np.argsort(-scores, kind="stable")[: config.num_experts_per_token]
    weights = scores[experts] / (scores[experts].sum() + 1e-20)
    return experts, weights * config.routed_scaling_factor


def norm_before_sum(outputs: Array, weights: Array, norm_weight: Array, eps: float) -> Array:
    """The latent norm applied to each expert instead of to their sum."""
    return weights @ kimi_k3.rms_norm(outputs, norm_weight, eps)


@pytest.mark.parametrize(
    ("checkpoint", "name", "wrong"),
    [
        pytest.param("released", "log_decay", clamped_decay, id="decay-clamped"),
        pytest.param("released", "log_decay", decay_per_channel, id="a-log-per-channel"),
        pytest.param("released", "log_decay", decay_from_padding, id="a-log-from-padding"),
        pytest.param("small_vectors", "l2norm", l2norm_without_epsilon, id="l2norm-without-eps"),
        pytest.param("small_vectors", "l2norm", l2norm_with(1e-5), id="l2norm-eps-1e-5"),
        pytest.param("small_vectors", "l2norm", l2norm_with(128e-6), id="l2norm-eps-of-a-mean"),
        pytest.param("small_vectors", "LORA_NORM_EPS", 1e-5, id="latent-norm-eps-1e-5"),
        pytest.param("released", "attention_residual", push_before_mixing, id="push-before-mix"),
        pytest.param("released", "attention_residual", push_after_attention, id="push-after"),
        pytest.param("released", "route", biased_weights, id="biased-weights"),
        pytest.param("released", "combine", norm_before_sum, id="norm-before-sum"),
    ],
)
def test_a_wrong_variant_is_noticed(
    checkpoint: str,
    name: str,
    wrong: object,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    comparison: Comparison = request.getfixturevalue(checkpoint)
    monkeypatch.setattr(kimi_k3, name, wrong)
    assert comparison.disagreement(tokens=24) > TOLERANCE
