"""Initial values that can be made again from a seed, bit for bit, on any machine and with any version.

In: a tensor's name, shape and dtype, and a :class:`InitializerRecipe`. Out: its values. They come from the raw bits of a
counter-based generator by integer arithmetic and correctly rounded products alone: no function of a mathematical
library has a say. ``format.md`` says how, to the bit, since files hold such draws in place of values.
"""

from __future__ import annotations

import hashlib
import math
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsify.errors import SparsifyError

DISTRIBUTIONS = ("constant", "uniform", "normal")
MAX_SEED = 2**63 - 1
_MIN_SAMPLE = 256  # entries below which a distribution is not told from another
_NUM_ERRORS = 5  # standard errors that a sample may be off
_CHUNK = 2**20  # entries drawn at a time


@dataclass(frozen=True)
class InitializerRecipe:
    """How a tensor's values are drawn.

    Args:
        distribution: ``"uniform"`` between -scale and scale, ``"normal"`` with a standard deviation of scale (a sum of
            twelve uniform numbers), or ``"constant"``: scale everywhere.
        scale: a finite number.
        seed: from 0 to 2^63 - 1. Each tensor has numbers of its own, by its name.

    Raises:
        SparsifyError: when one of them is none of these.

    Example:
        >>> InitializerRecipe("uniform", 0.5, seed=0).values("w", (2, 2), torch.float32)
        tensor([[-0.1640, -0.3026],
                [ 0.2695,  0.0022]])
    """

    distribution: str
    scale: float
    seed: int = 0

    def __post_init__(self) -> None:
        if self.distribution not in DISTRIBUTIONS:
            raise SparsifyError(
                f"distribution is {self.distribution!r:.100}, expected one of {', '.join(DISTRIBUTIONS)}"
            )
        is_number = isinstance(self.scale, (int, float)) and not isinstance(self.scale, bool)
        if not is_number or not abs(self.scale) <= sys.float_info.max:  # nor is NaN
            raise SparsifyError(f"scale is {self.scale!r:.100}, expected a finite number")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed <= MAX_SEED:
            raise SparsifyError(f"seed is {self.seed!r:.100}, expected an integer from 0 to 2^63 - 1")

    def values(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The values that a tensor of this name starts from, on the CPU."""
        result = torch.empty(math.prod(shape), dtype=dtype, device="cpu")
        if self.distribution == "constant":
            return result.copy_(torch.tensor(float(self.scale), dtype=torch.float64, device="cpu")).view(shape)
        numbers = _generator(self.seed, name)
        for part in result.split(_CHUNK):
            drawn = torch.from_numpy(_STANDARD[self.distribution](numbers, part.numel()) * float(self.scale))
            # by way of float32 in so many words: casts from float64 to a short dtype differ in how often they round
            part.copy_(drawn if dtype == torch.float64 else drawn.float())
        return result.view(shape)


def recognise(values: Tensor, normal_scales: tuple[float, ...], seed: int) -> InitializerRecipe | None:
    """The draw whose distribution some initial values have; ``None`` where that is not beyond doubt.

    Args:
        values: a tensor of at least one entry, as some initialiser left it.
        normal_scales: the standard deviations to look for; a uniform tensor is looked for between the bounds that
            torch's linear and convolutional layers, and PEFT's LoRA, start from: +- 1 / sqrt(inputs).
        seed: of the draw.
    """
    values = values.detach().double().flatten(1) if values.dim() > 1 else values.detach().double().reshape(1, -1)
    if values.numel() and bool((values == values[0, 0]).all()):
        first = float(values[0, 0])
        return InitializerRecipe("constant", first, seed) if math.isfinite(first) else None
    if values.numel() < _MIN_SAMPLE:
        return None
    bound, size = values.shape[1] ** -0.5, values.numel()
    spread, tails = float(values.std()), float(values.pow(4).mean() / values.pow(2).mean() ** 2)
    centred = abs(float(values.mean())) <= _NUM_ERRORS * spread / size**0.5
    error = _NUM_ERRORS / size**0.5
    if (
        centred
        and values.abs().max() <= bound
        and abs(tails - 1.8) < error
        and abs(spread * 3**0.5 / bound - 1) < error
    ):
        return InitializerRecipe("uniform", bound, seed)
    near = [scale for scale in normal_scales if abs(spread / scale - 1) < error]
    # the kurtosis is 3, that of our own draws 2.9, with a standard error of sqrt(24 / size)
    if centred and len(set(near)) == 1 and abs(tails - 2.95) < 0.05 + error * 24**0.5:
        return InitializerRecipe("normal", near[0], seed)
    return None


def _generator(seed: int, name: str) -> Any:
    import numpy

    key = hashlib.sha256(f"{seed}:{name}".encode()).digest()[:16]
    return numpy.random.Philox(key=int.from_bytes(key, "little"))


def _uniform(generator: Any, count: int) -> Any:
    """(count,) float64, each the middle of one of 2^24 equal parts of (-1, 1): 24 bits of a raw number."""
    raw = generator.random_raw(count)
    return (2 * (raw >> 40).astype("float64") + 1) / 2**24 - 1


def _normal(generator: Any, count: int) -> Any:
    """(count,) float64 with mean 0 and variance 1 - 2^-32: sums of the twelve 16-bit parts of three raw numbers."""
    parts = generator.random_raw(3 * count).astype("<u8").view("<u2").reshape(count, 12)
    return (parts.sum(axis=1, dtype="int64") - 6 * 65_535) / 65_536


_STANDARD = {"uniform": _uniform, "normal": _normal}
