"""Several named deltas on one model: the active one alone is applied, and the base comes back bit for bit."""

import copy

import pytest
import torch
from deltas import bits, make_base, task, unchanged

from sparsify import DeltaSwitch, SparseDelta
from sparsify.delta.format import FILE_NAME
from sparsify.errors import BaseMismatchError, SparsifyError

SEEDS = (1, 2, 3)


@pytest.fixture
def base():
    return make_base(torch.bfloat16)


@pytest.fixture
def deltas(base):
    head = SparseDelta({}, {"2.weight": torch.ones(3, 5, dtype=torch.bfloat16)})
    return {"head": head, **{str(seed): task(base, seed) for seed in SEEDS}}


@pytest.fixture
def switch(base, deltas):
    switch = DeltaSwitch(base)
    for name, delta in deltas.items():
        switch.attach(name, delta)
    return switch


def test_the_active_delta_is_in_the_model_and_no_other(base, deltas, switch):
    before, expected = bits(base), {}
    for name, delta in deltas.items():
        with delta.applied(base):
            expected[name] = bits(base)
    for name in ["1", "2", "2", "head", "1", "3"]:
        switch.activate(name)
        assert switch.active == name
        assert bits(base) == expected[name]
    assert repr(switch) == "DeltaSwitch(head, 1, 2, *3)"
    switch.deactivate()
    switch.deactivate()
    assert switch.active is None
    assert bits(base) == before


def test_a_block_ends_with_what_was_active_before(base, switch):
    before = bits(base)
    switch.activate("1")
    one = bits(base)
    with switch.activated("2") as model, switch.deactivated():
        assert model is base
        assert bits(base) == before
    assert switch.active == "1"
    assert bits(base) == one
    with pytest.raises(ZeroDivisionError), switch.activated("3"):
        raise ZeroDivisionError
    assert bits(base) == one


def test_a_delta_is_attached_while_another_is_active_unless_it_is_of_another_base(base, switch):
    delta = task(base, 9)
    switch.activate("1")
    with unchanged(base):
        switch.attach("9", delta)
        with pytest.raises(BaseMismatchError, match="does not hold the values that the delta was trained on"):
            switch.attach("other", task(make_base(torch.bfloat16, seed=5), 9))
    assert (list(switch), switch.active) == (["head", "1", "2", "3", "9"], "1")


@pytest.mark.parametrize(("own", "other", "held"), [("1", "2", "the delta's"), ("2", "1", "the base's")])
def test_a_model_that_was_changed_meanwhile_is_left_alone(base, deltas, switch, own, other, held):
    changed = {name: set(deltas[name].tensors["0.weight"].indices.tolist()) for name in (own, other)}
    switch.activate("1")
    with torch.no_grad():
        base[0].weight.view(-1)[min(changed[own] - changed[other])] += 1
    with unchanged(base), pytest.raises(SparsifyError, match=f"tensor `0.weight` no longer holds {held} values"):
        switch.activate("2")
    assert switch.active == "1"


def test_a_sum_is_attached_as_its_value_on_the_base_and_a_delta_from_where_it_was_saved(base, deltas, switch, tmp_path):
    deltas["1"].save(tmp_path)
    total = 0.5 * deltas["1"] + deltas["2"]
    for given, delta in [(total, total), *((path, deltas["1"]) for path in (str(tmp_path), tmp_path / FILE_NAME))]:
        with delta.applied(base):
            expected = bits(base)
        switch.attach("given", given)
        with switch.activated("3"), switch.activated("given"):
            assert bits(base) == expected
        switch.detach("given")


def test_what_is_no_delta_is_not_attached_and_what_is_active_stays(base, deltas, switch, tmp_path):
    switch.activate("1")
    for call, text in [
        (lambda: switch.activate(None), "None names no delta: give names"),
        (lambda: switch.activate([["1", "2"]]), r"\[\['1', '2'\]\] names no delta: give names"),
        (lambda: switch.attach("1", deltas["2"]), "a delta called '1' is attached already: `detach"),
        (lambda: switch.attach("new", tmp_path / "nowhere"), "does not exist, so there is no delta to load"),
        (lambda: switch.attach("new", base), "a Sequential cannot be attached; expected a SparseDelta, a sum of them"),
    ]:
        with unchanged(base), pytest.raises(SparsifyError, match=text):
            call()
    assert list(switch) == ["head", "1", "2", "3"]


def test_several_are_active_at_once_as_their_sum(base, deltas, switch):
    before = bits(base)
    with (deltas["1"] + deltas["head"] + deltas["3"]).entries_only().applied(base):
        expected = bits(base)
    switch.attach("12", deltas["1"].then(SparseDelta({}, {"2.bias": torch.ones(3, dtype=torch.bfloat16)})))
    switch.activate("2")
    switch.detach("head")
    switch.activate(["1", "3", "1"])
    assert switch.active == ("1", "3")
    assert repr(switch) == "DeltaSwitch(*1, 2, *3, 12)"
    assert bits(base) == expected
    switch.activate("12")
    switch.detach("1")
    assert switch.active == "12"
    with pytest.raises(
        SparsifyError, match=r"\[\] names no delta: give names; `deactivate\(\)` makes the model the base"
    ):
        switch.activate([])
    switch.deactivate()
    assert bits(base) == before


def test_weights_that_were_loaded_again_get_the_active_delta_again(base, deltas, switch):
    state, before = copy.deepcopy(base.state_dict()), bits(base)
    with deltas["1"].applied(base):
        expected = bits(base)
    for then in ("1", "2", None):
        switch.activate("1")
        base.load_state_dict(state)
        switch.activate(then) if then else switch.deactivate()
        assert bits(base) == before if then is None else switch.active == then
        assert then != "1" or bits(base) == expected
    for _ in range(2):
        assert bits(deltas["1"].apply(base)) == expected
        base.load_state_dict(state)


def test_a_block_ends_with_the_base_where_the_delta_of_before_was_detached_in_it(base, switch):
    before = bits(base)
    switch.activate("1")
    with switch.activated("2"):
        switch.detach("1")
    assert switch.active is None
    assert bits(base) == before
