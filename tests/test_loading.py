"""From a base's name and a delta to the model: the same logits, bit for bit, or an error that says what to do."""

import copy
import json
import logging
import shutil
import warnings

import pytest
import torch
import transformers as hf
from limits import needs_limits, within_limits
from models import build, train
from requirements import needs_transformers_5
from trainers import WORDS, tokenizer
from transformers import AutoModelForSequenceClassification, BertForMaskedLM, BertForSequenceClassification, pipeline

from sparsify import BaseMismatchError, SparseDelta, SparsifyError, desparsify, load_model, sparsify

of_version_5 = needs_transformers_5("4 refuses a base without a model type, and builds a bare BertPreTrainedModel")
LABELS = {0: "no", 1: "maybe", 2: "yes", 3: "so-so"}


def trained(model, batches):
    new_head = ["classifier"] if hasattr(model, "classifier") else None
    train(sparsify(model, 40, "id3", steps=2, modules_to_save=new_head), batches[:2])
    delta = SparseDelta.from_model(model)
    return delta, logits(desparsify(model).eval(), batches)


def logits(model, batches):
    assert not model.training
    inputs = {name: value for name, value in batches[-1].items() if name != "labels"}
    with torch.no_grad():
        return model(**inputs).logits


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    model, batches = build("bert")
    folder = tmp_path_factory.mktemp("models") / "base"
    model.bert.save_pretrained(folder)
    return folder, batches


@pytest.fixture(scope="module")
def made(pretrained):
    torch.manual_seed(1)
    model = BertForSequenceClassification.from_pretrained(pretrained[0], num_labels=4, id2label=LABELS)
    return trained(model, pretrained[1])


@pytest.fixture
def classifier(pretrained, made, tmp_path):
    """The base's folder, a delta with a new head of four named labels, batches, and the trained model's logits."""
    base, batches = pretrained
    return shutil.copytree(base, tmp_path / "base"), copy.deepcopy(made[0]), made[1], batches


def test_a_classifier_with_a_new_head_has_equal_logits(classifier, tmp_path):
    base, delta, expected, batches = classifier
    delta.save(tmp_path / "delta")
    torch.manual_seed(2)
    model = load_model(base, tmp_path / "delta")
    assert type(model) is BertForSequenceClassification
    assert torch.equal(logits(model, batches), expected)
    (answer,) = pipeline("text-classification", model=model, tokenizer=tokenizer())(WORDS[0])
    assert answer["label"] in LABELS.values()
    assert model.config.id2label == LABELS
    assert model.config.label2id == {"no": 0, "maybe": 1, "yes": 2, "so-so": 3}
    assert delta.config["base_dtypes"] == ["float32"]
    labels = {str(number): label for number, label in LABELS.items()}
    head = {"num_labels": 4, "id2label": labels, "problem_type": "single_label_classification"}
    assert delta.config["model_config"] == head


@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize("base", ["base", "two labels"])
def test_a_head_of_another_size_that_is_trained_within_the_budget_is_in_the_delta(pretrained, labels, base):
    folder, batches = pretrained
    folder = folder.with_name(base)
    if base != "base":
        BertForSequenceClassification.from_pretrained(pretrained[0], num_labels=2).save_pretrained(folder)
    options = {"num_labels": labels, "ignore_mismatched_sizes": True}
    model = sparsify(BertForSequenceClassification.from_pretrained(folder, **options), 40, "id3", steps=2)
    train(model, [{**batch, "labels": 0 * batch["labels"] + (0.5 if labels == 1 else 0)} for batch in batches[:2]])
    assert torch.equal(
        logits(load_model(folder, SparseDelta.from_model(model)), batches), logits(model.eval(), batches)
    )


@pytest.mark.parametrize(("name", "dtype"), [("gpt2", "bfloat16"), ("llama", "float32"), ("t5", "bfloat16")])
def test_a_language_model_has_equal_logits_in_the_dtype_of_training(tmp_path, name, dtype):
    model, batches = build(name)
    model.save_pretrained(tmp_path / "base")
    model = type(model).from_pretrained(tmp_path / "base", dtype=dtype).train()
    if name == "t5":
        batches = [{**batch, "decoder_input_ids": batch["labels"]} for batch in batches]
    delta, expected = trained(model, batches)
    loaded = load_model(tmp_path / "base", delta)
    assert loaded.dtype == getattr(torch, dtype)
    assert torch.equal(logits(loaded, batches), expected)
    assert delta.config["model_config"] == {}


def test_the_recorded_base_is_the_default_and_is_recorded_by_its_full_path(pretrained, monkeypatch):
    """From another folder, `base` would be the id of somebody's repository on the hub."""
    base, batches = pretrained
    monkeypatch.chdir(base.parent)
    model = sparsify(BertForSequenceClassification.from_pretrained("base", num_labels=4), 40, steps=2)
    monkeypatch.chdir("/")
    train(model, batches[:2])
    delta, expected = SparseDelta.from_model(model), logits(desparsify(model).eval(), batches)
    assert delta.config["base_model_name_or_path"] == str(base)
    assert torch.equal(logits(load_model(None, delta), batches), expected)


@pytest.mark.parametrize("options", [{"modules_to_save": ["lm_head"]}, {"target_modules": ["lm_head"]}])
def test_a_head_that_was_untied_in_training_goes_onto_no_tied_base(tmp_path, options):
    model, batches = build("llama")
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(tmp_path)
    loose = copy.deepcopy(model)
    loose.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    train(sparsify(loose, 5, "random", **options), batches[:1])
    delta = SparseDelta.from_model(loose)
    for verb in (lambda: load_model(tmp_path, delta), lambda: delta.apply(model), lambda: delta.check(tmp_path)):
        with pytest.raises(BaseMismatchError, match=r"`model.embed_tokens.weight` and `lm_head.weight` are one tensor"):
            verb()


def test_a_head_replaces_one_of_another_size_in_a_class_of_ones_own_choice(classifier, tmp_path):
    base, delta, expected, batches = classifier
    BertForSequenceClassification.from_pretrained(base, num_labels=2).save_pretrained(tmp_path / "two")
    assert torch.equal(logits(load_model(tmp_path / "two", delta), batches), expected)
    delta.config["architecture"] = "MyOwn"
    model = load_model(base, delta, model_class=AutoModelForSequenceClassification)
    assert torch.equal(logits(model, batches), expected)


def test_another_dtype_is_a_reason_to_warn_and_a_head_that_the_delta_brings_is_none(classifier, caplog):
    base, delta, *_ = classifier
    with pytest.warns(UserWarning, match="cannot be checked, and the trained values are cast"):
        assert load_model(base, delta, dtype=torch.bfloat16).dtype == torch.bfloat16
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING, logger="transformers"):
        warnings.simplefilter("error")
        logger = logging.getLogger("transformers")
        logger.addHandler(caplog.handler)
        load_model(base, delta)
        delta.config["model_config"] = {"num_labels": 4}
        assert load_model(base, delta).config.num_labels == 4
        logger.removeHandler(caplog.handler)
    assert caplog.records == []


def test_a_wrong_base_and_tensors_that_nobody_has_are_refused_rather_than_drawn_at_random(classifier, tmp_path):
    _, delta, *_ = classifier  # trained with the base's pooler, which a masked language model lacks
    build("bert", seed=5)[0].bert.save_pretrained(tmp_path / "wrong")
    BertForMaskedLM(build("bert")[0].config).save_pretrained(tmp_path / "other")
    with pytest.raises(BaseMismatchError, match="does not hold the values that the delta was trained on"):
        load_model(tmp_path / "wrong", delta)
    with pytest.raises(BaseMismatchError, match=r"tensor `bert.pooler.dense.bias` \(2 in all\) is neither in the base"):
        load_model(tmp_path / "other", delta)
    delta.whole.pop("classifier.bias")
    with pytest.raises(BaseMismatchError, match=r"tensor `classifier.bias` \(1 in all\).*random values: pass the base"):
        load_model(None, delta)


BASE = "base_model_name_or_path"
RECORDS = [
    ("architecture", None, r"does not record which class it was trained in: pass `model_class=...`"),
    (BASE, None, r"does not record its base.*pass the base's id on the hub or its folder"),
    (BASE, "nowhere/at-all", r"cannot load the base `nowhere/at-all` as .*id on the hub or its folder"),
]
for name in ("MyOwn", "PreTrainedModel", "BertConfig", "models", ["BertModel"]):
    RECORDS.append(("architecture", name, r"which is no model class of transformers: pass `model_class=...`"))


@pytest.mark.parametrize(("key", "value", "match"), RECORDS, ids=str)
def test_a_record_of_no_class_or_base_is_refused(classifier, key, value, match):
    _, delta, *_ = classifier
    delta.config[key] = value
    with pytest.raises(SparsifyError, match=match):
        load_model(None, delta)


def test_arguments_of_the_wrong_type_are_refused(classifier):
    base, delta, *_ = classifier
    with pytest.raises(SparsifyError, match=r"got a Linear that is loaded: use `delta.apply\(model\)`"):
        load_model(torch.nn.Linear(1, 1), delta)
    with pytest.raises(SparsifyError, match=r"model_class='AutoModel'; expected a class with `from_pretrained`"):
        load_model(base, delta, model_class="AutoModel")
    with pytest.raises(SparsifyError, match=r"no values without its base: .*`load_model\(base, delta.on"):
        load_model(base, 0.5 * delta)
    assert type(load_model(base, (0.5 * delta).on(base))) is BertForSequenceClassification


@needs_limits
def test_a_class_of_another_family_is_refused_before_it_is_built(classifier):
    """In its own default size, which a BERT's config says nothing of, it would take 24 GB."""
    base, delta, *_ = classifier
    delta.config["architecture"] = "GPTJForCausalLM"
    with pytest.raises(SparsifyError, match=r"was trained in GPTJForCausalLM, and .* family of models \(bert\)"):
        within_limits(lambda: load_model(base, delta))


def rewrite(base, change):
    config = json.loads((base / "config.json").read_text())
    change(config)
    (base / "config.json").write_text(json.dumps(config))


@of_version_5
def test_a_config_from_before_there_were_model_types_is_of_any_family(classifier):
    base, delta, expected, batches = classifier
    rewrite(base, lambda config: config.pop("model_type"))
    assert torch.equal(logits(load_model(base, delta), batches), expected)


def test_a_part_of_a_composite_model_is_of_its_family(tmp_path):
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    text, vision = {**sizes, "vocab_size": 9}, {**sizes, "image_size": 4, "patch_size": 2}
    hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=4)).save_pretrained(tmp_path)
    for name in ("CLIPTextModel", "CLIPModel"):
        assert type(load_model(tmp_path, SparseDelta({}, {}, {"architecture": name}))).__name__ == name
    assert type(load_model(tmp_path, SparseDelta({}), model_class=hf.CLIPTextModel)) is hf.CLIPTextModel


def test_a_composite_model_of_any_parts_is_of_its_own_family(tmp_path):
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    parts = hf.BertConfig(**sizes, vocab_size=9), hf.BertConfig(**sizes, vocab_size=9)
    hf.EncoderDecoderModel(hf.EncoderDecoderConfig.from_encoder_decoder_configs(*parts)).save_pretrained(tmp_path)
    loaded = load_model(tmp_path, SparseDelta({}, {}, {"architecture": "EncoderDecoderModel"}))
    assert type(loaded) is hf.EncoderDecoderModel
    loaded.decoder.resize_token_embeddings(12, mean_resizing=False)
    SparseDelta.diff(tmp_path, loaded).merge(tmp_path, tmp_path / "out")
    merged = hf.EncoderDecoderModel.from_pretrained(tmp_path / "out")
    assert (merged.config.encoder.vocab_size, merged.config.decoder.vocab_size) == (9, 12)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda config: config.update(hidden_act="zzz"), "BertModel"),
        (lambda config: config.update(dtype="zzz"), "BertModel"),
        pytest.param(lambda config: None, "BertPreTrainedModel", marks=of_version_5),
    ],
)
def test_what_transformers_cannot_build_is_an_error_of_ours(classifier, change, name):
    base, *_ = classifier
    rewrite(base, change)
    with pytest.raises(SparsifyError, match=f"transformers cannot load the base .* as {name} .*: check base and arg"):
        load_model(base, SparseDelta({}, {}, {"architecture": name}), dtype="auto")


@pytest.mark.parametrize("text", [b"[]", b"[" * 100_000, b"\xff"])
def test_a_broken_config_of_a_base_is_an_error_of_ours(classifier, text):
    base, delta, *_ = classifier
    (base / "config.json").write_bytes(text)
    with pytest.raises(SparsifyError, match=r"the base `.*(config|argument|recursion)"):
        load_model(base, delta)


@needs_limits
def test_a_number_of_labels_counts_only_with_all_of_the_head(classifier):
    """Another tensor of as many rows is no head, whose rows would be made first, and whose labels named."""
    base, delta, *_ = classifier
    many, most = 10_000_000, 10**15
    strays = [torch.zeros(many, 1, dtype=torch.float16), torch.zeros(many, dtype=torch.uint8), torch.empty(most, 0)]
    for stray in strays:
        delta.config["model_config"] = {"num_labels": len(stray)}
        delta.whole["stray"] = stray
        with pytest.raises(BaseMismatchError, match="build the model with that head or module"):
            within_limits(lambda: load_model(base, delta), seconds=10)
