"""Scoring a checkpoint, beside the model it was made from.

Both models run layer by layer over the same batches, so neither has to fit in memory; only the
hidden states of both are held until their logits are compared, batch by batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from reap import __version__
from reap.artifacts import DocumentScore, Evaluation, Provenance
from reap.errors import ReapError
from reap.models.divergence import kl_divergence, log_probabilities
from reap.models.source import SourceModel
from reap.models.stream import LayerStream
from reap.models.text import (
    Batch,
    Cut,
    Text,
    batches,
    check_length,
    corpora,
    load_tokenizer,
    read_sequences,
)
from reap.progress import Progress, silent

QUANTILES = (0, 1, 5, 10, 50, 90, 95, 99, 99.9, 100)


@dataclass(frozen=True)
class EvaluationSettings:
    """`tokens`: limit over all domains, None for all text; `documents`: whether one that is longer
    than a sequence is split into several or truncated to its first."""

    tokens: int | None = None
    sequence_length: int = 512
    documents: Cut = "split"
    batch_tokens: int = 4096


def evaluate(
    checkpoint: SourceModel,
    texts: Sequence[Text],
    settings: EvaluationSettings,
    *,
    reference: SourceModel | None = None,
    label: str = "",
    command: str = "",
    trust_remote_code: bool = False,
    progress: Progress = silent,
) -> Evaluation:
    """Perplexity of `checkpoint`, and its divergence from `reference` if there is one.

    Raises ReapError if the two do not share a vocabulary or a logit is not finite.
    """
    return evaluate_all(
        {label or _label(checkpoint): checkpoint},
        texts,
        settings,
        reference=reference,
        command=command,
        trust_remote_code=trust_remote_code,
        progress=progress,
    )[0]


def evaluate_all(
    checkpoints: Mapping[str, SourceModel],
    texts: Sequence[Text],
    settings: EvaluationSettings,
    *,
    reference: SourceModel | None = None,
    command: str = "",
    trust_remote_code: bool = False,
    progress: Progress = silent,
) -> list[Evaluation]:
    """`evaluate` for several checkpoints by label, with one pass of the reference for all."""
    models = [*checkpoints.values(), *([] if reference is None else [reference])]
    first = models[0]
    for other in models[1:]:
        if other.vocabulary != first.vocabulary:
            raise ReapError(
                f"{first.checkpoint.name} has {first.vocabulary} tokens, "
                f"{other.checkpoint.name} {other.vocabulary}: they cannot be compared."
            )
    tokens_per_call = min(model.tokens_per_call for model in models)
    check_length(settings.sequence_length, tokens_per_call)
    tokenizer = load_tokenizer(first.checkpoint.path, trust_remote_code=trust_remote_code)
    read, parts = read_sequences(
        texts,
        tokenizer,
        sequence_length=settings.sequence_length,
        tokens=settings.tokens,
        documents=settings.documents,
        vocab_size=first.vocabulary,
    )
    made = batches(parts, tokens_per_batch=min(settings.batch_tokens, tokens_per_call))
    scored = [_Scored() for _ in checkpoints]
    for batch, logits in zip(made, _logits(models, made, progress)):
        base = None if reference is None else logits[-1]
        for mine, own in zip(scored, logits):
            mine.add(batch, _score(batch, own, base))
    inputs = {text.source: text.sha256 for text in read}
    if reference is not None:
        inputs["reference model"] = reference.checkpoint.model_sha256
    return [
        Evaluation(
            provenance=Provenance(
                reap_version=__version__,
                command=command,
                model=model.checkpoint.name,
                revision=model.checkpoint.revision,
                model_sha256=model.checkpoint.model_sha256,
                inputs=inputs | _plan_input(model),
                corpora=corpora(read, parts),
                settings=asdict(settings),
            ),
            checkpoint=model.checkpoint.name,
            reference=None if reference is None else reference.checkpoint.name,
            label=label,
            sequence_length=settings.sequence_length,
            weight_bytes=_loaded_bytes(model),
            expert_bytes=_expert_bytes(model),
            base_expert_bytes=_expert_bytes(reference or model),
            documents=mine.documents([text.domain for text in read]),
            kl_quantiles=mine.quantiles(),
        )
        for (label, model), mine in zip(checkpoints.items(), scored)
    ]


def _plan_input(model: SourceModel) -> dict[str, str]:
    plan = model.checkpoint.origin.get("plan_sha256")
    return {"plan": plan} if plan else {}


class _Scored:
    """What one checkpoint scored so far."""

    def __init__(self) -> None:
        # By domain and document the fields of DocumentScore while they add up.
        self._sums: dict[tuple[int, int], dict[str, Any]] = {}
        self._divergences: list[np.ndarray] = []

    def add(self, batch: Batch, scores: dict[str, np.ndarray]) -> None:
        if "kl" in scores:
            self._divergences.append(scores["kl"][batch.mask[:, 1:]])
        for row, document in enumerate(batch.documents):
            sums = self._sums.setdefault((batch.domain, document), defaultdict(float))
            tokens = int(batch.lengths[row]) - 1
            sums["tokens"] += tokens
            for name, values in scores.items():
                sums[name] += float(values[row, :tokens].sum())

    def documents(self, domains: Sequence[str]) -> tuple[DocumentScore, ...]:
        """`domains`: their names, in the batches' order."""
        return tuple(
            DocumentScore(
                domains[domain],
                **sums | {name: int(sums[name]) for name in ("tokens", "same_top")},
            )
            for (domain, _), sums in sorted(self._sums.items(), key=lambda entry: entry[0])
        )

    def quantiles(self) -> dict[str, float]:
        """Of the divergence of single tokens, in nats by percentage; empty without reference."""
        if not self._divergences:
            return {}
        values = np.percentile(np.concatenate(self._divergences), QUANTILES)
        return {f"{q:g}": float(v) for q, v in zip(QUANTILES, values)}


def _logits(
    models: Sequence[SourceModel], made: Sequence[Batch], progress: Progress
) -> Iterator[list[mx.array]]:
    """For each batch the log probabilities of every model, [sequences, tokens, vocabulary]."""
    depth = max(len(model.layers) for model in models)
    work = sum(int(batch.lengths.sum()) for batch in made)
    passes = sum(len(model.layers) for model in models)
    done = 0
    tokens = [batch.tokens for batch in made]
    with ExitStack() as stack:
        streams = []
        for model in models:
            model.load_trunk()
            streams.append(stack.enter_context(LayerStream(model.model, model.layers, tokens)))
        for index in range(depth):
            for model, stream in zip(models, streams):
                if index >= len(model.layers):
                    continue
                model.load_layer(index)
                for position, batch in enumerate(made):
                    progress(f"layer {index} ({index + 1} of {depth})", done // passes, work)
                    stream.step(position)
                    done += int(batch.lengths.sum())
                model.release_layer(index)
                if len(models) > 1:
                    mx.clear_cache()  # the next layer is of another model
        progress("scoring", work, work)
        for position in range(len(made)):
            yield [log_probabilities(stream.finish(position)) for stream in streams]


def _score(batch: Batch, log_p: mx.array, base: mx.array | None = None) -> dict[str, np.ndarray]:
    """Figures of each predicted position, float64 [sequences, tokens - 1]."""
    targets = batch.tokens[:, 1:, None]
    # The last position of a sequence predicts nothing that is known.
    own = log_p[:, :-1]
    chosen = mx.take_along_axis(own, targets, axis=-1).squeeze(-1)
    scores = {"nll": -chosen}
    if base is not None:
        theirs = base[:, :-1]
        base_chosen = mx.take_along_axis(theirs, targets, axis=-1).squeeze(-1)
        scores |= {
            "base_nll": -base_chosen,
            "kl": kl_divergence(theirs, own),
            "same_top": own.argmax(axis=-1) == theirs.argmax(axis=-1),
            "dp": mx.exp(chosen) - mx.exp(base_chosen),
        }
    mx.eval(scores)
    found = {name: np.array(array).astype(np.float64) for name, array in scores.items()}
    real = batch.mask[:, 1:]
    for name, values in found.items():
        if not np.isfinite(values[real]).all():
            raise ReapError(f"the logits are not finite ({name}).", "the checkpoint is damaged")
    found["nll_squared"] = found["nll"] ** 2
    if base is not None:
        found["base_nll_squared"] = found["base_nll"] ** 2
        found["nll_cross"] = found["nll"] * found["base_nll"]
        found["dp_squared"] = found["dp"] ** 2
    return found


def _loaded_bytes(model: SourceModel) -> int:
    return sum(model.checkpoint.tensors[name].nbytes for name in model.loaded_names())


def _expert_bytes(model: SourceModel) -> int:
    """Bytes of routed experts, whether the checkpoint stores them apart or stacked."""
    stacked = tuple(f"{model.layer_prefix(i)}.{model.family.experts}." for i in model.moe_layers)
    return sum(
        model.checkpoint.tensors[name].nbytes
        for name in model.loaded_names()
        if name.startswith(stacked) or model.family.source_expert.fullmatch(name)
    )


def _label(model: SourceModel) -> str:
    """A checkpoint that reap wrote is named by its source and layout, not by its directory."""
    made = model.checkpoint.origin
    return f"{made['source']}, {made['layout']}" if made else model.checkpoint.name
