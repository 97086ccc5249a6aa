"""Wrapping the call of one module instance without touching the parameter tree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.nn as nn


@contextmanager
def hooked(module: nn.Module, call: Callable[..., Any]) -> Iterator[None]:
    """While the block runs, `module(*args)` is `call(original, *args)`.

    `original` is the module's own bound call. The instance's class is swapped for a subclass, so
    parameter names stay as they are; hooks on one module nest.
    """
    cls = type(module)

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return call(lambda *a, **k: cls.__call__(self, *a, **k), *args, **kwargs)

    subclass: Any = type(cls.__name__, (cls,), {"__call__": __call__})
    module.__class__ = subclass
    try:
        yield
    finally:
        module.__class__ = cls
        # A class lies in reference cycles. Without this, whatever `call` holds (a layer's experts
        # in low bits) would stay in memory until Python looks for cycles.
        del subclass.__call__


def submodule(module: nn.Module, path: str) -> Any:
    """The module or array at a dotted path below `module`."""
    found: Any = module
    for part in path.split("."):
        found = found[int(part)] if part.isdigit() else getattr(found, part)
    return found
