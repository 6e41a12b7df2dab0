"""Several ranks train as one process with all their batches would: gloo processes on the CPU, many scenarios a spawn.

The ranks select with either top-k: that of CPUs, and that of devices that the host runs ahead of.
"""

from functools import cache
from unittest.mock import patch

import pytest
import torch
from oracle import unmasked_sets
from rank_models import BUDGET, STEPS, WAYS, assert_like, error_of, mlp, own_part, selecting, words
from rank_models import train as train_parallel
from rank_processes import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sparsify import get_engine, register_importance, sparsify, summary
from sparsify.common.ranks import Ranks, num_ranks
from sparsify.core.importance import D3
from sparsify.integrations.distributed import check_ranks
from sparsify.strategies.importance import SNIP
from sparsify.strategies.strategy import Increment, Repeat, Strategy


def train(rank, model, batches, *, wrap=lambda model: model, ddp=True, micro=1, steps=STEPS, **options):
    model = wrap(model)
    parallel = DistributedDataParallel(model, **options) if ddp and num_ranks() > 1 else model
    result = train_parallel(rank, model, batches, micro=micro, steps=steps, parallel=parallel)
    return {**result, "text": str(summary(model))}


def within_another_model(model):
    """DDP is told of the outer model, whose names of the entries are others, and broadcasts them."""
    outer = nn.ModuleDict({"inner": model})
    outer.forward = lambda **batch: outer["inner"](**batch)
    outer.sparse_values = model.sparse_values
    return outer


away_from_zero = register_importance("away-from-zero")(lambda weight, grad: -weight * grad)


def of(importance, selection=Increment()):  # noqa: B008 - frozen
    return {"strategy": Strategy(importance, selection)}


def few_words_of_many():
    """A table that is looked up in, more rows than the batches have tokens; and one with fewer."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"many": nn.Embedding(300, 4), "few": nn.Embedding(15, 4), "out": nn.Linear(4, 3)}).double()

    def forward(x, labels):
        return nn.functional.cross_entropy(model["out"](torch.tanh(model["many"](x) + model["few"](x % 15))), labels)

    model.forward = forward
    return model, [{"x": torch.randint(300, (8,)), "labels": torch.randint(3, (8,))} for _ in range(STEPS)]


# name -> model and batches, arguments of sparsify(), arguments of train()
RUNS = {
    "exact": (words, {}, {}),
    "in bfloat16": (lambda: words(torch.bfloat16), {}, {}),
    "embeddings": (few_words_of_many, {}, {}),
    "unmasking less than all steps": (words, {"steps": STEPS - 2}, {}),
    "options of DDP": (words, of(SNIP()), {"gradient_as_bucket_view": True, "find_unused_parameters": True}),
    "a static graph": (words, {}, {"static_graph": True}),
    "accumulating": (words, {}, {"micro": 2}),
    "within another model": (words, {}, {"wrap": within_another_model}),
    "an importance that is not monotone": (mlp, of(away_from_zero), {}),
    "repeat": (mlp, {**of(D3(), Repeat()), "budget": 20}, {}),
    "static beside a dense head": (mlp, {"strategy": "pafi", "steps": None, "modules_to_save": ["head"]}, {}),
}
SHORT = "in bfloat16"  # its sums are rounded otherwise in one process


def trained(rank, name):
    make, settings, options = RUNS[name]
    model, batches = make()
    sparsify(model, **{"budget": BUDGET, "strategy": "id3", "steps": STEPS, **settings})
    result = train(rank, model, batches, **options)
    check_ranks(model)
    return result


def no_token_on_one_rank(rank):
    """An embedding that sees only padding, and a layer that gets no row, still take part."""
    model, batches = words()
    sparsify(model, BUDGET, "id3", steps=STEPS, target_modules=["table", "wide"])
    hidden = model.table(own_part(batches[0], rank)["x"] * (1 - rank))
    model.wide(hidden[hidden.abs().sum(-1) > 0]).sum().backward()
    return get_engine(model).unmasked


def skipping(rank, name, forward):
    model, batches = mlp()
    sparsify(model, BUDGET, "id3", steps=STEPS)
    if rank == 1:
        model.get_submodule(name).forward = forward
    return model, error_of(lambda: model(**own_part(batches[0], rank)).backward())


def several_in_one_header(function, *args):
    """What the function returns where tensors share headers, and how many of these there were."""
    with (
        patch("sparsify.selection.distributed.MOST_AT_ONCE", 1 << 26),
        patch.object(Ranks, "headers", autospec=True, side_effect=Ranks.headers) as headers,
    ):
        return function(*args), headers.call_count


def headers_of_a_step(rank):
    """Two ranks exchange one header for the four weights and biases of the step, and one at its end."""
    model, batches = mlp()
    sparsify(model, BUDGET, "id3", steps=STEPS, target_modules=["first", "second"])
    model(**own_part(batches[0], rank)).backward()  # in the first two steps the ranks compare all else, too
    get_engine(model)._compared = {0, 1}
    get_engine(model).optimizer_stepped()
    return several_in_one_header(lambda: model(**own_part(batches[1], rank)).backward())[1]


def a_small_module_on_one_rank_alone(rank):
    with patch("sparsify.selection.joined.LARGEST", 10):  # the norm's and all biases
        model, error = skipping(rank, "norm", lambda x: nn.functional.layer_norm(x, x.shape[1:]))
    return unmasked_sets(model) if error == "no error" else error


def message(rank, *, seed=0, strategy="id3", steps=STEPS, **options):
    model, batches = mlp(seed)
    sparsify(model, BUDGET, strategy, steps=steps)
    return error_of(lambda: train(rank, model, batches, **options))


def message_of_a_check(rank):
    check_ranks(model := sparsify(mlp()[0], BUDGET, "pafi"))
    model.sparse_values.data += rank
    return error_of(check_ranks, model)


def staged(rank):
    from torch.distributed.pipelining import PipelineStage

    model, batches = mlp()
    stage = PipelineStage(nn.Sequential(sparsify(model, BUDGET, "id3", steps=STEPS)), rank, 2, torch.device("cpu"))
    return error_of(lambda: stage.submod[0](**batches[0]))


def joined(rank):
    model, batches = mlp()
    with (parallel := DistributedDataParallel(sparsify(model, BUDGET, "id3", steps=STEPS))).join():
        parallel(**own_part(batches[0], rank)).backward()


# what every rank runs, and what it is told
REFUSED = {
    "a module is skipped": (
        lambda rank: skipping(rank, "second", lambda x: x[:, :8])[1],
        "rank 0 is at `second.", "rank 1 is at `norm.", "has to run the same modules",
    ),
    "a module is skipped among others that share a header": (
        lambda rank: several_in_one_header(skipping, rank, "second", lambda x: x[:, :8])[0][1],
        "rank 0 is at `second.", "rank 1 is at `norm.", "has to run the same modules",
    ),
    "the last module is skipped": (
        lambda rank: skipping(rank, "first", lambda x: x.new_zeros(x.shape[0], 10))[1],
        "rank 0 is at `first.", "rank 1 is at the end",
    ),
    "other weights": (
        lambda rank: message(rank, seed=rank, strategy="pafi"),
        "differ in their unmasked entries", "torch.manual_seed on every rank",
    ),
    "other arguments": (lambda rank: message(rank, steps=STEPS + rank), "differ in their settings", "same arguments"),
    "without DDP": (lambda rank: message(rank, ddp=False), "differ in their flat delta", "DistributedDataParallel"),
    "a known set without DDP": (lambda rank: message(rank, strategy="pafi", ddp=False), "differ in their flat delta"),
    "uneven batches": (lambda rank: error_of(joined, rank), "under join() of", "give every rank as many batches"),
    "a delta that was moved": (message_of_a_check, "differ in their flat delta"),
    "a stage of a pipeline": (staged, "a stage of a pipeline", "cannot choose together", "instead, by fully_shard()"),
}  # fmt: skip
# what every rank runs, with the same result, and whether that is right
OWN = {
    no_token_on_one_rank: lambda found: found == BUDGET // STEPS,
    headers_of_a_step: lambda number: number == 2,
    a_small_module_on_one_rank_alone: lambda found: _size(found) == BUDGET // STEPS,
}


def _size(sets):
    return sum(map(len, sets.values()))


def all_scenarios(rank, way):
    with selecting(way, small=100):
        runs = {name: trained(rank, name) for name in RUNS}
    with selecting(way):
        own = {scenario.__name__: scenario(rank) for scenario in OWN}
        return {**runs, **own, **{name: scenario(rank) for name, (scenario, *_) in REFUSED.items() if way == "cpu"}}


@cache
def two(way):
    return on_ranks(2, all_scenarios, way)


in_each_way = pytest.mark.parametrize("way", WAYS)


@in_each_way
@pytest.mark.parametrize("name", [name for name in RUNS if name != SHORT])
def test_two_ranks_train_like_one_process_with_both_batches(name, way):
    assert_like([result[name] for result in two(way)], trained(0, name))


def test_devices_average_short_gradients_as_cpus_do():
    assert_like([result[SHORT] for result in two("device")], two("cpu")[0][SHORT])


@in_each_way
@pytest.mark.parametrize("scenario", OWN, ids=lambda scenario: scenario.__name__)
def test_ranks_agree_in_a_scenario_of_its_own(scenario, way):
    first, second = [result[scenario.__name__] for result in two(way)]
    assert first == second
    assert OWN[scenario](first), first


def test_only_steps_that_choose_by_gradients_send_anything():
    for result in two("cpu"):
        run = result["unmasking less than all steps"]
        assert all(run["sent"][:-2])
        assert run["sent"][-2:] == [0, 0]
        assert f"{sum(run['sent']):,} bytes" in run["text"]
        assert result["static beside a dense head"]["sent"][2:] == [0] * (STEPS - 2), "after all ranks hold the same"


@pytest.mark.parametrize("name", REFUSED)
def test_ranks_that_part_are_told_so(name):
    _, *texts = REFUSED[name]
    for result in two("cpu"):
        assert all(text in result[name] for text in texts), result[name]
