"""Strategies: rows of importance x selection that round-trip through JSON."""

import json

import pytest
import torch

from sparsify import sparsify, summary
from sparsify.core.importance import D3
from sparsify.errors import SparsifyError
from sparsify.strategies.importance import SNIP, Magnitude, Random, register_importance
from sparsify.strategies.strategy import PRESETS, Increment, Prune, Repeat, Static, Strategy, resolve_strategy


@pytest.mark.parametrize(
    "strategy",
    [
        *PRESETS.values(),
        Strategy(D3(exp=-1.5, eps=1e-3), Increment()),
        Strategy(Random(), Prune("uniform", pretrained=True)),
        Strategy(Magnitude(largest=True), Static("uniform")),
    ],
    ids=repr,
)
def test_strategies_survive_json(strategy):
    data = json.loads(json.dumps(strategy.to_dict(), allow_nan=False))
    assert Strategy.from_dict(data) == strategy
    assert data == strategy.to_dict(), "reading changes nothing"


def test_the_json_has_names_and_settings_and_may_be_from_before_there_were_allocations():
    assert PRESETS["id3"].to_dict() == {
        "importance": {"name": "d3", "exp": 2, "eps": 1},
        "selection": {"name": "increment"},
    }
    assert PRESETS["fish"].to_dict()["importance"] == {"name": "fisher", "num_samples": 1024}
    assert PRESETS["sparseadapter"] == Strategy(SNIP(), Prune())
    data = {"importance": {"name": "magnitude", "largest": False}, "selection": {"name": "static"}}
    assert Strategy.from_dict(data) == PRESETS["pafi"]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ({"importance": {"name": "d4"}}, "unknown importance 'd4'; expected one of d3, fisher, snip, magnitude"),
        ({"selection": {"name": "d4"}}, r"unknown selection 'd4'; .* static, increment, repeat, prune\."),
        ({"importance": {"name": "d3", "power": 2}}, r"importance 'd3' with settings .*; it has these: exp, eps"),
        ({"selection": {"name": "given"}}, "pass the set itself"),
    ],
)
def test_from_dict_names_what_it_does_not_know(data, text):
    with pytest.raises(SparsifyError, match=text):
        Strategy.from_dict(PRESETS["id3"].to_dict() | data)
    for other in (data, "id3"):
        with pytest.raises(SparsifyError, match="describes no strategy; expected a dict with"):
            Strategy.from_dict(other)


@pytest.mark.parametrize("kind", [Static, Prune])
@pytest.mark.parametrize(("typo", "meant"), [("uniformly", "uniform"), ("local", None), (None, None)])
def test_an_unknown_allocation_lists_the_known_ones(kind, typo, meant):
    known = "expected one of global, uniform"
    with pytest.raises(SparsifyError, match=rf"{kind.__name__} got allocation={typo!r}; {known}") as caught:
        kind(typo)
    assert (meant is not None) == str(caught.value).endswith(f"Did you mean {meant!r}?")


@pytest.mark.parametrize("capacity", [0, -1, 1.5, True])
def test_the_capacity_of_repeat_is_a_number_of_entries(capacity):
    with pytest.raises(SparsifyError, match="expected an int of at least 1, or None"):
        Repeat(capacity=capacity)


def test_a_registered_importance_survives_json_under_its_name():
    cubed = register_importance("test-strategies-cubed")(lambda weight, grad: grad.abs() ** 3)
    strategy = Strategy(cubed, Increment())
    assert strategy.to_dict()["importance"] == {"name": "test-strategies-cubed"}
    assert Strategy.from_dict(json.loads(json.dumps(strategy.to_dict()))) == strategy
    with pytest.raises(SparsifyError, match="it has these: none"):
        Strategy.from_dict({**strategy.to_dict(), "importance": {"name": "test-strategies-cubed", "power": 3}})


@pytest.mark.parametrize(
    ("importance", "selection", "text"),
    [
        (None, Static(), r"importance=None with Static\(.*expected an object such as D3\(\)"),
        (D3, Increment(), r"importance=<class .*expected an object such as D3\(\)"),
        (D3(), Increment, r"selection=<class .*expected an object such as Increment\(\)"),
        (D3(), "increment", r"selection='increment'; expected an object such as Increment\(\)"),
        (Magnitude(), Prune(), r"remove the large ones; magnitude pruning is Magnitude\(largest=True\)"),
    ],
    ids=str,
)
def test_parts_of_the_wrong_type_or_that_do_not_go_together_are_refused_at_once(importance, selection, text):
    with pytest.raises(SparsifyError, match=text):
        Strategy(importance, selection)


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("id-3", "id3"), ("ID3", "id3"), ("d3", "id3"), ("D3_Repeat", "d3-repeat"), ("bitft", "bitfit"),
        ("Full", "full"), ("xyz", None),
    ],
)  # fmt: skip
def test_an_unknown_name_lists_the_presets_and_suggests_the_nearest(typo, meant):
    with pytest.raises(SparsifyError, match=rf"unknown strategy '{typo}'; expected one of id3, d3-repeat,") as caught:
        resolve_strategy(typo)
    assert str(caught.value).endswith(f"Did you mean {meant!r}?") == (meant is not None)
    for other in (None, 3, D3(), ["id3"], {"importance": None}):
        with pytest.raises(SparsifyError, match=r"unknown strategy .*a Strategy\(importance=\.\.\., selection="):
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
