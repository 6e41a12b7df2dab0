"""New parameters: found, stored whole or generated again from a recipe, and applied."""

import copy
import math
import warnings

import models
import pytest
import torch
from deltas import bits
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, BertModel

from sparsify import SparseDelta, get_unmasker, overlap, sparsify, summary
from sparsify.adapters import add_adapters
from sparsify.common.initializers import InitializerRecipe
from sparsify.common.raw_bits import digest
from sparsify.delta.sparse_delta import TensorDelta
from sparsify.errors import BaseMismatchError, SparsifyError
from sparsify.training.new_parameters import find_new, find_recipes

CONFIG = BertConfig(
    vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip
STEPS = 4
IDS = torch.arange(24).view(4, 6)


def bert(seed=0):
    torch.manual_seed(seed)
    return BertForSequenceClassification(CONFIG)


def lora(model, seed=1, **settings):
    torch.manual_seed(seed)
    config = LoraConfig(**{"r": 8, "target_modules": ["query", "value"], "task_type": "SEQ_CLS", **settings})
    return get_peft_model(model, config)


def prefix(model):
    return get_peft_model(model, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))


def pfeiffer(model, seed=1):
    torch.manual_seed(seed)
    return add_adapters(model, "pfeiffer", 2)


def train(model):
    return models.train(model, [{"input_ids": IDS, "labels": torch.tensor([0, 1, 1, 0])}] * STEPS).eval()


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def quiet(call, *args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call(*args, **kwargs)


@pytest.mark.parametrize("fresh", ["store", "seed"])
@pytest.mark.parametrize("extend", [lora, pfeiffer])
def test_a_delta_of_new_modules_goes_onto_a_base_with_others_in_their_place(extend, fresh, tmp_path):
    model = quiet(sparsify, extend(bert()), 0.24, steps=STEPS, fresh=fresh, modules_to_save=["classifier"])
    train(model)
    SparseDelta.from_model(model).save(tmp_path)
    delta = SparseDelta.load(tmp_path)
    assert delta.num_entries + delta.entries_in_whole == get_unmasker(model).unmasked
    base = extend(bert(), seed=2)
    before = bits(base)
    assert torch.equal(logits(delta.apply(base)), logits(model))
    delta.revert(base)
    assert bits(base) == before


@pytest.mark.parametrize("fresh", ["store", "seed"])
def test_a_delta_of_fewer_entries_is_that_of_the_first_unmasked(fresh, tmp_path):
    model = train(quiet(sparsify, lora(bert()), 300, steps=STEPS, fresh=fresh))
    delta = SparseDelta.from_model(model, budget=100)
    applied = delta.apply(lora(bert(), seed=2))
    changed = 0
    for tensor in get_unmasker(model).tensors:
        expected = tensor.parameter.detach().clone()
        late = tensor.slots >= 100
        expected.view(-1)[tensor.indices[late]] = tensor.base[late]
        assert torch.equal(applied.get_parameter(tensor.name), expected)
        changed += int((~late).sum())
    assert changed == 100


@pytest.fixture(scope="module")
def drawn():
    """The delta of a LoRA model whose initial values are drawn again."""
    return SparseDelta.from_model(train(quiet(sparsify, lora(bert()), 500, steps=STEPS, fresh="seed")))


def test_a_parameter_with_a_recipe_is_stored_as_its_entries_alone(drawn):
    of_lora = {name: part for name, part in drawn.tensors.items() if "lora_" in name}
    assert len(of_lora) == 2 * 2 * 2
    assert not of_lora.keys() & drawn.whole.keys()
    assert sum(part.count for part in of_lora.values()) == 500
    assert {part.initializer.distribution for part in of_lora.values()} == {"uniform", "constant"}


def test_frozen_new_parameters_are_part_of_the_delta_too():
    model = lora(bert())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_B" in name)
    for fresh in ("store", "seed"):
        trained = train(quiet(sparsify, copy.deepcopy(model), 100, steps=STEPS, fresh=fresh))
        delta = SparseDelta.from_model(trained)
        assert torch.equal(logits(delta.apply(lora(bert(), seed=2))), logits(trained))


def test_recipes_change_new_parameters_only_and_the_same_seed_gives_the_same():
    model = lora(bert())
    before = copy.deepcopy(model.state_dict())
    twice = [quiet(sparsify, lora(bert(), seed=seed), 100, steps=1, fresh="seed", seed=4) for seed in (1, 2)]
    first, second = ({name: t for name, t in m.state_dict().items() if not name.startswith("sparse_")} for m in twice)
    changed = {name for name in before if not torch.equal(before[name], first[name])}
    assert changed == {name for name in before if "lora_A" in name}
    assert all(torch.equal(first[name], second[name]) for name in first if "modules_to_save" not in name)
    other = quiet(sparsify, lora(bert()), 100, steps=1, fresh="seed", seed=5).state_dict()
    assert all(not torch.equal(other[name], first[name]) for name in changed)
    assert summary(twice[0], verify=True).verification.ok


def test_other_weights_loaded_after_sparsify_are_stored_whole():
    """Never a file that generates other initial values than the model had."""
    model = quiet(sparsify, lora(bert()), 100, steps=STEPS, fresh="seed")
    other = quiet(sparsify, lora(bert(), seed=2), 100, steps=STEPS)
    model.load_state_dict(train(other).state_dict())
    delta = SparseDelta.from_model(model)
    assert sum("lora_A" in name for name in delta.whole) == 2 * 2
    assert torch.equal(logits(delta.apply(lora(bert(), seed=3))), logits(model))


def test_a_wrong_recipe_is_an_error_and_changes_nothing(drawn):
    delta = copy.deepcopy(drawn)
    name = next(name for name in delta.tensors if "lora_A" in name)
    object.__setattr__(delta.tensors[name], "initializer", InitializerRecipe("uniform", 32**-0.5, seed=1))
    base = lora(bert(), seed=2)
    before = bits(base)
    with pytest.raises(BaseMismatchError, match=f"`{name}` is drawn from a seed, and what is drawn here is not what"):
        delta.apply(base)
    assert bits(base) == before


def test_a_recipe_beyond_its_dtype_is_refused():
    recipe = InitializerRecipe("constant", 1e6)
    none = torch.empty(0, dtype=torch.int64)
    initial = recipe.values("weight", (2, 2), torch.float16)
    part = TensorDelta(none, none.half(), (2, 2), torch.float16, "replace", digest(initial), recipe)
    with pytest.raises(BaseMismatchError, match=r"`weight` is drawn with a scale of 1000000\.0, beyond"):
        SparseDelta({"weight": part}).apply(nn.Linear(2, 2).half())


def test_a_parameter_with_a_recipe_is_no_change_of_a_base(drawn):
    with pytest.raises(SparsifyError, match=r"a sum is about changes of a base, and tensor `.*lora_.*` \(8 in all\)"):
        (drawn + drawn).apply(lora(bert()))
    with pytest.raises(SparsifyError, match="a comparison is about changes of a base"):
        overlap(drawn, drawn)


def test_a_failed_call_leaves_the_initial_values():
    model = lora(bert())
    before = bits(model)

    def fails(model):
        raise RuntimeError("no data")

    with pytest.raises(RuntimeError, match="no data"):
        quiet(sparsify, model, 100, "fish", calibration=fails, fresh="seed")
    assert bits(model) == before


def initialised(how, shape=(24, 384), dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Module()
    model.weight = nn.Parameter(torch.empty(shape, dtype=dtype))
    with torch.no_grad():
        how(model.weight)
    return model


def recipe_of(model):
    return quiet(find_recipes, model, ["weight"], "seed", 5).get("weight")


def kaiming_uniform(tensor):
    return nn.init.kaiming_uniform_(tensor, a=math.sqrt(5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("how", "recipe"),
    [
        (nn.init.zeros_, InitializerRecipe("constant", 0.0, 5)),
        (kaiming_uniform, InitializerRecipe("uniform", 384**-0.5, 5)),
        (lambda tensor: nn.init.normal_(tensor, std=0.02), InitializerRecipe("normal", 0.02, 5)),
    ],
    ids=["LoRA's B", "LoRA's A", "adapters"],
)
def test_loras_and_adapters_initial_values_have_a_recipe_and_its_values_have_it_again(how, recipe, dtype):
    assert recipe_of(initialised(how, dtype=torch.float32)) == recipe
    values = recipe.values("weight", (24, 384), dtype)
    assert recipe_of(initialised(lambda tensor: tensor.copy_(values), dtype=dtype)) == recipe


@pytest.mark.parametrize(
    "how",
    [
        lambda tensor: nn.init.normal_(tensor, std=0.03),
        lambda tensor: nn.init.normal_(tensor, mean=0.01, std=0.02),
        lambda tensor: nn.init.normal_(tensor, std=0.02).view(-1)[:1].fill_(1.0),
        lambda tensor: nn.init.uniform_(tensor, -0.02 * 3**0.5, 0.02 * 3**0.5),
        lambda tensor: nn.init.kaiming_uniform_(tensor),
        lambda tensor: kaiming_uniform(tensor).add_(torch.randn(24, 384), alpha=2e-3),
        lambda tensor: nn.init.zeros_(tensor).view(-1)[:5].fill_(0.001),
        lambda tensor: tensor.fill_(math.nan),
        lambda tensor: nn.init.normal_(tensor, std=0.02).view(-1)[:1].fill_(math.inf),
        nn.init.ones_,
    ],
    ids=["std", "mean", "outlier", "uniform std", "bound", "trained", "few entries", "nan", "inf", "ones"],
)
def test_other_values_have_no_recipe_and_are_stored_whole(how):
    model = initialised(how)
    with pytest.warns(UserWarning, match="1 of 1 new parameters have other initial values .* stored whole: weight"):
        assert find_recipes(model, ["weight"], "seed", 5) == {}


def test_a_few_numbers_have_no_recipe_unless_they_are_zeros():
    assert recipe_of(initialised(lambda tensor: nn.init.normal_(tensor, std=0.02), (5, 5))) is None
    assert recipe_of(initialised(nn.init.zeros_, ())) == InitializerRecipe("constant", 0.0, 5)


@pytest.mark.parametrize(("extend", "zeros"), [(lora, "lora_B"), (pfeiffer, "bias")])
def test_a_slightly_trained_matrix_is_not_drawn_again(extend, zeros):
    """Its own values may look initialised; those that started at zero do not."""
    model = extend(bert())
    names = [name for name, _ in model.named_parameters() if "lora_" in name or "adapter_" in name]
    assert set(names) == find_recipes(model, names, "seed", 0).keys()
    with torch.no_grad():
        for name in names:
            if zeros in name:
                model.get_parameter(name).add_(1e-3)
    assert quiet(find_recipes, model, names, "seed", 0) == {}


@pytest.mark.parametrize(
    ("make", "pattern"),
    [
        (lambda: lora(bert(), use_dora=True), "lora_"),
        (lambda: lora(bert(), target_modules=["word_embeddings"]), "lora_embedding"),
        (lambda: pfeiffer(bert()), "adapters.default"),
        (lambda: prefix(models.build("llama")[0]), "prompt_encoder"),
    ],
    ids=["dora", "embedding", "adapters", "prefix"],
)
def test_parameters_of_peft_and_adapters_are_found_and_no_others(make, pattern):
    model = make()
    names = [name for name, _ in model.named_parameters() if pattern in name or "modules_to_save" in name]
    assert names
    assert list(find_new(model)) == names


def test_a_head_that_the_checkpoint_lacks_is_found(tmp_path):
    torch.manual_seed(0)
    BertModel(CONFIG).save_pretrained(tmp_path)
    model = BertForSequenceClassification.from_pretrained(tmp_path)
    assert find_new(model) == ("classifier.weight", "classifier.bias")
    assert find_new(model, saved=["classifier.weight"]) == ("classifier.bias",)
    assert find_new(BertModel.from_pretrained(tmp_path)) == ()
    delta = SparseDelta.from_model(train(sparsify(model, 500, steps=STEPS)))
    assert set(delta.whole) == {"classifier.weight", "classifier.bias"}
    again = BertForSequenceClassification.from_pretrained(tmp_path)
    assert torch.equal(logits(delta.apply(again)), logits(model))


def test_without_the_checkpoint_a_head_is_not_found(tmp_path):
    assert find_new(bert()) == ()
    model = bert()
    model.config._name_or_path = str(tmp_path)
    assert find_new(model) == ()
    model.config._name_or_path = "somebody/something"
    assert find_new(model) == ()


def test_the_user_may_name_new_modules():
    pooler = ("bert.pooler.dense.weight", "bert.pooler.dense.bias")
    assert find_new(bert(), ["pooler"]) == pooler
    model = sparsify(bert(), 500, steps=STEPS, fresh_modules=["pooler"])
    assert set(SparseDelta.from_model(train(model)).whole) == set(pooler)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"fresh_modules": ["poler"]}, r"fresh_modules: 'poler' matches no module"),
        ({"fresh": "sed"}, "fresh='sed'; expected one of 'store', 'seed'"),
        ({"fresh": "seed"}, "this model has none except modules_to_save: leave it out"),
    ],
)
def test_wrong_options_are_refused(options, match):
    with pytest.raises(SparsifyError, match=match):
        sparsify(bert(), 500, steps=STEPS, **options)
