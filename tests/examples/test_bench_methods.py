"""Each benchmarked method trains what it says, from the same filled buffers and on the same batches."""

import gzip
import json
from dataclasses import replace
from itertools import pairwise

import peft
import pytest
import torch
from safetensors.torch import save_file
from step_bench.methods import METHODS, Trainee
from step_bench.models import SHAPES, build, find_texts, make_batches, make_rows
from step_bench.settings import AHEAD, WARM_UP, Settings
from step_bench.worker import Worker, make_state, peak_bytes
from torch import nn
from torch.profiler import ProfilerActivity, profile

from sparsify import SparsifyError, get_engine
from sparsify.cli.demo import Example
from sparsify.core.step import COLLECT, COMMIT

BUDGET = 2_000
SMALL = {  # of each family
    "vocab_size": 50, "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 32,
    "head_dim": 4, "pooler_hidden_size": 16, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2,
}  # fmt: skip


@pytest.fixture
def start(tmp_path):
    """Makes a worker, after its warm-up; the buffers are filled where they are not yet."""

    def start(method, **others):
        usual = {"shape": "tiny", "budget": BUDGET, "batch": 2, "length": 8, "folder": str(tmp_path)}
        settings = Settings(method, **usual | others)
        if "id3" in method and settings.start and not settings.state_file.exists():
            save_file(make_state(settings), settings.state_file)
        return Worker(settings)

    return start


def support_of(worker):
    """The unmasked flat indices by name, of the library's engine or of the dense masks."""
    if worker.settings.method == "dense-id3":
        masks = worker.trainee.before_step.__self__.masks
        return {name: mask.flatten().nonzero().flatten().tolist() for name, mask in masks.items()}
    return {tensor.name: sorted(tensor.indices.tolist()) for tensor in get_engine(worker.trainee.model).tensors}


def test_the_dense_form_and_the_library_select_the_same_entries_from_the_same_buffers(start):
    sparse, dense = start("id3"), start("dense-id3")
    assert sparse.unmasked == dense.unmasked == BUDGET // 2
    for _ in range(3):
        assert support_of(sparse) == support_of(dense)
        assert sum(map(len, support_of(dense).values())) == sparse.trainee.unmasked() == dense.trainee.unmasked()
        sparse.step(), dense.step()
    assert dense.trainee.unmasked() == BUDGET // 2 + (WARM_UP + 3) * BUDGET // 1000


def test_the_dense_form_starts_from_the_trained_weights_and_moves_no_masked_entry(start):
    worker = start("dense-id3")
    before = {name: parameter.detach().clone() for name, parameter in worker.trainee.model.named_parameters()}
    base = dict(build(worker.settings).named_parameters())
    moved = sum(int((before[name] != base[name]).sum()) for name in base)
    assert 0.9 * BUDGET / 2 < moved <= worker.trainee.unmasked()
    worker.step()
    for name, parameter in worker.trainee.model.named_parameters():
        changed = (parameter != before[name]).flatten().nonzero().flatten().tolist()
        assert set(changed) <= set(support_of(worker)[name])


def test_buffers_filled_to_the_whole_budget_leave_places_for_every_step(start):
    worker = start("id3", fill=1.0)
    assert worker.unmasked == pytest.approx(BUDGET * 0.95, abs=1)
    seen = [worker.trainee.unmasked()]
    for _ in range(AHEAD - WARM_UP):
        worker.step()
        seen.append(worker.trainee.unmasked())
    assert all(later > earlier for earlier, later in pairwise(seen))
    assert seen[-1] == BUDGET


def test_without_fill_a_run_starts_at_its_beginning(start):
    worker = start("id3", fill=0.0)
    assert (worker.unmasked, worker.trainee.unmasked()) == (0, WARM_UP * BUDGET // 1000)


@pytest.mark.parametrize("method", METHODS)
def test_each_method_trains_as_many_numbers_as_it_says(start, method):
    if method == "supertuning" and not hasattr(peft, "SupertuningConfig"):
        pytest.skip("this PEFT does not have it")
    worker = start(method)
    model, trained = worker.trainee.model, worker.trainee.trained
    if method == "dense-id3":
        assert trained == BUDGET
    else:
        assert trained == sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert (trained == 0) == (method == "floor")
    assert (trained == worker.parameters) == (method == "full")
    if method in ("shira", "supertuning"):  # within one rank, and PEFT's head
        head = sum(p.numel() for name, p in model.named_parameters() if p.requires_grad and "modules_to_save" in name)
        assert head
        assert trained - head == pytest.approx(BUDGET, rel=0.3 if method == "shira" else 0.01)


def test_the_sparse_part_of_a_backward_is_timed_in_some_more_steps(start):
    worker = start("static")
    engine = get_engine(worker.trainee.model)
    found = worker.measure(2)
    assert engine.step == WARM_UP + 4
    assert len(found["forward_backward"]) == len(found["updates"]) == len(found["sparse"]) == 2
    assert all(0 < seconds < 60 for seconds in found["sparse"])
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        worker.step()
    counts = {event.key: event.count for event in profiled.key_averages()}
    assert counts[COLLECT] >= sum(bool(tensor.count) for tensor in engine.tensors)
    assert counts[COMMIT] == 1


class Event:
    """In place of CUDA's: a moment, told in milliseconds."""

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self, stream):
        self.moment, self.waited = next(stream), False

    def synchronize(self):
        self.waited = True

    def elapsed_time(self, end):
        assert end.waited
        return 1e3 * (end.moment - self.moment)


def test_on_a_gpu_times_are_those_of_its_stream_and_memory_is_that_of_its_tensors(monkeypatch):
    worker, moments = object.__new__(Worker), iter([1, 2, 5, 5, 6, 10])
    worker.settings, worker.method = Settings("id3", device="cuda:1"), METHODS["id3"]
    worker.batches = iter([{}] * 2)
    worker.initialisation = worker.parameters = worker.unmasked = worker.library_bytes = 0
    worker.trainee = Trainee(lambda: type("Output", (), {"loss": torch.ones((), requires_grad=True)}), trained=1)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: moments if device == "cuda:1" else None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 7 if device == "cuda:1" else 0)
    found = worker.measure(2)
    assert (found["forward_backward"], found["updates"]) == ([1, 1], [3, 4])
    assert (found["peak_bytes"], found["sparse"]) == (7, [])
    assert peak_bytes() > 2**26


@pytest.mark.parametrize("family", ["tiny", "t5-small", "deberta-v3-base", "llama-1b"])
def test_the_floor_goes_back_to_the_embeddings_output(start, family, monkeypatch):
    if family != "tiny":
        config = {**SHAPES[family].config, **dict.fromkeys(SHAPES[family].depth, 2)}
        monkeypatch.setitem(SHAPES, family, replace(SHAPES[family], config={**config, **SMALL}))
    worker = start("floor", shape=family)
    table, reached = worker.trainee.model.get_input_embeddings().weight, []
    for module in worker.trainee.model.modules():
        if isinstance(module, nn.Embedding) and module.weight is table:
            module.register_forward_hook(lambda module, args, output: output.register_hook(reached.append) and None)
    worker.step()
    assert len(reached) == (2 if family == "t5-small" else 1)
    assert all(gradient.abs().sum() > 0 for gradient in reached)
    assert all(parameter.grad is None for parameter in worker.trainee.model.parameters())


@pytest.mark.parametrize(
    ("shape", "millions"),
    [("bert-base", 109.5), ("deberta-v3-base", 184.4), ("t5-small", 60.5), ("llama-1b", 1235.8), ("llama-7b", 6738.4)],
)
def test_a_shape_has_as_many_parameters_as_the_published_model(shape, millions):
    with torch.device("meta"):
        model = SHAPES[shape].make(SHAPES[shape].config)
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.1)


@pytest.mark.parametrize("shape", ["tiny", "t5-small", "llama-7b"])
def test_a_model_has_as_many_layers_as_it_is_told(shape, monkeypatch):
    monkeypatch.setitem(SHAPES, shape, replace(SHAPES[shape], config={**SHAPES[shape].config, **SMALL}))
    settings = Settings("full", shape, layers=5)
    model = build(settings)
    blocks = sum(isinstance(module, nn.ModuleList) and len(module) == 5 for module in model.modules())
    assert blocks == len(SHAPES[shape].depth)


def test_a_model_is_made_in_its_dtype_with_the_same_weights_each_time():
    settings = Settings("full", "tiny", dtype="bfloat16")
    first, second = build(settings), build(settings)
    assert {parameter.dtype for parameter in first.parameters()} == {torch.bfloat16}
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert torch.get_default_dtype() == torch.float32
    assert first.training


class Words:
    """A tokenizer that gives each word its length."""

    cls_token_id, sep_token_id = 101, 102

    def __call__(self, texts, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": [[len(word) for word in text.split()] for text in texts]}


def test_rows_are_whole_and_of_one_label():
    texts = [("a bb ccc", 0), ("dddd eeeee", 1), ("ffffff g", 0), ("hh", 1)]
    rows = make_rows(texts, Words(), length=4)
    found = sorted(zip(rows["tokens"].tolist(), rows["labels"].tolist(), strict=True))
    assert found == [([101, 1, 2, 102], 0), ([101, 3, 6, 102], 0), ([101, 4, 5, 102], 1)], "a rest is not used"
    for length in (2, 100):
        with pytest.raises(SparsifyError, match=rf"{length} tokens a sequence; .* change --seq"):
            make_rows([("a b", 0)], Words(), length)


@pytest.mark.parametrize("name", ["train.jsonl", "train.jsonl.gz"])
def test_texts_are_mrpc_from_the_folder_in_the_environment_or_else_docstrings(tmp_path, monkeypatch, name):
    monkeypatch.setenv("SPARSIFY_DATA", str(tmp_path))
    examples = [Example("A text.", 1, "a.py")], [Example("Another.", 0, "b.py")]
    monkeypatch.setattr("sparsify.cli.demo.load_examples", lambda: examples)
    assert find_texts() == ("docstrings", [("A text.", 1), ("Another.", 0)])
    (tmp_path / "mrpc").mkdir()
    row = json.dumps({"sentence1": "One.", "sentence2": "Two.", "label": 1}) + "\n"
    with (gzip.open if name.endswith("gz") else open)(tmp_path / "mrpc" / name, "wt") as file:
        file.write(row * 2)
    assert find_texts() == ("mrpc", [("One. Two.", 1)] * 2)


def test_batches_are_the_same_for_all_methods_and_of_real_text_where_there_is_some(tmp_path):
    save_file({"tokens": torch.arange(20).view(5, 4), "labels": torch.arange(5)}, tmp_path / "tokens.safetensors")
    for tokens in ("", "mrpc"):
        settings = Settings("id3", shape="tiny", batch=3, length=4, tokens=tokens, folder=str(tmp_path))
        first, second = (next(make_batches(settings, 9, seed=1)) for _ in range(2))
        assert all(torch.equal(first[name], second[name]) for name in first)
        assert first["input_ids"].shape == (3, 4)
    assert torch.equal(first["input_ids"][:, 0], 4 * first["labels"])
