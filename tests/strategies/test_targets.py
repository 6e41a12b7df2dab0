"""Candidates: patterns in PEFT's words, owners, and error texts that help with a typo."""

import pytest
import torch
from models import build
from torch import nn

from sparsify.errors import SparsifyError
from sparsify.strategies.targets import check_own_memory, find_targets

DIM = 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(DIM, DIM)
        self.value = nn.Linear(DIM, DIM, bias=False)
        self.norm = nn.LayerNorm(DIM)


class Model(nn.Module):
    """Two blocks, a table, a parameter of its own, and a head that may be tied to the table."""

    def __init__(self, tied=False):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(DIM))
        self.embed = nn.Embedding(6, DIM)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.subquery = nn.Linear(DIM, DIM)
        self.head = nn.Linear(DIM, 6, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def get_output_embeddings(self):
        return self.head


BLOCK = ["query.weight", "query.bias", "value.weight", "norm.weight", "norm.bias"]
ALL = ["scale", "embed.weight", *(f"blocks.{i}.{name}" for i in range(2) for name in BLOCK)]
ALL += ["subquery.weight", "subquery.bias", "head.weight"]


@pytest.fixture
def model():
    return Model()


def names(targets):
    return [candidate.name for candidate in targets.candidates]


def candidates(model, *args, **options):
    return names(find_targets(model, *args, **options))


def test_every_trainable_parameter_is_a_candidate_in_the_models_own_order(model):
    targets = find_targets(model)
    assert names(targets) == ALL
    assert [candidate.parameter for candidate in targets.candidates] == list(model.parameters())
    assert targets.saved == targets.frozen == {}


@pytest.mark.parametrize(("pattern", "expected"), [
    (["value"], ["blocks.0.value.weight", "blocks.1.value.weight"]),
    (("1.query",), ["blocks.1.query.weight", "blocks.1.query.bias"]),
    # a set is printed in another order by every process, and pytest's processes compare their tests' names
    pytest.param({"blocks.0.value", "embed"}, ["embed.weight", "blocks.0.value.weight"], id="a set of names"),
    # a suffix is one of whole components: not subquery
    (["query"], [name for name in ALL if ".query." in name]),
    (r".*\.query", [name for name in ALL if ".query." in name]),
    (r"blocks\.[01]\.(value|norm)", [name for name in ALL if "value" in name or "norm" in name]),
    (r".*query", [name for name in ALL if "query" in name]),
    ("head", ["head.weight"]),  # a string is for the whole name
    ("all-linear", [name for name in ALL if "query" in name or "value" in name]),  # not the output head
], ids=str)  # fmt: skip
def test_a_list_matches_ends_of_names_and_a_string_whole_names(model, pattern, expected):
    targets = find_targets(model, target_modules=pattern)
    assert names(targets) == expected
    assert set(targets.frozen) == set(ALL) - set(expected)
    assert candidates(model, exclude_modules=pattern) == [name for name in ALL if name not in expected]


def test_all_linear_includes_gpt2s_transposed_layers_and_not_its_tied_head():
    model, _ = build("gpt2")
    found = candidates(model, "all-linear")
    assert len(found) == 2 * 4 * 2  # layers, linear layers in each, weight and bias
    assert all(name.split(".")[-2] in {"c_attn", "c_proj", "c_fc"} for name in found)
    assert candidates(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), "all-linear") == ["0.weight", "0.bias"]


def test_a_dense_module_is_saved_whole_with_what_is_inside_it(model):
    targets = find_targets(model, modules_to_save=["head", "blocks.1"])
    assert set(targets.saved) == {name for name in ALL if name == "head.weight" or name.startswith("blocks.1.")}
    assert targets.saved["head.weight"] is model.head.weight
    assert names(targets) == [name for name in ALL if name not in targets.saved]


def test_a_frozen_parameter_is_neither_a_candidate_nor_dense_nor_to_be_frozen_and_reported_if_targeted(model):
    model.blocks[0].requires_grad_(False)
    model.head.requires_grad_(False)
    message = r"matched 2 modules .*; 1 of them hold none that .*: blocks\.0\.query\.$"
    with pytest.warns(UserWarning, match=message):
        targets = find_targets(model, target_modules=["query"])
    assert names(targets) == ["blocks.1.query.weight", "blocks.1.query.bias"]
    with pytest.raises(
        SparsifyError, match=r"`head` is in modules_to_save, but is frozen: call its requires_grad_\(True"
    ):
        find_targets(model, modules_to_save=["blocks.1", "head"])
    assert not any(name.startswith("blocks.0") for name in targets.frozen)


@pytest.mark.parametrize(("name", "other"), [("embed", "head"), ("head", "embed")])
def test_a_tied_tensor_is_one_candidate_by_either_of_its_names(name, other):
    model = Model(tied=True)
    (candidate,) = find_targets(model, target_modules=[name]).candidates
    assert candidate.name == "embed.weight"
    assert candidate.owners == (("embed", model.embed, "weight"), ("head", model.head, "weight"))
    assert list(find_targets(model, modules_to_save=[name]).saved) == ["embed.weight"]
    assert candidates(model, exclude_modules=[name]) == [n for n in ALL if n.split(".")[0] not in (name, other)]
    assert "embed.weight" in find_targets(model, ["query", "head"], [name]).frozen
    with pytest.raises(SparsifyError, match=rf"`embed\.weight` .*tied to `{name}` in exclude_modules"):
        find_targets(model, None, [name], [other])


@pytest.mark.parametrize("alias", ["first", "second"])
def test_a_layer_reachable_under_two_names_is_found_by_either(alias):
    model = nn.ModuleDict({"first": nn.Linear(2, 2), "other": nn.Linear(2, 2)})
    model["second"] = model["first"]
    assert candidates(model, target_modules=[alias]) == ["first.weight", "first.bias"]
    assert list(find_targets(model, modules_to_save=[alias]).saved) == ["first.weight", "first.bias"]


NOTHING_LEFT = r"no trainable parameter is left: target_modules=\[.*linear layers\.$"


@pytest.mark.parametrize(("options", "text"), [
    ({"target_modules": ["value", "qurey"]}, "target_modules: 'qurey' matches no module of .*Near names: query"),
    ({"exclude_modules": ["qurey"]}, "exclude_modules: 'qurey' matches no module of the model"),
    ({"modules_to_save": ["qurey"]}, "modules_to_save: 'qurey' matches no module of the model"),
    ({"target_modules": "blocks.0.que"}, r"'blocks\.0\.que' matches no module .*Near names: query"),
    ({"target_modules": "zzz"}, "'zzz' matches no module .*Modules here: 0, 1, blocks, embed"),
    ({"target_modules": "(query"}, r"target_modules='\(query' is not a regular expression: missing \)"),
    ({"modules_to_save": "head"}, "modules_to_save='head'; expected a list, as in"),
    ({"exclude_modules": "query"}, r"a string is a .* for the whole name\. Pass a list, .*=\['query'\], .* \(2 here\)"),
    *(
        ({"target_modules": typo}, rf"'{typo}' matches no module of the model\. Did you mean 'all-linear'\?")
        for typo in ("all_linear", "All-Linear")
    ),
    ({"target_modules": ["blocks"]}, NOTHING_LEFT),
    ({"target_modules": []}, NOTHING_LEFT),
    ({"target_modules": ["query"], "exclude_modules": ["query"]}, NOTHING_LEFT),
    ({"target_modules": ["query"], "modules_to_save": ["blocks", "subquery"]}, NOTHING_LEFT),
], ids=str)  # fmt: skip
def test_patterns_that_match_nothing_or_leave_nothing_are_errors_with_a_hint(model, options, text):
    with pytest.raises(SparsifyError, match=text):
        find_targets(model, **options)


@pytest.mark.filterwarnings("error")
def test_exclusions_and_dense_modules_are_taken_from_the_targets_and_the_model_is_only_read(model):
    before = {name: (id(parameter), parameter.requires_grad) for name, parameter in model.named_parameters()}
    expected = ["blocks.0.query.weight", "blocks.0.query.bias", "blocks.0.value.weight", "blocks.1.value.weight"]
    assert candidates(model, ["query", "value"], ["1.query"]) == expected
    assert candidates(model, exclude_modules=["blocks"]) == [name for name in ALL if not name.startswith("blocks")]
    find_targets(model, target_modules="all-linear", modules_to_save=["head"])
    targets = find_targets(model, target_modules=["query"], modules_to_save=["1.query"])
    assert names(targets) == ["blocks.0.query.weight", "blocks.0.query.bias"]
    assert set(targets.saved) == {"blocks.1.query.weight", "blocks.1.query.bias"}
    assert {name: (id(p), p.requires_grad) for name, p in model.named_parameters()} == before


def sharing(arrange):
    """Three parameters, of which `first` and `third` are over the same memory."""
    memory = torch.randn(12)
    tensors = {"first": memory[:6], "second": torch.randn(6), "third": arrange(memory)}
    return nn.ParameterDict({name: nn.Parameter(tensor) for name, tensor in tensors.items()})


@pytest.mark.parametrize("arrange", [lambda m: m[:6].view(2, 3).t(), lambda m: m[4:10], lambda m: m])
def test_parameters_over_the_same_memory_are_refused_by_both_their_names(arrange):
    model = sharing(arrange)
    with pytest.raises(SparsifyError, match=r"`first` shares its memory with `third`, .*; untie them, or make them"):
        check_own_memory(model, find_targets(model).candidates)
    model["first"].requires_grad_(False)
    with pytest.raises(SparsifyError, match=r"`third` shares its memory with `first`"):
        check_own_memory(model, find_targets(model).candidates)


def test_parameters_that_are_neighbours_in_memory_are_not_taken_for_one():
    memory = torch.randn(6, 4)
    columns, rows = [memory[:, :2], memory[:, 2:]], [torch.randn(12)[:6], torch.randn(12)[6:]]
    lists = nn.ParameterList([*columns, *rows, torch.randn(0)])
    for model in (lists, sharing(lambda memory: memory[6:])):
        check_own_memory(model, find_targets(model).candidates)
