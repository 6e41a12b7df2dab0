"""Shared by the tests of selection."""

import pytest
from products import FREE

from sparsify.selection import screening


@pytest.fixture
def screened(monkeypatch):
    """Any layer is worth a screen, and no tensor of more than 16 entries is small."""
    monkeypatch.setattr(screening, "SMALLEST_SCREENED", 1)
    for name, cost in FREE.items():
        monkeypatch.setattr(screening, name, cost)
    monkeypatch.setattr("sparsify.selection.joined.LARGEST", 16)
