"""Pictures of a selection, and the rank correlation of two fine-tunings' changes."""

from examples.analysis.correlation import ChangeCorrelation, change_correlation
from examples.analysis.plots import plot_shares, plot_trajectory

__all__ = ["ChangeCorrelation", "change_correlation", "plot_shares", "plot_trajectory"]
