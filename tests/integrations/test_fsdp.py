"""FSDP2 (``fully_shard``) trains as one process with all batches would: gloo processes, many checks a spawn."""

import copy
import re

import pytest
import torch
from deltas import bits
from oracle import unmasked_sets
from rank_models import (
    BUDGET,
    STEPS,
    assert_like,
    error_of,
    mean_over_ranks,
    mlp,
    own_part,
    selecting,
    shard,
    train,
    words,
)
from rank_processes import on_ranks
from torch.distributed import checkpoint as checkpoints
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from sparsify import DeltaPublisher, DeltaSubscriber, SparseDelta, base_weights, desparsify, sparsify
from sparsify.api import get_engine, summary
from sparsify.common.ranks import num_ranks
from sparsify.integrations.distributed import check_ranks

# name -> model and batches, arguments of sparsify()
LIKE_ONE_PROCESS = {
    "tied and twice used": (words, {}),
    "selecting as on a device": (words, {}),
    "rows that do not divide": (mlp, {}),
    "static beside a dense head": (mlp, {"strategy": "pafi", "steps": None, "modules_to_save": ["head"]}),
    "accumulating": (words, {}),
    "checkpointed": (words, {}),
    "hybrid": (words, {}),
    "hybrid, rows that do not divide": (mlp, {"modules_to_save": ["head"]}),
}


def hybrid_mesh():
    """Two copies, each sharded over half of the ranks."""
    return init_device_mesh("cpu", (2, num_ranks() // 2), mesh_dim_names=("replicate", "shard"))


def trained(rank, name):
    make, settings = LIKE_ONE_PROCESS[name]
    with selecting("device" if "device" in name else "cpu", small=100):
        model, batches = make()
        mesh = {"mesh": hybrid_mesh()} if "hybrid" in name and num_ranks() > 1 else {}
        shard(sparsify(model, **{"budget": BUDGET, "strategy": "id3", "steps": STEPS, **settings}), **mesh)
        if name == "checkpointed":
            wide = model.wide.forward
            model.wide.forward = lambda hidden: checkpoint(wide, hidden, use_reentrant=False)
        result = train(rank, model, batches, micro=2 if name == "accumulating" else 1)
    if "head" in settings.get("modules_to_save", ()):
        delta = SparseDelta.from_model(model)
        result |= {"head": delta.whole["head.weight"], "entries": delta.num_entries}
    return result


def whole_weights(model):
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return {name: value.clone() for name, value in state.items()}


def rounded_in_forward(rank):
    """bfloat16 in forward and backward, the weights and the delta in float32 all along."""
    model, batches = words(torch.float32)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    sparsify(model, BUDGET, "id3", steps=STEPS)
    shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    result = train(rank, model, batches)
    with torch.no_grad():
        model(**own_part(batches[0], rank))  # leaves the root's weights gathered, in bfloat16
    after, engine = whole_weights(model), get_engine(model)
    exact = all(
        torch.equal(after[tensor.name].take(tensor.indices), tensor.base + tensor.delta)
        and torch.equal(before[tensor.name].take(tensor.indices), tensor.base)
        for tensor in engine.tensors
    )
    return exact, engine.values.dtype, engine.values.grad.dtype, result["sets"], engine.unmasked


def written_behind_its_back(rank):
    """An evaluation leaves the root's weights gathered; what is written then has to reach the next forward."""
    model, batches = words()
    shard(sparsify(model, BUDGET, "id3", steps=STEPS))
    train(rank, model, batches, steps=2)
    plain, _ = words()
    with torch.no_grad():
        trained = model(**batches[0])
        with base_weights(model):
            base = model(**batches[0])
        again = model(**batches[0])
        engine = get_engine(model)
        engine.values.data.zero_()
        through_forward = model(**batches[0])
        engine.values.data.fill_(0.1)
        engine.refresh()
        synced = model(**batches[0])
        expected = plain(**batches[0])
    same = torch.equal(trained, again), torch.equal(base, expected), torch.equal(through_forward, expected)
    return same, torch.equal(synced, expected)


def state(rank, **options):
    """A full state dict goes into one process and back onto shards; the delta too."""
    model, batches = words()
    shard(sparsify(model, BUDGET, "id3", steps=STEPS), **options)
    train(rank, model, batches, steps=3)
    check_ranks(model)
    verified = summary(model, verify=True).verification.ok
    full = whole_weights(model)
    delta = SparseDelta.from_model(model)
    alone, _ = words()
    sparsify(alone, BUDGET, "id3", steps=STEPS).load_state_dict(full)
    base, _ = words()
    delta.apply(base)
    applied = all(torch.equal(parameter, full[name]) for name, parameter in base.named_parameters())
    applied &= delta.config["architecture"] == type(base).__name__
    other, _ = words()
    shard(sparsify(other, BUDGET, "id3", steps=STEPS), **options)
    set_model_state_dict(other, full, options=StateDictOptions(full_state_dict=True))
    resumed = train(rank, other, batches[3:], steps=3)
    return verified, applied, unmasked_sets(alone) == unmasked_sets(model), resumed


# name -> model and batches, arguments of sparsify()
FOLLOWED = {"sharded": (words, {}), "with a head": (mlp, {"modules_to_save": ["head"]}), "replicated": (words, {})}


def followed(rank):
    """By case: a follower's bits after each step, and whether a delta of the model makes the same."""
    found = {name: [] for name in FOLLOWED}
    for name, (make, settings) in FOLLOWED.items():
        model, batches = make()
        base = copy.deepcopy(model)
        sparsify(model, **{"budget": BUDGET, "strategy": "id3", "steps": STEPS, **settings})
        parallel = DistributedDataParallel(model) if name == "replicated" else shard(model)
        publisher, follower = DeltaPublisher(parallel), DeltaSubscriber(copy.deepcopy(base))
        follower.apply(bytes(publisher.snapshot()))
        for batch in batches:
            train(rank, model, [batch], steps=1, parallel=parallel)
            follower.apply(bytes(publisher.update()))
            expected = SparseDelta.from_model(model).apply(copy.deepcopy(base))
            found[name].append((bits(follower.model), bits(follower.model) == bits(expected)))
    return found


def refused(rank):
    """The errors of what cannot work, by what each has to say."""

    def sparse():
        return sparsify(mlp()[0], BUDGET, "id3", steps=STEPS)

    def trains(model):
        return error_of(train, rank, model, mlp()[1])

    blocks_only = sparse()
    fully_shard(blocks_only.second)
    by_fsdp1 = error_of(FullyShardedDataParallel, sparse(), device_id=torch.device("cpu"), use_orig_params=True)
    return {
        r"ignored_params=\{model.sparse_values\}": trains(fully_shard(sparse())),
        r"over the last dimension of a mesh of all ranks": trains(shard(sparse(), mesh=hybrid_mesh()["shard"])),
        r"`second(.weight)?` is sharded, but not the model that was sparsified": trains(blocks_only),
        r"is sharded; call sparsify\(\) on the plain model": error_of(sparsify, fully_shard(mlp()[0]), BUDGET),
        r"cannot be turned back; apply its SparseDelta": error_of(desparsify, shard(sparse())),
        r"FullyShardedDataParallel \(FSDP1\)": by_fsdp1,
    }


def one_block_alone(rank):
    """Only one block is sharded, whose bias cannot be in a node with those of the others."""
    model, batches = words()
    sparsify(model, BUDGET, "id3", steps=STEPS)
    fully_shard(model.wide, mesh=init_device_mesh("cpu", (1,)))
    model(**batches[0]).backward()
    return get_engine(model).unmasked


OWN = [rounded_in_forward, written_behind_its_back, state, followed, refused]


def all_scenarios(rank):
    own = {scenario.__name__: scenario(rank) for scenario in OWN}
    return own | {name: trained(rank, name) for name in LIKE_ONE_PROCESS}


@pytest.fixture(scope="module")
def two():
    """The result of every scenario on each of two ranks."""
    return on_ranks(2, all_scenarios)


def on_each(results, scenario):
    return [result[scenario.__name__] for result in results]


@pytest.mark.parametrize("name", LIKE_ONE_PROCESS)
def test_two_shards_train_like_one_process_with_both_batches(two, name):
    assert_like([result[name] for result in two], trained(0, name))


def test_a_mixed_precision_policy_rounds_neither_the_delta_nor_the_base(two):
    first, second = on_each(two, rounded_in_forward)
    assert first == second
    exact, dtype, grad_dtype, _, unmasked = first
    assert exact
    assert (dtype, grad_dtype, unmasked) == (torch.float32, torch.float32, BUDGET)


def test_what_is_written_after_an_evaluation_reaches_the_next_forward(two):
    assert on_each(two, written_behind_its_back) == [((True, True, True), False)] * 2


def test_states_and_deltas_leave_the_shards_and_come_back(two):
    uninterrupted = two[0]["tied and twice used"]
    for verified, applied, same, resumed in on_each(two, state):
        assert verified
        assert applied
        assert same
        assert resumed["sets"].keys() == uninterrupted["sets"].keys()
        assert sum(map(len, resumed["sets"].values())) == BUDGET


@pytest.mark.parametrize("name", FOLLOWED)
def test_ranks_publish_the_same_versions_to_the_bit_what_a_delta_takes(two, name):
    first, second = (found[name] for found in on_each(two, followed))
    assert first == second
    assert all(is_right for _, is_right in first)
    assert len({str(held) for held, _ in first}) == STEPS


def steps_from_checkpoint(rank, folder, first, last):
    """Trains from a checkpoint, if it is not the first step, and leaves one on the way to the last step."""
    model, batches = words()
    model = shard(sparsify(model, BUDGET, "id3", steps=STEPS))
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-2)
    saving, losses, held = None, [], None
    for step in range(first, STEPS):
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        if step == first != 0:
            checkpoints.load(state, checkpoint_id=folder)
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        elif step == last:
            group = torch.distributed.new_group(backend="gloo")  # the thread that saves needs one of its own
            saving = checkpoints.async_save(state, checkpoint_id=folder, process_group=group)
        if step in (first, last):  # what is saved, or was loaded
            held = get_engine(model).entries.ids.clone(), get_engine(model).values.detach().clone()
        optimizer.zero_grad()
        loss = model(**own_part(batches[step], rank))
        loss.backward()
        losses.append(mean_over_ranks(loss))
        optimizer.step()
    if saving is not None:
        saving.result()
    delta = get_engine(model).values.detach().clone()
    return {"losses": losses, "sets": unmasked_sets(model), "delta": delta, "held": held}


def hybrids(rank):
    return {name: trained(rank, name) for name in LIKE_ONE_PROCESS if "hybrid" in name}


@pytest.mark.slow
def test_two_copies_of_two_shards_train_like_one_process_with_all_batches():
    results = on_ranks(4, hybrids)
    for name in results[0]:
        assert_like([result[name] for result in results], trained(0, name))


def test_a_block_may_be_sharded_alone():
    assert on_ranks(1, one_block_alone) == [-(-BUDGET // STEPS)]


@pytest.mark.slow
def test_a_distributed_checkpoint_of_four_ranks_is_saved_in_passing_and_goes_on_on_two_and_one(tmp_path):
    alone = steps_from_checkpoint(0, None, 0, STEPS)
    four = on_ranks(4, steps_from_checkpoint, tmp_path, 0, 3)
    assert_like(four, alone)
    rest, again = {**alone, "losses": alone["losses"][3:]}, on_ranks(4, steps_from_checkpoint, tmp_path, 3, STEPS)
    others = on_ranks(2, steps_from_checkpoint, tmp_path, 3, STEPS)
    others.append(steps_from_checkpoint(0, tmp_path, 3, STEPS))
    for result in again + others:  # each begins with the same bits
        torch.testing.assert_close(result["held"], four[0]["held"], rtol=0, atol=0)
    assert_like(others, rest)  # whose sums are rounded otherwise
    for result in again:
        assert (result["losses"], result["sets"]) == (four[0]["losses"][3:], four[0]["sets"])
        assert result["delta"].equal(four[0]["delta"])


def test_what_cannot_work_is_refused_by_name(two):
    for messages in on_each(two, refused):
        for text, message in messages.items():
            assert re.search(text, message), message
