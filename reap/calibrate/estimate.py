"""What a calibration will take, from a measured probe: one layer on a few tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from reap.calibrate.calibrate import CalibrationSettings, _Layer, _probe_parts, _Run, _usable
from reap.calibrate.observe import first_array
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

    `all_tokens` and `all_probe_tokens` are those of all ranks together. `scratch_bytes`: states
    between layers, all on disk; `seconds_per_token` of one layer, `read_rate` in bytes per second
    (high if the files lie in the system's cache)."""

    ranks: int
    layers: int
    all_tokens: int
    all_probe_tokens: int
    tokens: int
    probe_tokens: int
    read_bytes: int
    peak_bytes: int
    scratch_bytes: int
    seconds: float
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
    probes = _probe_parts(parts, settings.probe_tokens, len(texts))
    longest = max(parts, key=lambda part: len(part.tokens))
    few = replace(longest, tokens=longest.tokens[:_TOKENS])
    made = batches([few], tokens_per_batch=_TOKENS)
    run = _Run(source, spec, made, made if probes else [], used, settings, formats, silent)
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
            if probes and len(seconds) == 2:
                layer.probe(stream, 1, made[0])
                start = time.perf_counter()
                layer.measure(stream, forked)
                measuring = time.perf_counter() - start
    source.release_layer(index)
    peak = mx.get_peak_memory()

    names = source.loaded_names()
    read = sum(source.checkpoint.tensors[name].nbytes for name in names)
    rate = source.layer_bytes(index) / loading
    per_token = min(seconds) / size
    tokens, probed = (
        _largest_share(
            batches(some, tokens_per_batch=min(settings.batch_tokens, source.tokens_per_call)),
            ranks,
        )
        for some in (parts, probes)
    )
    layers, experts = len(source.layers), len(source.moe_layers)
    kinds = len(run.variants) if run.sensitivity else 0
    # A variant of layer i goes through all layers after it.
    steps = kinds * sum(layers - 1 - i for i in source.moe_layers)
    total = read / rate + per_token * (layers * (tokens + probed) + steps * probed)
    total += experts * measuring * max(1.0, probed / size) if probes else 0.0
    blocks = text_config(source.config).get("attn_res_block_size")
    state = hidden + more * (-(-layers // blocks) if blocks else 1)
    scratch = round(state * (tokens + probed * (1 + kinds * experts)))
    largest = max(source.layer_bytes(i) for i in range(layers))
    held = scratch if memory is None else min(memory, scratch)
    return Estimate(
        ranks=ranks,
        layers=layers,
        all_tokens=sum(len(part.tokens) for part in parts),
        all_probe_tokens=sum(len(part.tokens) for part in probes),
        tokens=tokens,
        probe_tokens=probed,
        read_bytes=read,
        peak_bytes=round(peak * max(1.0, largest / source.layer_bytes(index))) + held + _PROCESS,
        scratch_bytes=scratch,
        seconds=total,
        seconds_per_token=per_token,
        read_rate=rate,
    )


def _largest_share(made: Sequence[Batch], ranks: int) -> int:
    """Tokens of the rank that has most."""
    tokens = [int(batch.lengths.sum()) for batch in made]
    shares = share([batch.tokens.size for batch in made], ranks)
    return max(sum(tokens[position] for position in items) for items in shares)
