"""Activation checkpointing and offloaded activations change neither losses nor unmasked sets."""

import copy
import functools

import pytest
import torch
from deltas import unchanged
from models import build, loss_of, sparsified
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from twins import Twins

from sparsify import SparsifyError, sparsify, summary

BUDGET, STEPS = 40, 4
KEPT = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]


def by_default(model):
    model.config.use_cache = True  # which transformers turns off
    model.gradient_checkpointing_enable()


def non_reentrant(model, **options):
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False, **options})


def selective(model):
    non_reentrant(model, context_fn=functools.partial(create_selective_checkpoint_contexts, KEPT))


def compare(name, prepare, wrap=lambda model: model):
    dense, batches = build(name, dtype=torch.float64)
    dense.config.problem_type = "single_label_classification"  # else BERT's first forward sets it, and is a graph
    sparse = sparsify(copy.deepcopy(dense), BUDGET, "id3", steps=STEPS)
    prepare(sparse)
    Twins(dense, sparse, BUDGET, STEPS, run=wrap(sparse)).train(batches[:STEPS])


@pytest.mark.parametrize("name", ["gpt2", "t5"])
@pytest.mark.parametrize("prepare", [by_default, selective], ids=lambda f: f.__name__)
def test_a_checkpointed_model_is_the_oracle(name, prepare):
    compare(name, prepare)


def test_a_checkpointed_model_that_is_compiled_is_the_oracle():
    torch._dynamo.reset()
    compare("bert", selective, lambda model: torch.compile(model, backend="aot_eager"))
    torch._dynamo.reset()


def test_activations_that_are_kept_on_the_cpu_change_nothing():
    def kept(model):
        def run(**batch):
            with torch.autograd.graph.save_on_cpu():
                return model(**batch)

        return run

    compare("bert", lambda model: None, kept)


def test_reentrant_checkpointing_is_refused_before_anything_has_changed_and_blocks_are_computed_again_once():
    model, batches = sparsified("bert", BUDGET, steps=STEPS)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    calls, message = [], r"was recomputed inside a backward pass.*use_reentrant\": False"
    with unchanged(model), pytest.raises(SparsifyError, match=message):
        loss_of(model, batches[0]).backward()
    assert model.sparse_values.grad is None
    for block in model.bert.encoder.layer:
        block.attention.self.register_forward_hook(lambda *_: calls.append(1))
    non_reentrant(model)
    loss_of(model, batches[0]).backward()
    assert summary(model).unmasked == BUDGET // STEPS
    assert len(calls) == 2 * 2
