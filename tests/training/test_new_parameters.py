"""New parameters: found, stored whole, and applied."""

import models
import pytest
import torch
from deltas import unchanged
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from transformers import BertForSequenceClassification, BertModel

from sparsify import SparseDelta, get_engine, sparsify
from sparsify.adapters import add_adapters
from sparsify.errors import SparsifyError
from sparsify.training.plan import find_new

STEPS = 4
PREFIX = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
IDS = torch.arange(24).view(4, 6)


def bert(seed=0):
    return models.build("bert", seed)[0]


def lora(model, seed=1, **settings):
    torch.manual_seed(seed)
    config = LoraConfig(**{"r": 8, "target_modules": ["query", "value"], "task_type": "SEQ_CLS", **settings})
    return get_peft_model(model, config)


def pfeiffer(model, seed=1):
    torch.manual_seed(seed)
    return add_adapters(model, "pfeiffer", 2)


def train(model):
    return models.train(model, [{"input_ids": IDS, "labels": torch.tensor([0, 1, 1, 0])}] * STEPS).eval()


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def assert_goes_onto(base, delta, model):
    """The delta makes the model of a base with other initial values, and leaves nothing behind."""
    with unchanged(base), delta.applied(base):
        assert torch.equal(logits(base), logits(model))


@pytest.mark.parametrize("extend", [lora, pfeiffer])
def test_a_delta_of_new_modules_goes_onto_a_base_with_others_in_their_place(extend, tmp_path):
    model = sparsify(extend(bert()), 0.24, "id3", steps=STEPS, modules_to_save=["classifier"])
    train(model)
    SparseDelta.from_model(model).save(tmp_path)
    delta = SparseDelta.load(tmp_path)
    assert delta.num_entries + delta.entries_in_whole == get_engine(model).unmasked
    assert_goes_onto(extend(bert(), seed=2), delta, model)


def test_a_delta_of_fewer_entries_is_that_of_the_first_unmasked():
    model = train(sparsify(lora(bert()), 300, "id3", steps=STEPS))
    delta = SparseDelta.from_model(model, budget=100)
    applied = delta.apply(lora(bert(), seed=2))
    changed = 0
    for tensor in get_engine(model).tensors:
        expected = tensor.parameter.detach().clone()
        late = tensor.slots >= 100
        expected.view(-1)[tensor.indices[late]] = tensor.base[late]
        assert torch.equal(applied.get_parameter(tensor.name), expected)
        changed += int((~late).sum())
    assert changed == 100


def test_frozen_new_parameters_are_part_of_the_delta_too():
    model = lora(bert())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_B" in name)
    trained = train(sparsify(model, 100, "id3", steps=STEPS))
    delta = SparseDelta.from_model(trained)
    assert_goes_onto(lora(bert(), seed=2), delta, trained)


@pytest.mark.parametrize(("make", "pattern"), [
    (lambda: lora(bert(), use_dora=True), "lora_"),
    (lambda: lora(bert(), target_modules=["word_embeddings"]), "lora_embedding"),
    (lambda: pfeiffer(bert()), "adapters.default"),
    (lambda: get_peft_model(models.build("llama")[0], PREFIX), "prompt_encoder"),
], ids=["dora", "embedding", "adapters", "prefix"])  # fmt: skip
def test_parameters_of_peft_and_adapters_are_found_and_no_others(make, pattern):
    model = make()
    names = [name for name, _ in model.named_parameters() if pattern in name or "modules_to_save" in name]
    assert names
    assert list(find_new(model)) == names


def test_a_head_that_the_checkpoint_lacks_is_found(tmp_path):
    bert().bert.save_pretrained(tmp_path)
    model = BertForSequenceClassification.from_pretrained(tmp_path)
    assert find_new(model) == ("classifier.weight", "classifier.bias")
    assert find_new(model, saved=["classifier.weight"]) == ("classifier.bias",)
    assert find_new(BertModel.from_pretrained(tmp_path)) == ()


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
    model = sparsify(bert(), 500, "id3", steps=STEPS, fresh_modules=["pooler"])
    assert set(SparseDelta.from_model(train(model)).whole) == set(pooler)
    with pytest.raises(SparsifyError, match=r"fresh_modules: 'poler' matches no module"):
        sparsify(bert(), 500, "id3", steps=STEPS, fresh_modules=["poler"])
