"""Sums and multiples of deltas against the same arithmetic on whole models."""

import copy
import math
from itertools import pairwise

import pytest
import torch
from deltas import bits, close, fine_tuned, make_base, task, unchanged
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from sparsify.delta.algebra import DeltaSum
from sparsify.delta.sparse_delta import SparseDelta
from sparsify.errors import BaseMismatchError, SparsifyError

PROPERTY = settings(max_examples=50)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2}
COEFFICIENTS = st.lists(st.sampled_from([-1.5, -1.0, 0.25, 0.5, 1.0, 2.0]), min_size=1, max_size=4)


def by_hand(base, tuned, coefficients):
    start = copy.deepcopy(base).double().state_dict()
    models = [(c, copy.deepcopy(model).double().state_dict()) for c, model in zip(coefficients, tuned, strict=True)]
    sums = {name: value + sum(c * (m[name] - value) for c, m in models) for name, value in start.items()}
    return {name: sums[name].to(parameter.dtype) for name, parameter in base.named_parameters()}


@PROPERTY
@given(COEFFICIENTS, st.sampled_from(list(TOLERANCE)), st.sampled_from(["replace", "add"]))
def test_a_sum_does_what_the_same_sum_of_models_does(coefficients, dtype, kind):
    base = make_base(dtype)
    tuned = [fine_tuned(base, seed) for seed in range(len(coefficients))]
    terms = [c * SparseDelta.diff(base, m, progress=False) for c, m in zip(coefficients, tuned, strict=True)]
    expected = by_hand(base, tuned, coefficients)
    with unchanged(base), sum(terms).on(base, kind).applied(base):
        close(base, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_entries_of_one_term_alone_are_taken_as_they_are(dtype):
    base = make_base(dtype)
    tuned = fine_tuned(base, 1)
    delta = SparseDelta.diff(base, tuned, progress=False)
    with (1 * delta).applied(base):
        assert bits(base) == bits(tuned)


def test_operators_make_the_terms_that_they_say_and_what_is_taken_away_again_is_no_entry_any_more():
    base = make_base()
    a, b = task(base, 1), task(base, 2)
    assert [(c, d) for c, d in (0.5 * (a - 2 * b) / 4 + -a).terms] == [(0.125, a), (-0.25, b), (-1.0, a)]
    assert [c for c, _ in (a * 3).terms] == [3.0]
    assert isinstance(sum([a, b]), DeltaSum)
    rest = (a + b - a).on(base)
    assert rest.tensors.keys() == b.tensors.keys()
    assert all(torch.equal(part.indices, b.tensors[name].indices) for name, part in rest.tensors.items())
    assert (a - a).on(base).num_entries == 0


@pytest.mark.parametrize(
    "nonsense", [lambda a: a + 1, lambda a: a * a, lambda a: a - None, lambda a: 2 - a, lambda a: torch.ones(2) + a]
)
def test_what_has_no_meaning_is_a_type_error(nonsense):
    with pytest.raises(TypeError, match="unsupported operand"):
        nonsense(task(make_base(), 1))


@pytest.mark.parametrize(
    ("factor", "shown"),
    [("a", "'a'"), ([2], r"\[2\]"), (None, "None"), (2j, "2j"), (10**400, "1000"), (math.nan, "nan")],
)
def test_what_is_no_number_is_no_coefficient(factor, shown):
    delta = task(make_base(), 1)
    for operation in (lambda: delta * factor, lambda: factor * delta, lambda: (delta + delta) * factor):
        with pytest.raises(SparsifyError, match=f"a delta cannot be multiplied by {shown}.*; expected a finite number"):
            operation()
    with pytest.raises(SparsifyError, match=f"a delta cannot be divided by {shown}"):
        delta / factor
    with pytest.raises(SparsifyError, match="cannot be divided by 0"):
        delta / 0


@pytest.mark.parametrize("kind", ["replace", "add"])
def test_a_saved_sum_loads_as_a_delta(tmp_path, kind):
    base = make_base()
    total = 0.5 * task(base, 1) + task(base, 2)
    with total.applied(base):
        expected = {name: p.detach().clone() for name, p in base.named_parameters()}
    total.save(tmp_path, base=base, kind=kind)
    loaded = SparseDelta.load(tmp_path)
    assert {part.kind for part in loaded.tensors.values()} == {kind}
    assert [term["coefficient"] for term in loaded.config["sum"]] == [0.5, 1.0]
    with loaded.applied(base):
        close(base, expected, 0 if kind == "replace" else 1e-6)


def test_another_base_is_refused():
    base, other = make_base(), make_base(seed=7)
    total = task(base, 1) + task(base, 2)
    with unchanged(other), pytest.raises(BaseMismatchError, match=r"does not hold the values that the delta was tra"):
        total.apply(other)
    with pytest.raises(BaseMismatchError, match=r"`0.weight` has shape \(2, 6\) in the model, \(5, 6\) in the delta"):
        total.apply(nn.Sequential(nn.Linear(6, 2), *base[1:]))
    with pytest.raises(BaseMismatchError, match=r"the model has no tensor `0.weight`"):
        total.apply(nn.ModuleDict({"head": nn.Linear(6, 5)}))
    with pytest.raises(BaseMismatchError, match=r"near: .*`x\.0\.weight`.*Load the base that the delta was trained on"):
        total.apply(nn.ModuleDict({"x": base}))


def test_heads_are_taken_from_what_is_added_and_must_agree():
    base = make_base()
    head, other = torch.ones(3, 5), torch.zeros(3, 5)
    a, same, b = (SparseDelta({}, {"2.weight": tensor}) for tensor in (head, head.clone(), other))
    assert torch.equal((0.5 * a + same - b).on(base).whole["2.weight"], head)
    assert not (-1 * a).on(base).whole
    remedy = r"tensor `2.weight` is stored whole by several deltas and differs .*`\(a \+ b\).entries_only\(\)`"
    with pytest.raises(SparsifyError, match=remedy):
        (a + b).apply(base)
    a.tensors, b.tensors = task(base[:1], 1).tensors, task(base[:1], 2).tensors
    assert (a + 0.5 * b).entries_only().on(base) == (a.entries_only() + 0.5 * b.entries_only()).on(base)
    with pytest.raises(SparsifyError, match="changed at entries by one delta and stored whole by another"):
        (a + task(base, 1)).apply(base)


def test_a_sum_that_the_dtype_cannot_hold_is_refused_by_name():
    base, large = nn.Linear(1, 1, bias=False).half(), nn.Linear(1, 1, bias=False).half()
    nn.init.constant_(large.weight, 60_000)
    total = 2 * SparseDelta.diff(base, large, progress=False)
    with pytest.raises(SparsifyError, match=r"tensor `weight`: the sum cannot be a delta: .* not finite"):
        total.apply(base)
    with pytest.raises(SparsifyError, match="kind='multiply'; expected one of replace, add"):
        total.on(base, "multiply")


def test_what_the_terms_have_in_common_is_recorded():
    base = make_base()
    a, b = task(base, 1), task(base, 2)
    a.config = {"base_model_name_or_path": "bert", "budget": 3, "architecture": "A"}
    b.config = {"base_model_name_or_path": "bert", "budget": 3, "architecture": "B"}
    config = (a + 0.5 * b).on(base).config
    assert config["base_model_name_or_path"] == "bert"
    assert config.keys() == {"base_model_name_or_path", "sum"}, "a sum has another budget, and no one architecture"
    assert config["sum"] == [{"coefficient": c, "entries": d.num_entries} for c, d in ((1.0, a), (0.5, b))]


def test_a_base_in_another_dtype_is_computed_on_with_a_warning():
    with pytest.warns(UserWarning, match="torch.bfloat16 where the delta was trained on torch.float32 .*be checked"):
        (task(make_base(), 1) + task(make_base(), 2)).on(make_base(seed=7).bfloat16())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", ["replace", "add"])
def test_a_second_stage_on_top_of_the_first_is_one_delta_of_the_base(dtype, kind, tmp_path):
    base = make_base(dtype)
    stages = [base]
    for seed in range(3):  # each trains other entries, and some of the same
        stages.append(fine_tuned(stages[-1], seed))
    deltas = [SparseDelta.diff(old, new, progress=False) for old, new in pairwise(stages)]
    deltas[0].config = {"base_model_name_or_path": "bert", "budget": 9}
    deltas[2].config = {"budget": 8, "architecture": "A"}
    deltas[0].then(deltas[1]).then(deltas[2]).save(tmp_path, base=base, kind=kind)
    loaded = SparseDelta.load(tmp_path)
    with unchanged(base), loaded.applied(base):
        close(base, dict(stages[3].named_parameters()), 0 if kind == "replace" else TOLERANCE[dtype])
    assert loaded.config == {
        "base_model_name_or_path": "bert", "architecture": "A", "stages": [delta.num_entries for delta in deltas]
    }  # fmt: skip
    assert bits((deltas[0] + deltas[1]).on(base).apply(copy.deepcopy(base))) == bits(stages[2]), "a sum of stages"
    with pytest.raises(BaseMismatchError, match=r"the first's result as its base: both are `first.then\(second\)`"):
        (deltas[1] + deltas[0]).apply(base)
    with pytest.raises(BaseMismatchError, match="does not hold the values"):
        deltas[1].then(deltas[0]).apply(base)


def test_a_head_goes_on_through_the_stages():
    base = make_base()
    head = torch.ones(3, 5)
    first = SparseDelta(task(base[:1], 1).tensors, {"2.weight": head, "2.bias": head[:, 0]})
    tuned = first.apply(copy.deepcopy(base))
    final = fine_tuned(tuned, 2)
    second = SparseDelta.diff(tuned, final, progress=False)
    second.whole["2.bias"] = second.tensors.pop("2.bias") and final[2].bias.detach()
    assert bits(first.then(second).apply(base)) == bits(final)
    for wrong in (lambda: (first + first).then(second), lambda: first.then(second + second), lambda: first.then("x")):
        with pytest.raises(SparsifyError, match=r"evaluate a sum first, `total.on\(base\).then\(second\)`"):
            wrong()
    with pytest.raises(SparsifyError, match="a DeltaSequence is no plain sum"):
        2 * first.then(second)
