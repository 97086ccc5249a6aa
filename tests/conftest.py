"""Fixtures that several test files share."""

from __future__ import annotations

from pathlib import Path

import pytest

from reap.data import embedded_model


@pytest.fixture(scope="session")
def tiny_k3() -> Path:
    """The embedded K3-architecture checkpoint; do not write to it."""
    return embedded_model()
