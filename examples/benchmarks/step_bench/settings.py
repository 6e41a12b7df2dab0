"""Settings of a measured process, passed from the command to its workers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

PLANNED_STEPS = 1000  # optimizer steps of the run that the measured steps belong to
WARM_UP = 2  # steps before the first measured one
MOST_STEPS = 20  # measured in one turn
AHEAD = 50  # most steps of one process, each of which unmasks entries: warm-up, measured and profiled ones
SEED = 0
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Settings:
    """A method, a model, and the conditions that it is measured under; most are options of ``step.py``."""

    method: str
    shape: str = "bert-base"
    budget: int = 320_000
    fill: float = 0.5
    batch: int = 8
    length: int = 128
    dtype: str = "float32"
    device: str = "cpu"
    layers: int = 0
    tokens: str = ""  # the kind of real text in tokens_file; empty for random tokens
    folder: str = ""  # of state_file and tokens_file

    @property
    def start(self) -> int:
        """The first step of the run of ``PLANNED_STEPS`` after the buffers are filled: at most all but ``AHEAD``.

        Example:
            >>> Settings("id3", fill=0.5).start, Settings("id3", fill=1.0).start
            (500, 950)
        """
        return min(round(self.fill * PLANNED_STEPS), PLANNED_STEPS - AHEAD)

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
