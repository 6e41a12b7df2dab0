"""Training on several ranks: a check for debugging."""

from torch import nn

from sparsify.api import get_engine
from sparsify.common.ranks import num_ranks
from sparsify.training.distributed import check_ranks_alike


def check_ranks(model: nn.Module) -> None:
    """Compares settings, weights, unmasked entries, base values and the flat delta of all ranks, for debugging.

    All ranks call it at the same point. It compares digests of the O(budget) tensors, and a sample of every weight. The
    first two training steps do the same automatically; the unmasked entries are compared in every step.

    Args:
        model: a sparsified model, or one that contains it.

    Raises:
        SparsifyError: on all ranks, when they differ; the text names the difference.

    Example:
        >>> import torch, sparsify
        >>> check_ranks(sparsify.sparsify(torch.nn.Linear(4, 4), budget=3, steps=1))  # nothing to compare on one rank
    """
    engine = get_engine(model)
    if num_ranks() > 1:
        check_ranks_alike(engine)
