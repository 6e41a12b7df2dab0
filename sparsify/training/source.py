"""What :class:`sparsify.SparseDelta` and :class:`sparsify.DeltaPublisher` find on a sparsified model."""

from __future__ import annotations

from torch import nn

from sparsify.delta.entries import DeltaParts
from sparsify.training.engine import Engine
from sparsify.training.export import export
from sparsify.training.exporter import Exporter


class DeltaSource:
    """Gives the delta of an engine's model, to code that needs nothing of training."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def export(self, budget: int | None, model: nn.Module) -> DeltaParts:
        """The parts of a :class:`sparsify.SparseDelta`."""
        return export(self._engine, budget, model)

    def exporter(self, model: nn.Module) -> Exporter:
        """A function that gives the model's present version, for :class:`sparsify.DeltaPublisher`."""
        return Exporter(self._engine, model)
