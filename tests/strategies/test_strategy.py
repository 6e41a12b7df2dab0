"""Strategies: rows of importance x selection that round-trip through JSON."""

import json

import pytest
import torch

from sparsify import sparsify, summary
from sparsify.errors import SparsifyError
from sparsify.strategies.importance import D3, SNIP, Bias, Fisher, GraSP, Magnitude, Random, register_importance
from sparsify.strategies.strategy import (
    PRESETS,
    SELECTIONS,
    Dense,
    Increment,
    Prune,
    Repeat,
    Static,
    Strategy,
    resolve_strategy,
)


def test_presets_have_the_papers_settings():
    assert {
        "id3": Strategy(D3(exp=2, eps=1), Increment()),
        "d3-repeat": Strategy(D3(exp=2, eps=1), Repeat()),
        "pafi": Strategy(Magnitude(), Static()),
        "fish": Strategy(Fisher(num_samples=1024), Static()),
        "random": Strategy(Random(), Static()),
        "bitfit": Strategy(Bias(), Static()),
        "sparseadapter": Strategy(SNIP(), Prune()),
        "full": Strategy(None, Dense()),
    } == PRESETS


@pytest.mark.parametrize(
    "strategy",
    [
        *PRESETS.values(),
        Strategy(D3(exp=-1.5, eps=1e-3), Increment()),
        Strategy(D3(exp=0), Increment()),
        Strategy(SNIP(), Increment()),
        Strategy(GraSP(), Prune()),
        Strategy(Random(), Prune("erdos-renyi")),
        Strategy(Random(), Prune(pretrained=True)),
        Strategy(Magnitude(largest=True), Static("uniform")),
    ],
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
        name: name for name in ("static", "prune", "increment", "repeat", "given", "dense")
    }


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ("importance", r"unknown importance 'd4'; expected one of d3, fisher, snip, grasp, magnitude, random, bias"),
        ("selection", r"unknown selection 'd4'; expected one of static, prune, increment, repeat, given, dense"),
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


@pytest.mark.parametrize("importance", [D3(), Fisher(), SNIP()], ids=repr)
@pytest.mark.parametrize("selection", [Static(), Prune(), Increment(), Repeat()], ids=repr)
def test_only_static_selection_by_gradients_needs_a_calibration(importance, selection):
    assert Strategy(importance, selection).calibrates == (selection in (Static(), Prune()))
    assert not Strategy(Magnitude(largest=True), selection).calibrates


@pytest.mark.parametrize("selection", [Increment(), Repeat()], ids=repr)
def test_grasp_does_not_go_with_a_selection_that_is_made_while_training(selection):
    with pytest.raises(SparsifyError, match=r"GraSP\(\) with .*: a training step has no Hessian.*Prune\(\) or Static"):
        Strategy(GraSP(), selection)


def test_pruning_does_not_keep_the_smallest_weights():
    with pytest.raises(SparsifyError, match=r"remove the large ones; magnitude pruning is Magnitude\(largest=True\)"):
        Strategy(Magnitude(), Prune())
    assert Strategy(Magnitude(largest=True), Prune()).selection == Prune()


@pytest.mark.parametrize("kind", [Static, Prune])
@pytest.mark.parametrize(("typo", "meant"), [("erdos_renyi", "erdos-renyi"), ("local", None), (None, None)])
def test_an_unknown_allocation_lists_those_that_there_are(kind, typo, meant):
    with pytest.raises(
        SparsifyError, match=rf"{kind.__name__} got allocation={typo!r}; expected one of global, uniform, erdos-renyi"
    ) as caught:
        kind(typo)
    assert (meant is not None) == str(caught.value).endswith(f"Did you mean {meant!r}?")


def test_a_static_selection_from_before_there_were_allocations_is_read():
    data = {"importance": {"name": "magnitude", "largest": False}, "selection": {"name": "static"}}
    assert Strategy.from_dict(data) == PRESETS["pafi"]


def test_pruning_is_another_selection_than_static():
    assert Prune() != Static()
    assert Prune("uniform") != Prune()


@pytest.mark.parametrize("capacity", [0, -1, 1.5, True])
def test_the_room_of_repeat_is_a_number_of_entries(capacity):
    with pytest.raises(SparsifyError, match="expected an int of at least 1, or None"):
        Repeat(capacity=capacity)


def test_a_given_set_stands_for_itself_and_is_not_made_from_its_description():
    support = {"weight": torch.tensor([1, 2])}
    strategy = resolve_strategy(support)
    assert strategy.selection.support is support
    assert strategy.to_dict() == {"importance": None, "selection": {"name": "given"}}
    with pytest.raises(SparsifyError, match="pass the set itself"):
        Strategy.from_dict(strategy.to_dict())


def test_a_registered_importance_survives_json_under_its_name():
    @register_importance("test-strategies-cubed")
    def cubed(weight, grad):
        return grad.abs() ** 3

    strategy = Strategy(cubed, Increment())
    assert strategy.to_dict()["importance"] == {"name": "test-strategies-cubed"}
    assert Strategy.from_dict(json.loads(json.dumps(strategy.to_dict()))) == strategy
    with pytest.raises(SparsifyError, match="it has these: none"):
        Strategy.from_dict({**strategy.to_dict(), "importance": {"name": "test-strategies-cubed", "power": 3}})


@pytest.mark.parametrize("selection", [Static(), Increment(), Repeat()], ids=repr)
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


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("id-3", "id3"), ("ID3", "id3"), ("Id3", "id3"), ("d3", "id3"), ("D3_Repeat", "d3-repeat"),
        ("bitft", "bitfit"), ("pafy", "pafi"), ("SparseAdapter", "sparseadapter"), ("xyz", None),
    ],
)  # fmt: skip
def test_an_unknown_name_lists_the_presets_and_suggests_the_nearest(typo, meant):
    with pytest.raises(
        SparsifyError, match=rf"unknown strategy '{typo}'; expected one of id3, d3-repeat, pafi, fish,"
    ) as caught:
        resolve_strategy(typo)
    if meant:
        assert str(caught.value).endswith(f"Did you mean {meant!r}?")


@pytest.mark.parametrize("other", [None, 3, D3(), ["id3"], {"importance": None}], ids=repr)
def test_what_is_no_strategy_is_refused(other):
    with pytest.raises(SparsifyError, match=r"unknown strategy .*a Strategy\(importance=\.\.\., selection=\.\.\.\)"):
        resolve_strategy(other)


@pytest.mark.parametrize(("head", "entries"), [(False, 102_912), (True, 103_682)], ids=["backbone", "two labels"])
def test_bitfit_trains_the_biases_of_deberta_v3_base_that_the_paper_counts(head, entries):
    from transformers import DebertaV2Config, DebertaV2ForSequenceClassification, DebertaV2Model

    config = DebertaV2Config(
        vocab_size=128_100, hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072,
        max_position_embeddings=512, type_vocab_size=0, layer_norm_eps=1e-7, relative_attention=True,
        position_buckets=256, norm_rel_ebd="layer_norm", share_att_key=True, pos_att_type=["p2c", "c2p"],
        position_biased_input=False, pooler_hidden_size=768, num_labels=2,
    )  # fmt: skip
    with torch.device("meta"):
        model = DebertaV2ForSequenceClassification(config) if head else DebertaV2Model(config)
    model.to_empty(device="cpu")  # the counts do not depend on the numbers
    assert summary(sparsify(model, None, "bitfit")).unmasked == entries
