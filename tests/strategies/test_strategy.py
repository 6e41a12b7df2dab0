"""Strategies: rows of importance x selection that round-trip through JSON."""

import json

import pytest

from sparsify.core.importance import D3
from sparsify.errors import SparsifyError
from sparsify.strategies.importance import SNIP, Magnitude, Random, register_importance
from sparsify.strategies.strategy import PRESETS, Increment, Prune, Repeat, Static, Strategy, resolve_strategy

cubed = register_importance("test-strategies-cubed")(lambda weight, grad: grad.abs() ** 3)


@pytest.mark.parametrize("strategy", [
    *PRESETS.values(),
    Strategy(D3(exp=-1.5, eps=1e-3), Increment()),
    Strategy(cubed, Increment()),
    Strategy(Random(), Prune("uniform", pretrained=True)),
    Strategy(Magnitude(largest=True), Static("uniform")),
], ids=repr)  # fmt: skip
def test_strategies_survive_json(strategy):
    data = json.loads(json.dumps(strategy.to_dict(), allow_nan=False))
    assert Strategy.from_dict(data) == strategy
    assert data == strategy.to_dict(), "reading changes nothing"


def test_the_json_has_names_and_settings_and_may_be_from_before_there_were_allocations():
    assert PRESETS["id3"].to_dict() == {
        "importance": {"name": "d3", "exp": 2, "eps": 1},
        "selection": {"name": "increment", "select": "all", "allocation": "global"},
    }
    assert Strategy(cubed, Increment()).to_dict()["importance"] == {"name": "test-strategies-cubed"}
    assert PRESETS["fish"].to_dict()["importance"] == {"name": "fisher", "num_samples": 1024}
    assert PRESETS["sparseadapter"] == Strategy(SNIP(), Prune())
    data = {"importance": {"name": "magnitude", "largest": False}, "selection": {"name": "static"}}
    assert Strategy.from_dict(data) == PRESETS["pafi"]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ({"importance": {"name": "d4"}}, "unknown importance 'd4'; expected one of d3, fisher, gsnr, snip, magnitude"),
        ({"selection": {"name": "d4"}}, r"unknown selection 'd4'; .* static, increment, repeat, prune\."),
        ({"importance": {"name": "d3", "power": 2}}, r"importance 'd3' with settings .*; it has these: exp, eps"),
        ({"importance": {"name": "test-strategies-cubed", "power": 3}}, "it has these: none"),
        ({"selection": {"name": "given"}}, "pass the set itself"),
    ],
)
def test_from_dict_names_what_it_does_not_know(data, text):
    with pytest.raises(SparsifyError, match=text):
        Strategy.from_dict(PRESETS["id3"].to_dict() | data)
    for other in (data, "id3"):
        with pytest.raises(SparsifyError, match="describes no strategy; expected a dict with"):
            Strategy.from_dict(other)


KNOWN = "; expected one of global, uniform"


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Static("uniformly"), f"Static got allocation='uniformly'{KNOWN}.*Did you mean 'uniform'.$"),
        (lambda: Static(None), f"Static got allocation=None{KNOWN}[^?]*$"),
        (lambda: Prune({"a": 1}), f"Prune got allocation={{'a': 1}}{KNOWN}"),
        (lambda: Increment(allocation="uniform"), "Increment got allocation='uniform'; expected one of global"),
        (lambda: Increment(allocation={"(": 1}), r"'\(' is no name of a module, nor a regular expression"),
        (lambda: Static({"a": 0}), "the budget of 'a' is 0; expected an int, or a share"),
        *((lambda n=n: Repeat(capacity=n), "expected an int of at least 1, or None") for n in (0, -1, 1.5, True)),
        (lambda: Strategy(Magnitude(), Increment(allocation={"a": 1})), r"importance of gradients, or Static\(\)"),
        (lambda: Strategy(D3, Increment()), r"importance=<class .*expected an object such as D3\(\)"),
        (lambda: Strategy(D3(), Increment), r"selection=<class .*expected an object such as Increment\(\)"),
        (lambda: Strategy(Random(), Static("spread")), r"random entries are spread by themselves: Static\(\)"),
        (lambda: Strategy(Magnitude(), Prune()), r"remove the large weights; take Magnitude\(largest=True\)"),
    ],
)
def test_parts_that_make_no_sense_or_do_not_go_together_are_refused_at_once(make, text):
    with pytest.raises(SparsifyError, match=text):
        make()


@pytest.mark.parametrize(("typo", "meant"), [("D3_Repeat", "d3-repeat"), ("Full", "full"), ("xyz", None)])
def test_an_unknown_name_lists_the_presets_and_suggests_the_nearest(typo, meant):
    with pytest.raises(SparsifyError, match=rf"unknown strategy '{typo}'; expected one of id3, d3-repeat,") as caught:
        resolve_strategy(typo)
    assert str(caught.value).endswith(f"Did you mean {meant!r}?") == (meant is not None)
    for other in (None, 3, D3(), ["id3"], {"importance": None}):
        with pytest.raises(SparsifyError, match=r"unknown strategy .*a Strategy\(importance=\.\.\., selection="):
            resolve_strategy(other)
