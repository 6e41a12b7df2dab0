"""An engine's memory, found by asking its loader, as the base of deltas: fused, padded and sharded weights."""

import copy

import pytest
import torch
from checkpoints import make_delta, save, tuned
from engines import Engine, llama, same, start, weights

from sparsify import DeltaPublisher, DeltaSubscriber, DeltaSwitch, SparseDelta, sparsify
from sparsify.delta.served import ServedModel, Window
from sparsify.errors import BaseMismatchError, SparsifyError


def test_what_is_applied_is_what_would_have_been_loaded_and_revert_is_exact(tmp_path):
    engine, served = start(tmp_path)
    base, before = llama(), weights(engine)
    delta = make_delta(base)
    assert len(delta.tensors) == len(base.state_dict()), "biases, norms, the table and the head too"
    delta.apply(served)
    assert same(engine, delta.apply(copy.deepcopy(base)))
    assert not engine.embed[37:].any(), "padding"
    delta.revert(served)
    assert all(tensor.equal(before[name]) for name, tensor in engine.named_parameters())


def test_heads_stored_whole_and_several_deltas_by_name(tmp_path):
    engine, served = start(tmp_path)
    base, switch = llama(), DeltaSwitch(served)
    models = {"a": tuned(base, seed=2), "b": tuned(base, seed=3)}
    for name, model in models.items():
        delta = SparseDelta.diff(base, model, progress=False)
        del delta.tensors["lm_head.weight"]
        delta.whole["lm_head.weight"] = model.lm_head.weight.detach()
        switch.attach(name, delta)
    for name in ("a", "b", "a"):
        switch.activate(name)
        assert same(engine, models[name])
    switch.deactivate()
    assert same(engine, base)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_rank_follows_a_training_in_the_dtype_that_it_computes_in(tmp_path, ranks, dtype):
    engines = [start(tmp_path, rank, ranks, dtype=dtype) for rank in range(ranks)]
    followers = [DeltaSubscriber(served) for _, served in engines]
    model = sparsify(llama(), 90, steps=4, modules_to_save=["o_proj"])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    publisher = DeltaPublisher(model)
    updates = [bytes(publisher.snapshot())]
    for _ in range(4):
        tokens = torch.randint(3, 30, (2, 6))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        updates += [bytes(publisher.update()), bytes(publisher.snapshot())]
    for update in (updates[0], updates[1], updates[6], updates[7]):  # a snapshot over a version, too
        for (_, served), follower in zip(engines, followers, strict=True):
            served.found.clear()
            follower.apply(update)
            assert ranks == 2 or all(mask.all() for mask in served.found)
        masks = zip(*(served.found for _, served in engines), strict=True)
        assert all(torch.stack(each).any(0).all() for each in masks), "each entry is on one rank at least"
    expected = SparseDelta.from_model(model).apply(llama())
    assert all(same(engine, expected) for engine, _ in engines)


@pytest.mark.parametrize(
    ("transform", "problem"),
    [
        (lambda name, weight: weight * 2, r"more to `lm_head.weight` than to move its values: aten.mul.Tensor"),
        (lambda name, weight: weight if weight.max() else weight, "aten.max.default, which changes values or looks"),
        (lambda name, weight: weight[:1].expand(weight.shape), "a copy of single entries to several places"),
        (lambda name, weight: torch.zeros(weight.shape).copy_(weight), "a copy to other memory than the model's"),
        (lambda name, weight: weight.view(7, -1), "does not load `.*` once more .RuntimeError: shape"),
    ],
)
def test_a_loader_that_does_more_than_move_values_is_refused_by_name(tmp_path, transform, problem):
    engine, served = start(tmp_path)
    engine.transform, before = transform, weights(engine)
    with pytest.raises(BaseMismatchError, match=problem):
        make_delta(llama()).apply(served)
    assert all(tensor.equal(before[name]) for name, tensor in engine.named_parameters())


def test_copies_that_move_values_are_followed(tmp_path):
    def transform(name, weight):
        return weight.t().contiguous().t().to(torch.bfloat16) if weight.dim() == 2 else weight.clone()

    engine, served = start(tmp_path)
    engine.transform = transform
    delta = make_delta(llama())
    delta.apply(served)
    assert same(engine, delta.apply(llama()))


def test_wrong_values_or_places_are_an_error_before_anything_is_written(tmp_path):
    engine, served = start(tmp_path)
    delta = make_delta(llama())
    engine.down1.data += 1  # repacked after loading, say
    before = weights(engine)
    with pytest.raises(BaseMismatchError, match=r"`model.layers.1.mlp.down_proj.weight` does not hold the values that"):
        delta.apply(served)
    engine.down1 = torch.nn.Parameter(engine.down1 - 1)
    with pytest.raises(SparsifyError, match=r"the engine has moved `model.layers.1.mlp.down_proj.weight` to other mem"):
        delta.apply(served)
    del before["down1"]
    assert all(tensor.equal(getattr(engine, name)) for name, tensor in before.items())


def test_tensors_that_the_engine_lacks_or_ties_are_refused(tmp_path):
    base = llama()
    delta = make_delta(base)
    engine, served = start(tmp_path, base=base)
    engine.load_weights = lambda weights: Engine.load_weights(engine, [pair for pair in weights if "norm" not in pair[0]])
    with pytest.raises(BaseMismatchError, match=r"no place for \d+ of \d+ entries of `model.layers.0.input_layernorm"):
        delta.apply(served)
    tied = llama(tie_word_embeddings=True)
    engine = Engine(tied.state_dict())
    engine.head.data = engine.embed.data
    served = ServedModel(engine, str(save(tied, tmp_path / "tied")), torch.float32)
    change = make_delta(tied)
    change.apply(served)
    assert engine.head[:37].equal(change.apply(copy.deepcopy(tied)).lm_head.weight)
    change.revert(served)
    change.tensors["lm_head.weight"] = change.tensors["model.embed_tokens.weight"]
    with pytest.raises(BaseMismatchError, match=r"are one tensor in the checkpoint \(`model.embed_tokens.weight`\)"):
        change.apply(served)


@pytest.mark.parametrize("seed", range(30))
def test_windows_find_the_entries_of_any_view(seed):
    torch.manual_seed(seed)
    source, memory = torch.arange(2 * 3 * 4 * 5).view(6, 20), torch.zeros(200, dtype=torch.int64)
    view = source.view(2, 3, 4, 5).permute(*torch.randperm(4).tolist())
    for dim in range(4):
        view = view.narrow(dim, 0, int(torch.randint(1, view.shape[dim] + 1, ())))
    order = torch.randperm(4).tolist()  # of the dimensions in memory, from 8 on
    target = memory[8:128].view([2, 3, 4, 5]).permute(order)
    target = memory[8:].as_strided(view.shape, torch.empty([view.shape[dim] for dim in order]).stride())
    target = target.as_strided(view.shape, [target.stride()[order.index(dim)] for dim in range(4)])
    window = Window.of(target, view)
    indices = torch.randperm(120)[:50].sort().values
    numbers, positions = window.locate(indices)
    target.copy_(view)
    assert memory[positions].equal(indices[numbers])
    assert len(numbers) == int(torch.isin(indices, view.reshape(-1)).sum())
