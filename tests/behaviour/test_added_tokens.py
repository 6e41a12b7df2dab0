"""Added tokens: a resized vocabulary goes into a delta by itself, and the rows of chosen tokens can be trained."""

import copy
from contextlib import nullcontext

import models
import pytest
import torch
from checkpoints import _SIZES, _build

from sparsify import DeltaPublisher, DeltaSubscriber, SparseDelta, Strategy, load_model, sparsify, summary
from sparsify.api import extend, get_engine, trained_state
from sparsify.cli import commands
from sparsify.errors import BaseMismatchError, SparsifyError
from sparsify.strategies.importance import Magnitude
from sparsify.strategies.strategy import Increment
from sparsify.training.plan import find_resized

OLD, STEPS = 40, 3
SIZES = {**_SIZES, "intermediate_size": 24}
LLAMA = {**SIZES, "num_key_value_heads": 1, "initializer_range": 0.2, "pad_token_id": None}
BART = {"vocab_size": OLD, "d_model": 16, "encoder_ffn_dim": 24, "encoder_layers": 1, "decoder_layers": 1}
MODELS = {  # class, sizes, and the tensors with a row or a number for each token
    "untied": ("LlamaForCausalLM", LLAMA, {"model.embed_tokens.weight", "lm_head.weight"}),
    "tied": ("LlamaForCausalLM", {**LLAMA, "tie_word_embeddings": True}, {"model.embed_tokens.weight"}),
    "bias": ("PhiForCausalLM", SIZES, {"model.embed_tokens.weight", "lm_head.weight", "lm_head.bias"}),
    "buffer": ("BartForConditionalGeneration", BART, {"model.shared.weight", "final_logits_bias"}),
}
LINEAR = {"target_modules": "all-linear"}
WAYS = {
    "frozen": (LINEAR, {}),
    "candidates": ({}, {"pad_to_multiple_of": 16}),
    "fewer": ({"modules_to_save": ["lm_head"]}, {"size": OLD - 4}),
    "chosen": ({"trainable_token_indices": [OLD, OLD + 1]}, {}),
}


class Added:
    """A base on disk, and models of it with more tokens, whose new rows are random by a seed."""

    def __init__(self, folder, name="untied"):
        self.base, (kind, sizes, self.names) = folder / "base", MODELS[name]
        self.kind = type(model := _build(kind, **sizes))
        model.save_pretrained(self.base, max_shard_size="15KB")

    def load(self, seed, size=OLD + 2, **options):
        torch.manual_seed(seed)
        model = self.kind.from_pretrained(self.base)
        model.resize_token_embeddings(size, mean_resizing=False, **options)
        return model


def batch(model):
    ids = torch.tensor([[3, OLD, 4, OLD + 1, 5]]) % model.get_input_embeddings().num_embeddings
    return {"input_ids": ids, "labels": ids}


def train(model, steps=STEPS):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return models.train(model, [batch(model)] * steps, optimizer=torch.optim.SGD(trained, lr=0.05))


@torch.no_grad()
def logits(model):
    return model.eval()(**batch(model)).logits


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("options", "resizing"), WAYS.values(), ids=WAYS)
def test_a_delta_of_a_resized_model_goes_onto_its_base_in_every_way(name, options, resizing, tmp_path):
    added = Added(tmp_path, name)
    model = train(sparsify(added.load(1, **resizing), 50, "id3", steps=STEPS, **options))
    assert summary(model, verify=True).verification.ok
    delta, size = SparseDelta.from_model(model), model.config.vocab_size
    assert set(delta.whole) >= added.names
    delta.save(tmp_path / "delta")
    commands.merge(str(tmp_path / "delta"), added.base, tmp_path / "out")
    made = [load_model(added.base, tmp_path / "delta"), load_model(added.base, delta, vocab_size=size)]
    made += [delta.apply(added.load(2, **resizing)), added.kind.from_pretrained(tmp_path / "out")]
    if size > OLD:
        made.append(load_model(added.base, SparseDelta.diff(added.base, tmp_path / "out"), model_class=added.kind))
    assert all(torch.equal(logits(again), logits(model)) for again in made)
    assert {again.config.vocab_size for again in made} == {size}
    with pytest.raises(BaseMismatchError, match=rf"`model.resize_token_embeddings\({size}\)` first"):
        delta.apply(added.load(0, OLD))
    with pytest.raises(BaseMismatchError, match="in the checkpoint"):
        delta.patches(added.base)


def test_a_resumed_run_and_a_subscriber_have_the_new_rows(tmp_path):
    added = Added(tmp_path)
    whole, half, other = (sparsify(added.load(seed), 50, "id3", steps=4, **LINEAR) for seed in (1, 1, 2))
    other.load_state_dict(copy.deepcopy(trained_state(train(half, 2))))
    assert torch.equal(logits(train(other, 2)), logits(train(whole, 4)))
    subscriber = DeltaSubscriber(added.load(3))
    subscriber.apply(DeltaPublisher(whole).snapshot())
    assert torch.equal(logits(subscriber.model), logits(whole))


def test_a_model_that_is_resized_after_sparsify_is_named(tmp_path):
    model = sparsify(Added(tmp_path).load(0, OLD), 50, "id3", steps=STEPS, **LINEAR)
    model.resize_token_embeddings(OLD + 2)
    with pytest.warns(UserWarning, match="lm_head.weight were resized after sparsify"):
        SparseDelta.from_model(train(model))


def test_a_resized_model_is_found_within_another_one(tmp_path):
    names = ["0.lm_head.weight", "0.model.embed_tokens.weight"]
    assert sorted(find_resized(torch.nn.Sequential(Added(tmp_path).load(1)))) == names


@pytest.mark.parametrize("name", ["untied", "tied"])
@pytest.mark.parametrize("strategy", ["id3", "d3-repeat", "pafi", Strategy(Magnitude(), Increment())])
def test_rows_of_chosen_tokens_are_trained_whole_in_addition_to_the_budget(name, strategy, tmp_path):
    both, dense = {"embed_tokens": [7, 3], "lm_head": [3, 7]}, Added(tmp_path, name).load(0, OLD)
    model = sparsify(copy.deepcopy(dense), 50, strategy, steps=STEPS, trainable_token_indices=both)
    tables = [tensor for tensor in get_engine(model).tensors if tensor.rows]
    entries = 2 * 16 * len(tables)
    assert (get_engine(model).budget, len(tables)) == (50 + entries, 1 if name == "tied" else 2)
    for each in (model, dense):
        each(input_ids=torch.tensor([[3, 7, 1]]), labels=torch.tensor([[3, 7, 1]])).loss.backward()
    wanted = [dict(dense.named_parameters())[tensor.name].grad[[3, 7]].flatten() for tensor in tables]
    assert torch.allclose(model.sparse_values.grad[:entries], torch.cat(wanted), atol=1e-6)
    model.zero_grad()
    train(model)
    for tensor in tables:
        changed = tensor.parameter != dict(dense.named_parameters())[tensor.name]
        assert changed[3].all()
        assert set(changed.any(dim=1).nonzero().flatten().tolist()) <= {3, 7}
    assert summary(model, verify=True).verification.ok
    if strategy == "id3":
        assert get_engine(model).unmasked == 50 + entries
        extend(model, budget=80, steps=2 * STEPS)
        assert get_engine(train(model)).unmasked == 80 + entries


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_row_of_padding_is_a_token_like_others_where_the_output_layer_trains_it(is_tied):
    model = _build("LlamaForCausalLM", **{**LLAMA, "pad_token_id": 3, "tie_word_embeddings": is_tied})
    with nullcontext() if is_tied else pytest.raises(SparsifyError, match=r"without its padding_idx \(3\)"):
        sparsify(model, 50, "id3", steps=STEPS, trainable_token_indices=[3])


@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        ([OLD], {}, r"`model.embed_tokens` a list of different tokens from 0 to 39"),
        ({"lm_head": [3], "embed_tokens": [4]}, {}, "for tied tables one and the same"),
        ({"head": [3]}, {}, "trainable_token_indices: 'head' matches no module"),
        ({"mlp": [3]}, {}, r"`model.layers.0.mlp` \(LlamaMLP\) is no plain embedding or output layer"),
        ([3], {"modules_to_save": ["embed_tokens"]}, "is trained whole by modules_to_save"),
        ([3], {"budget": None, "strategy": "full"}, 'with strategy "full"'),
    ],
)
def test_tokens_that_cannot_be_trained_are_refused(tokens, options, message, tmp_path):
    model = Added(tmp_path, "tied").load(0, OLD)
    with pytest.raises(SparsifyError, match=message):
        sparsify(model, **{"budget": 50, "strategy": "id3", "steps": STEPS, **options}, trainable_token_indices=tokens)
