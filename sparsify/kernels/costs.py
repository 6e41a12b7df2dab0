"""The way to the entries of a product left^T right, by a fixed rule: equal shapes take equal ways.

    dense      multiplies everything
    sampled    computes some entries as dot products (SDDMM)
    screened   reads both factors for the norms that bound the entries, and multiplies what these do not rule out; on
               CPUs only

Costs are counted in entries of the dense product, which has rows x cols. Nothing is timed at run time. A CPU's were
measured once, with 1024 tokens, and overestimate the cost of screening. A GPU's follow from the bytes that the loops of
``kernels/triton`` move, and from a data sheet: none has been measured.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sparsify.core.devices import runs_ahead
from sparsify.kernels import has_triton
from sparsify.kernels.sddmm import SECTOR, SHORT

# a CPU's costs, in entries of the float32 product; half as many of the bfloat16 one take as long
NORMS = 48  # for each row and column
TILE = 1.5  # for each entry that screening multiplies and compares
ENTRY = 70  # for each dot product
SCREENED = {torch.float32: 1, torch.bfloat16: 2}  # the dtypes that are screened, and by how much all costs more

# a GPU's, as an H100 reaches them
BYTES = 2.5e12  # moved a second
OPERATIONS = {True: 4e14, False: 5e13}  # a second, with matrix units and without


class Costs(NamedTuple):
    """Costs of the ways to a product's entries, in entries of the dense product."""

    dense: float  # of all entries
    entry: float  # of a sampled entry
    base: float = 0  # of sampling, before the first entry
    direct: float = math.inf  # of an entry that is sampled without transposing the factors
    norms: float = math.inf  # of screening, before the first entry
    tile: float = 1  # of an entry that screening multiplies

    def prefers_sampling(self, number: int) -> bool:
        """Whether sampling so many entries costs no more than the dense product."""
        return min(self.base + number * self.entry, number * self.direct) <= self.dense

    def screening_limit(self, sampled: int = 0) -> int:
        """Number of entries that screening may multiply at the cost of the dense product, which it samples from too."""
        left = self.dense - self.norms - sampled * self.entry
        return int(left / self.tile) if left > 0 else 0


def costs_of(left: Tensor, right: Tensor) -> Costs:
    """Returns the costs of a product left^T right, of left (n, rows) and right (n, cols)."""
    rows, cols = left.shape[1], right.shape[1]
    if runs_ahead(left.device):
        return _costs_on_gpu(left, rows, cols)
    if left.dtype not in SCREENED:
        return Costs(rows * cols, ENTRY)
    factor = SCREENED[left.dtype]
    return Costs(rows * cols, ENTRY * factor, norms=NORMS * factor * (rows + cols), tile=TILE * factor)


def _costs_on_gpu(left: Tensor, rows: int, cols: int) -> Costs:
    if left.dtype not in SHORT or not has_triton(left.device):
        return Costs(rows * cols, 0, base=math.inf)
    in_units = left.dtype.itemsize == 2 or torch.get_float32_matmul_precision() != "highest"
    entries = OPERATIONS[in_units] / 2  # of the dense product, in a second, for each token
    number = left.dtype.itemsize * entries / BYTES  # of a factor, read or written once
    # without transposing, each number lies in a sector of its own
    return Costs(rows * cols, 2 * number, base=2 * (rows + cols) * number, direct=2 * SECTOR * entries / BYTES)
