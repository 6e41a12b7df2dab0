"""Training on several ranks: a check that all of them hold the same."""

from __future__ import annotations

from torch import nn

from sparsify.api import get_unmasker
from sparsify.common.ranks import num_ranks
from sparsify.training.rank_checks import check_ranks_alike


def check_ranks(model: nn.Module) -> None:
    """Compares settings, weights, unmasked entries, base values and the flat delta of all ranks; to debug with.

    To be called on all ranks at the same point; digests of what has B entries, and a sample of every weight. It is done
    of its own accord in the first two steps; that all ranks choose the same entries is checked in every one.

    Args:
        model: a sparsified model, or one that holds it.

    Raises:
        SparsifyError: on all ranks, when they differ; says in what.

    Example:
        >>> import torch, sparsify
        >>> check_ranks(sparsify.sparsify(torch.nn.Linear(4, 4), budget=3, steps=1))  # a single rank is like itself
    """
    engine = get_unmasker(model)
    if num_ranks() > 1:
        check_ranks_alike(engine)


def keep_whole(model: nn.Module) -> list[nn.Module]:
    """What accelerate's FSDP2 plugin is to leave alone: the flat delta, which is to stay whole on every rank.

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
    return [nn.ParameterList([get_unmasker(model).values])]
