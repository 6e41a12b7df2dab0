"""What the ways to a product's entries cost on this machine: measured once for each kind of product, then remembered.

A kind is the factors' dtype and sizes, the tokens rounded up to a power of two, and torch's threads. A product of a
kind that was not met before is timed on random factors for a fraction of a second; what was found stays in memory,
and in one small file per machine, so that a run that is resumed decides as it began. Ways differ in the last bits of
what they compute. So constants decide instead where results are to be the same again elsewhere: under
``torch.use_deterministic_algorithms``, on several ranks, or with ``SPARSIFY_COSTS=fixed`` in the environment.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from sparsify.common.ranks import num_ranks
from sparsify.errors import SparsifyError
from sparsify.kernels.cpu.library import cache_folder, library
from sparsify.kernels.cpu.sddmm import LOOPS
from sparsify.kernels.norm_bound import Room, survey
from sparsify.kernels.sddmm import sddmm
from sparsify.kernels.threshold import BLOCK_ENTRIES, reaching

logger = logging.getLogger(__name__)

SMALLEST_MEASURED = 1 << 16  # entries of a product; a smaller one takes less time than deciding about it is worth
TOKENS_MEASURED = 1024  # at most: more take longer in proportion
WORK_MEASURED = 1 << 30  # multiplications of a measured product, at most
FEW, MANY = 32, 4096  # entries that are sampled, to tell what one costs
REPETITIONS = 3  # the least of which is what it takes
EVICTING = 1 << 23  # bytes that take the place of all else in a core's cache
BLOCK_COLUMNS = 1 << 12  # of a factor, drawn once and repeated
CHEAPEST_TILE = 0.01  # all tiles cost at least this share of the whole product, whatever a disturbed clock says
CHEAPEST_ENTRY = 4  # a sampled entry costs at least this many of the whole product, whatever a disturbed clock says


class Costs(NamedTuple):
    """What the ways cost: in seconds where they were measured, else in times of the whole product.

    Attributes:
        product: multiplying everything out.
        whole: that, and comparing every entry with a threshold.
        norms: a survey that has to multiply nothing, and takes some entries; infinite where the dtype has none.
        tile: an entry that a survey multiplies and compares.
        base: single entries as dot products, before the first one.
        entry: one of them.
    """

    product: float
    whole: float
    norms: float
    tile: float
    base: float
    entry: float

    def samples(self, number: int) -> bool:
        """Whether so many entries are had sooner as dot products than by the whole product."""
        return self.base + number * self.entry <= self.product

    def room(self, number: int = 0) -> Room | None:
        """How much a survey may multiply, and leave to be scored and sampled, before the whole product is as fast.

        What is left is not sampled where nothing was rounded: then this is less room than there might be.

        Args:
            number: entries that it samples besides.

        Returns:
            ``None`` where its norms alone are not worth it.
        """
        left = self.whole - self.norms - number * self.entry
        return Room(int(left / (2 * self.entry)), int(left / self.tile)) if left > 0 else None


def costs_of(left: Tensor, right: Tensor) -> Costs:
    """What a product left^T right costs on a CPU.

    Args:
        left: (n, rows).
        right: (n, cols).

    Raises:
        SparsifyError: the environment's ``SPARSIFY_COSTS`` is neither ``fixed`` nor ``measured``.

    Example:
        >>> costs_of(torch.ones(8, 16), torch.ones(8, 16)).samples(200)
        False
    """
    rows, cols = left.shape[1], right.shape[1]
    if rows * cols < SMALLEST_MEASURED or not left.shape[0] or not _measures():
        return fixed(left.dtype, rows * cols)
    n = 1 << (left.shape[0] - 1).bit_length()
    return _measured(left.dtype, n, rows, cols, torch.get_num_threads())


def fixed(dtype: torch.dtype, numel: int) -> Costs:
    """Costs that depend on nothing but the form of the loops: rough, and a survey's rather too dear than too cheap."""
    each = 1 / max(1, numel)
    if dtype not in LOOPS:
        return Costs(1, 1.05, math.inf, math.inf, 0, 70 * each)
    if library() is None:
        return Costs(1, 1.05, 0.3, 1.5 * each, 0, 70 * each)
    if dtype == torch.bfloat16:
        return Costs(1, 1.3, 0.3, each, 0.15, 35 * each)
    return Costs(1, 1.05, 0.1, each, 0.04, 14 * each)


def _measures() -> bool:
    """Whether this process decides by what it has measured."""
    said = os.environ.get("SPARSIFY_COSTS", "")
    if said not in ("", "fixed", "measured"):
        raise SparsifyError(
            f"the environment says SPARSIFY_COSTS={said!r}; expected 'fixed' or 'measured', or nothing."
        )
    return said == "measured" or (not said and num_ranks() == 1 and not torch.are_deterministic_algorithms_enabled())


@cache
def _measured(dtype: torch.dtype, n: int, rows: int, cols: int, threads: int) -> Costs:
    """The costs of a kind, from the machine's file or measured."""
    kind = f"{str(dtype).removeprefix('torch.')} {n}x{rows}x{cols} {threads} threads"
    path = _file()
    found = _read(path).get(kind)
    if found is None:
        found = _remember(path, kind, _measure(dtype, n, rows, cols))
    logger.debug("costs of %s: %s", kind, found)
    return found


@torch.no_grad()
def _measure(dtype: torch.dtype, n: int, rows: int, cols: int) -> Costs:
    """Times the ways on random factors: some of the tokens, and a part of the product, stand for all."""
    tokens = min(n, TOKENS_MEASURED)
    shrunk = min(1.0, math.sqrt(WORK_MEASURED / (rows * cols * tokens)))
    some_rows, some_cols = max(1, int(rows * shrunk)), max(1, int(cols * shrunk))
    generator = torch.Generator().manual_seed(0)
    with torch.autocast("cpu", enabled=False):
        left, right = _factor(tokens, rows, dtype, generator), _factor(tokens, cols, dtype, generator)
        rows_part, cols_part = left[:, :some_rows].contiguous(), right[:, :some_cols].contiguous()
        least, longer = torch.full((some_rows,), math.inf, dtype=torch.float32), n / tokens  # than what is measured
        indices = torch.randint(rows * cols, (MANY,), generator=generator)
        nothing = indices[:0]
        product = _seconds(lambda: rows_part.t() @ cols_part)
        whole = _seconds(lambda: _scan(rows_part.t() @ cols_part, least))
        norms = tile = math.inf
        if dtype in LOOPS:
            never, reached = least.new_full((rows,), math.inf), least.new_full((some_rows,), tokens / 4)
            all_tiles, room = _cancelling(rows_part, cols_part), Room(some_rows * some_cols, sys.maxsize)
            norms = _seconds(lambda: survey(left, right, indices[:FEW], nothing, never, room))
            surveyed = _seconds(lambda: survey(*all_tiles, nothing, nothing, reached, room))
            tile = max(surveyed - norms * shrunk, CHEAPEST_TILE * product) / (some_rows * some_cols) * longer
        few = _seconds(lambda: sddmm(left, right, indices[:FEW]))
        many = _seconds(lambda: sddmm(left, right, indices))
    larger = rows * cols / (some_rows * some_cols) * longer
    entry = max((many - few) / (MANY - FEW) * longer, CHEAPEST_ENTRY * product * larger / (rows * cols))
    return Costs(product * larger, whole * larger, norms * longer, tile, few * longer, entry)


def _factor(tokens: int, width: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    block = torch.randn(tokens, min(width, BLOCK_COLUMNS), generator=generator).to(dtype)
    return block.repeat(1, -(-width // BLOCK_COLUMNS))[:, :width].contiguous()


def _scan(values: Tensor, least: Tensor) -> None:
    """Looks at all entries as a selection does: block by block."""
    lines = max(1, BLOCK_ENTRIES // values.shape[1])
    for block, reach in zip(values.split(lines), least.split(lines), strict=True):
        reaching(block, reach)


def _cancelling(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Factors (tokens, ...) with the norms of these, so that all has to be multiplied, and a product of zeros.

    Of an odd number of tokens one is left, so that of few tokens much is found, and a survey seems dearer than it is.
    """
    left, right = left.clone(), right.clone()
    even = left.shape[0] // 2 * 2
    left[1:even:2], right[1:even:2] = left[:even:2], -right[:even:2]
    return left, right


def _seconds(way: Callable[[], object]) -> float:
    """How long a way takes when nothing disturbs it, its operands in no core's cache: so it is in training."""
    times, elsewhere = [], torch.zeros(EVICTING * torch.get_num_threads(), dtype=torch.uint8)
    for _ in range(REPETITIONS):
        elsewhere += 1
        start = time.perf_counter()
        way()
        times.append(time.perf_counter() - start)
    return min(times)


# ------------------------------------------------------------------------------------ one file per machine


def _file() -> Path:
    """Where this machine's costs are kept; another processor, torch or library has another file."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else [platform.processor()]
    native = library()
    parts = [line for line in lines if line.startswith("model name")][:1] or lines[:1]
    parts += [platform.machine(), torch.__version__, "plain" if native is None else Path(native._name).stem]
    parts += Costs._fields
    return cache_folder() / f"costs-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}.json"


def _read(path: Path) -> dict[str, Costs]:
    """The costs in a file, by kind; whatever is damaged is left out, and so measured anew."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        entries = found.items()
    except (OSError, ValueError, AttributeError):
        return {}
    return {kind: Costs(*numbers) for kind, numbers in entries if _are_costs(numbers)}


def _are_costs(numbers: object) -> bool:
    """Whether they can have been measured; a survey costs infinitely much where there is none."""
    if not isinstance(numbers, list) or len(numbers) != len(Costs._fields):
        return False
    if not all(isinstance(number, float) and number > sys.float_info.min for number in numbers):
        return False
    found = Costs(*numbers)
    return math.isfinite(found.product + found.whole + found.base + found.entry)


def _remember(path: Path, kind: str, costs: Costs) -> Costs:
    """Adds a kind's costs to the file, where it can be written, and returns those that hold: the first that came."""
    known = _read(path)  # again: another process may have written since
    costs = known.setdefault(kind, costs)
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            temporary = Path(file.name)
            json.dump(known, file, indent=1)
        temporary.replace(path)
    except OSError as error:
        logger.info("measured costs are not kept for the next process: %s", error)
        if temporary is not None:
            temporary.unlink(missing_ok=True)
    return costs
