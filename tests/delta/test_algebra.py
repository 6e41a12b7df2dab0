"""Sums, merges and comparisons of deltas against the same on whole models; TIES and DARE against PEFT's functions."""

import copy
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from deltas import bits, close, fine_tuned, make_base, task, unchanged
from hypothesis import given, settings
from hypothesis import strategies as st
from peft.utils.merge_utils import ties
from torch import nn

from sparsify import merge_deltas, overlap
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
    [
        ("a", "'a'"),
        ([2], r"\[2\]"),
        (None, "None"),
        (2j, "2j"),
        (10**400, "1000"),
        (math.nan, "nan"),
        (np.float32("inf"), ".*inf"),
    ],
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
    with pytest.raises(SparsifyError, match="kind is 'multiply', expected one of replace, add"):
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
    b.whole, b.config["model_config"] = {"head.weight": torch.ones(2, 5)}, {"num_labels": 2}
    config = (a + 0.5 * b).on(base).config
    assert (config["architecture"], config["model_config"]) == ("B", {"num_labels": 2}), "those of the only head"
    b.config["peft"] = {"default": {"peft_type": "LORA"}}
    assert (a + 0.5 * b).on(base).config["peft"] == b.config["peft"], "without which nobody builds what is stored whole"


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
    first.config["model_config"], second.config["model_config"] = {"id2label": {"0": "no"}}, {}
    assert first.then(second).on(copy.deepcopy(base)).config["model_config"] == {"id2label": {"0": "no"}}, "the head's"
    assert bits(first.then(second).apply(base)) == bits(final)
    for wrong in (lambda: (first + first).then(second), lambda: first.then(second + second), lambda: first.then("x")):
        with pytest.raises(SparsifyError, match=r"evaluate a sum first, `total.on\(base\).then\(second\)`"):
            wrong()
    with pytest.raises(SparsifyError, match="a DeltaSequence is no plain sum"):
        2 * first.then(second)


def dense(base, delta):
    before = nn.utils.parameters_to_vector(base.parameters()).detach()
    with delta.applied(base):
        change = nn.utils.parameters_to_vector(base.parameters()).detach() - before
    masks = {name: torch.zeros(parameter.numel(), dtype=torch.bool) for name, parameter in base.named_parameters()}
    for name, part in delta.tensors.items():
        masks[name][part.indices] = True
    return change, torch.cat([*masks.values()])


@settings(max_examples=40)
@given(st.integers(0, 20), st.floats(0.2, 0.9))
def test_counts_and_cosine_are_those_of_the_dense_changes(seed, share):
    base = make_base(torch.float64)
    a, b = task(base, 2 * seed, share), task(base, 2 * seed + 1, share)
    (left, in_a), (right, in_b) = dense(base, a), dense(base, b)
    both = in_a & in_b
    found = overlap(a, b, base)
    assert found.shared == int(both.sum()) == sum(found.by_tensor.values())
    assert found.union == int((in_a | in_b).sum())
    assert found.jaccard == pytest.approx(found.shared / found.union)
    assert found.opposed == int((left * right < 0)[both].sum())
    expected = nn.functional.cosine_similarity(left[both], right[both], dim=0) if found.shared else math.nan
    assert found.cosine == pytest.approx(float(expected), nan_ok=True)


def test_heads_that_disagree_are_named_and_without_a_base_only_places_are_compared():
    base = make_base()
    a, same, b = (SparseDelta({}, {"2.weight": torch.full((3, 5), value)}) for value in (1.0, 1.0, 2.0))
    a.tensors = same.tensors = {"0.bias": task(base, 1).tensors["0.bias"]}
    found = overlap(a, same)
    assert (found.jaccard, found.cosine, found.opposed, found.conflicting_whole) == (1.0, None, None, ())
    found = overlap(a, b, base)
    assert found.conflicting_whole == ("2.weight",)
    assert found.jaccard == 0.0
    assert "stored whole by both, and different: 2.weight" in str(found)
    biases = torch.zeros(3), torch.zeros(3).half(), torch.full((3,), math.nan)
    zero, other, nan = (SparseDelta({}, {"2.bias": bias}) for bias in biases)
    assert overlap(zero, other).conflicting_whole == ("2.bias",)
    assert overlap(nan, nan).conflicting_whole == ()
    assert str(overlap(zero, zero, base)) == "0 of 0 entries shared (Jaccard 0.0000)"
    for wrong in ("a", zero + zero):
        with pytest.raises(SparsifyError, match=r"overlap\(\) got .*, expected a SparseDelta: load\(\) a path"):
            overlap(zero, wrong)


def test_deltas_of_different_models_are_refused():
    base, other = make_base(), nn.Sequential(nn.Linear(2, 5))
    with pytest.raises(SparsifyError, match=r"`0.weight` has shape \(5, 6\) in one delta and \(5, 2\) in the other"):
        overlap(task(base, 1), task(other, 1, 0.9))
    with pytest.raises(BaseMismatchError, match="does not hold the values"):
        overlap(task(base, 1), task(base, 2), make_base(seed=3))


@pytest.mark.parametrize("sign", ["total", "frequency"])
@pytest.mark.parametrize(("share", "density"), [(0.5, 1.0), (1.1, 0.4)])
def test_ties_is_that_of_peft(sign, share, density):
    base = make_base(torch.float64)
    tuned, weights = [fine_tuned(base, seed, share) for seed in range(3)], [1.0, 0.5, 2.0]
    deltas = [SparseDelta.diff(base, model, progress=False) for model in tuned]
    merged = merge_deltas(deltas, weights, density=density, majority_sign_method=sign)
    with merged.applied(base):
        found = {name: parameter.detach().clone() for name, parameter in base.named_parameters()}
    for name, parameter in base.named_parameters():
        changes = [dict(model.named_parameters())[name].detach() - parameter.detach() for model in tuned]
        expected = parameter + ties(changes, torch.tensor(weights).double(), density, sign)
        torch.testing.assert_close(found[name], expected.detach())


def test_ties_keeps_one_entry_of_each_tensor_at_least():
    base = make_base()
    delta = SparseDelta({"0.weight": task(base, 1).tensors["0.weight"]})
    assert merge_deltas([delta], density=1e-3).on(base).num_entries == 1


@pytest.mark.parametrize("method", ["dare_linear", "dare_ties"])
def test_dare_drops_a_share_and_scales_the_others_up(method):
    base = make_base(torch.float64)
    delta = SparseDelta.diff(base, fine_tuned(base, 1, share=1.1), progress=False)
    merged = [merge_deltas([delta], method=method, density=0.5, seed=seed).on(base, "add") for seed in (0, 0, 1)]
    assert merged[0] == merged[1] != merged[2]
    assert 0.2 < merged[0].num_entries / delta.num_entries < 0.8
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert merge_deltas([delta], method=method, density=0.5, seed=1).on(base, "add") == merged[2]
    finally:
        torch.set_default_dtype(torch.float32)
    for name, part in merged[0].tensors.items():
        change = (delta.tensors[name].values - dict(base.named_parameters())[name].detach().flatten())[part.indices]
        torch.testing.assert_close(part.values, change * 2)


def test_what_cannot_be_merged_is_refused_and_a_merge_is_no_term():
    base = make_base(torch.float64)
    a, b = task(base, 1), task(base, 2)
    for options, problem in [
        ({"method": "tie"}, "method is 'tie', expected one of ties, dare_ties, dare_linear"),
        ({"density": 0.0}, "density is 0.0, expected a share"),
        ({"majority_sign_method": "most"}, "majority_sign_method is 'most'"),
        ({"weights": [1.0]}, r"weights \[1.0\], expected a weight for each of 2 deltas"),
    ]:
        with pytest.raises(SparsifyError, match=problem):
            merge_deltas([a, b], **options)
    with pytest.raises(SparsifyError, match=r"deltas are .*DeltaSum.*save sums of them first"):
        merge_deltas([a + b, b])
    assert merge_deltas(each for each in (a, b)).on(base) == merge_deltas([a, b]).on(base)
    with pytest.raises(SparsifyError, match=r"a DeltaMerge is no plain sum: evaluate it first, `.on\(base\)`"):
        merge_deltas([a, b]) + a
    a.whole["head"] = torch.ones(2)
    assert merge_deltas([a, b]).entries_only().on(base) == merge_deltas([a.entries_only(), b]).on(base)
