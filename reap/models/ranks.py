"""One run as several processes, the ranks: what they exchange, and how all of them end.

`mlx.launch` starts the same command once per rank, on one machine or several, and MLX's back ends
(ring, MPI, JACCL) carry bytes between them. What fails on one rank fails on all. MLX is imported
only where there are several ranks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from reap.errors import ReapError


class _Lost(ReapError):
    """The ranks cannot exchange anything any more."""


class _Failed(ReapError):
    """What one or several ranks have failed with; all ranks know it."""


class Ranks:
    """The ranks of a run and this one's place among them; by default, a run of one process."""

    def __init__(self, group: Any = None) -> None:
        """group: of `mlx.core.distributed`."""
        self._group = group
        self._exchanging = False
        self.rank: int = 0 if group is None else group.rank()
        self.size: int = 1 if group is None else group.size()

    @property
    def name(self) -> str:
        """What tells this rank's files from those of the others."""
        return _name(self.rank, self.size)

    def gather(self, message: bytes = b"") -> list[bytes]:
        """Every rank's message, in their order, when all ranks have come here.

        Raises ReapError if another rank has failed or is gone.
        """
        return [message] if self.size == 1 else self._exchange(message, failed=False)

    def total(
        self, arrays: Mapping[str, NDArray], *, greatest: Collection[str] = ()
    ) -> dict[str, NDArray]:
        """The sums of the ranks' arrays, or the maxima of those in `greatest`.

        Bytes are exchanged and added up in the order of the ranks (MLX has no float64 on GPUs), so
        every rank gets the same. A rank may lack arrays that others have.
        """
        if self.size == 1:
            return dict(arrays)
        mine = save({name: np.array(array, order="C") for name, array in arrays.items()})
        totals: dict[str, NDArray] = {}
        for message in self.gather(mine):
            for name, array in load(message).items():
                add = np.maximum if name in greatest else np.add
                totals[name] = np.asarray(add(totals[name], array)) if name in totals else array
        return totals

    @contextmanager
    def together(self, tell: Callable[[ReapError], None]) -> Iterator[None]:
        """Leave the block when all ranks do; what fails on one rank ends it on all of them.

        Rank 0 tells it once, with `tell`, and all leave with exit code 1. Ranks that are in the
        middle of something learn of it at their next exchange.
        """
        try:
            yield
            self.gather()
        except BaseException as error:
            known = self._make_known(error)
            if known is None:
                raise
            if self.rank == 0 and not isinstance(error, KeyboardInterrupt):
                tell(known)
            with suppress(_Lost):
                self._all(np.zeros(1, np.uint32))  # launchers end all once one has ended
            if not isinstance(error, ReapError):
                raise
            raise SystemExit(1) from None

    def _make_known(self, error: BaseException) -> _Failed | None:
        """What all ranks know after it; None if they cannot be told, and find this one gone."""
        if isinstance(error, _Failed):
            return error
        if self.size == 1 or isinstance(error, _Lost) or self._exchanging:
            return None
        if isinstance(error, ReapError):
            what = error.message, error.hint
        elif isinstance(error, KeyboardInterrupt):
            what = "interrupted", None
        else:
            what = f"{type(error).__name__}: {error}", None
        try:
            self._exchange(json.dumps(what).encode(), failed=True)
        except _Failed as known:
            return known
        except _Lost:
            pass
        return None

    def _exchange(self, message: bytes, *, failed: bool) -> list[bytes]:
        """First what is to come, always of one size: ranks may come here from different places."""
        self._exchanging = True
        heads = self._all(np.array([failed, len(message)], np.uint64).view(np.uint32))
        failures, lengths = heads.view(np.uint64).T
        padded = np.zeros(-(-int(lengths.max()) // 4), np.uint32)
        padded.view(np.uint8)[: len(message)] = np.frombuffer(message, np.uint8)
        bodies = self._all(padded).view(np.uint8) if padded.size else np.zeros((self.size, 0))
        messages = [body[:length].tobytes() for body, length in zip(bodies, lengths)]
        self._exchanging = False
        if failures.any():
            failed_ranks = {r: messages[r] for r in range(self.size) if failures[r]}
            raise _failed(failed_ranks, self.size)
        return messages

    def _all(self, words: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """uint32 [n] of every rank, [size, n]."""
        import mlx.core as mx

        try:
            found = mx.distributed.all_gather(mx.array(words), group=self._group, stream=mx.cpu)
            mx.eval(found)
        except RuntimeError as error:
            raise _Lost(
                f"rank {self.rank} lost the other ranks: {error}.",
                "see what ended them; what is done can be taken up with --resume",
            ) from None
        return np.array(found).reshape(self.size, -1)


def _name(rank: int, size: int) -> str:
    return f"rank-{rank}-of-{size}"


def _failed(messages: Mapping[int, bytes], size: int) -> _Failed:
    """Each reason once, in the words of the lowest rank that has it, and which ranks have it."""
    found = {rank: tuple(json.loads(message)) for rank, message in messages.items()}
    alike: dict[str, list[int]] = {}
    for rank, (each, _) in found.items():  # the same reason may name each rank's own files
        alike.setdefault(each.replace(_name(rank, size), ""), []).append(rank)
    lowest, hint = found[min(found)]
    if len(alike) == 1 and len(found) == size:
        return _Failed(lowest, hint)
    told = (f"{_named(ranks)} failed: {found[ranks[0]][0]}" for ranks in alike.values())
    return _Failed("; ".join(told), hint)


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def share(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """The items that each rank takes, by their positions, rising; about equally much to each.

    The largest first, each to the rank that has least.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    taken = [0] * ranks
    for item in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        rank = taken.index(min(taken))
        shares[rank].append(item)
        taken[rank] += sizes[item]
    return [sorted(items) for items in shares]


def launched() -> bool:
    """Whether this process is one of several that mlx.launch or mpirun has started."""
    own = os.environ.get
    if any(own(n, "1") != "1" for n in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MLX_WORLD_SIZE")):
        return True
    if own("MLX_RANK") is None:
        return False
    # `mlx.launch -n 1` names an empty file, which MLX does not take.
    hostfile = own("MLX_HOSTFILE")
    return hostfile is None or bool(Path(hostfile).read_text().strip())


def join() -> Ranks:
    """The ranks that this process was launched with. Raises ReapError if it cannot reach them."""
    if not launched():
        return Ranks()
    import mlx.core as mx

    try:
        ranks = Ranks(mx.distributed.init(strict=True))
        if ranks.size == 1:  # several that do not know of each other would write the same files
            raise RuntimeError("this process found no other")
    except RuntimeError as error:
        raise ReapError(
            f"the ranks could not be connected: {error}.",
            "check mlx.launch's --hosts, --hostfile and --backend",
        ) from None
    return ranks
