"""Initial values of which a file holds a recipe, as ``delta/format.md`` specifies to the bit.

They are made from a counter-based generator's raw bits by integer arithmetic and correctly rounded products alone.
"""

from __future__ import annotations

import hashlib
import math
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsify.errors import SparsifyError

DISTRIBUTIONS = ("constant", "uniform", "normal")
MAX_SEED = 2**63 - 1
_CHUNK = 2**20  # entries generated at a time


@dataclass(frozen=True)
class InitializerRecipe:
    """How a tensor's initial values are generated; tensors of different names get different numbers from one seed.

    ``"uniform"`` is between -scale and scale, ``"normal"`` has a standard deviation of scale (a sum of twelve uniform
    numbers), ``"constant"`` is scale everywhere. Raises ``SparsifyError`` for anything else, or out of range.
    """

    distribution: str
    scale: float
    seed: int = 0

    def __post_init__(self) -> None:
        if self.distribution not in DISTRIBUTIONS:
            names = ", ".join(DISTRIBUTIONS)
            raise SparsifyError(f"distribution is {self.distribution!r:.100}, expected one of {names}")
        if type(self.scale) not in (int, float) or not abs(self.scale) <= sys.float_info.max:  # nor is NaN
            raise SparsifyError(f"scale is {self.scale!r:.100}, expected a finite number")
        if type(self.seed) is not int or not 0 <= self.seed <= MAX_SEED:
            raise SparsifyError(f"seed is {self.seed!r:.100}, expected an integer from 0 to 2^63 - 1")

    def values(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns the initial values of the tensor with this name, on the CPU."""
        result = torch.empty(math.prod(shape), dtype=dtype, device="cpu")
        if self.distribution == "constant":
            return result.copy_(torch.tensor(float(self.scale), dtype=torch.float64, device="cpu")).view(shape)
        import numpy

        key = hashlib.sha256(f"{self.seed}:{name}".encode()).digest()[:16]
        generator = numpy.random.Philox(key=int.from_bytes(key, "little"))
        for part in result.split(_CHUNK):
            count = part.numel()
            if self.distribution == "uniform":  # the middle of one of 2^24 equal parts of (-1, 1)
                standard = (2 * (generator.random_raw(count) >> 40).astype("float64") + 1) / 2**24 - 1
            else:  # with mean 0 and variance 1 - 2^-32, of the twelve 16-bit parts of three raw numbers
                parts = generator.random_raw(3 * count).astype("<u8").view("<u2").reshape(count, 12)
                standard = (parts.sum(axis=1, dtype="int64") - 6 * 65_535) / 65_536
            numbers = torch.from_numpy(standard * float(self.scale))
            # through float32 explicitly: casts from float64 to a short dtype differ in how often they round
            part.copy_(numbers if dtype == torch.float64 else numbers.float())
        return result.view(shape)
