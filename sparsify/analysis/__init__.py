"""What a sparse fine-tuning did, in numbers and in pictures; afterwards, since nothing is recorded while it trains.

trajectory(model)                  tensor sparsity and selection entropy over the steps       trajectory.py
shares(model_or_delta)             the unmasked share of each tensor, by layer and kind       shares.py
change_correlation(a, b, base)     whether two fine-tunings changed the same entries alike    correlation.py
plot_trajectory, plot_shares       the first two as pictures                                  plots.py

The pictures and the correlation need the extra ``plot``, which is imported only when they are asked for.
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
