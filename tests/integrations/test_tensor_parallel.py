"""Tensor-parallel models train as one process does, alone and in copies: gloo processes, many runs a spawn."""

import copy
import os
import re
import tempfile
from functools import partial
from unittest.mock import patch

import pytest
import torch
from architectures import ARCHITECTURES
from models import llama, next_tokens
from oracle import unmasked_sets
from rank_models import STEPS, assert_like, error_of, mlp, selecting, shard, train, words
from rank_processes import on_ranks
from safetensors.torch import save_model
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from sparsify import SparseDelta, base_weights, desparsify, sparsify, summary, trained_state
from sparsify.common.ranks import num_ranks
from sparsify.core.importance import D3
from sparsify.integrations.distributed import check_ranks
from sparsify.strategies.importance import Magnitude
from sparsify.strategies.strategy import Increment, Prune, Repeat, Static, Strategy

BUDGET = 150  # enough for entries in all kinds of tensors
SHARED = {"output_layouts": Replicate()}
WORDS = {
    "table": RowwiseParallel(input_layouts=Replicate()),
    "wide": ColwiseParallel(),
    "narrow": RowwiseParallel(),
    "again": ColwiseParallel(**SHARED),
    "out": ColwiseParallel(**SHARED),
}
MLP = {  # 3 rows on two ranks, and a norm that sees half of the examples
    "first": ColwiseParallel(output_layouts=Shard(0)),
    "norm": SequenceParallel(sequence_dim=0),
    "second": ColwiseParallel(input_layouts=Shard(0), **SHARED),
    "head": ColwiseParallel(**SHARED),
}
LLAMA = {
    "model.embed_tokens": ColwiseParallel(**SHARED),
    **{f"model.layers.*.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
    "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    **{f"model.layers.*.mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
    "model.layers.*.mlp.down_proj": RowwiseParallel(),
    "lm_head": ColwiseParallel(**SHARED),
}


def tiny_llama():
    torch.manual_seed(0)
    model, batch = llama(num_key_value_heads=2)
    return model.double(), [batch() for _ in range(STEPS)]


def loaded(name="qwen3", **settings):
    """Qwen3, whose norms within heads see those of one rank, or another model, as transformers loads it."""
    import transformers

    torch.manual_seed(0)
    model, config, sizes, _ = ARCHITECTURES[name]
    config = getattr(transformers, config)(**{**sizes, "vocab_size": 40, "num_key_value_heads": 2})
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        save_model(getattr(transformers, model)(config), f"{folder}/model.safetensors", metadata={"format": "pt"})
        options = {"dtype": torch.float64, "distributed_config": settings or None}
        options["experts_implementation"] = config._experts_implementation  # which the file has not
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
    return model, [next_tokens() for _ in range(STEPS)]


mixture = partial(loaded, "mixtral")


def one_sided(**settings):
    """A mixture whose batches, of one token again and again, go to two experts: where a rank has these, others idle."""
    model, _ = mixture(**settings)
    with torch.no_grad():
        for gate in (layer.mlp.gate.weight for layer in model.model.layers):
            gate.copy_(gate[:1] * torch.tensor([[1.0], [1.5], [-1.0], [-1.5]]))
    model.enable_input_require_grads()  # else each rank of transformers communicates in its own way, and waits
    tokens = [{key: torch.full_like(own, 3 + step) for key, own in next_tokens().items()} for step in range(STEPS)]
    return model, tokens


AUTO = {"tp_size": 2, "tp_plan": "auto"}  # of transformers' DistributedConfig
SOME = {"target_modules": ["experts"]}  # not the table: what the first of them read has no gradient

# name -> model and batches, plan, arguments of sparsify()
LIKE_ONE_PROCESS = {
    "tied and twice used": (words, WORDS, {}),
    "selecting as on a device": (words, WORDS, {}),
    "accumulating": (words, WORDS, {}),
    "checkpointed": (words, WORDS, {}),
    "by magnitude": (words, WORDS, {"strategy": Strategy(Magnitude(), Increment())}),
    "repeat": (words, WORDS, {"strategy": Strategy(D3(), Repeat()), "budget": 60}),
    "calibrated by examples": (words, WORDS, {"strategy": "fish", "steps": None}),
    "calibrated": (mlp, MLP, {"strategy": Strategy(D3(), Static()), "steps": None}),
    "rows that do not divide": (mlp, MLP, {}),
    "static beside a dense head": (mlp, MLP, {"strategy": "pafi", "steps": None, "modules_to_save": ["head"]}),
    "llama": (tiny_llama, LLAMA, {"trainable_token_indices": [3, 30]}),
    "loaded by its plan": (loaded, AUTO, {}),
    "norms within heads": (loaded, AUTO, {"target_modules": ["q_norm", "k_norm"], "budget": 32}),
    "experts in parts on all ranks": (mixture, AUTO, SOME),
    "experts on one rank each": (mixture, {**AUTO, "ep_size": 2}, SOME),
    "experts on a rank that gets no tokens": (one_sided, {**AUTO, "ep_size": 2}, SOME),
}


def meshed():
    return init_device_mesh("cpu", (num_ranks() // 2, 2), mesh_dim_names=("copies", "parallel"))


def made(name, **more):
    make, plan, settings = LIKE_ONE_PROCESS[name]
    is_loaded = "tp_size" in plan
    model, batches = make(**plan) if is_loaded and num_ranks() > 1 else make()
    if num_ranks() > 1 and not is_loaded:
        parallelize_module(model, meshed()["parallel"], plan)
        if make is words:
            model.out.weight = model.table.weight
    if "calibrated" in name:
        settings = {**settings, "calibration": batches[:2], "loss_fn": lambda model, batch: model(**batch)}
    return sparsify(model, **{"budget": BUDGET, "strategy": "id3", "steps": STEPS, **settings, **more}), batches


def trained(rank, name, wrap=lambda model: model):
    with selecting("device" if "device" in name else "cpu", small=100):
        model, batches = made(name)
        if name == "checkpointed":
            wide = model.wide.forward
            model.wide.forward = lambda hidden: checkpoint(wide, hidden, use_reentrant=False)
        micro, parts = 2 if name == "accumulating" else 1, max(1, num_ranks() // 2)
        result = train(rank // 2, model, batches, parallel=wrap(model), micro=micro, parts=parts)
    check_ranks(model)
    assert summary(model, verify=True).verification.ok
    delta = SparseDelta.from_model(model)
    result |= {"entries": {name: (own.indices, own.values) for name, own in delta.tensors.items()}}
    return result | {"whole": delta.whole, "gradient": model.sparse_values.grad}


def state(rank):
    """What is saved in the middle goes on, on parallel ranks; delta and weights are those of a plain model."""
    model, batches = made("tied and twice used")
    train(0, model, batches, steps=3, parts=1)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    found = {"small": trained_state(model), "full": {name: value.clone() for name, value in full.items()}}
    applied = SparseDelta.from_model(model).apply(words()[0]).named_parameters()
    same = [torch.equal(parameter, found["full"][name]) for name, parameter in applied]
    options = StateDictOptions(full_state_dict=True, strict=False)
    for name in ("small", "full"):
        other, _ = made("tied and twice used")
        set_model_state_dict(other, dict(found[name]), options=options)
        found[f"{name}, resumed"] = train(0, other, batches[3:], steps=3, parts=1)
    with torch.no_grad():
        now, base = model(**batches[0]), words()[0](**batches[0])
        with base_weights(model):
            same.append(torch.allclose(model(**batches[0]), base))
        same += [torch.equal(each(**batches[0]), now) for each in (model, copy.deepcopy(model))]
        same.append(torch.equal(desparsify(model)(**batches[0]), now))
    return found | {"same": same}


def refused(rank):
    """The errors of what cannot work, by what each has to say."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    mesh, compiled, pruned = meshed()["parallel"], mlp()[0], mlp()[0]
    late, placed, style, pieces, old = sparsify(mlp()[0], BUDGET, "id3", steps=STEPS), *[mlp()[0] for _ in range(4)]
    for model in (late, compiled, pruned):
        parallelize_module(model, mesh, MLP)
    other = init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "parallel"))
    placed.first.weight = nn.Parameter(distribute_tensor(placed.first.weight, other, [Replicate(), Shard(0)]))
    apply_tensor_parallelism(style, mesh, {"first.weight": "colwise", "first": "packed_colwise"})
    apply_tensor_parallelism(pieces, mesh, {"first.weight": "packed_colwise"})
    old._tp_size = 2
    with patch("sparsify.masked.tensor.PARTIAL", None):
        heads = error_of(train, 0, *made("norms within heads"))
    too_late = error_of(train, 0, late, mlp()[1])
    wrapped = error_of(train, 0, torch.compile(sparsify(compiled, BUDGET, "id3", steps=STEPS)), mlp()[1])
    prune = error_of(sparsify, pruned, 9, Strategy(Magnitude(largest=True), Prune(pretrained=True)))
    calibrated = error_of(lambda: made("norms within heads", strategy="fish", calibration=[next_tokens()]))
    placed, style, pieces, old = (error_of(sparsify, model, BUDGET) for model in (placed, style, pieces, old))
    return {
        "[kq]_norm.weight` is whole on each .* parallelize what sees a rank's tokens or heads alone": heads,
        r"is sharded, but not the model .* parallelize_module\(\) belongs before sparsify\(\)": too_late,
        "trains without torch.compile": wrapped,
        "`first.weight` is tensor-parallel and cannot be pruned": prune,
        "q_norm.weight` is tensor-parallel and has no dense gradient to calibrate by": calibrated,
        r"`first.weight` is sharded; call sparsify\(\) on the plain model": placed,
        "`first.weight` cannot be masked: .* by transformers' PackedColwiseParallel, which computes past": style,
        "`first.weight` cannot be masked: .* parts that are no block of it": pieces,
        "in plain tensors, as earlier versions of transformers load it": old,
    }


def all_scenarios(rank):
    return {"state": state(rank), "refused": refused(rank)} | {name: trained(rank, name) for name in LIKE_ONE_PROCESS}


@pytest.fixture(scope="module")
def two():
    return on_ranks(2, all_scenarios)


@pytest.mark.parametrize("name", LIKE_ONE_PROCESS)
def test_two_parallel_ranks_train_like_one_process(two, name):
    assert_like([result[name] for result in two], trained(0, name))
    if "experts" in name:
        assert len(experts := [own for tensor, own in two[0][name]["sets"].items() if "experts" in tensor]) == 4
        assert all(experts)


def test_states_and_deltas_leave_the_ranks_and_come_back(two):
    alone, batches = made("tied and twice used")
    train(0, alone, batches, steps=3, parts=1)
    for name in ("small", "full"):
        other, _ = made("tied and twice used")
        other.load_state_dict(two[0]["state"][name], strict=name == "full")
        resumed = train(0, other, batches[3:], steps=3, parts=1)
        assert_like([result["state"][f"{name}, resumed"] for result in two], resumed)
        torch.testing.assert_close(two[0]["state"]["full"], dict(alone.state_dict()), check_dtype=False)
    assert all(all(result["state"]["same"]) for result in two)


def test_what_cannot_work_is_refused_by_name(two):
    for result in two:
        for text, message in result["refused"].items():
            assert re.search(text, message), message


def copies(rank):
    def wrap(model):
        return shard(model, mesh=meshed()["copies"])

    return {name: trained(rank, name, wrap) for name in ("llama", "static beside a dense head")}


@pytest.mark.slow
def test_two_copies_of_two_parallel_ranks_train_like_one_process_with_both_batches():
    results = on_ranks(4, copies)
    for name in results[0]:
        assert_like([result[name] for result in results], trained(0, name))


def by_the_trainer(folder, **settings):
    from trainers import make_trainer

    model, batches = loaded(**settings)
    rows = [{name: values[row] for name, values in batch.items()} for batch in batches for row in range(4)]
    with patch("accelerate.ParallelismConfig._validate_accelerator", lambda *_: None):  # which wants a GPU
        trainer = make_trainer(sparsify(model, BUDGET, "id3"), folder, rows, max_steps=STEPS, save_only_model=True)
    trainer.train()
    return unmasked_sets(model), model.sparse_values.detach()


def under_torchrun(rank, folder):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", ACCELERATE_USE_CPU="true")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29512")
    return by_the_trainer(folder, tp_size=2, tp_plan="auto")


@pytest.mark.slow
def test_the_trainer_trains_a_parallel_model_as_a_whole_one(tmp_path):
    sets, delta = by_the_trainer(tmp_path / "alone")
    for own_sets, own_delta in on_ranks(2, under_torchrun, tmp_path):
        assert own_sets == sets
        torch.testing.assert_close(own_delta, delta)
