"""A sparsified model under ``torch.compile``: the oracle's numbers, one graph, and no other as entries are unmasked."""

import copy
import functools
import gc
import itertools
import weakref

import pytest
import torch
from models import build, loss_of
from oracle import unmasked_sets
from program_runs import run as run_program
from programs import Program, program
from quantized_models import quantized_build
from rank_models import Words, words
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from trainers import make_trainer
from twins import Twins, masks_of, sgd

from sparsify import SparsifyError, get_engine, sparsify, summary

BUDGET, STEPS = 20, 4
slow = pytest.mark.slow
RATE = functools.partial(sgd, lr=0.1)
PRELUDE = 1  # the root's pre-hook is a frame of its own, with one operator in it


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def graph_breaks():
    """Those that transformers' own warnings make apart."""
    return {reason: count for reason, count in counters["graph_break"].items() if "logging.Logger" not in reason}


def compare(dense, batches, wrap, strategy="id3", budget=BUDGET, **options):
    sparse = sparsify(copy.deepcopy(dense), budget, strategy, steps=STEPS)
    options = {"masks": None if strategy == "id3" else masks_of(sparse), "make_optimizer": RATE, **options}
    Twins(dense, sparse, budget, STEPS, run=wrap(sparse), **options).train(batches[:STEPS])
    assert counters["stats"]["unique_graphs"] > 0, "nothing was compiled"


def on(model, batch):
    return model(batch)


def assert_trains_alike(model, eager, batches, run, loss_of=on):
    for batch in batches:
        for each, called in ((model, run), (eager, eager)):
            loss_of(called, batch).backward()
            RATE([each.sparse_values]).step()
            each.zero_grad()
        assert list(unmasked_sets(model).values()) == list(unmasked_sets(eager).values())
        torch.testing.assert_close(model.sparse_values, eager.sparse_values, rtol=1e-4, atol=1e-5)


def aot(model, counter="aot_eager"):
    return torch.compile(model, backend=counter, fullgraph=True)


def built(name, dtype=torch.float64):
    model, batches = build(name, dtype=dtype)
    if name == "bert":
        model.config.problem_type = "single_label_classification"  # the first forward would set it, and be a graph
        del model.bert.encoder.layer[1]  # compiled in half the time
    if hasattr(model, "config"):
        model.config.use_cache = False  # a block that fills a cache has a graph for the first one
    return model, batches


@pytest.mark.parametrize("name", ["bert", *(pytest.param(name, marks=slow) for name in ("llama", "t5", "gpt2"))])
def test_a_whole_model_is_one_graph_and_the_oracle(name):
    counter, breaks_itself = CompileCounterWithBackend("aot_eager"), name == "gpt2"  # by a warning
    compare(*built(name), lambda model: torch.compile(model, backend=counter, fullgraph=not breaks_itself))
    assert counter.frame_count == PRELUDE + 1 + breaks_itself
    assert not graph_breaks()


@pytest.mark.parametrize(
    ("name", "mode"),
    [("mlp", None), ("mlp", "reduce-overhead"), pytest.param("bert", None, marks=slow)],  # with CUDA graphs
)
def test_the_default_backend_is_the_oracle(name, mode):
    compare(*built(name, torch.float32), lambda model: torch.compile(model, mode=mode), tolerance=1e-5)
    assert counters["stats"]["unique_graphs"] == PRELUDE + 1
    assert not graph_breaks()


@pytest.mark.parametrize("strategy", ["id3", "bitfit"])
def test_gradients_whose_memory_the_default_backend_uses_again_are_what_they_are_in_eager_mode(strategy):
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)) for _ in range(3)]
    model = sparsify(nn.Sequential(*blocks), 60 if strategy == "id3" else None, strategy, steps=3)
    batches, eager = [torch.randn(8, 16) for _ in range(3)], copy.deepcopy(model)
    assert_trains_alike(model, eager, batches, torch.compile(model), lambda model, x: (model(x) * x.sin()).sum())


def test_the_trainers_torch_compile_is_what_it_is_without(tmp_path):
    models = []
    for options in ({}, {"torch_compile": True, "torch_compile_backend": "aot_eager"}):
        model, _ = built("bert", torch.float32)
        models.append(sparsify(model, BUDGET, "id3", steps=STEPS))
        options.update(max_steps=STEPS, save_strategy="no")
        make_trainer(model, tmp_path, callbacks=[], **options).train()
    eager, compiled = models
    assert summary(compiled).unmasked == BUDGET
    assert unmasked_sets(compiled) == unmasked_sets(eager)
    torch.testing.assert_close(compiled.sparse_values, eager.sparse_values)
    assert counters["stats"]["unique_graphs"] == PRELUDE + 1
    assert not graph_breaks()


def test_a_model_that_was_compiled_in_place_is_the_oracle_and_one_that_torch_compile_wraps_is_refused():
    model, batches = built("mlp")
    model.compile(backend="aot_eager", fullgraph=True)
    loss_of(model, batches[0])
    compare(model, batches, lambda model: model)
    wrapped = torch.compile(nn.Linear(2, 2))
    with pytest.raises(SparsifyError, match=r"wrapped by torch\.compile; call sparsify\(\) first"):
        sparsify(wrapped, 1, "pafi")


def test_a_model_whose_parts_torch_compile_wraps_is_what_it_is_in_eager_mode():
    model, batches = built("mlp")
    eager = sparsify(copy.deepcopy(model), BUDGET, "id3", steps=STEPS)
    model.norm, model.second = (torch.compile(part, backend="aot_eager") for part in (model.norm, model.second))
    sparsify(model, BUDGET, "id3", steps=STEPS)
    assert_trains_alike(model, eager, batches[:STEPS], model, loss_of)
    assert not graph_breaks()


@pytest.mark.parametrize(("strategy", "budget"), [("id3", BUDGET), ("random", 0.5)])  # few entries, or some everywhere
def test_blocks_compiled_one_by_one_share_their_graph(strategy, budget):
    counter = CompileCounterWithBackend("aot_eager")

    def regional(model):
        for block in model.model.layers:
            block.compile(backend=counter, fullgraph=True)
        return model

    compare(*built("llama"), regional, strategy, budget)
    assert counter.frame_count == 1


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=slow) for seed in range(2, 20))])
def test_a_random_program_that_is_compiled_is_the_oracle(seed, monkeypatch):
    """Every way in which a weight is used; several graphs in a step; weights that are read, loaded and copied."""

    def compiled(*args, **kwargs):
        model = sparsify(*args, **kwargs)
        model.compile(backend="aot_eager")
        return model

    each = program(seed)
    batches = each.batches()
    script = [action for action in each.script if action[0] != "fail"]  # which hooks the forward pass
    script = tuple((*action[:-1], None) if action[0] == "backward" else action for action in script)
    monkeypatch.setattr("program_runs.sparsify", compiled)
    monkeypatch.setattr(Program, "batches", lambda self: [(ids[:1], labels[:1], ()) for ids, labels, _ in batches])
    with torch._functorch.config.patch(donated_buffer=False):  # for graphs that are kept
        run_program(each.but(script=script))
    assert counters["stats"]["unique_graphs"] > 0


class TwiceOnTheSame(Words):
    """Two uses on the same numbers, whose gradients are the same too: no compiler may take them for one."""

    def between(self, hidden):
        return super().between(hidden).sigmoid() + super().between(hidden).sigmoid()


def test_a_default_device_changes_nothing():
    (dense, batches), aot = words(), functools.partial(torch.compile, backend="aot_eager")
    with torch.device("cpu"):  # torch.set_default_device() is the same mode
        compare(dense, batches, aot)


def test_two_uses_that_look_the_same_are_counted_both():
    compare(*words(model_class=TwiceOnTheSame), aot)


@pytest.mark.parametrize("part", ["table", "wide", "norm", "out"])
def test_a_tensor_used_by_compiled_and_eager_layers_gets_both_gradients(part):
    def compile_part(model):
        getattr(model, part).compile(backend="aot_eager", fullgraph=True)
        return model

    compare(*words(), compile_part)


def test_a_part_of_a_compiled_function_is_in_its_graph_and_batches_of_other_shapes_are_one_more():
    counter = CompileCounterWithBackend("aot_eager")
    compare(*built("mlp"), lambda model: aot(lambda **batch: 2 * model(**batch) / 2, counter))
    assert counter.frame_count == 1
    torch._dynamo.reset()
    ids = [torch.randint(20, (4, length)) for length in (5, 7, 6, 9)]
    compare(words()[0], [{"x": x, "labels": x} for x in ids], lambda model: aot(model, counter))
    assert counter.frame_count == 1 + PRELUDE + 2


def test_an_eager_forward_between_compiled_ones_changes_nothing():
    counter = CompileCounterWithBackend("aot_eager")

    def taking_turns(model):
        turns = itertools.cycle([aot(model, counter), model])
        return lambda **batch: next(turns)(**batch)

    def thrice(model, batch):
        return sum(model(**{name: ids.flip(dim) for name, ids in batch.items()}) for dim in (0, 1, 0))

    compare(*words(), taking_turns, loss_of=thrice)
    assert counter.frame_count == PRELUDE + 1


class SparseTable(nn.Embedding):
    def forward(self, ids):
        return F.embedding(ids, self.weight, sparse=True).pow(3).sum()


def test_sparse_gradients_and_quantized_layers_are_what_they_are_in_eager_mode():
    model = sparsify(SparseTable(9, 4), 8, "id3", steps=1)
    run = torch.compile(model, backend="aot_eager")
    assert_trains_alike(model, copy.deepcopy(model), [torch.tensor([1, 4, 4, 7])], run)
    assert counters["stats"]["unique_graphs"] > 0
    model, batches = quantized_build("mlp", "torchao-int8")
    sparsify(model, BUDGET, "id3", steps=STEPS, target_modules="all-linear")
    run = torch.compile(model, backend="aot_eager")
    assert_trains_alike(model, copy.deepcopy(model), batches[:2], run, loss_of)


@pytest.mark.parametrize("training", [True, False])
def test_a_delta_written_past_the_optimizer_is_seen(training):
    model, (batch, *_) = words()
    compiled = aot(sparsify(model, BUDGET, "pafi"))
    with torch.set_grad_enabled(training):
        before = compiled(**batch)
        model.sparse_values.data.add_(0.3)
        after = compiled(**batch)
    assert not torch.allclose(after, before)
    torch.testing.assert_close(after, model(**batch))


def test_a_flat_delta_that_was_replaced_or_frozen_is_seen():
    model, (batch, *_) = words()
    compiled = aot(sparsify(model, BUDGET, "pafi"))
    compiled(**batch).backward()
    expected, state = model.sparse_values.grad.clone(), copy.deepcopy(model.state_dict())
    model.load_state_dict(state, assign=True)
    assert model.sparse_values.grad is None
    compiled(**batch).backward()
    torch.testing.assert_close(model.sparse_values.grad, expected)
    model.sparse_values.requires_grad_(False)
    assert not compiled(**batch).requires_grad
    model.sparse_values.requires_grad_(True)
    compiled(**batch).backward()
    torch.testing.assert_close(model.sparse_values.grad, 2 * expected)


@pytest.mark.parametrize("compiled", [False, True])
def test_an_overflow_unmasks_nothing_and_a_model_that_is_let_go_is_freed(compiled):
    model, (batch, *_) = words()
    sparsify(model, BUDGET, "id3", steps=STEPS)
    ((aot(model) if compiled else model)(**batch) * torch.inf).backward()
    assert model.sparse_values.grad.isnan().all()
    assert summary(model).unmasked == 0
    engine, root = weakref.ref(get_engine(model)), weakref.ref(model)
    del model
    torch._dynamo.reset()
    gc.collect()
    assert engine() is None
    assert root() is None


def test_autocast_is_what_it_is_in_eager_mode():
    model, (batch, *_) = words(torch.float32)
    eager = copy.deepcopy(sparsify(model, BUDGET, "pafi"))
    for each in (eager, aot(model)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = each(**batch)
        loss.backward()
    torch.testing.assert_close(model.sparse_values.grad, eager.sparse_values.grad, rtol=0.02, atol=1e-3)


def test_an_optimizer_step_that_is_compiled_is_seen():
    def compiled_sgd(parameters):
        optimizer = RATE(parameters)
        if len(parameters) == 1:  # the flat delta
            optimizer.step = torch.compile(optimizer.step, backend="aot_eager")
        return optimizer

    compare(*words(), aot, make_optimizer=compiled_sgd)


def test_reentrant_checkpointing_of_a_compiled_part_is_refused_by_name():
    model = sparsify(words(torch.float32)[0], BUDGET, "id3", steps=STEPS)
    model.wide.compile(backend="aot_eager", fullgraph=True)
    x = torch.randn(3, 12, requires_grad=True)
    output = checkpoint(model.wide, x, use_reentrant=True)
    with pytest.raises(SparsifyError, match=r"`wide\.(weight|bias)` was recomputed.*use_reentrant"):
        output.sum().backward()


class OfItsOwnDtype(nn.Sequential):
    @property
    def dtype(self):  # as transformers' models have it
        return next(parameter.dtype for parameter in self.parameters() if parameter.is_floating_point())

    def forward(self, x):
        return super().forward(x.to(self.dtype))


def test_a_graph_computes_in_the_models_dtype_and_not_in_that_of_the_flat_delta():
    model = sparsify(OfItsOwnDtype(nn.Linear(4, 4), nn.Linear(4, 2)).bfloat16(), 5, "id3", steps=2)
    output = torch.compile(model, backend="eager", fullgraph=True)(torch.ones(2, 4))
    assert output.dtype == torch.bfloat16
    output.sum().backward()
    assert summary(model).unmasked == 2
