"""A model that several ranks train publishes the same versions on each of them, to the bit what a delta takes."""

import copy

import pytest
from deltas import bits
from rank_models import BUDGET, STEPS, mlp, train, words
from rank_processes import on_ranks
from test_fsdp import shard
from torch.nn.parallel import DistributedDataParallel

from sparsify import DeltaPublisher, DeltaSubscriber, SparseDelta, sparsify


def sharded(model):
    return shard(model), None


def replicated(model):
    return model, DistributedDataParallel(model)


CASES = {
    "sharded": (sharded, words, {}),
    "sharded, with a head": (sharded, mlp, {"modules_to_save": ["head"]}),
    "replicated": (replicated, words, {}),
}


@pytest.fixture(scope="module")
def ranks():
    """What both ranks found, by case; starting the processes takes most of the time."""
    return on_ranks(2, all_followed)


def all_followed(rank):
    return {name: followed(rank, *case) for name, case in CASES.items()}


def followed(rank, wrap, make, options):
    """The bits of a follower after each step, and whether they are those that a delta of the model makes."""
    model, batches = make()
    base = copy.deepcopy(model)
    model, parallel = wrap(sparsify(model, BUDGET, steps=STEPS, **options))
    publisher, follower = DeltaPublisher(parallel or model), DeltaSubscriber(copy.deepcopy(base))
    follower.apply(bytes(publisher.snapshot()))
    found, right = [], []
    for batch in batches:
        train(rank, model, [batch], steps=1, parallel=parallel)
        follower.apply(bytes(publisher.update()))
        found.append(bits(follower.model))
        right.append(found[-1] == bits(SparseDelta.from_model(model).apply(copy.deepcopy(base))))
    return found, all(right)


@pytest.mark.parametrize("case", CASES)
def test_ranks_publish_the_same_versions(ranks, case):
    (one, one_is_right), (other, other_is_right) = (found[case] for found in ranks)
    assert one_is_right
    assert other_is_right
    assert one == other
    assert len({str(found) for found in one}) == STEPS
