"""The entries that reach a threshold: the compiled form finds what the plain one does."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsify.kernels.cpu.library import library
from sparsify.kernels.threshold import find_reaching, plain_find_reaching


@pytest.fixture(params=["compiled", "plain"], scope="module")
def form(request):
    """Both forms; the compiled one where the machine has it."""
    if request.param == "compiled" and library() is None:
        pytest.skip("needs a compiler")
    return find_reaching if request.param == "compiled" else plain_find_reaching


def found_by(form, values, least):
    indices, finite = form(values, least)
    return sorted(indices.tolist()), bool(finite)


numbers = st.one_of(
    st.floats(width=32, allow_subnormal=True),
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-45, 1e-30, 1e30, float("inf"), float("-inf"), float("nan")]),
)


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(), rows=st.integers(1, 4), cols=st.sampled_from([1, 3, 63, 64, 65, 130]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_an_entry_is_found_if_it_reaches_its_rows_threshold(form, data, rows, cols, dtype):
    few = data.draw(st.lists(numbers, min_size=1, max_size=8))
    order = torch.tensor(data.draw(st.lists(st.integers(0, len(few) - 1), min_size=rows * cols, max_size=rows * cols)))
    values = torch.tensor(few)[order].view(rows, cols).to(dtype)
    least = torch.tensor(data.draw(st.lists(numbers, min_size=rows, max_size=rows))).abs().nan_to_num(0.0)
    size = values.double().abs()
    expected = (size >= least[:, None].double()).view(-1).nonzero().squeeze(1).tolist()
    assert found_by(form, values, least) == (expected, bool(size.isfinite().all()))


def test_a_nan_reaches_nothing_and_is_told(form):
    values = torch.tensor([[torch.nan, 1.0, -2.0], [3.0, torch.nan, 0.0]])
    assert found_by(form, values, torch.zeros(2)) == ([1, 2, 3, 5], False)
    assert found_by(form, torch.full((1, 70), torch.nan), torch.zeros(1)) == ([], False)


def test_nothing_is_found_in_nothing(form):
    assert found_by(form, torch.empty(0, 5), torch.empty(0)) == ([], True)


def test_a_matrix_may_be_strided_and_a_threshold_expanded(form):
    values = torch.randn(30, 20, generator=torch.Generator().manual_seed(0))
    least = torch.tensor(1.0).expand(30)
    expected = found_by(form, values, least)
    assert expected[0]
    assert found_by(form, values.t().contiguous().t(), least) == expected


def test_any_number_of_threads_finds_the_same(form, threads):
    values, sets = torch.randn(70, 130, generator=torch.Generator().manual_seed(0)), []
    for number in (1, 2, 5):
        threads(number)
        sets.append(found_by(form, values, torch.full((70,), 2.0)))
    assert sets[0][0]
    assert sets == sets[:1] * 3
