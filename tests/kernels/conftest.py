"""Shared by the tests of kernels."""

import pytest
import torch


@pytest.fixture
def threads():
    """Sets the number of threads; it is as before afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
