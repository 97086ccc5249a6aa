"""Layer-by-layer execution of an unmodified mlx-lm forward pass.

What passes between decoder layers is what a layer returns, kept in a store. To take a batch
through layer L, the model's own forward runs with hooked layers: those before L do not run, L - 1
returns what was kept, L runs, and an exception leaves the forward. Nothing of the model-level loop
is reimplemented, hence the logits are bit-identical to the plain forward; and between two layers a
batch is plain data that may lie on a disk.

Layers before L - 1 return `_Spent`, which cannot be computed with. So a model whose layers need
more than the output of the one before (a skip over several layers, shared keys) is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from reap.errors import CalibrationError
from reap.models.hooks import hooked
from reap.models.states import States, is_plain_object, leaves


@dataclass
class _Call:
    """One decoder layer call: its arguments by position or name, as they were before it (mutable
    objects copied), and which of them are the n-th part of the previous layer's output."""

    arguments: dict[int | str, Any]
    carried: dict[int | str, int]


class _Spent:
    """What a layer before the last one returned. It may be handed on and scaled, no more."""

    __slots__ = ()

    def _same(self, *_: Any, **__: Any) -> _Spent:
        return self

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __getitem__ = _same
    __neg__ = astype = _same


class _Reached(BaseException):
    """Leaves the forward pass; no `except Exception` on the way stops it."""


class LayerStream:
    """Batches of tokens on their way through a model, one decoder layer at a time.

    Use as a context manager. For each layer in order and each batch, call `step(batch)`; after
    the last layer, `finish(batch)` runs the final norm and head and returns the logits.

    For batches in `forked`, `fork` adds a variant: a copy of the batch's state that goes through
    the present layer in a changed form (say, with fewer experts) and through later layers as they
    are, by `step_forks`. `fork_logits` gives its logits.

    `states` keeps what is between the layers, under (batch, None) and (batch, variant); with
    `start` the first so many layers are done and it holds what they gave.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[nn.Module],
        batches: Sequence[mx.array],
        *,
        forked: frozenset[int] = frozenset(),
        states: States | None = None,
        start: int = 0,
    ) -> None:
        """`batches`: int arrays [sequences, tokens], padded on the right (layers are causal)."""
        self._model = model
        self._layers = layers
        self._batches = batches
        self._position = [start] * len(batches)
        self._hooks = ExitStack()
        self._forked = forked
        self._calls: dict[int, _Call] = {}
        self._states = States() if states is None else states
        # Of the forward pass that is going on: the layer to run, and what those before it gave.
        self._target = 0
        self._next = 0
        self._before: Any = None
        self._batch: int | None = None
        self._running = True
        self._output: Any = None

    def __enter__(self) -> LayerStream:
        for index, layer in enumerate(self._layers):
            self._hooks.enter_context(hooked(layer, self._layer_call(index)))
        try:
            if self._batches:  # a model that cannot take tokens says so at once
                self._forward(self._batches[0], target=0, before=None, run=False)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._hooks.close()
        self._calls.clear()

    def _layer_call(self, index: int) -> Callable[..., Any]:
        def call(original: Any, *args: Any, **kwargs: Any) -> Any:
            if index != self._next:
                raise RuntimeError(f"the forward pass went to layer {index}, not {self._next}")
            self._next += 1
            if index < self._target:
                return self._before if index == self._target - 1 else _spent(self._before)
            if not self._running:
                raise _Reached
            if any(isinstance(item, _Spent) for item in leaves((args, kwargs))):
                raise _needs_more()
            # Evaluated before the layer runs, so that the variants share them.
            _evaluate((args, kwargs))
            if self._batch in self._forked:
                self._calls[self._batch] = self._recorded(args, kwargs)
            out = original(*args, **kwargs)
            _evaluate((out, args, kwargs))
            self._output = out
            raise _Reached

        return call

    def _forward(self, tokens: mx.array, *, target: int, before: Any, run: bool = True) -> Any:
        """The model's forward up to layer `target`, which is run or, if not `run`, only reached.

        `before` is what layer `target` - 1 gave. With a target behind the last layer: logits.
        """
        self._target, self._before, self._next, self._running = target, before, 0, run
        try:
            return self._model(tokens)
        except _Reached:
            output, self._output = self._output, None
            return output
        except (TypeError, ValueError, AttributeError) as error:
            # MLX refuses what is no array in ways of its own.
            if self._next < target or "_Spent" in str(error):
                raise _needs_more() from error
            raise
        finally:
            self._before = self._output = None

    def step(self, batch: int) -> Any:
        """Take one batch through its next layer; what the layer returned, evaluated."""
        index = self._position[batch]
        if index == len(self._layers):
            raise RuntimeError(f"batch {batch} is through all layers already")
        before = self._states.get((batch, None)) if index else None
        self._batch = batch
        try:
            output = self._forward(self._batches[batch], target=index, before=before)
        finally:
            self._batch = None
        self._states.put((batch, None), output)
        self._position[batch] = index + 1
        return output

    def finish(self, batch: int) -> mx.array:
        """Logits [sequences, tokens, vocabulary] of a batch that is through all layers."""
        return self._logits(batch, None)

    def _recorded(self, args: Any, kwargs: Any) -> _Call:
        before = _parts(self._before)
        arguments: dict[int | str, Any] = dict(enumerate(args)) | kwargs
        carried = {
            name: part
            for name, argument in arguments.items()
            for part, made in enumerate(before)
            if argument is made and argument is not None
        }
        if self._target and 0 not in carried.values():
            raise CalibrationError(
                "this architecture changes the hidden state between decoder layers, so variants "
                "of one layer cannot be carried through the rest.",
                "calibrate with --no-sensitivity",
            )
        return _Call({n: _copied(a) for n, a in arguments.items()}, carried)

    def step_forks(self, batch: int) -> None:
        """Take the variants of a batch through the layer that `step` has just run."""
        call = self._calls[batch]
        for key in self._variants(batch):
            parts = _parts(self._states.get((batch, key)))
            own = {name: parts[part] for name, part in call.carried.items()}
            self._states.put((batch, key), self._run_layer(batch, call.arguments | own))

    def _variants(self, batch: int) -> list[Any]:
        held = self._states.keys()
        return [key for of, key in held if of == batch and key is not None]

    def fork(self, batch: int, key: Any, changed: AbstractContextManager[None]) -> None:
        """Start a variant at the layer that `step` has just run; `changed` alters the layer."""
        call = self._calls[batch]
        with changed:
            own = {name: _copied(argument) for name, argument in call.arguments.items()}
            self._states.put((batch, key), self._run_layer(batch, own))

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
        logits = self._logits(batch, key)
        mx.eval(logits)
        return logits

    def _logits(self, batch: int, key: Any) -> mx.array:
        if self._position[batch] != len(self._layers):
            raise RuntimeError(f"batch {batch} has done {self._position[batch]} layers only")
        before = self._states.get((batch, key))
        return self._forward(self._batches[batch], target=len(self._layers), before=before)


def _needs_more() -> CalibrationError:
    return CalibrationError(
        "this architecture's layers need more than the output of the layer before, so it cannot "
        "run one layer at a time.",
        "this architecture is not supported by reap",
    )


def _spent(out: Any) -> Any:
    """In the outer form of what a layer returned, since models take it apart."""
    if isinstance(out, list | tuple):
        return type(out)(None if part is None else _Spent() for part in out)
    return _Spent()


def _parts(out: Any) -> tuple[Any, ...]:
    return out if isinstance(out, tuple) else (out,)


def _copied(arg: Any) -> Any:
    """A plain object's own copy; its arrays are shared, since none is ever written to."""
    return copy.copy(arg) if is_plain_object(arg) else arg


def _evaluate(value: Any) -> None:
    mx.eval([leaf for leaf in leaves(value) if isinstance(leaf, mx.array)])
