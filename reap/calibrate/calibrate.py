"""The calibration run: all batches through one layer at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from reap import __version__
from reap.artifacts import Format, Measurement, ModelSpec, Provenance, Saliency, SecondMoments
from reap.calibrate.measure import (
    BlockInput,
    LayerMeasurement,
    keep_best,
    kept_grid,
    measure_layer,
    restricted_router,
)
from reap.calibrate.moments import LayerMoments, stacked
from reap.calibrate.observe import SUMS, LayerSums, first_array
from reap.calibrate.probes import Probes, variants
from reap.calibrate.resume import PartialRun, check_alike, fingerprint, packed, unpacked
from reap.errors import ReapError
from reap.models.divergence import kl_divergence, log_probabilities
from reap.models.hooks import hooked
from reap.models.lowbit import ROUNDINGS, quantizer
from reap.models.quantize import Quantizer, requantized_experts
from reap.models.ranks import Ranks, share
from reap.models.source import SourceModel
from reap.models.stream import LayerStream
from reap.models.tap import ExpertTap
from reap.models.text import (
    Batch,
    Cut,
    Text,
    TextSet,
    batches,
    check_length,
    corpora,
    load_tokenizer,
    read_sequences,
)
from reap.progress import Progress, silent


@dataclass(frozen=True, kw_only=True)
class CalibrationSettings:
    """`tokens`: limit over all domains; `documents`: whether one that is longer than a sequence is
    split into several or truncated to its first; `probe_tokens`: how many tokens the drop curve,
    the low-bit errors and the layers' sensitivity are measured on (0: not at all); `low_formats`:
    the formats to measure, `low_rounding` how experts get into them, as in a plan ("feedback" makes
    the saliency file larger by a covariance per layer and kind of input); `sensitivity`: whether to
    measure KL with one layer changed at a time, on `sensitivity_tokens` of the probes (as many as
    `probe_tokens`: all; None: as many as are no more work than taking all tokens through the
    layers once, at least 64 of each domain)."""

    tokens: int | None = None
    sequence_length: int = 512
    documents: Cut = "split"
    batch_tokens: int = 4096
    probe_tokens: int = 2048
    sensitivity: bool = True
    sensitivity_tokens: int | None = None
    low_formats: tuple[Format, ...] = (Format(2, 128, "affine"), Format(3, 128, "affine"))
    low_rounding: str = "weighted"

    def __post_init__(self) -> None:
        if self.low_rounding not in ROUNDINGS:
            raise ReapError(
                f"unknown low_rounding {self.low_rounding!r}.", f"one of {', '.join(ROUNDINGS)}"
            )
        self._check_sensitivity()

    def _check_sensitivity(self) -> None:
        tokens = self.sensitivity_tokens
        if tokens is None:
            return
        if tokens < 1:
            raise ReapError(
                f"the sensitivity cannot be measured on {tokens:,} tokens.",
                "--no-sensitivity leaves it out",
            )
        if not self.sensitivity:
            raise ReapError(
                f"sensitivity_tokens is {tokens:,}, but no sensitivity is to be measured.",
                "leave out the one or the other",
            )
        if tokens > self.probe_tokens:
            raise ReapError(
                f"sensitivity_tokens is {tokens:,}, more than the {self.probe_tokens:,} "
                "probe_tokens that they are taken from.",
                "raise the latter or lower the former",
            )

    def to_json(self) -> dict[str, Any]:
        """The settings as the saliency's provenance records them."""
        return asdict(self) | {"low_formats": [format.label for format in self.low_formats]}


def calibrate(
    source: SourceModel,
    texts: Sequence[Text],
    settings: CalibrationSettings,
    *,
    command: str = "",
    trust_remote_code: bool = False,
    progress: Progress = silent,
    partial: Path | None = None,
    resume: bool = False,
    memory: int | None = None,
    ranks: Ranks | None = None,
) -> Saliency:
    """Run the text through the model and add up what its experts do.

    Only one decoder layer's weights are resident at a time. What is between the layers is kept in
    the directory `partial` after each layer, so that a run that was cut off can be taken up again
    (`resume`) and gives the same file; at most `memory` bytes of it are held in memory, too. The
    caller removes the directory. With several `ranks` each takes some of the batches, and all get
    the sums over all. Raises CalibrationError, before any weight is read where possible.
    """
    ranks = ranks or Ranks()
    check_length(settings.sequence_length, source.tokens_per_call)
    tokenizer = load_tokenizer(source.checkpoint.path, trust_remote_code=trust_remote_code)
    spec = source.spec()
    read, parts = read_sequences(
        texts,
        tokenizer,
        sequence_length=settings.sequence_length,
        tokens=settings.tokens,
        documents=settings.documents,
        vocab_size=source.vocabulary,
    )
    tokens_per_batch = min(settings.batch_tokens, source.tokens_per_call)
    made = batches(parts, tokens_per_batch=tokens_per_batch)
    formats = _usable(settings.low_formats, spec)
    probes = Probes.choose(parts, settings, source, formats, len(texts))
    known = fingerprint(source, read, parts, settings.to_json())
    check_alike(source, known, ranks)
    kept = None
    if partial is not None:
        kept = PartialRun(partial, memory=memory, ranks=ranks)
        kept.begin(known, command, resume=resume)
        command = kept.command
    measured, changed = probes.batches(tokens_per_batch)
    run = _Run(
        source, spec, made, measured, changed, read, settings, formats, progress, kept, ranks
    )
    try:
        sums = run.layers()
    finally:
        if kept is not None:
            kept.abandon()
    saliency = Saliency(
        provenance=Provenance(
            reap_version=__version__,
            command=command,
            model=spec.model,
            revision=spec.revision,
            model_sha256=spec.model_sha256,
            inputs={text.source: text.sha256 for text in read},
            corpora=corpora(read, parts),
            settings=settings.to_json(),
        ),
        spec=spec,
        domains=tuple(text.domain for text in texts),
        count=np.stack([s.count for s in sums], axis=2),
        max_norm=np.stack([s.max_norm for s in sums], axis=2),
        tokens=np.stack([s.tokens for s in sums], axis=2),
        residual_energy=np.stack([s.residual_energy for s in sums], axis=2),
        output_energy=np.stack([s.output_energy for s in sums], axis=2),
        measurement=run.measurement(),
        moments=stacked(run.moments),
        **{name: np.stack([s.sums[name] for s in sums], axis=2) for name in SUMS},
    )
    saliency.check()
    return saliency


def _usable(formats: Sequence[Format], spec: ModelSpec) -> tuple[Format, ...]:
    """The formats with the largest group that divides every projection's columns."""
    columns = [p.columns for layer in spec.moe_layers for p in layer.projections]
    usable = []
    for format in formats:
        fitting = [g for g in (128, 64, 32) if g <= format.group_size]
        group = next((g for g in fitting if all(c % g == 0 for c in columns)), None)
        if group is not None:
            usable.append(Format(format.bits, group, format.mode))
    return tuple(dict.fromkeys(usable))


class _Run:
    """One pass over the layers: `batches` are observed, `probes` are measured on, and those in
    `changed`, which may be the probes, go through one layer changed at a time, too.

    Each rank takes its share of all.
    """

    def __init__(
        self,
        source: SourceModel,
        spec: ModelSpec,
        made: list[Batch],
        probes: list[Batch],
        changed: list[Batch],
        texts: Sequence[TextSet],
        settings: CalibrationSettings,
        formats: tuple[Format, ...],
        progress: Progress,
        kept: PartialRun | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.source = source
        self.kept = kept
        self.ranks = ranks or Ranks()
        self.batches = _own(made, self.ranks)
        self.probes = _own(probes, self.ranks)
        own = self.probes if changed is probes else _own(changed, self.ranks)
        others = [] if changed is probes else own
        self.everything = [*self.batches, *self.probes, *others]
        last = len(self.everything)
        self.forked = frozenset(range(last - len(own), last))
        self.measures = bool(probes)
        self.domains = len(texts)
        self.formats = formats
        self.progress = progress
        self.grid = kept_grid(spec.num_experts, spec.min_experts, spec.n_group)
        self.kl_kept = int(self.grid[np.argmin(abs(self.grid - spec.num_experts / 2))])
        self.low_rounding = settings.low_rounding
        self.moments: list[SecondMoments] = []
        self.sensitivity = bool(changed)
        self.measured: list[LayerMeasurement] = []
        self.variants = variants(formats)
        self.kl_tokens = 0
        self.kl: dict[tuple[int, str], float] = {}

    def layers(self) -> list[LayerSums]:
        """Run all layers; the sums of those with experts."""
        source = self.source
        source.load_trunk()
        start, sums = self._taken_up()
        everything, forked = self.everything, self.forked
        first_probe = len(self.batches)
        after_probes = first_probe + len(self.probes)
        work = sum(int(batch.lengths.sum()) for batch in everything)
        count = len(source.layers)
        with LayerStream(
            source.model,
            source.layers,
            [b.tokens for b in everything],
            forked=forked,
            states=None if self.kept is None else self.kept.states,
            start=start,
        ) as stream:
            for index in range(start, count):
                source.load_layer(index)
                source.prefetch(index + 1)
                layer = _Layer(self, index) if index in source.moe_layers else None
                done = 0
                for position, batch in enumerate(everything):
                    self.progress(
                        f"layer {index} ({index + 1} of {count})",
                        (index * work + done) // count,
                        work,
                    )
                    if layer is None or position >= after_probes:
                        stream.step(position)
                    elif position < first_probe:
                        layer.observe(stream, position)
                    else:
                        layer.probe(stream, position, batch)
                    if position in forked:
                        stream.step_forks(position)
                    done += int(batch.lengths.sum())
                if layer is not None:
                    layer.add_up()
                    sums.append(layer.sums)
                    self.moments.append(layer.moments.found())
                    passed = (index + 1) * work // count
                    if layer.inputs:
                        doing = f"measuring layer {index} ({index + 1} of {count})"
                        self.progress(doing, passed, work)
                    layer.measure()
                    layer.fork(stream, forked)
                source.release_layer(index)
                self._keep(index, layer)
            self.progress("comparing", work, work)
            self._compare(stream)
        return sums

    def _taken_up(self) -> tuple[int, list[LayerSums]]:
        """How many layers are done already, and their sums."""
        if self.kept is None:
            return 0, []
        sums: list[LayerSums] = []
        for index, arrays in sorted(self.kept.results().items()):
            sums.append(LayerSums(index, self.domains, self.source.num_experts))
            vars(sums[-1]).update(unpacked(arrays, 0))
            if measured := unpacked(arrays, 1):
                self.measured.append(LayerMeasurement(**measured))
            if moments := SecondMoments.from_arrays(arrays):
                self.moments.append(moments)
        return self.kept.layers_done, sums

    def _keep(self, index: int, layer: _Layer | None) -> None:
        """Make a finished layer one that a later run need not do again."""
        if self.kept is None:
            return
        measured = self.measured[-1:] if self.measures else []
        results = None
        if layer is not None:
            results = packed(layer.sums, *measured) | self.moments[-1].to_arrays()
        self.kept.layer_done(index, results)

    def _compare(self, stream: LayerStream) -> None:
        """Mean KL per token of every variant, over all batches that have any."""
        if not self.sensitivity:
            return
        keys = [(index, kind) for index in self.source.moe_layers for kind in self.variants]
        tokens, sums = 0, np.zeros(len(keys))
        for position in sorted(self.forked):
            batch = self.everything[position]
            mask = mx.array(batch.mask)
            tokens += int(batch.lengths.sum())
            exact = log_probabilities(stream.finish(position))
            for which, key in enumerate(keys):
                changed = log_probabilities(stream.fork_logits(position, key))
                divergence: Any = mx.where(mask, kl_divergence(exact, changed), 0).sum().item()
                sums[which] += float(divergence)
        total = self.ranks.total({"tokens": np.array(tokens), "sums": sums})
        self.kl_tokens = int(total["tokens"])
        self.kl = dict(zip(keys, total["sums"] / self.kl_tokens))

    def measurement(self) -> Measurement | None:
        """What was measured, stacked over layers; None if nothing was."""
        measured = self.measured
        if not measured:
            return None
        layers = self.source.moe_layers if self.sensitivity else []
        return Measurement(
            formats=self.formats,
            low_rounding=self.low_rounding,
            tokens=np.array([m.tokens for m in measured], np.int64),
            kept=self.grid,
            order=np.stack([m.order for m in measured]),
            output_energy=np.array([m.output_energy for m in measured]),
            drop_error=np.stack([m.drop_error for m in measured]),
            low_error=np.stack([m.low_error for m in measured], axis=1),
            low_expert_error=np.stack([m.low_expert_error for m in measured], axis=1),
            kl_kept=np.array([self.kl_kept], np.int64),
            drop_kl=np.array([self.kl[index, "drop"] for index in layers]),
            low_kl=np.array([self.kl[index, "low"] for index in layers if self.formats]),
            kl_tokens=np.array([self.kl_tokens] if layers else [], np.int64),
        )


def _own(made: Sequence[Batch], ranks: Ranks) -> list[Batch]:
    """This rank's share of the batches."""
    shares = share([batch.tokens.size for batch in made], ranks.size)
    return [made[position] for position in shares[ranks.rank]]


class _Layer:
    """One MoE layer while it is resident."""

    def __init__(self, run: _Run, index: int) -> None:
        self.run = run
        self.index = index
        self.sums = LayerSums(index, run.domains, run.source.num_experts)
        self.moments = LayerMoments(
            index, run.source.experts(index), products=run.low_rounding == "feedback"
        )
        self.inputs: list[BlockInput] = []
        self._low_banks: dict[Format, nn.Module] = {}

    def observe(self, stream: LayerStream, position: int) -> None:
        """Take one batch through this layer and add up what it does."""
        source, batch = self.run.source, self.run.batches[position]

        def experts_used(x: mx.array, indices: mx.array, weights: mx.array, y: mx.array) -> None:
            self.sums.add(batch, indices, weights, y)

        def block_call(original: Any, *args: Any, **kwargs: Any) -> Any:
            y = original(*args, **kwargs)
            self.sums.add_energy("output_energy", batch, first_array(y))
            return y

        with (
            self.moments.observed(batch.mask),
            ExpertTap(self.index, experts_used).on(source.experts(self.index)),
            hooked(source.block(self.index), block_call),
        ):
            out = stream.step(position)
        self.sums.add_energy("residual_energy", batch, first_array(out))

    def probe(self, stream: LayerStream, position: int, batch: Batch) -> None:
        """Take one batch through this layer and keep what enters the MoE block."""

        def block_call(original: Any, x: mx.array, *args: Any, **kwargs: Any) -> Any:
            self.inputs.append(BlockInput(x, batch.mask))
            return original(x, *args, **kwargs)

        with hooked(self.run.source.block(self.index), block_call):
            stream.step(position)

    def add_up(self) -> None:
        """When all batches have been observed: take in what the other ranks have."""
        self.sums.add_up(self.run.ranks)
        self.moments.add_up(self.run.ranks)

    def low_bank(self, format: Format) -> nn.Module:
        """This layer's experts stored in `format`, when all batches have been observed."""

        def chosen(projection: str) -> Quantizer:
            moments = self.moments
            return quantizer(
                self.run.low_rounding,
                moments.mean(projection),
                lambda: moments.covariance(projection),
            )

        if format not in self._low_banks:
            experts = self.run.source.experts(self.index)
            self._low_banks[format] = requantized_experts(experts, format, chosen)
        return self._low_banks[format]

    def measure(self) -> None:
        """Measure this layer on the probes."""
        run = self.run
        if not run.measures:
            return
        measured = measure_layer(
            run.source,
            self.index,
            self.inputs,
            energy=self.sums.sums["gate2_norm2"].sum(axis=(0, 1)),
            grid=run.grid,
            formats=run.formats,
            low_bank=self.low_bank,
        ).total(run.ranks)
        run.measured.append(measured)

    def fork(self, stream: LayerStream, forked: frozenset[int]) -> None:
        """Start the variants of this layer, which has been measured."""
        run = self.run
        if not forked:
            return
        n_group, _ = run.source.groups()
        kept = keep_best(run.measured[-1].order, run.kl_kept, n_group)
        experts = run.source.experts(self.index)
        low = self.low_bank(run.formats[0]) if run.formats else None
        for position in sorted(forked):
            fewer = restricted_router(run.source, self.index, kept)
            stream.fork(position, (self.index, "drop"), fewer)
            if low is not None:
                coarser = hooked(experts, lambda original, x, indices: low(x, indices))
                stream.fork(position, (self.index, "low"), coarser)
