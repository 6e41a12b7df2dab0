"""A sparsified model under ``torch.compile``: the oracle's numbers, one graph, and no other as entries are unmasked."""

import copy
import functools
import gc
import pickle
import weakref

import pytest
import torch
from models import build, loss_of
from oracle import unmasked_sets
from peft import LoraConfig, get_peft_model
from quantized_models import quantized_build
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import Trainer, TrainingArguments
from twins import Twins, sgd

from sparsify import SparsifyError, base_weights, get_unmasker, sparsify, summary

BUDGET, STEPS = 20, 4
slow = pytest.mark.slow
RATE = functools.partial(sgd, lr=0.1)
PRELUDE = 1  # the root's pre-hook is a frame of its own, with one operator in it


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    torch.manual_seed(0)
    counters.clear()
    yield
    torch._dynamo.reset()


def graph_breaks():
    """Those that transformers' own warnings make apart."""
    return {reason: count for reason, count in counters["graph_break"].items() if "logging.Logger" not in reason}


def compare(dense, batches, wrap, strategy="id3", masks=None, **options):
    """Trains what ``wrap`` makes of a sparsified copy beside the dense oracle."""
    options = {"loss_of": loss_of, "tolerance": 1e-9, "make_optimizer": RATE, **options}
    sparse = sparsify(copy.deepcopy(dense), None if masks else BUDGET, strategy, steps=None if masks else STEPS)
    Twins(dense, sparse, BUDGET, STEPS, run=wrap(sparse), masks=masks, **options).train(batches[:STEPS])
    assert counters["stats"]["unique_graphs"] > 0, "nothing was compiled"


def assert_trains_alike(model, eager, batches, run, loss_of=lambda model, batch: model(batch)):
    """Trains two sparsified models, one of them as ``run``, and compares unmasked sets and flat deltas."""
    for batch in batches:
        for each, called in ((model, run), (eager, eager)):
            loss_of(called, batch).backward()
            RATE([each.sparse_values]).step()
            each.zero_grad()
        assert unmasked_sets(model) == unmasked_sets(eager)
        torch.testing.assert_close(model.sparse_values, eager.sparse_values, rtol=1e-4, atol=1e-5)


def aot(model, counter="aot_eager"):
    return torch.compile(model, backend=counter, fullgraph=True)


# -------------------------------------------------------------------------------- whole models


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
    ("name", "dtype", "mode"),
    [
        ("mlp", torch.float32, None),
        ("mlp", torch.float32, "reduce-overhead"),  # with CUDA graphs
        pytest.param("bert", torch.float32, None, marks=slow),
        pytest.param("bert", torch.float64, None, marks=slow),
    ],
)
def test_the_default_backend_is_the_oracle(name, dtype, mode):
    tolerance = 1e-9 if dtype == torch.float64 else 1e-5
    compare(*built(name, dtype), lambda model: torch.compile(model, mode=mode), tolerance=tolerance)
    assert counters["stats"]["unique_graphs"] == PRELUDE + 1
    assert not graph_breaks()


@pytest.mark.parametrize("strategy", ["id3", "bitfit"])
def test_gradients_whose_memory_the_default_backend_uses_again_are_what_they_are_in_eager_mode(strategy):
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)) for _ in range(3)]
    model = sparsify(nn.Sequential(*blocks), 60 if strategy == "id3" else None, strategy, steps=3)
    batches = [torch.randn(8, 16) for _ in range(3)]
    assert_trains_alike(
        model, copy.deepcopy(model), batches, torch.compile(model), lambda model, x: (model(x) * x.sin()).sum()
    )


def test_the_trainers_torch_compile_is_what_it_is_without(tmp_path):
    model, batches = built("bert", torch.float32)
    sparsify(model, BUDGET, steps=STEPS)
    eager = copy.deepcopy(model)
    examples = [{key: value[row] for key, value in batch.items()} for batch in batches[:STEPS] for row in range(4)]
    for each, backend in ((eager, None), (model, "aot_eager")):
        arguments = TrainingArguments(
            str(tmp_path), max_steps=STEPS, per_device_train_batch_size=4, torch_compile=backend is not None,
            torch_compile_backend=backend, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True,
            learning_rate=0.01,
        )  # fmt: skip
        Trainer(each, arguments, train_dataset=examples).train()
    assert summary(model).unmasked == BUDGET
    assert unmasked_sets(model) == unmasked_sets(eager)
    torch.testing.assert_close(model.sparse_values, eager.sparse_values)
    assert counters["stats"]["unique_graphs"] == PRELUDE + 1
    assert not graph_breaks()


@pytest.mark.parametrize("before", [False, True])
def test_a_model_compiled_in_place_is_the_oracle(before):
    model, batches = built("mlp")
    if before:
        model.compile(backend="aot_eager", fullgraph=True)
        loss_of(model, batches[0])

    def in_place(model):
        if not before:
            model.compile(backend="aot_eager", fullgraph=True)
        return model

    compare(model, batches, in_place)


def test_a_model_that_torch_compile_wraps_is_refused_by_name():
    wrapped = torch.compile(nn.Linear(2, 2))
    with pytest.raises(SparsifyError, match=r"wrapped by torch\.compile; call sparsify\(\) first"):
        sparsify(wrapped, 1, "pafi")


def test_a_model_whose_parts_torch_compile_wraps_is_what_it_is_in_eager_mode():
    model, batches = built("mlp")
    eager = sparsify(copy.deepcopy(model), BUDGET, steps=STEPS)
    model.norm, model.second = (torch.compile(part, backend="aot_eager") for part in (model.norm, model.second))
    sparsify(model, BUDGET, steps=STEPS)
    for batch in batches[:STEPS]:
        for each in (model, eager):
            loss_of(each, batch).backward()
            RATE([each.sparse_values]).step()
            each.zero_grad()
    assert list(unmasked_sets(model).values()) == list(unmasked_sets(eager).values())
    torch.testing.assert_close(model.sparse_values, eager.sparse_values)
    assert not graph_breaks()


def some_of_every_tensor(model):
    masks = {name: torch.rand(parameter.shape) < 0.1 for name, parameter in model.named_parameters()}
    for mask in masks.values():
        mask.view(-1)[3] = True
    return masks


@pytest.mark.parametrize("given", [False, True])
def test_blocks_compiled_one_by_one_share_their_graph(given):
    model, batches = built("llama")
    masks = some_of_every_tensor(model) if given else None
    counter = CompileCounterWithBackend("aot_eager")

    def regional(model):
        for block in model.model.layers:
            block.compile(backend=counter, fullgraph=True)
        return model

    compare(model, batches, regional, copy.deepcopy(masks) if given else "id3", masks)
    assert counter.frame_count == 1


def test_a_part_of_a_compiled_module_is_in_its_graph():
    class Around(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, **batch):
            return 2 * self.inner(**batch) / 2

    counter = CompileCounterWithBackend("aot_eager")
    compare(*built("mlp"), lambda model: aot(Around(model), counter))
    assert counter.frame_count == 1


# -------------------------------------------------------------------------------- uses of a tensor


class Tied(nn.Module):
    """An embedding's table as the output layer's weight, a norm, and layers between them."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8, padding_idx=1)
        self.middle = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.output = nn.Linear(8, 20, bias=False)
        self.output.weight = self.embedding.weight

    def between(self, hidden):
        return self.norm(torch.tanh(self.middle(hidden)))

    def logits(self, hidden):
        return self.output(self.between(hidden))

    def forward(self, ids):
        return F.cross_entropy(self.logits(self.embedding(ids)).flatten(0, 1), ids.flatten())


class ReadPastItsModule(Tied):
    def logits(self, hidden):
        return F.linear(self.between(hidden), self.embedding.weight)


class TwiceOnTheSame(Tied):
    """Two uses on the same numbers, whose gradients are the same too: no compiler may take them for one."""

    def forward(self, ids):
        return (
            (self.between(self.embedding(ids)).sigmoid() + self.between(self.embedding(ids)).sigmoid()).square().sum()
        )


class Checkpointed(Tied):
    def logits(self, hidden):
        for _ in range(2):
            hidden = checkpoint(self.between, hidden, use_reentrant=False)
        return self.output(hidden)


class Broken(Tied):
    def logits(self, hidden):
        torch._dynamo.graph_break()
        hidden = self.between(hidden)
        torch._dynamo.graph_break()
        return self.output(hidden)


class Convolved(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, ids):
        image = ids.double().repeat(2, 2, 1, 1)
        tokens = self.norm(self.convolution(image)).flatten(2).transpose(1, 2)
        return self.attention(tokens, tokens, tokens)[0].square().sum()


def batches_of_ids(shape=(4, 5)):
    return [torch.randint(20, shape) for _ in range(STEPS)]


def on(model, batch):
    return model(batch)


@pytest.mark.parametrize(
    "model_class", [Tied, ReadPastItsModule, TwiceOnTheSame, Checkpointed, Broken, Convolved], ids=lambda c: c.__name__
)
def test_every_use_of_a_tensor_is_counted(model_class):
    fullgraph = model_class is not Broken
    compare(
        model_class().double(),
        batches_of_ids(),
        lambda model: torch.compile(model, backend="aot_eager", fullgraph=fullgraph),
        loss_of=on,
    )


@pytest.mark.parametrize("part", ["embedding", "middle", "norm", "output"])
def test_a_tensor_used_by_compiled_and_eager_layers_gets_both_gradients(part):
    def compile_part(model):
        getattr(model, part).compile(backend="aot_eager", fullgraph=True)
        return model

    compare(Tied().double(), batches_of_ids(), compile_part, loss_of=on)


def two_forwards_and_one_backward(model, batch):
    return model(batch) + 2 * model(batch.flip(1))


def a_graph_that_is_dropped(model, batch):
    model(batch.flip(1))
    return model(batch)


@pytest.mark.parametrize("loss_of", [two_forwards_and_one_backward, a_graph_that_is_dropped], ids=lambda f: f.__name__)
def test_several_graphs_in_one_step_are_the_oracle(loss_of):
    compare(Tied().double(), batches_of_ids(), aot, loss_of=loss_of)


@pytest.mark.parametrize("kept", [False, True])
def test_gradients_of_two_graphs_add_up(kept):
    model = sparsify(Tied().double(), BUDGET, "pafi")
    compiled, (one, other, *_) = aot(model), batches_of_ids()
    if kept:  # the first graph runs backward again, together with a newer one
        first = compiled(one)
        first.backward(retain_graph=True)
        (first + compiled(other)).backward()
    else:
        for loss in [compiled(one), compiled(other)]:
            loss.backward()
    found = model.sparse_values.grad.clone()
    model.zero_grad()
    ((1 + kept) * model(one) + model(other)).backward()
    torch.testing.assert_close(found, model.sparse_values.grad)
    assert found.count_nonzero() > 0


def test_batches_of_other_shapes_are_one_more_graph():
    counter = CompileCounterWithBackend("aot_eager")
    batches = [torch.randint(20, (4, length)) for length in (5, 7, 6, 9)]
    compare(Tied().double(), batches, lambda model: aot(model, counter), loss_of=on)
    assert counter.frame_count == PRELUDE + 2


def test_an_eager_forward_between_compiled_ones_changes_nothing():
    model = Tied().double()
    counter = CompileCounterWithBackend("aot_eager")

    class Both(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.compiled, self.eager = aot(model, counter), model

        def forward(self, ids):
            return self.compiled(ids) + self.eager(ids.flip(1)) + self.compiled(ids.flip(0))

    def both(model, batch):
        return model(batch) + model(batch.flip(1)) + model(batch.flip(0))

    compare(
        model,
        batches_of_ids(),
        Both,
        loss_of=lambda model, batch: (on if isinstance(model, Both) else both)(model, batch),
    )
    assert counter.frame_count == PRELUDE + 1


class SparseTable(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(9, 4))

    def forward(self, ids):
        return F.embedding(ids, self.weight, sparse=True).pow(3).sum()


def test_a_parameter_with_sparse_gradients_is_what_it_is_in_eager_mode():
    model = sparsify(SparseTable(), 8, steps=1)
    run = torch.compile(model, backend="aot_eager")
    assert_trains_alike(model, copy.deepcopy(model), [torch.tensor([1, 4, 4, 7])], run)
    assert counters["stats"]["unique_graphs"] > 0


def test_a_quantized_layer_breaks_the_graph_and_is_right():
    model, batches = quantized_build("mlp", "torchao-int8")
    sparsify(model, BUDGET, steps=STEPS, target_modules="all-linear")
    run = torch.compile(model, backend="aot_eager")
    assert_trains_alike(model, copy.deepcopy(model), batches[:2], run, loss_of)


@slow
def test_a_lora_that_is_trained_sparsely_is_one_graph():
    model, batches = built("llama")
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    sparsify(model, BUDGET, steps=STEPS)
    counter = CompileCounterWithBackend("aot_eager")
    assert_trains_alike(model, copy.deepcopy(model), batches[:STEPS], aot(model, counter), loss_of)
    assert counter.frame_count == PRELUDE + 1


def test_bitfit_keeps_no_input_of_a_layer_whose_weight_is_never_trained():
    model, batches = built("mlp")
    sparsify(model, None, "bitfit")
    assert_trains_alike(model, copy.deepcopy(model), batches[:1], aot(model), loss_of)


# -------------------------------------------------------------------------------- weights that change


def test_compiled_graphs_see_the_weights_as_they_are():
    dense = Tied().double()
    sparse = sparsify(copy.deepcopy(dense), BUDGET, steps=STEPS)
    compiled = aot(sparse)
    for batch in batches_of_ids():
        compiled(batch).backward()
        RATE([sparse.sparse_values]).step()
        with torch.no_grad(), base_weights(sparse):
            torch.testing.assert_close(compiled(batch), dense(batch))
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                torch.testing.assert_close(compiled(batch), sparse(batch))


@pytest.mark.parametrize("training", [True, False])
def test_a_delta_written_past_the_optimizer_is_seen(training):
    model = sparsify(Tied().double(), BUDGET, "pafi")
    compiled, batch = aot(model), batches_of_ids()[0]
    with torch.set_grad_enabled(training):
        before = compiled(batch)
        model.sparse_values.data.add_(0.3)
        after = compiled(batch)
    assert not torch.allclose(after, before)
    torch.testing.assert_close(after, model(batch))


def test_a_flat_delta_that_was_replaced_or_frozen_is_seen():
    model = sparsify(Tied().double(), BUDGET, "pafi")
    compiled, batch = aot(model), batches_of_ids()[0]
    compiled(batch).backward()
    expected, state = model.sparse_values.grad.clone(), copy.deepcopy(model.state_dict())
    model.load_state_dict(state, assign=True)
    assert model.sparse_values.grad is None
    compiled(batch).backward()
    torch.testing.assert_close(model.sparse_values.grad, expected)
    model.sparse_values.requires_grad_(False)
    assert not compiled(batch).requires_grad
    model.sparse_values.requires_grad_(True)
    compiled(batch).backward()
    torch.testing.assert_close(model.sparse_values.grad, 2 * expected)


def test_an_overflow_unmasks_nothing_and_is_returned():
    model = sparsify(Tied().double(), BUDGET, steps=STEPS)
    compiled, batch = aot(model), batches_of_ids()[0]
    (compiled(batch) * torch.inf).backward()
    assert model.sparse_values.grad.isnan().all()
    assert summary(model).unmasked == 0


@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_model_that_was_compiled_trains_by_itself(make_copy):
    model = sparsify(Tied().double(), BUDGET, steps=STEPS)
    first, *others = batches_of_ids()
    aot(model)(first).backward()
    twin = make_copy(model)
    assert_trains_alike(twin, copy.deepcopy(model), others, torch.compile(twin, backend="aot_eager"))
    assert summary(model).step == 0


@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_that_is_let_go_is_freed(compiled):
    model = sparsify(Tied(), BUDGET, steps=STEPS)
    (aot(model) if compiled else model)(batches_of_ids()[0]).backward()
    engine, root = weakref.ref(get_unmasker(model)), weakref.ref(model)
    del model
    torch._dynamo.reset()
    gc.collect()
    assert engine() is None
    assert root() is None


def test_autocast_is_what_it_is_in_eager_mode():
    model = sparsify(Checkpointed(), BUDGET, "pafi")
    eager, batch = copy.deepcopy(model), batches_of_ids()[0]
    for each in (eager, aot(model)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = each(batch)
        loss.backward()
    torch.testing.assert_close(model.sparse_values.grad, eager.sparse_values.grad, rtol=0.02, atol=1e-3)


def test_an_optimizer_step_that_is_compiled_is_seen():
    def compiled_sgd(parameters):
        optimizer = RATE(parameters)
        if len(parameters) == 1:  # the flat delta
            optimizer.step = torch.compile(optimizer.step, backend="aot_eager")
        return optimizer

    compare(Tied().double(), batches_of_ids(), aot, loss_of=on, make_optimizer=compiled_sgd)


def test_reentrant_checkpointing_of_a_compiled_part_is_refused_by_name():
    model = sparsify(Tied(), BUDGET, steps=STEPS)
    model.middle.compile(backend="aot_eager", fullgraph=True)
    x = torch.randn(3, 8, requires_grad=True)
    output = checkpoint(model.middle, x, use_reentrant=True)
    with pytest.raises(SparsifyError, match=r"`middle\.(weight|bias)` was recomputed.*use_reentrant"):
        output.sum().backward()
