"""What a calibration will take, from a measured probe: one layer on a few tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from reap.calibrate.calibrate import CalibrationSettings, _Layer, _Run, _usable
from reap.calibrate.observe import first_array
from reap.calibrate.probes import Probes, variant_passes
from reap.models.families import text_config
from reap.models.ranks import share
from reap.models.source import SourceModel
from reap.models.states import States, state_bytes
from reap.models.stream import LayerStream
from reap.models.text import (
    Batch,
    Text,
    batches,
    check_length,
    load_tokenizer,
    read_sequences,
)
from reap.progress import silent

_TOKENS = 256
_PROCESS = 400_000_000  # interpreter and libraries


@dataclass(frozen=True)
class Estimate:
    """Bytes and seconds of a whole run; of several `ranks`, of the one that has most to do.

    `all_…` are those of all ranks together. `scratch_bytes`: states between layers, all on disk;
    `measuring_seconds`: those of `seconds` that drops and low bits take; `seconds_per_token` of one
    layer, `read_rate` in bytes per second (high if the files lie in the system's cache)."""

    ranks: int
    layers: int
    all_tokens: int
    all_probe_tokens: int
    all_sensitivity_tokens: int
    tokens: int
    probe_tokens: int
    sensitivity_tokens: int
    read_bytes: int
    peak_bytes: int
    scratch_bytes: int
    seconds: float
    measuring_seconds: float
    seconds_per_token: float
    read_rate: float


def estimate(
    source: SourceModel,
    texts: Sequence[Text],
    settings: CalibrationSettings,
    *,
    trust_remote_code: bool = False,
    memory: int | None = None,
    ranks: int = 1,
) -> Estimate:
    """Run the first layer with experts on a few tokens, and reckon.

    With several `ranks` for the one that has most to do. Raises as `calibrate` does.
    """
    check_length(settings.sequence_length, source.tokens_per_call)
    tokenizer = load_tokenizer(source.checkpoint.path, trust_remote_code=trust_remote_code)
    spec = source.spec()
    used, parts = read_sequences(
        texts,
        tokenizer,
        sequence_length=settings.sequence_length,
        tokens=settings.tokens,
        documents=settings.documents,
        vocab_size=source.vocabulary,
    )
    formats = _usable(settings.low_formats, spec)
    probes = Probes.choose(parts, settings, source, formats, len(texts))
    longest = max(parts, key=lambda part: len(part.tokens))
    few = replace(longest, tokens=longest.tokens[:_TOKENS])
    made = batches([few], tokens_per_batch=_TOKENS)
    measured, changed = (made if some else [] for some in (probes.parts, probes.changed))
    run = _Run(source, spec, made, measured, changed, used, settings, formats, silent)
    size = len(few.tokens)
    index = source.moe_layers[0]

    mx.reset_peak_memory()
    source.load_trunk()
    states = States()
    inside = [batch.tokens for batch in made * 2]
    source.load_layer(0)
    with LayerStream(source.model, source.layers, inside, states=states) as stream:
        for batch in (0, 1):
            out = stream.step(batch)
    hidden = first_array(out).nbytes / size
    more = state_bytes(out) / size - hidden
    source.release_layer(0)

    start = time.perf_counter()
    source.load_layer(index)
    loading = time.perf_counter() - start
    layer = _Layer(run, index)
    forked = frozenset({1} if run.sensitivity else ())
    # What leaves layer 0 stands for what enters this one: only times are asked for.
    measuring = 0.0
    seconds = []
    for _ in range(2):  # the first time is a warm-up
        with LayerStream(
            source.model, source.layers, inside, forked=forked, states=states, start=index
        ) as stream:
            start = time.perf_counter()
            layer.observe(stream, 0)
            seconds.append(time.perf_counter() - start)
            if measured and len(seconds) == 2:
                layer.probe(stream, 1, made[0])
                start = time.perf_counter()
                layer.measure()
                measuring = time.perf_counter() - start
                layer.fork(stream, forked)
    source.release_layer(index)
    peak = mx.get_peak_memory()

    names = source.loaded_names()
    read = sum(source.checkpoint.tensors[name].nbytes for name in names)
    rate = source.layer_bytes(index) / loading
    per_token = min(seconds) / size
    per_batch = min(settings.batch_tokens, source.tokens_per_call)
    tokens = _largest_share(batches(parts, tokens_per_batch=per_batch), ranks)
    probed, compared = (_largest_share(some, ranks) for some in probes.batches(per_batch))
    # The probes carry the variants if they are all of them; else others go through the layers, too.
    carried = tokens + probed + (0 if probes.changed is probes.parts else compared)
    layers, experts = len(source.layers), len(source.moe_layers)
    passes = layers * carried + variant_passes(source, formats) * compared
    measuring *= experts * max(1.0, probed / size)
    blocks = text_config(source.config).get("attn_res_block_size")
    state = hidden + more * (-(-layers // blocks) if blocks else 1)
    scratch = round(state * (carried + compared * len(run.variants) * experts))
    largest = max(source.layer_bytes(i) for i in range(layers))
    held = scratch if memory is None else min(memory, scratch)
    return Estimate(
        ranks=ranks,
        layers=layers,
        all_tokens=sum(len(part.tokens) for part in parts),
        all_probe_tokens=sum(len(part.tokens) for part in probes.parts),
        all_sensitivity_tokens=sum(len(part.tokens) for part in probes.changed),
        tokens=tokens,
        probe_tokens=probed,
        sensitivity_tokens=compared,
        read_bytes=read,
        peak_bytes=round(peak * max(1.0, largest / source.layer_bytes(index))) + held + _PROCESS,
        scratch_bytes=scratch,
        seconds=read / rate + per_token * passes + measuring,
        measuring_seconds=measuring,
        seconds_per_token=per_token,
        read_rate=rate,
    )


def _largest_share(made: Sequence[Batch], ranks: int) -> int:
    """Tokens of the rank that has most."""
    tokens = [int(batch.lengths.sum()) for batch in made]
    shares = share([batch.tokens.size for batch in made], ranks)
    return max(sum(tokens[position] for position in items) for items in shares)
