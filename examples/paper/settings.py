"""Settings: all that determines a run, and what of it a run's JSON line is found by."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Settings:
    """One run. ``None`` where a method does not depend on a setting, so that runs that are the same are run once.

    Args:
        task, model, method: names; a model may be a path.
        rate: learning rate.
        head_rate: of the new head, where it is trained whole; ``None``: ``rate``.
        budget: entries, or numbers of a LoRA; ``None`` where the method says how many.
        rows: training rows, of a shuffle that is the same for all seeds; ``None``: all.
        held_out: judge on so many other training rows instead of the validation rows, to choose a recipe on.
        steps: stop after this many; ``None``: ``epochs``.
        head: ``"dense"``: the new head is trained whole, apart from the budget; ``"budget"``: its entries are
            candidates, the paper's setting.
        shape, until: how the unmasked set grows, and the share of the steps after which it is complete.
        every: steps from one selection to the next.
        decay: of the learning rate: ``"constant"``, or ``"linear"`` to 0.
        warmup: share of the steps in which the rate rises from 0.
        beta2: AdamW's, of the mean of the squared gradients.
        candidates: ``"all"``, or ``"linear"``: the encoder's linear layers alone.
        exp, eps: of D3.
        judged: judge on so many rows of each set; ``None``: all.
        with_test: judge on the rows of the split ``test`` as well, where there is one.
        target_length: tokens to generate at most; ``None`` for tasks that generate nothing.
    """

    task: str
    model: str
    method: str
    rate: float
    seed: int
    budget: int | None
    epochs: int
    batch_size: int = 16
    max_length: int = 128
    rows: int | None = None
    held_out: int | None = None
    steps: int | None = None
    head: str = "dense"
    dtype: str = "float32"
    shape: str | None = "uniform"
    until: float | None = 1.0
    every: int = 1
    decay: str = "constant"
    warmup: float = 0.0
    candidates: str | None = "all"
    exp: float | None = 2.0
    eps: float | None = 1.0
    judged: int | None = None
    with_test: bool = False
    target_length: int | None = None
    head_rate: float | None = None
    beta2: float = 0.999

    @property
    def key(self) -> str:
        """The same for two runs with the same settings."""
        return json.dumps(asdict(self), sort_keys=True)
