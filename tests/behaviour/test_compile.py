"""A sparsified model under ``torch.compile``: the oracle's numbers, one graph, and no other as entries are unmasked."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from models import build, loss_of
from oracle import DenseOracle, unmasked_sets
from quantized_models import quantized_build
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from sparsify import SparsifyError, base_weights, get_unmasker, sparsify, summary

BUDGET, STEPS = 20, 4
PRELUDE = 1  # the root's pre-hook is a frame of its own, with one operator in it


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    torch.manual_seed(0)
    counters.clear()
    yield
    torch._dynamo.reset()


def sgd(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def graph_breaks():
    """Those that transformers' own warnings make apart."""
    return {reason: count for reason, count in counters["graph_break"].items() if "logging.Logger" not in reason}


def compare(dense, batches, wrap, strategy="id3", masks=None, loss_of=loss_of, tolerance=1e-9):
    """Trains what ``wrap`` makes of a sparsified copy beside the dense oracle; the copy."""
    sparse = copy.deepcopy(dense)
    oracle = DenseOracle(dense, sgd(dense), BUDGET, STEPS, masks=masks)
    sparsify(sparse, BUDGET if masks is None else None, strategy, steps=STEPS if masks is None else None)
    compiled, optimizer = wrap(sparse), sgd(sparse)
    for batch in batches[:STEPS]:
        dense_loss, loss = loss_of(dense, batch), loss_of(compiled, batch)
        torch.testing.assert_close(loss, dense_loss, rtol=tolerance, atol=tolerance)
        oracle.step(dense_loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert unmasked_sets(sparse) == oracle.unmasked_sets()
    for name, parameter in dense.named_parameters():
        torch.testing.assert_close(sparse.get_parameter(name), parameter, rtol=tolerance, atol=tolerance)
    assert counters["stats"]["unique_graphs"] > 0, "nothing was compiled"
    return sparse


def aot(model):
    return torch.compile(model, backend="aot_eager", fullgraph=True)


# -------------------------------------------------------------------------------- whole models


def built(name, dtype=torch.float64):
    model, batches = build(name, dtype=dtype)
    if name == "bert":
        model.config.problem_type = "single_label_classification"  # the first forward would set it, and be a graph
    if hasattr(model, "config"):
        model.config.use_cache = False  # a block that fills a cache has a graph for the first one
    return model, batches


@pytest.mark.parametrize(
    "name", ["bert", pytest.param("llama", marks=pytest.mark.slow), pytest.param("t5", marks=pytest.mark.slow)]
)
def test_a_whole_model_is_one_graph_and_the_oracle(name):
    counter = CompileCounterWithBackend("aot_eager")
    compare(*built(name), lambda model: torch.compile(model, backend=counter, fullgraph=True))
    assert counter.frame_count == PRELUDE + 1
    assert not graph_breaks()


@pytest.mark.slow
def test_gpt2_has_no_break_but_that_of_its_own_warning():
    counter = CompileCounterWithBackend("aot_eager")
    compare(*built("gpt2"), lambda model: torch.compile(model, backend=counter))
    assert counter.frame_count <= PRELUDE + 2
    assert not graph_breaks()


def test_the_default_backend_is_the_oracle():
    compare(*built("mlp", torch.float32), torch.compile, tolerance=1e-5)
    assert counters["stats"]["unique_graphs"] == PRELUDE + 1


@pytest.mark.parametrize("strategy", ["id3", "bitfit"])
def test_gradients_whose_memory_the_default_backend_uses_again_are_what_they_are_in_eager_mode(strategy):
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)) for _ in range(3)]
    eager = sparsify(nn.Sequential(*blocks), 60 if strategy == "id3" else None, strategy, steps=3)
    model = copy.deepcopy(eager)
    for each, run in ((eager, eager), (model, torch.compile(model))):
        optimizer = sgd(each)
        for step in range(3):
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
            (run(x) * x.sin()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert unmasked_sets(model) == unmasked_sets(eager)
    torch.testing.assert_close(model.sparse_values, eager.sparse_values, rtol=1e-4, atol=1e-5)


def test_the_mode_with_cuda_graphs_is_what_it_is_without():
    compare(*built("mlp", torch.float32), lambda model: torch.compile(model, mode="reduce-overhead"), tolerance=1e-5)


def test_the_trainers_torch_compile_is_what_it_is_without(tmp_path):
    from transformers import Trainer, TrainingArguments

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


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_default_backend_is_the_oracle_for_a_transformer(dtype):
    compare(*built("bert", dtype), torch.compile, tolerance=1e-9 if dtype == torch.float64 else 1e-5)
    assert counters["stats"]["unique_graphs"] == PRELUDE + 1
    assert not graph_breaks()


def test_a_model_compiled_in_place_is_the_oracle():
    model, batches = built("mlp")

    def in_place(model):
        model.compile(backend="aot_eager", fullgraph=True)
        return model

    compare(model, batches, in_place)


def test_a_model_that_was_compiled_in_place_before_is_the_oracle():
    model, batches = built("mlp")
    model.compile(backend="aot_eager", fullgraph=True)
    loss_of(model, batches[0])
    compare(model, batches, lambda model: model)


def test_a_model_that_torch_compile_wraps_is_refused_by_name():
    wrapped = torch.compile(nn.Linear(2, 2))
    with pytest.raises(SparsifyError, match=r"wrapped by torch\.compile; call sparsify\(\) first"):
        sparsify(wrapped, 1, "pafi")


def test_a_model_whose_parts_torch_compile_wraps_is_the_oracle():
    model, batches = built("mlp")
    dense = copy.deepcopy(model)
    model.norm, model.second = (torch.compile(part, backend="aot_eager") for part in (model.norm, model.second))
    sparsify(model, BUDGET, steps=STEPS)
    oracle, optimizer = DenseOracle(dense, sgd(dense), BUDGET, STEPS), sgd(model)
    for batch in batches[:STEPS]:
        oracle.step(loss_of(dense, batch))
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    assert list(unmasked_sets(model).values()) == list(oracle.unmasked_sets().values())
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
    compare(*built("mlp"), lambda model: torch.compile(Around(model), backend=counter, fullgraph=True))
    assert counter.frame_count == 1


# -------------------------------------------------------------------------------- uses of a tensor


class Tied(nn.Module):
    """Every kind of use: an embedding's table as the output layer's weight, a norm, layers that are used twice."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8, padding_idx=1)
        self.middle = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.output = nn.Linear(8, 20, bias=False)
        self.output.weight = self.embedding.weight

    def hidden(self, ids):
        return self.norm(torch.tanh(self.middle(self.embedding(ids))))

    def forward(self, ids):
        return F.cross_entropy(self.output(self.hidden(ids)).flatten(0, 1), ids.flatten())


class ReadPastItsModule(Tied):
    def forward(self, ids):
        return F.cross_entropy(F.linear(self.hidden(ids), self.embedding.weight).flatten(0, 1), ids.flatten())


class TwiceOnTheSame(Tied):
    """Two uses on the same numbers, whose gradients are the same too: no compiler may take them for one."""

    def forward(self, ids):
        return (self.hidden(ids).sigmoid() + self.hidden(ids).sigmoid()).square().sum()


class Checkpointed(Tied):
    def forward(self, ids):
        hidden = self.embedding(ids)
        for _ in range(2):
            hidden = checkpoint(lambda x: self.norm(torch.tanh(self.middle(x))), hidden, use_reentrant=False)
        return F.cross_entropy(self.output(hidden).flatten(0, 1), ids.flatten())


class Broken(Tied):
    def forward(self, ids):
        hidden = self.embedding(ids)
        torch._dynamo.graph_break()
        hidden = self.norm(torch.tanh(self.middle(hidden)))
        torch._dynamo.graph_break()
        return F.cross_entropy(self.output(hidden).flatten(0, 1), ids.flatten())


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


def test_two_forwards_then_one_backward_is_the_oracle():
    def both(model, batch):
        return model(batch) + 2 * model(batch.flip(1))

    compare(Tied().double(), batches_of_ids(), aot, loss_of=both)


def test_a_graph_that_is_dropped_leaves_nothing_behind():
    def with_a_dropped_one(model, batch):
        model(batch.flip(1))
        return model(batch)

    compare(Tied().double(), batches_of_ids(), aot, loss_of=with_a_dropped_one)


def test_two_forwards_then_two_backwards_add_up():
    model = sparsify(Tied().double(), BUDGET, "pafi")
    compiled, (one, other, *_) = aot(model), batches_of_ids()
    losses = compiled(one), compiled(other)
    for loss in losses:
        loss.backward()
    apart = model.sparse_values.grad.clone()
    model.zero_grad()
    (compiled(one) + compiled(other)).backward()
    torch.testing.assert_close(apart, model.sparse_values.grad)
    assert apart.count_nonzero() > 0


def test_a_kept_graph_and_a_newer_one_in_one_backward_add_up():
    model = sparsify(Tied().double(), BUDGET, "pafi")
    compiled, (one, other, *_) = aot(model), batches_of_ids()
    kept = compiled(one)
    kept.backward(retain_graph=True)
    (kept + compiled(other)).backward()
    both = model.sparse_values.grad.clone()
    model.zero_grad()
    (2 * model(one) + model(other)).backward()
    torch.testing.assert_close(both, model.sparse_values.grad)


def test_batches_of_other_shapes_are_one_more_graph():
    counter = CompileCounterWithBackend("aot_eager")
    batches = [torch.randint(20, (4, length)) for length in (5, 7, 6, 9)]
    compare(Tied().double(), batches, lambda model: torch.compile(model, backend=counter, fullgraph=True), loss_of=on)
    assert counter.frame_count == PRELUDE + 2


def test_an_eager_forward_between_compiled_ones_changes_nothing():
    model = Tied().double()
    counter = CompileCounterWithBackend("aot_eager")

    class Both(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.compiled, self.eager = torch.compile(model, backend=counter, fullgraph=True), model

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
    eager = sparsify(SparseTable(), 8, steps=1)
    compiled = copy.deepcopy(eager)
    ids = torch.tensor([1, 4, 4, 7])
    eager(ids).backward()
    torch.compile(compiled, backend="aot_eager")(ids).backward()
    assert counters["stats"]["unique_graphs"] > 0
    assert unmasked_sets(compiled) == unmasked_sets(eager)
    torch.testing.assert_close(compiled.sparse_values.grad, eager.sparse_values.grad)


def test_a_quantized_layer_breaks_the_graph_and_is_right():
    model, batches = quantized_build("mlp", "torchao-int8")
    sparsify(model, BUDGET, steps=STEPS, target_modules="all-linear")
    eager, compiled = copy.deepcopy(model), torch.compile(model, backend="aot_eager")
    for batch in batches[:2]:
        for each in (eager, compiled):
            loss_of(each, batch).backward()
        assert unmasked_sets(model) == unmasked_sets(eager)
        torch.testing.assert_close(model.sparse_values.grad, eager.sparse_values.grad)


@pytest.mark.slow
def test_a_lora_that_is_trained_sparsely_is_one_graph():
    from peft import LoraConfig, get_peft_model

    model, batches = built("llama")
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    sparsify(model, BUDGET, steps=STEPS)
    eager, counter = copy.deepcopy(model), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for batch in batches[:STEPS]:
        for each, own in ((eager, eager), (compiled, model)):
            loss_of(each, batch).backward()
            sgd(own).step()
            own.zero_grad()
        assert unmasked_sets(model) == unmasked_sets(eager)
    torch.testing.assert_close(model.sparse_values, eager.sparse_values)
    assert counter.frame_count == PRELUDE + 1


def test_bitfit_keeps_no_input_of_a_layer_whose_weight_is_never_trained():
    model, batches = built("mlp")
    sparsify(model, None, "bitfit")
    eager, compiled = copy.deepcopy(model), aot(model)
    for each in (eager, compiled):
        loss_of(each, batches[0]).backward()
    torch.testing.assert_close(model.sparse_values.grad, eager.sparse_values.grad)


# -------------------------------------------------------------------------------- weights that change


def test_compiled_graphs_see_the_weights_as_they_are():
    dense = Tied().double()
    sparse = sparsify(copy.deepcopy(dense), BUDGET, steps=STEPS)
    compiled, optimizer = aot(sparse), sgd(sparse)
    for batch in batches_of_ids():
        optimizer.zero_grad()
        compiled(batch).backward()
        optimizer.step()
        with torch.no_grad():
            torch.testing.assert_close(compiled(batch), sparse(batch))
            with base_weights(sparse):
                torch.testing.assert_close(compiled(batch), dense(batch))
        with torch.inference_mode():
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


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_a_copy_of_a_model_that_was_compiled_trains_by_itself(way):
    model = sparsify(Tied().double(), BUDGET, steps=STEPS)
    first, *others = batches_of_ids()
    aot(model)(first).backward()
    twin = copy.deepcopy(model) if way == "deepcopy" else pickle.loads(pickle.dumps(model))
    eager = copy.deepcopy(model)
    compiled = torch.compile(twin, backend="aot_eager")
    for batch in others:
        for each in (compiled, eager):
            each(batch).backward()
        for each in (twin, eager):
            sgd(each).step()
            each.zero_grad()
        assert unmasked_sets(twin) == unmasked_sets(eager)
        torch.testing.assert_close(twin.sparse_values, eager.sparse_values)
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
    dense, batches = Tied().double(), batches_of_ids()
    model = sparsify(copy.deepcopy(dense), BUDGET, steps=STEPS)
    oracle = DenseOracle(dense, sgd(dense), BUDGET, STEPS)
    compiled, optimizer = aot(model), sgd(model)
    step = torch.compile(optimizer.step, backend="aot_eager")
    for batch in batches:
        oracle.step(dense(batch))
        optimizer.zero_grad()
        compiled(batch).backward()
        step()
        assert summary(model).step == oracle.step_number
        for name, parameter in dense.named_parameters():
            torch.testing.assert_close(model.get_parameter(name), parameter)


def test_reentrant_checkpointing_of_a_compiled_part_is_refused_by_name():
    model = sparsify(Tied(), BUDGET, steps=STEPS)
    model.middle.compile(backend="aot_eager", fullgraph=True)
    x = torch.randn(3, 8, requires_grad=True)
    output = checkpoint(model.middle, x, use_reentrant=True)
    with pytest.raises(SparsifyError, match=r"`middle\.(weight|bias)` was recomputed.*use_reentrant"):
        output.sum().backward()
