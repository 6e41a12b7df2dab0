"""Settings of a measured process, passed from the command to its workers."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

PLANNED_STEPS = 1000  # optimizer steps of the run that the measured steps belong to
WARM_UP = 2  # steps before the first measured one
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# By default glibc returns some of the freed memory to the system and gets it back page by page, which takes up to a
# tenth of a step and varies from run to run. These are its limits for keeping all of it.
HEAPS = {"keep": {"MALLOC_MMAP_THRESHOLD_": str(1 << 25), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}, "system": {}}


@dataclass(frozen=True)
class Settings:
    """A method, a model, and the conditions that it is measured under; most are options of ``sparsify bench``."""

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
    tokens: str = ""  # the kind of real text in tokens_file; empty for random tokens
    ahead: int = 50  # most steps that one process will do, each of which unmasks entries
    seed: int = 0
    heap: str = "keep"
    layers: int = 0
    folder: str = ""  # of state_file and tokens_file

    @property
    def start(self) -> int:
        """The first step of the run of ``PLANNED_STEPS`` after the buffers are filled: at most all but ``ahead``.

        Example:
            >>> Settings("id3", fill=0.5).start, Settings("id3", fill=1.0, ahead=20).start
            (500, 980)
        """
        return min(round(self.fill * PLANNED_STEPS), PLANNED_STEPS - self.ahead)

    @property
    def is_cuda(self) -> bool:
        return torch.device(self.device).type == "cuda"

    @property
    def state_file(self) -> Path:
        """The trained state with filled buffers, for all methods that start from it."""
        return Path(self.folder, f"state-{self.shape}-{self.layers}-{self.budget}.safetensors")

    @property
    def tokens_file(self) -> Path:
        return Path(self.folder, "tokens.safetensors")

    def to_json(self) -> str:
        """One line, for a worker."""
        return json.dumps(asdict(self))
