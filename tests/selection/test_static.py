"""Static selection and pruning: which entries stay, what becomes of the others, and how the rest trains."""

import copy
import math
from functools import partial
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
import torch
from deltas import unchanged
from hypothesis import given, settings
from models import CLASSES, build, loss_of, train
from oracle import unmasked_sets
from torch import nn
from twins import Twins, masks_of

from sparsify import SparseDelta, SparsifyError, base_weights, desparsify, get_engine, sparsify, summary
from sparsify.adapters import add_adapters
from sparsify.core.importance import D3
from sparsify.selection.static import calibrate, draw, spread, spread_cap
from sparsify.strategies.importance import GSNR, SNIP, Bias, Fisher, Magnitude, Random, register_importance
from sparsify.strategies.strategy import ALLOCATIONS, Prune, Static, Strategy, share_out

BUDGET = 90  # of the MLP's 164 entries in matrices and 41 in vectors
MATRICES, VECTORS = 164, 41
SHAPES = {"first.weight": (10, 6), "second.weight": (8, 10), "head.weight": (CLASSES, 8)}
PRUNE = Prune(pretrained=True)  # the MLP stands for any pretrained model
PRUNED = Strategy(SNIP(), PRUNE)
IMPORTANCES = [SNIP(), Magnitude(largest=True), D3(), Fisher(num_samples=24), GSNR()]


@pytest.fixture
def model_and_batches():
    return build("mlp", dtype=torch.float64)


def matrix_scores(model, importance, batches):
    """Every matrix entry's score, by name, of the gradients that test_calibration.py compares with the plain ones."""
    matrices = {name: p for name, p in model.named_parameters() if p.dim() > 1}
    scores = calibrate(model, [*matrices.values()], importance, batches) if importance.uses_gradient else [None] * 3
    if not isinstance(importance, (Fisher, GSNR)):
        scores = [importance.score(p.detach(), total) for p, total in zip(matrices.values(), scores, strict=True)]
    return {name: score.flatten().tolist() for name, score in zip(matrices, scores, strict=True)}


def best(scores, number):
    """The best entries of all tensors, as sets by name; equal scores by position."""
    ranked = sorted((-score, t, i) for t, own in enumerate(scores.values()) for i, score in enumerate(own))[:number]
    return {name: sorted(i for _, t, i in ranked if t == position) for position, name in enumerate(scores)}


def plain_spread(scores, shape, cap):
    """From the best entry down, each is kept whose row and column have less than ``cap`` so far."""
    kept, rows, columns = [-math.inf] * len(scores), [0] * shape[0], [0] * shape[1]
    for i in sorted(range(len(scores)), key=lambda i: (-scores[i], i)):
        row, column = divmod(i, shape[1])
        if rows[row] < cap and columns[column] < cap and scores[i] > -math.inf:
            kept[i], rows[row], columns[column] = scores[i], rows[row] + 1, columns[column] + 1
    return kept


def expected_sets(scores, allocation, number):
    if allocation == "global":
        return best(scores, number)
    if allocation == "spread":
        cap = math.ceil(2 * number / sum(map(min, SHAPES.values())))
        return best({name: plain_spread(own, SHAPES[name], cap) for name, own in scores.items()}, number)
    counts = share_out(number, [len(own) for own in scores.values()])
    return {name: best({name: own}, n)[name] for (name, own), n in zip(scores.items(), counts, strict=True)}


def freeze_vectors(model):
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.dim() > 1)


def calibration_of(importance, batches):
    return {"calibration": batches} if importance.uses_gradient else {}


def assert_refused(model, message, *arguments, **options):
    """The call is an error, and changes nothing."""
    with unchanged(model), pytest.raises(SparsifyError, match=message):
        sparsify(model, *arguments, **options)
    assert type(model.first) is nn.Linear


@pytest.mark.parametrize("importance", IMPORTANCES, ids=lambda importance: importance.name)
@pytest.mark.parametrize("allocation", ALLOCATIONS)
@pytest.mark.parametrize("prunes", [True, False])
def test_the_best_entries_of_matrices_stay_and_pruning_keeps_vectors(model_and_batches, importance, allocation, prunes):
    model, batches = model_and_batches
    if not prunes:
        freeze_vectors(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    scores = matrix_scores(model, importance, batches[:2])
    expected = expected_sets(scores, allocation, BUDGET - VECTORS if prunes else BUDGET)
    selection = Prune(allocation, pretrained=True) if prunes else Static(allocation)
    sparsify(model, BUDGET, Strategy(importance, selection), **calibration_of(importance, batches[:2]))
    found = unmasked_sets(model)
    for name, value in before.items():
        kept = expected.get(name, list(range(value.numel())))
        assert found[name] == kept
        pruned = torch.zeros_like(value).view(-1)
        pruned[kept] = value.view(-1)[kept]
        assert torch.equal(model.get_parameter(name), pruned.view_as(value) if prunes else value)
    assert sum(map(len, found.values())) == summary(model).unmasked == BUDGET


@pytest.mark.parametrize("budget", [1, 9, 20, 60])
@pytest.mark.parametrize("crowded", [False, True])
def test_spread_a_row_or_column_has_at_most_twice_its_even_share(budget, crowded):
    model, _ = build("mlp")
    freeze_vectors(model)
    weights = dict(model.named_parameters())
    for name, (height, width) in SHAPES.items() if crowded else ():  # the same order in every row, and in every column
        weights[name].data = torch.linspace(1, 2, height)[:, None] * torch.linspace(3, 9, width)
    scores = {name: weights[name].detach().abs().flatten().tolist() for name in SHAPES}
    sparsify(model, budget, Strategy(Magnitude(largest=True), Static("spread")))
    found = {name: ids for name, ids in unmasked_sets(model).items() if name in SHAPES}
    assert found == expected_sets(scores, "spread", budget)
    lines = [[index // SHAPES[name][1] for index in ids] for name, ids in found.items()]
    lines += [[index % SHAPES[name][1] for index in ids] for name, ids in found.items()]
    assert max(own.count(line) for own in lines for line in own) <= math.ceil(2 * budget / 17)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_entries_are_spread_from_the_best_one_down(data):
    height, width, cap = (data.draw(st.integers(1, most)) for most in (9, 9, 4))
    few = st.sampled_from([-math.inf, 0.0, 1.0, 2.0, 3.0])  # many are equal
    scores = data.draw(st.lists(few, min_size=height * width, max_size=height * width))
    found = spread(torch.tensor(scores).view(height, width), cap)
    assert found.flatten().tolist() == plain_spread(scores, (height, width), cap)


def test_modules_with_budgets_of_their_own_have_their_best_entries():
    model, _ = build("mlp")
    scores = {name: p.detach().abs().flatten().tolist() for name, p in model.named_parameters()}
    sparsify(model, 20, Strategy(Magnitude(largest=True), Static({"first": 7, "head": 0.1})))
    parts = {part: {n: scores.pop(n) for n in list(scores) if n.startswith(part)} for part in ("first", "head")}
    tenth = sum(map(len, parts["head"].values())) // 10
    assert unmasked_sets(model) == best(parts["first"], 7) | best(scores, 20) | best(parts["head"], tenth)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_random_entries_are_drawn_from_all_that_are_not_excluded(data):
    tensors, excluded, offset = [], [], 0
    for size in data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=4)):
        tensors.append(SimpleNamespace(numel=size, offset=offset))
        excluded.append(torch.tensor(sorted(data.draw(st.sets(st.integers(0, size - 1)))), dtype=torch.int64))
        offset += size
    free = set(range(offset)) - {int(i) + t.offset for t, own in zip(tensors, excluded, strict=True) for i in own}
    number = data.draw(st.integers(1, offset + 1))
    found = draw(tensors, excluded, number, seed="0").tolist()
    assert len(found) == len({*found}) == min(number, len(free))
    assert {*found} <= free


def test_layers_of_one_size_have_random_entries_of_their_own():
    model = nn.Sequential(*[nn.Linear(20, 20, bias=False) for _ in range(3)])
    sparsify(model, 60, Strategy(Random(), Static("uniform")))
    found = unmasked_sets(model).values()
    assert [len(ids) for ids in found] == [20, 20, 20]
    assert len({tuple(ids) for ids in found}) == 3


def test_random_entries_are_drawn_with_the_same_chance_and_in_any_order():
    tensors, excluded = [SimpleNamespace(numel=10, offset=0)], [torch.tensor([3])]
    for number in (3, 6):
        draws = torch.stack([draw(tensors, excluded, number, seed=str(i)) for i in range(3000)])
        for column in (draws.flatten(), draws[:, 0]):
            counts = column.bincount(minlength=10) / column.numel()
            assert counts[3] == 0
            assert (counts[[0, 1, 2, 4, 5, 6, 7, 8, 9]] - 1 / 9).abs().max() < 0.03


@pytest.mark.parametrize("importance", [SNIP(), Random()], ids=lambda importance: importance.name)
def test_a_pruned_model_trains_as_the_dense_one_with_masked_gradients_from_the_pruned_weights(importance):
    model, batches = build("mlp", dtype=torch.float64)
    dense = copy.deepcopy(model)
    sparsify(model, BUDGET, Strategy(importance, PRUNE), **calibration_of(importance, batches[:2]))
    masks = masks_of(model)
    for name, parameter in dense.named_parameters():
        parameter.data.mul_(masks[name])
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    Twins(dense, model, BUDGET, 6, sgd, masks=masks).train(batches[:6])


def test_the_base_of_a_pruned_model_is_the_pruned_one_and_zeros_stay_after_desparsify():
    model, batches = build("mlp")
    sparsify(model, BUDGET, PRUNED, calibration=batches[:2])
    pruned = {name: p.detach().clone() for name, p in model.named_parameters() if name != "sparse_values"}
    zeros = sum(int((p == 0).sum()) for p in pruned.values() if p.dim() > 1)
    assert zeros == MATRICES - (BUDGET - VECTORS)
    train(model, batches, optimizer=torch.optim.AdamW([model.sparse_values], lr=0.1, weight_decay=0.5))
    assert summary(model, verify=True).verification.ok
    with base_weights(model):
        assert all(torch.equal(model.get_parameter(name), value) for name, value in pruned.items())
    trained = loss_of(model, batches[0])
    assert type(desparsify(model).first) is nn.Linear
    assert torch.equal(loss_of(model, batches[0]), trained)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad
        assert torch.equal(parameter == 0, pruned[name] == 0) or parameter.dim() == 1


@pytest.mark.parametrize("vectors", [True, False])
def test_a_delta_of_a_pruned_model_brings_the_zeros_to_a_base_that_was_not_pruned(tmp_path, vectors):
    model, batches = build("mlp")
    if not vectors:
        freeze_vectors(model)
    base = copy.deepcopy(model)
    train(sparsify(model, BUDGET, PRUNED, calibration=batches[:2]), batches[:4])
    delta = SparseDelta.from_model(model)
    assert set(delta.whole) == {"first.weight", "second.weight", "head.weight"}
    assert all("weight" not in name or "norm" in name for name in delta.tensors)
    delta.save(tmp_path / "delta")
    with unchanged(base), SparseDelta.load(tmp_path / "delta").applied(base):
        assert torch.equal(loss_of(base, batches[0]), loss_of(model, batches[0]))


def test_a_padding_row_is_neither_selected_nor_zeroed_and_a_shared_matrix_is_pruned_once():
    model = nn.Embedding(5, 4, padding_idx=2)
    model.weight.data[2] = 7.0
    shared = nn.ModuleDict({"a": model, "b": nn.Embedding(5, 4, padding_idx=2)})
    shared["b"].weight = model.weight
    sparsify(shared, 3, Strategy(Magnitude(largest=True), PRUNE))
    assert (model.weight[2] == 7).all()
    assert int((shared["b"].weight != 0).sum()) == 3 + 4


@pytest.mark.parametrize("strategy", ["sparseadapter", Strategy(Magnitude(largest=True), Prune("uniform"))])
def test_pretrained_matrices_are_not_pruned_unless_the_user_insists(model_and_batches, strategy):
    model, batches = model_and_batches
    options = {"calibration": batches[:2]} if strategy == "sparseadapter" else {}
    message = r"3 of the 3 matrices to prune are not known to be new, such as `first\.weight`.* pass Strategy\("
    assert_refused(model, message, BUDGET, strategy, **options)
    options["fresh_modules"] = ["first", "second"]
    assert_refused(model, r"1 of the 3 matrices to prune .* such as `head\.weight`", BUDGET, strategy, **options)
    sparsify(model, 75, strategy, target_modules=["first", "second"], **options)
    assert int((model.first.weight != 0).sum() + (model.second.weight != 0).sum()) == 75 - 18


def test_adapters_in_a_pretrained_model_are_pruned_and_the_model_is_not():
    model, batches = build("bert")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    add_adapters(model, "pfeiffer", reduction_factor=4)
    sparsify(model, 0.4, "sparseadapter", calibration=batches[:1], modules_to_save=["classifier"])
    pruned = [name for name, p in model.named_parameters() if p.dim() > 1 and "adapter" in name and not p.all()]
    assert pruned
    assert all(torch.equal(value, model.get_parameter(name)) for name, value in before.items())


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_the_cap_lets_as_many_be_found_as_are_asked_for(data):
    sizes = st.integers(1, 6) | st.just(40)
    shapes = data.draw(st.lists(st.tuples(sizes, sizes), min_size=1, max_size=4))
    number = data.draw(st.integers(1, sum(map(math.prod, shapes))))
    cap = spread_cap([torch.Size(shape) for shape in shapes], number)
    torch.manual_seed(data.draw(st.integers(0, 9)))
    found = [spread(torch.rand(shape).mul(3).round(), cap) for shape in shapes]
    assert sum(int(own.isfinite().sum()) for own in found) >= number


small = register_importance("test-static-small", uses_gradient=False)(lambda weight: weight.abs() < 0.5)
ranks = register_importance("test-static-ranks", uses_gradient=False)(lambda weight: -weight.abs().mul(99).long())


@pytest.mark.parametrize("selection", [Static(), Static("spread")])
@pytest.mark.parametrize("importance", [small, ranks], ids=["bool", "int"])
def test_scores_may_be_of_any_dtype(importance, selection):
    model = nn.Embedding(10, 8, padding_idx=4)
    model.weight.data[::2] = torch.arange(1, 41).view(5, 8) / 100  # all below 0.5, and the others above
    model.weight.data[1::2] = 1 + torch.rand(5, 8)
    (tensor,) = get_engine(sparsify(model, 8, Strategy(importance, selection))).tensors
    assert set((tensor.indices // 8).tolist()) <= {0, 2, 6, 8}


useless = register_importance("test-static-useless")(lambda weight, grad: weight * torch.nan)
of_weights = register_importance("test-static-weights", uses_gradient=False)
useless_weights = of_weights(lambda weight: weight.where(weight.abs() > 0.4, -torch.inf))


@pytest.mark.parametrize(
    ("budget", "strategy", "message"),
    [
        (VECTORS, PRUNED, r"=41 with Prune\(.*: biases, norms .* take 41 .* 42 to 205, or freeze the vectors before"),
        (None, Strategy(Bias(), PRUNE), "finds nothing to prune: no candidate that it covers has two dimensions"),
        (60, Strategy(Bias(), PRUNE), "expected 1 to 31, the number of candidates"),
        (90, Strategy(useless, Static()), "=90, but .* 'test-static-useless' gave only 0 entries a score above 0"),
        (90, Strategy(useless_weights, Static()), r"'test-static-weights' gave only \d+ entries a finite score \("),
        (90, Strategy(useless_weights, Static("spread")), r"a finite score, with at most 11 in a row or column \("),
    ],
)
def test_a_budget_that_does_not_fit_changes_nothing(model_and_batches, budget, strategy, message):
    model, batches = model_and_batches
    assert_refused(model, message, budget, strategy, **calibration_of(strategy.importance, batches[:2]))


def test_tensors_without_a_score_get_no_budget():
    """As a layer that is not used, and LoRA's B."""
    model = nn.ModuleDict({"used": nn.Linear(4, 2, bias=False), "unused": nn.Linear(2, 4, bias=False)})
    nn.init.zeros_(model["unused"].weight)
    options = {"calibration": [torch.ones(3, 4)], "loss_fn": lambda model, x: model["used"](x).square().sum()}
    with pytest.raises(SparsifyError, match=r"`unused\.weight` is to get 4 entries, but .* only 0 entries a score"):
        sparsify(model, 8, Strategy(SNIP(), Prune("uniform", pretrained=True)), **options)
    with pytest.raises(SparsifyError, match=r"budget=9, but .* only 8 entries .*1 of 2 tensors are all zeros"):
        sparsify(model, 9, PRUNED, **options)


def test_a_warm_start_trains_the_entries_of_an_earlier_delta_from_where_it_ended(tmp_path):
    base, batches = build("mlp")
    first = train(sparsify(copy.deepcopy(base), 40, "id3", steps=4), batches[:4])
    SparseDelta.from_model(first).save(tmp_path / "first")
    delta = SparseDelta.load(tmp_path / "first")
    again = delta.apply(copy.deepcopy(base))
    sparsify(again, None, delta.support)
    assert unmasked_sets(again) == unmasked_sets(first)
    assert again.sparse_values.numel() == 40
    for name, parameter in again.named_parameters():
        assert name == "sparse_values" or torch.equal(parameter, dict(first.named_parameters())[name])
    train(again, batches[:4])
    assert SparseDelta.from_model(again).config["strategy"] == {"importance": None, "selection": {"name": "given"}}
    assert "a given set" in str(summary(again))


def test_flat_indices_are_a_set_and_names_of_a_wrapped_model_are_found_under_their_plain_ones():
    wrapped = nn.ModuleDict({"module": nn.Linear(3, 3)})
    sparsify(wrapped, 3, {"weight": torch.tensor([7, 2, 7, 0])})
    assert unmasked_sets(wrapped)["module.weight"] == [0, 2, 7]
