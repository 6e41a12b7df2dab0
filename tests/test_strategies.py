"""Strategies: rows of importance x selection that round-trip through JSON."""

import json

import pytest

from sparsify.errors import SparsifyError
from sparsify.importance import D3, Bias, Magnitude, Random
from sparsify.strategies import PRESETS, SELECTIONS, Dense, Increment, Static, Strategy, resolve_strategy

WEIGHT_IMPORTANCES = [Magnitude(), Random(), Bias()]


def test_presets_have_the_papers_settings():
    assert {
        "id3": Strategy(D3(exp=2, eps=1), Increment()),
        "pafi": Strategy(Magnitude(), Static()),
        "random": Strategy(Random(), Static()),
        "bitfit": Strategy(Bias(), Static()),
        "full": Strategy(None, Dense()),
    } == PRESETS


@pytest.mark.parametrize(
    "strategy",
    [*PRESETS.values(), Strategy(D3(exp=-1.5, eps=1e-3), Increment()), Strategy(D3(exp=0), Increment())],
    ids=repr,
)
def test_strategies_survive_json(strategy):
    text = json.dumps(strategy.to_dict(), allow_nan=False)
    assert Strategy.from_dict(json.loads(text)) == strategy


def test_a_strategys_json_is_for_people_too():
    assert PRESETS["id3"].to_dict() == {
        "importance": {"name": "d3", "exp": 2, "eps": 1},
        "selection": {"name": "increment"},
    }
    assert PRESETS["full"].to_dict() == {"importance": None, "selection": {"name": "dense"}}


def test_from_dict_leaves_its_input_alone():
    data = PRESETS["id3"].to_dict()
    Strategy.from_dict(data)
    assert data == PRESETS["id3"].to_dict()


def test_selections_are_registered_under_their_own_names():
    assert {name: kind.name for name, kind in SELECTIONS.items()} == {
        name: name for name in ("static", "increment", "dense")
    }


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ("importance", r"unknown importance 'd4'; expected one of d3, magnitude, random, bias"),
        ("selection", r"unknown selection 'd4'; expected one of static, increment, dense"),
    ],
)
def test_from_dict_names_an_unknown_part(part, text):
    with pytest.raises(SparsifyError, match=text):
        Strategy.from_dict({**PRESETS["id3"].to_dict(), part: {"name": "d4"}})


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"importance": {"name": "d3"}},
        {"importance": {"name": "d3", "power": 2}, "selection": {"name": "increment"}},
        {"importance": "d3", "selection": {"name": "increment"}},
    ],
    ids=["empty", "no selection", "unknown setting", "not a dict"],
)
def test_from_dict_refuses_what_is_no_strategy(data):
    with pytest.raises(SparsifyError):
        Strategy.from_dict(data)


@pytest.mark.parametrize("importance", WEIGHT_IMPORTANCES, ids=repr)
def test_incrementing_needs_gradients(importance):
    with pytest.raises(
        SparsifyError, match=r"Increment\(\) with .* is not supported; it needs an importance that uses"
    ):
        Strategy(importance, Increment())


def test_static_with_a_gradient_importance_is_refused():
    with pytest.raises(SparsifyError, match=r"Static\(\) with D3\(exp=1, eps=1\.0\) needs gradients before training"):
        Strategy(D3(exp=1), Static())


@pytest.mark.parametrize("selection", [Static(), Increment()], ids=repr)
def test_a_selection_needs_an_importance(selection):
    with pytest.raises(SparsifyError, match=r"without an importance; expected one, such as D3\(\)"):
        Strategy(None, selection)


@pytest.mark.parametrize(
    ("importance", "selection"),
    [(D3(), Increment), (D3, Increment()), (D3(), "increment"), ("d3", Increment()), (D3(), None)],
    ids=["class for a selection", "class for an importance", "named selection", "named importance", "no selection"],
)
def test_parts_of_the_wrong_type_are_refused_at_once(importance, selection):
    with pytest.raises(SparsifyError):
        Strategy(importance, selection)


@pytest.mark.parametrize("name", PRESETS)
def test_a_name_stands_for_its_preset(name):
    assert resolve_strategy(name) is PRESETS[name]


def test_a_strategy_stands_for_itself():
    strategy = Strategy(D3(exp=1), Increment())
    assert resolve_strategy(strategy) is strategy


@pytest.mark.parametrize(("typo", "meant"), [("id-3", "id3"), ("bitft", "bitfit"), ("pafy", "pafi"), ("ID3", None)])
def test_an_unknown_name_lists_the_presets_and_suggests_the_nearest(typo, meant):
    with pytest.raises(SparsifyError, match=rf"unknown strategy '{typo}'; expected one of id3, pafi,") as caught:
        resolve_strategy(typo)
    if meant:
        assert str(caught.value).endswith(f"Did you mean {meant!r}?")


@pytest.mark.parametrize("other", [None, 3, D3(), ["id3"], {"importance": None}], ids=repr)
def test_what_is_no_strategy_is_refused(other):
    with pytest.raises(SparsifyError, match=r"unknown strategy .*or a Strategy\(importance=\.\.\., selection=\.\.\.\)"):
        resolve_strategy(other)
