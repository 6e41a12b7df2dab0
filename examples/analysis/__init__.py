"""Pictures of a selection, how it came about, and the rank correlation of two fine-tunings' changes."""

from examples.analysis.correlation import ChangeCorrelation, change_correlation
from examples.analysis.plots import plot_shares, plot_trajectory
from examples.analysis.trajectory import TrajectoryPoint, trajectory

__all__ = ["ChangeCorrelation", "TrajectoryPoint", "change_correlation", "plot_shares", "plot_trajectory", "trajectory"]
