"""An engine's memory, found by asking its loader, as the base of deltas: fused, padded and sharded weights."""

import copy

import pytest
import torch
from checkpoints import make_delta, save, tuned
from engines import Engine, llama, start
from models import train

from sparsify import DeltaPublisher, DeltaSubscriber, DeltaSwitch, SparseDelta, sparsify
from sparsify.delta.served import LoaderCopy, ServedModel
from sparsify.errors import BaseMismatchError, SparsifyError


def test_what_is_applied_is_what_would_have_been_loaded_and_revert_is_exact(tmp_path):
    engine, served = start(tmp_path)
    before, delta = engine.bits(), make_delta(llama())
    assert delta.tensors.keys() == llama().state_dict().keys(), "biases, norms, the table and the head too"
    with delta.applied(served):
        assert engine.holds(delta.apply(llama()))
    assert engine.holds(before)
    models, switch = [tuned(llama(), seed=seed) for seed in (2, 3)], DeltaSwitch(served)
    for number, model in enumerate(models):
        delta = SparseDelta.diff(llama(), model, progress=False)
        del delta.tensors["lm_head.weight"]
        delta.whole["lm_head.weight"] = model.lm_head.weight.detach()
        switch.attach(str(number), delta)
    for number in (0, 1, 0):
        switch.activate(str(number))
        assert engine.holds(models[number])
    switch.deactivate()
    assert engine.holds(before)


@pytest.mark.parametrize(("ranks", "dtype"), [(1, torch.float32), (2, torch.bfloat16)])
def test_each_rank_follows_a_training_in_the_dtype_that_it_computes_in(tmp_path, ranks, dtype):
    engines = [start(tmp_path, rank, ranks, dtype) for rank in range(ranks)]
    followers = [DeltaSubscriber(served) for _, served in engines]
    model = sparsify(llama(), 90, "id3", steps=4, modules_to_save=["o_proj"])
    publisher = DeltaPublisher(model)
    updates = [publisher.snapshot()]
    for _ in range(4):
        tokens = torch.randint(3, 30, (2, 6))
        train(model, [{"input_ids": tokens, "labels": tokens}], lr=0.1)
        updates.append(publisher.update())
    for update in (updates[0], updates[1], updates[3].snapshot(), updates[4]):
        for (_, served), follower in zip(engines, followers, strict=True):
            served.found.clear()
            follower.apply(update)
        masks = zip(*(served.found for _, served in engines), strict=True)
        assert all(torch.stack(each).any(0).all() for each in masks), "each entry is on one rank at least"
    assert all(engine.holds(SparseDelta.from_model(model).apply(llama())) for engine, _ in engines)


@pytest.mark.parametrize(
    ("transform", "problem"),
    [
        (lambda weight: weight * 2, r"more to `lm_head.weight` than to move its values: aten.mul.Tensor"),
        (lambda weight: weight[weight.max() > 0 :], "aten.max.default, which changes values or looks"),
        (lambda weight: weight[:1].expand(weight.shape), "a copy of single entries to several places"),
        (lambda weight: torch.zeros(weight.shape).copy_(weight), "a copy to other memory than the model's"),
        (lambda weight: weight.view(7, -1), "loader fails after `.*` .RuntimeError: shape"),
        (lambda weight: weight.t().contiguous().t().bfloat16() if weight.dim() == 2 else weight.clone(), None),
    ],
)
def test_loaders_may_move_values_and_what_else_they_do_is_named(tmp_path, transform, problem):
    (engine, served), delta = start(tmp_path), make_delta(llama())
    engine.transform, before = transform, engine.bits()
    if problem is None:
        delta.apply(served)
        assert engine.holds(delta.apply(llama()))
        return
    with pytest.raises(BaseMismatchError, match=problem):
        delta.apply(served)
    assert engine.holds(before)


def test_wrong_values_or_places_are_errors_before_anything_is_written(tmp_path):
    (engine, served), delta = start(tmp_path), make_delta(llama())
    engine.own["1down_proj_weight"].data += 1  # it was repacked after loading, say
    before = engine.bits()
    with pytest.raises(BaseMismatchError, match=r"`model.layers.1.mlp.down_proj.weight` does not hold the values that"):
        delta.apply(served)
    engine.own["1down_proj_weight"] = engine.own["1down_proj_weight"].clone()
    with pytest.raises(SparsifyError, match=r"the engine has moved `model.layers.1.mlp.down_proj.weight` to other mem"):
        delta.apply(served)
    assert engine.holds(before)
    engine, served = start(tmp_path)
    engine.load_weights = lambda pairs: Engine.load_weights(engine, [pair for pair in pairs if "norm" not in pair[0]])
    with pytest.raises(BaseMismatchError, match=r"no place for \d+ of \d+ entries of `model.layers.0.input_layernorm"):
        delta.apply(served)
    engine, served = start(tmp_path)
    engine.load_weights = lambda weights: torch.add(torch.ones(16), 1, out=engine.own.norm_weight.data)
    with pytest.raises(BaseMismatchError, match=r"than to move its values: aten.add.out on its own `own.norm_weight`"):
        delta.apply(served)
    assert engine.holds(llama())


def test_tied_heads_are_one_tensor(tmp_path):
    tied = llama(tie_word_embeddings=True)
    engine, change = Engine(tied.state_dict()), make_delta(tied)
    engine.own.lm_head_weight.data = engine.own.embed_tokens_weight.data
    served = ServedModel(engine, str(save(tied, tmp_path)), torch.float32)
    with change.applied(served):
        assert engine.own.lm_head_weight[:37].equal(change.apply(copy.deepcopy(tied)).lm_head.weight)
    change.tensors["lm_head.weight"] = change.tensors["model.embed_tokens.weight"]
    with pytest.raises(BaseMismatchError, match=r"are one tensor in the checkpoint \(`model.embed_tokens.weight`\)"):
        change.apply(served)


@pytest.mark.parametrize("seed", range(20))
def test_recorded_copies_find_the_entries_of_any_view(seed):
    torch.manual_seed(seed)
    source, memory = torch.arange(120).view(6, 20), torch.zeros(200, dtype=torch.int64)
    view, order = source.view(2, 3, 4, 5).permute(*torch.randperm(4).tolist()), torch.randperm(4).tolist()
    for dim in range(4):
        view = view.narrow(dim, 0, int(torch.randint(1, view.shape[dim] + 1, ())))
    target = memory[8 : 8 + view.numel()].view([view.shape[dim] for dim in order])
    target = target.permute(*torch.tensor(order).argsort())
    copy, indices = LoaderCopy.of(target, view), torch.randperm(120)[:50].sort().values
    numbers, positions = copy.locate(indices)
    target.copy_(view)
    assert memory[positions].equal(indices[numbers])
    assert len(positions) == int(torch.isin(indices, view.reshape(-1)).sum())
