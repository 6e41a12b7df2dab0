"""Where the entries of a sparse fine-tuning are, computed afterwards: nothing is recorded during training.

trajectory(model)         tensor sparsity and selection entropy over the steps
shares(model_or_delta)    the unmasked share of each tensor, with its layer and kind

``examples/analysis/`` draws both, and compares the changes of two fine-tunings.
"""

from sparsify.analysis.shares import TensorShare, shares
from sparsify.analysis.trajectory import TrajectoryPoint, trajectory

__all__ = ["TensorShare", "TrajectoryPoint", "shares", "trajectory"]
