"""Factors of products left^T right that are hard to screen, their entries in float64, and costs that favour it."""

import importlib

import pytest
import torch
from hypothesis import strategies as st

from sparsify.kernels import has_triton

FREE = {"NORMS": 0, "TILE": 1e-9, "ENTRY": 0}  # costs in `screening.py` that have any product screened
SIZES = st.sampled_from([1, 2, 15, 16, 17, 31, 32, 33, 63, 65, 100])
KINDS = {
    "random": lambda left, right: (left, right),
    "huge by tiny": lambda left, right: (left * 1e18, right * 1e-30),
    "tiny by huge": lambda left, right: (left * 1e-30, right * 1e18),
    "tiny by ordinary": lambda left, right: (left * 1e-25, right),
    "denormal by large": lambda left, right: (left * 1e-39, right * 1e15),
    "large by what units take for zero": lambda left, right: (
        torch.full_like(left, 2.0**60), torch.full_like(right, 2.0**-127)
    ),
    "one huge row": lambda left, right: (_times(left, 0, 1e6), right),
    "one tiny column": lambda left, right: (left, _times(right, 0, 1e-22)),
    "widely spread": lambda left, right: (left * 10 ** (8 * torch.rand_like(left) - 4), right),
    "all equal": lambda left, right: (torch.full_like(left, 0.3), torch.full_like(right, 1.7)),
    "rounded up": lambda left, right: (torch.full_like(left, 1 + 2**-8 - 2**-20), torch.full_like(right, 1 + 2**-9)),
    "rounded down": lambda left, right: (torch.full_like(left, 1 + 2**-8), torch.full_like(right, 1 + 2.99 * 2**-8)),
    "cancelling": lambda left, right: (left, _alternating(torch.ones_like(right) * (1 + 2**-8))),
    "few tokens": lambda left, right: (left * (torch.rand(len(left), 1) < 0.1), right),
    "tokens that matter to one side": lambda left, right: _opposite(left, right, 8),
    "tokens that matter to one side alone": lambda left, right: _opposite(left, right, 18),
    "tokens far apart": lambda left, right: (left * 10 ** (24 * torch.rand(len(left), 1) - 12), right),
    "mostly zero": lambda left, right: (left * (torch.rand_like(left) < 0.05), right),
    "zero": lambda left, right: (left * 0, right),
}  # fmt: skip


def triton_kernels(device):
    """The module of the Triton kernels; skips where they do not run on a device."""
    if not has_triton(device):
        pytest.skip("Triton is not installed, or does not run here")
    return importlib.import_module("sparsify.kernels.triton")


def seeded(seed):
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


def factors(kind, tokens, rows, cols, dtype=torch.float32, seed=0):
    """left (tokens, rows) and right (tokens, cols) of one of the ``KINDS``."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        left, right = KINDS[kind](torch.randn(tokens, rows), torch.randn(tokens, cols))
    return left.to(dtype), right.to(dtype)


def exact(left, right):
    return left.double().t() @ right.double()


def _times(factor, column, number):
    factor[:, column] *= number
    return factor


def _opposite(left, right, power):
    sizes = 10 ** (2 * power * torch.rand(len(left), 1) - power)
    return left * sizes, right / sizes


def _alternating(factor):
    factor[1::2] *= -1
    return factor
