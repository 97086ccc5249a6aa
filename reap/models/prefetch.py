"""Having the operating system read a file ahead: into its own cache, not into this process."""

from __future__ import annotations

import os
import struct
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_CHUNK = 64 * 2**20  # the call may wait for the disk's queue


class Prefetch:
    """Reads byte ranges ahead in the background. A hint only: no error ever comes of it.

    Dropping the object ends it.
    """

    def __init__(self, ranges: Sequence[tuple[Path, int, int]]) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=_advise, args=(list(ranges), self._stop), daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        self._thread.join()

    def __del__(self) -> None:
        self._stop.set()


def _advise(ranges: Sequence[tuple[Path, int, int]], stop: threading.Event) -> None:
    with suppress(OSError):
        for path, offset, size in ranges:
            file = os.open(path, os.O_RDONLY)
            try:
                for start in range(offset, offset + size, _CHUNK):
                    if stop.is_set():
                        return
                    _will_need(file, start, min(_CHUNK, offset + size - start))
            finally:
                os.close(file)


def _will_need(file: int, offset: int, size: int) -> None:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, offset, size, os.POSIX_FADV_WILLNEED)
    elif sys.platform == "darwin":
        import fcntl

        # struct radvisory { off_t ra_offset; int ra_count; }; F_RDADVISE is 44
        fcntl.fcntl(file, getattr(fcntl, "F_RDADVISE", 44), struct.pack("qi4x", offset, size))
