"""Scores of entries, and the bounds that let the selection skip a row without scoring it."""

import math
import re

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from sparsify.core.importance import D3
from sparsify.errors import SparsifyError
from sparsify.strategies.importance import IMPORTANCES, SNIP, Bias, Fisher, register_importance

EXPONENTS = [-2, -1, 0, 1, 2]
ROWS, COLS = 2, 3
DTYPES = {torch.float32: np.float32, torch.float64: np.float64}


def matrices(dtype):
    """Finite matrices (ROWS, COLS): ordinary numbers, denormals and the largest ones alike."""
    width = 32 if dtype == torch.float32 else 64
    numbers = st.floats(allow_nan=False, allow_infinity=False, width=width)
    return arrays(DTYPES[dtype], (ROWS, COLS), elements=numbers).map(torch.from_numpy)


@pytest.mark.parametrize(("importance", "name", "values", "expected"), [
    (D3, "exp", [math.inf, math.nan, np.int64(1), np.float32(1), "2"], "exp must be a finite int or float"),
    (D3, "eps", [math.inf, math.nan, 0, -1e-3, np.float32(1)], "eps one above 0"),
    (Fisher, "num_samples", [0, -1, 2.0, True, None], "expected an int of at least 1"),
])  # fmt: skip
def test_settings_that_give_no_score_are_refused(importance, name, values, expected):
    for value in values:
        with pytest.raises(SparsifyError, match=re.escape(f"{name}={value!r}") + f".*{expected}"):
            importance(**{name: value})


def assert_bounded(importance, weight, grad):
    """Asserts that each selectable entry's gradient is at least the bound for its score."""
    scores = importance.score(weight, grad)
    for row, column in (scores.isfinite() & (scores > 0)).nonzero().tolist():
        least = importance.least_gradient(scores[row, column], weight)
        assert least.shape == (weight.shape[0],)
        assert grad[row, column].abs() >= least[row], (row, column, least[row].item(), scores[row, column].item())


d3 = st.builds(D3, st.sampled_from([*EXPONENTS, -0.5, 0.5, 1.7]), st.sampled_from([1, 0.1, 1e-3, 1e-8]))


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=150)
@given(data=st.data(), importance=d3 | st.sampled_from([SNIP(), Fisher()]))
def test_no_entry_has_a_smaller_gradient_than_its_score_takes_at_least(dtype, data, importance):
    assert_bounded(importance, data.draw(matrices(dtype)), data.draw(matrices(dtype)))


@settings(max_examples=100)
@given(units=st.integers(1, 200), exp=st.sampled_from(EXPONENTS), eps=st.sampled_from([0.1, 0.3, 0.9, 1, 3]))
@example(units=1, exp=2, eps=1)
def test_bounds_hold_for_denormal_gradients(units, exp, eps):
    grad = torch.full((1, 1), units * 2.0**-149)
    assert_bounded(D3(exp=exp, eps=eps), torch.zeros(1, 1), grad)


def test_bias_covers_parameters_called_bias_and_nothing_else():
    names = ["bias", "encoder.0.bias", "relative_attention_bias.weight", "encoder.rel_bias"]
    assert [name for name in names if Bias().covers(name)] == names[:2]


def test_a_name_may_be_registered_again_but_not_one_of_ours():
    first = register_importance("test-importance-again")(lambda weight, grad: grad.abs())
    second = register_importance("test-importance-again")(lambda weight, grad: grad.abs())
    assert IMPORTANCES["test-importance-again"]() is second is not first
    assert (second.name, second.uses_gradient) == ("test-importance-again", True)
    assert second.score(torch.tensor([2.0]), torch.tensor([-3.0])).tolist() == [3.0]
    with pytest.raises(SparsifyError, match="'d3' is a built-in importance; register yours under another"):
        register_importance("d3")
    with pytest.raises(SparsifyError, match="expected a string that is not empty"):
        register_importance("")


def test_a_users_function_has_to_score_every_entry():
    total = register_importance("test-importance-total")(lambda weight, grad: grad.abs().sum())
    with pytest.raises(SparsifyError, match=r"'test-importance-total' made .* a score for every entry, in that shape"):
        total.score(torch.ones(3), torch.ones(3))
