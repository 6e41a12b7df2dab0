"""Training on several ranks: a check for debugging, and the setting that accelerate's FSDP2 needs."""

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


def keep_whole(model: nn.Module) -> list[nn.Module]:
    """Returns the modules for accelerate's FSDP2 plugin to ignore: one with the flat delta, which must not be sharded.

    With ``fully_shard()`` itself pass ``ignored_params={model.sparse_values}`` instead.

    Args:
        model: a sparsified model.

    Returns:
        For ``FullyShardedDataParallelPlugin(fsdp_version=2, ignored_modules=...)``, or its attribute
        ``ignored_modules`` before ``Accelerator.prepare()``.

    Example:
        >>> import torch, sparsify
        >>> model = sparsify.sparsify(torch.nn.Linear(4, 4), budget=3, steps=1)
        >>> [parameter is model.sparse_values for module in keep_whole(model) for parameter in module.parameters()]
        [True]
    """
    return [nn.ParameterList([get_engine(model).values])]
