"""A sparse fine-tuning in numbers and pictures, computed afterwards: nothing is recorded during training.

trajectory(model)                  tensor sparsity and selection entropy over the steps
shares(model_or_delta)             the unmasked share of each tensor, with its layer and kind
change_correlation(a, b, base)     rank correlation of the changes of two fine-tunings
plot_trajectory, plot_shares       pictures of the first two

The correlation and the pictures need the extra ``plot``, which is imported when they are called.
"""

from sparsify.analysis.correlation import ChangeCorrelation, change_correlation
from sparsify.analysis.plots import plot_shares, plot_trajectory
from sparsify.analysis.shares import TensorShare, shares
from sparsify.analysis.trajectory import TrajectoryPoint, trajectory

__all__ = [
    "ChangeCorrelation",
    "TensorShare",
    "TrajectoryPoint",
    "change_correlation",
    "plot_shares",
    "plot_trajectory",
    "shares",
    "trajectory",
]
