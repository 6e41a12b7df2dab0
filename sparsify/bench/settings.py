"""What is measured: a method on a model shape, and the point of a run that it is measured at."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch

from sparsify.errors import SparsifyError

PLANNED_STEPS = 1000  # optimizer steps of the run that the measured ones belong to
WARM_UP = 2  # steps before the first measured one
PROFILE = "profile"  # said to a worker before a number of steps: they are not measured but profiled
ERROR = "error"  # said by a worker in place of an answer
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# By itself glibc gives freed memory back to the system or keeps it in holes of its heap, by luck more or less of it,
# and what was given back comes again page by page: up to a tenth of a step. To keep all, it has to be told, up to the
# largest blocks that it may keep.
HEAPS = {"keep": {"MALLOC_MMAP_THRESHOLD_": str(1 << 25), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}, "system": {}}


@dataclass(frozen=True)
class Settings:
    """What one process measures.

    Attributes:
        method: one of ``METHODS`` in ``methods.py``.
        shape: one of ``SHAPES`` in ``shapes.py``.
        budget: entries.
        fill: share of the budget that ID3 has unmasked before the first step.
        batch: sequences a step.
        length: tokens a sequence.
        dtype: of the weights, one of ``DTYPES``.
        threads: of torch; 0 for its default.
        device: ``"cpu"``, ``"cuda"``, or one GPU such as ``"cuda:1"``.
        checkpointing: whether activations are recomputed in backward (non-reentrant).
        tokens: file with rows of real text; none: random tokens.
        ahead: steps that the process may do; ID3 unmasks in all of them, so that a buffer filled to the whole budget
            is filled to the budget less what these steps unmask.
        seed: of the weights and the batches.
        heap: while times are taken on Linux, memory that was freed is kept (``"keep"``), or given back to the system
            when glibc sees fit (``"system"``).
        layers: of the model, an encoder's and a decoder's each; 0 for as many as the shape has.
    """

    method: str
    shape: str = "bert-base"
    budget: int = 320_000
    fill: float = 0.5
    batch: int = 8
    length: int = 128
    dtype: str = "float32"
    threads: int = 0
    device: str = "cpu"
    checkpointing: bool = False
    tokens: str = ""
    ahead: int = 50
    seed: int = 0
    heap: str = "keep"
    layers: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.fill <= 1:
            raise SparsifyError(f"fill={self.fill!r}; expected a share of the budget, from 0 to 1.")
        if not 0 <= self.ahead < PLANNED_STEPS:
            raise SparsifyError(
                f"{self.ahead} steps to measure; a run has {PLANNED_STEPS}: take fewer rounds or fewer steps a round."
            )
        if self.layers < 0:
            raise SparsifyError(f"layers={self.layers!r}; expected an int of at least 1, or 0 for the shape's own.")
        for name in ("budget", "batch", "length"):
            if getattr(self, name) < 1:
                raise SparsifyError(f"{name}={getattr(self, name)!r}; expected an int of at least 1.")
        for name, known in (("dtype", DTYPES), ("heap", HEAPS)):
            if getattr(self, name) not in known:
                raise SparsifyError(f"unknown {name} {getattr(self, name)!r}; expected one of {', '.join(known)}.")

    @property
    def start(self) -> int:
        """The step of the run, of ``PLANNED_STEPS``, that comes next once the buffers are filled.

        Example:
            >>> Settings("id3", fill=0.5).start, Settings("id3", fill=1.0, ahead=20).start
            (500, 980)
        """
        return min(round(self.fill * PLANNED_STEPS), PLANNED_STEPS - self.ahead)

    @property
    def is_cuda(self) -> bool:
        """Whether it runs on a GPU."""
        return torch.device(self.device).type == "cuda"

    def to_json(self) -> str:
        """One line, for a worker."""
        return json.dumps(asdict(self))


@contextmanager
def errors_as_answers() -> Iterator[None]:
    """A worker's error of ours is its answer, one line of JSON; the worker ends with status 1."""
    try:
        yield
    except SparsifyError as error:
        print(json.dumps({ERROR: str(error)}), flush=True)
        sys.exit(1)
