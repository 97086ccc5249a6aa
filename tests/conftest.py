"""Fixtures that several test files share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# No test may depend on the network; read when the libraries are imported.
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

from reap.data import embedded_model


@pytest.fixture(scope="session")
def tiny_k3() -> Path:
    """The embedded K3-architecture checkpoint; do not write to it."""
    return embedded_model()
