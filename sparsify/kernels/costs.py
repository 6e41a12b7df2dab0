"""The path to the entries of a product left^T right, by a fixed rule: equal machines take equal paths.

    dense      multiplies everything
    sampled    computes some entries as dot products (SDDMM), for which it transposes both factors
    screened   reads both factors for the norms that bound the entries, multiplies tile by tile what these do not rule
               out, and computes again what then may be among the best

Costs are counted in entries of the dense product, which has rows x cols. The other paths begin with a pass over the
factors, whose cost grows with rows + cols. So small layers take the dense path; a large one is sampled where few
entries are wanted, and screened as long as what the norms leave costs less than the dense product.

Nothing is timed at run time. A CPU's numbers below are ratios that were measured once, with AVX-512 and 128 to 1024
tokens; they deliberately overestimate the cost of screening. A GPU's follow from the bytes that the loops of
``kernels/triton`` move, and from a data sheet: none has been measured.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sparsify.core.devices import runs_ahead
from sparsify.kernels import has_triton
from sparsify.kernels.cpu.library import library
from sparsify.kernels.norm_bound import Limits, has_matrix_units
from sparsify.kernels.sddmm import LOOPS, SECTOR, SHORT

TOKENS = 32  # of a block: the passes over the factors share blocks among the threads; columns.h


class Loops(NamedTuple):
    """Costs of a machine's loops, in entries of the dense product."""

    norms: float  # for each number of the factors
    tile: float  # for each entry that is multiplied and compared
    transpose: float  # for each number of the factors
    entry: float  # for each dot product


PLAIN = Loops(norms=128, tile=1.5, transpose=0, entry=70)  # in torch
COMPILED = {
    # by dtype and matrix units; the dense product is faster in bfloat16, so all else costs more of its entries
    (torch.float32, False): Loops(norms=16, tile=0.75, transpose=8, entry=6),
    (torch.float32, True): Loops(norms=16, tile=0.5, transpose=8, entry=6),
    (torch.bfloat16, False): Loops(norms=64, tile=2, transpose=32, entry=32),
    (torch.bfloat16, True): Loops(norms=64, tile=1, transpose=32, entry=32),
}


# a GPU's, as an H100 reaches them
BYTES = 2.5e12  # moved a second
OPERATIONS = {True: 4e14, False: 5e13}  # a second, with matrix units and without
TILE_OPERATIONS = 3e14  # a second, of a tile that is screened; float32 numbers are rounded to tf32 for it
LAUNCHES = 4e-5  # seconds that the host takes to launch what screening launches more than the dense product


class Costs(NamedTuple):
    """Costs of the paths to a product's entries, in entries of the dense product."""

    dense: float  # of all entries
    norms: float  # of screening, before the first tile
    tile: float  # of an entry that screening multiplies
    base: float  # of sampling, before the first entry
    entry: float  # of a sampled entry
    direct: float = math.inf  # of one that is sampled without transposing the factors

    def samples(self, number: int) -> bool:
        """Whether sampling so many entries costs no more than the dense product."""
        return min(self.base + number * self.entry, number * self.direct) <= self.dense

    def limits(self, sampled: int = 0) -> Limits | None:
        """Returns what screening may compute at the cost of the dense product; ``None`` where the norms cost more."""
        left = self.dense - self.norms - sampled * self.entry  # which the same pass computes
        # a found entry is scored, and may have to be sampled
        return Limits(int(left / (2 * self.entry)), int(left / self.tile)) if left > 0 else None


def costs_of(left: Tensor, right: Tensor) -> Costs:
    """Returns the costs of a product left^T right, of left (n, rows) and right (n, cols)."""
    if runs_ahead(left.device):
        return _costs_on_gpu(left, right)
    (n, rows), cols, loops = left.shape, right.shape[1], _loops(left.dtype)
    idle = max(1.0, torch.get_num_threads() * TOKENS / max(1, n))  # where some threads have no tokens
    numbers = (rows + cols) * idle
    return Costs(rows * cols, numbers * loops.norms, loops.tile, numbers * loops.transpose, idle * loops.entry)


def _costs_on_gpu(left: Tensor, right: Tensor) -> Costs:
    (n, rows), cols = left.shape, right.shape[1]
    in_units = left.dtype.itemsize == 2 or torch.get_float32_matmul_precision() != "highest"
    entries = OPERATIONS[in_units] / 2  # of the dense product, in a second, for each token
    number = left.dtype.itemsize * entries / BYTES  # of a factor, read or written once
    direct = 2 * SECTOR * entries / BYTES
    if left.dtype not in SHORT or not has_triton(left.device):
        return Costs(rows * cols, math.inf, 0, math.inf, 0)
    # the norms take two passes, and both ways begin by transposing
    norms = 4 * (rows + cols) * number + LAUNCHES * entries / max(1, n)
    return Costs(rows * cols, norms, 2 * entries / TILE_OPERATIONS, 2 * (rows + cols) * number, 2 * number, direct)


def _loops(dtype: torch.dtype) -> Loops:
    if dtype not in LOOPS:
        return PLAIN._replace(norms=math.inf)  # no screening
    return PLAIN if library() is None else COMPILED[dtype, has_matrix_units()]
