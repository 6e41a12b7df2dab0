"""The path to the entries of a product left^T right on a CPU: a fixed rule, so that equal machines take equal paths.

    dense      multiplies everything out
    sampled    computes some entries as dot products (SDDMM), for which both factors are transposed once
    screened   reads both factors for the norms that bound the entries, multiplies tile by tile what these do not rule
               out, and computes again what then may be among the best

Costs are counted in entries of the dense product. Each path but the first begins with a pass over the factors, a cost
in proportion to rows + cols, where the dense product's is rows x cols. So small layers go densely; a large one is
sampled where few entries are wanted, and screened as long as what the norms leave costs less than the dense product.

Nothing is timed at run time: the numbers in the tables below are ratios measured once, with AVX-512, of 128 to 1024
tokens. They deliberately overestimate the cost of screening.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sparsify.kernels.cpu.library import library
from sparsify.kernels.norm_bound import Limits, has_matrix_units
from sparsify.kernels.sddmm import LOOPS

TOKENS_OF_A_THREAD = 32  # the loops over the factors give each thread blocks of so many; columns.h


class Loops(NamedTuple):
    """Speed of a machine's loops, in entries of the dense product.

    Attributes:
        norms: reading a number of a factor for the norms.
        tile: an entry that screening multiplies and compares.
        transpose: transposing a number of a factor.
        entry: a dot product.
    """

    norms: float
    tile: float
    transpose: float
    entry: float


PLAIN = Loops(norms=128, tile=1.5, transpose=0, entry=70)  # in torch
COMPILED = {
    # (dtype, whether there are matrix units): the dense product is fast in bfloat16, and so the others cost more of it
    (torch.float32, False): Loops(norms=16, tile=0.75, transpose=8, entry=6),
    (torch.float32, True): Loops(norms=16, tile=0.5, transpose=8, entry=6),
    (torch.bfloat16, False): Loops(norms=64, tile=2, transpose=32, entry=32),
    (torch.bfloat16, True): Loops(norms=64, tile=1, transpose=32, entry=32),
}


class Costs(NamedTuple):
    """Costs of the paths to a product's entries, in entries of the dense product.

    Attributes:
        dense: all entries.
        norms: what screening begins with.
        tile: an entry that screening multiplies.
        base: what sampling begins with.
        entry: a sampled entry.
    """

    dense: float
    norms: float
    tile: float
    base: float
    entry: float

    def samples(self, number: int) -> bool:
        """Whether sampling so many entries costs no more than the dense product."""
        return self.base + number * self.entry <= self.dense

    def limits(self, number: int = 0) -> Limits | None:
        """Returns how much screening may compute before the dense product would cost less.

        Args:
            number: entries that are sampled on the way.

        Returns:
            ``None`` where the norms alone cost as much. Each found entry is counted twice, for it is scored, and may
            have to be sampled.
        """
        left = self.dense - self.norms - number * self.entry
        return Limits(int(left / (2 * self.entry)), int(left / self.tile)) if left > 0 else None


def costs_of(left: Tensor, right: Tensor) -> Costs:
    """Returns the costs of a product left^T right on a CPU.

    Args:
        left: (n, rows).
        right: (n, cols).

    Example:
        >>> costs_of(torch.ones(8, 16), torch.ones(8, 16)).samples(200)
        False
    """
    (n, rows), cols, loops = left.shape, right.shape[1], _loops(left.dtype)
    idle = max(1.0, torch.get_num_threads() * TOKENS_OF_A_THREAD / max(1, n))  # the passes over the factors take longer
    numbers = (rows + cols) * idle
    return Costs(rows * cols, numbers * loops.norms, loops.tile, numbers * loops.transpose, idle * loops.entry)


def _loops(dtype: torch.dtype) -> Loops:
    if dtype not in LOOPS:
        return PLAIN._replace(norms=math.inf)  # no screening
    return PLAIN if library() is None else COMPILED[dtype, has_matrix_units()]
