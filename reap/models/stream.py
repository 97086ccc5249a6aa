"""Layer-by-layer execution of an unmodified mlx-lm forward pass.

Each batch runs the model's own forward in a greenlet. Hooked decoder layers hand control back
before they run, so the caller can take all batches through layer L while only that layer's
weights are resident, then go to L+1. Nothing of the model-level loop is reimplemented, hence the
logits are bit-identical to the plain forward.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from greenlet import greenlet

from reap.errors import CalibrationError
from reap.models.hooks import hooked


@dataclass
class _Call:
    """One decoder layer call: its arguments by position or name, as they were before it (mutable
    objects copied), and which of them are the n-th part of the previous layer's output."""

    arguments: dict[int | str, Any]
    carried: dict[int | str, int]


class LayerStream:
    """Batches of tokens on their way through a model, one decoder layer at a time.

    Use as a context manager. For each layer in order and each batch, call `step(batch)`; after
    the last layer, `finish(batch)` runs the final norm and head and returns the logits.

    For batches in `forked`, `fork` adds a variant: a copy of the batch's state that goes through
    the present layer in a changed form (say, with fewer experts) and through later layers as they
    are, by `step_forks`. `fork_logits` gives its logits.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[nn.Module],
        batches: Sequence[mx.array],
        *,
        forked: frozenset[int] = frozenset(),
    ) -> None:
        """`batches`: int arrays [sequences, tokens], padded on the right (layers are causal)."""
        self._model = model
        self._layers = layers
        self._batches = batches
        self._runs: list[greenlet] = []
        self._position = [0] * len(batches)
        self._hooks = ExitStack()
        self._output: Any = None
        self._forked = forked
        self._calls: dict[int, _Call] = {}
        self._previous: dict[int, Any] = {}
        self._variants: dict[int, dict[Any, Any]] = {batch: {} for batch in forked}
        self._bypass: Any = None

    def __enter__(self) -> LayerStream:
        for index, layer in enumerate(self._layers):
            self._hooks.enter_context(hooked(layer, self._layer_call(index)))
        try:
            for batch in self._batches:
                run = greenlet(self._model)
                self._runs.append(run)
                run.switch(batch)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        for run in self._runs:
            if not run.dead:
                run.throw()
        self._hooks.close()

    def _layer_call(self, index: int) -> Callable[..., Any]:
        last = index == len(self._layers) - 1

        def call(original: Any, *args: Any, **kwargs: Any) -> Any:
            if self._bypass is not None:
                return self._bypass
            # Evaluated before each pause: a lazy graph would keep the last layer's weights alive.
            _evaluate((args, kwargs))
            hub = greenlet.getcurrent().parent
            batch = hub.switch(index)
            if batch in self._forked:
                self._calls[batch] = self._recorded(batch, args, kwargs)
            out = original(*args, **kwargs)
            _evaluate((out, args, kwargs))
            self._output = out
            if last:
                hub.switch(None)
            return out

        return call

    def step(self, batch: int) -> Any:
        """Take one batch through its next layer; what the layer returned, evaluated."""
        expected = self._position[batch] + 1
        reached = self._runs[batch].switch(batch)
        if reached != (expected if expected < len(self._layers) else None):
            raise RuntimeError(f"the forward pass went to layer {reached} after {expected - 1}")
        self._position[batch] = expected
        output, self._output = self._output, None
        if batch in self._forked:
            self._previous[batch] = output
        return output

    def finish(self, batch: int) -> mx.array:
        """Logits [sequences, tokens, vocabulary] of a batch that is through all layers."""
        return self._runs[batch].switch()

    def _recorded(self, batch: int, args: Any, kwargs: Any) -> _Call:
        before = _parts(self._previous.get(batch))
        arguments: dict[int | str, Any] = dict(enumerate(args)) | kwargs
        carried = {
            name: part
            for name, argument in arguments.items()
            for part, made in enumerate(before)
            if argument is made and argument is not None
        }
        if batch in self._previous and 0 not in carried:
            raise CalibrationError(
                "this architecture changes the hidden state between decoder layers, so variants "
                "of one layer cannot be carried through the rest.",
                "calibrate with --no-sensitivity",
            )
        return _Call({n: _copied(a) for n, a in arguments.items()}, carried)

    def step_forks(self, batch: int) -> None:
        """Take the variants of a batch through the layer that `step` has just run."""
        call = self._calls[batch]
        for key, out in self._variants[batch].items():
            own = {name: _parts(out)[part] for name, part in call.carried.items()}
            self._variants[batch][key] = self._run_layer(batch, call.arguments | own)

    def fork(self, batch: int, key: Any, changed: AbstractContextManager[None]) -> None:
        """Start a variant at the layer that `step` has just run; `changed` alters the layer."""
        call = self._calls[batch]
        with changed:
            own = {name: _copied(argument) for name, argument in call.arguments.items()}
            self._variants[batch][key] = self._run_layer(batch, own)

    def _run_layer(self, batch: int, arguments: dict[int | str, Any]) -> Any:
        layer = self._layers[self._position[batch] - 1]
        plain = type(layer).__mro__[1]  # below the hook's subclass
        args = [value for name, value in arguments.items() if isinstance(name, int)]
        kwargs = {name: value for name, value in arguments.items() if isinstance(name, str)}
        out = plain.__call__(layer, *args, **kwargs)
        _evaluate((out, args, kwargs))
        return out

    def fork_logits(self, batch: int, key: Any) -> mx.array:
        """Logits of a variant after the last layer."""
        self._bypass = self._variants[batch][key]
        try:
            logits = self._model(self._batches[batch])
            mx.eval(logits)
        finally:
            self._bypass = None
        return logits


def _parts(out: Any) -> tuple[Any, ...]:
    return out if isinstance(out, tuple) else (out,)


def _copied(arg: Any) -> Any:
    """A plain object's own copy; its arrays are shared, since none is ever written to."""
    return copy.copy(arg) if _is_plain_object(arg) else arg


def _is_plain_object(value: Any) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, nn.Module | mx.array)


def _evaluate(value: Any) -> None:
    mx.eval(list(_arrays(value)))


def _arrays(value: Any) -> Iterator[mx.array]:
    """All arrays in nested containers and plain objects (e.g. K3's residual blocks)."""
    if isinstance(value, mx.array):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _arrays(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _arrays(item)
    elif _is_plain_object(value):
        yield from _arrays(vars(value))
