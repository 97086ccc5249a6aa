"""Fixtures that several test files share."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

# No test may depend on the network; read when the libraries are imported.
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

from reap.data import embedded_model

# Shells start background jobs, and so CI perhaps the tests, with Ctrl-C ignored; what the tests
# start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny_k3() -> Path:
    """The embedded K3-architecture checkpoint; do not write to it."""
    return embedded_model()
