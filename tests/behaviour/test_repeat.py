"""repeat-S: the whole budget is selected again at each step; what was touched keeps its value and its slot."""

from models import build, train

from sparsify import D3, Repeat, Strategy, get_engine, sparsify, summary

BUDGET = 12


def test_each_step_trains_the_budget_and_touched_entries_add_up():
    model, batches = build("mlp")
    sparsify(model, BUDGET, "d3-repeat", steps=6)
    assert model.sparse_values.numel() == 6 * BUDGET
    touched = []
    for batch in batches[:6]:
        train(model, [batch])
        assert get_engine(model).trained == int((model.sparse_values.grad != 0).sum()) == BUDGET
        touched.append(summary(model).unmasked)
    assert touched == sorted(touched)
    assert BUDGET == touched[0] < touched[-1] <= 6 * BUDGET
    assert summary(model).updates == summary(model).static_updates == 6 * BUDGET
    assert "touched" in str(summary(model))


def test_where_the_room_ends_a_step_goes_without_new_entries():
    model, batches = build("mlp")
    sparsify(model, BUDGET, Strategy(D3(), Repeat(capacity=BUDGET + 2)))
    train(model, batches)
    assert summary(model).unmasked == BUDGET + 2
    assert 0 < get_engine(model).trained <= BUDGET
