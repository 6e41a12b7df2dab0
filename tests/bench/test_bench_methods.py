"""What the benchmark compares trains what it says, from the same filled buffers."""

from itertools import pairwise

import peft
import pytest
import torch
from torch import nn

from sparsify import Schedule, get_unmasker
from sparsify.bench import cache
from sparsify.bench.dense_id3 import DenseID3
from sparsify.bench.filling import load_state, make_state, state_path
from sparsify.bench.methods import METHODS, check_installed
from sparsify.bench.settings import WARM_UP, Settings
from sparsify.bench.shapes import SHAPES, Shape, build
from sparsify.bench.worker import Worker
from sparsify.errors import SparsifyError

BUDGET = 2_000
TINY_T5 = {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
TINY_T5 |= {"decoder_start_token_id": 0, "use_cache": False}
TINY_DEBERTA = SHAPES["deberta-v3-base"].config | {
    "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
    "pooler_hidden_size": 16,
}  # fmt: skip
TINY_LLAMA = SHAPES["llama-1b"].config | {
    "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 32, "head_dim": 4,
}  # fmt: skip


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def settings_of(method, **others):
    return Settings(method, **{"shape": "tiny", "budget": BUDGET, "batch": 2, "length": 8, **others})


def start(method, **others):
    """A worker, after its warm-up; the buffers are filled where there are none yet."""
    settings = settings_of(method, **others)
    if load_state(settings) is None:
        cache.save(state_path(settings), make_state(settings))
    return Worker(settings)


def support_of(worker):
    """The unmasked flat indices by name, of the library's engine or of the dense masks."""
    if worker.settings.method == "dense-id3":
        masks = worker.trainee.before_step.__self__.masks
        return {name: mask.flatten().nonzero().flatten().tolist() for name, mask in masks.items()}
    return {tensor.name: sorted(tensor.indices.tolist()) for tensor in get_unmasker(worker.trainee.model).tensors}


def test_the_dense_form_and_the_library_choose_the_same_entries_from_the_same_buffers():
    sparse, dense = start("id3"), start("dense-id3")
    assert sparse.unmasked == dense.unmasked == BUDGET // 2
    for _ in range(3):
        assert support_of(sparse) == support_of(dense)
        assert sum(map(len, support_of(dense).values())) == sparse.trainee.unmasked() == dense.trainee.unmasked()
        sparse.step(), dense.step()
    assert dense.trainee.unmasked() == BUDGET // 2 + (WARM_UP + 3) * BUDGET // 1000


def test_the_dense_form_starts_from_the_trained_weights_and_moves_no_masked_entry():
    worker = start("dense-id3")
    before = {name: parameter.detach().clone() for name, parameter in worker.trainee.model.named_parameters()}
    base = dict(build(worker.settings).named_parameters())
    moved = sum(int((before[name] != base[name]).sum()) for name in base)
    assert 0.9 * BUDGET / 2 < moved <= worker.trainee.unmasked()
    worker.step()
    for name, parameter in worker.trainee.model.named_parameters():
        changed = (parameter != before[name]).flatten().nonzero().flatten().tolist()
        assert set(changed) <= set(support_of(worker)[name])


def test_the_dense_form_unmasks_nothing_beyond_its_plan():
    weight = nn.Parameter(torch.arange(4.0))
    id3 = DenseID3({"weight": weight}, budget=2, steps=1)
    for _ in range(2):
        weight.grad = torch.tensor([1.0, 9.0, 20.0, 1.0])
        id3.mask_gradients()
        assert weight.grad.tolist() == [0.0, 9.0, 20.0, 0.0]
        assert id3.unmasked == 2


def test_a_parameter_without_a_gradient_is_passed_over():
    used, unused = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    id3 = DenseID3({"unused": unused, "used": used}, budget=1, steps=1)
    used.grad = torch.tensor([1.0, 2.0])
    id3.mask_gradients()
    assert used.grad.tolist() == [0.0, 2.0]
    assert unused.grad is None


def test_filled_to_the_whole_budget_every_step_still_unmasks():
    worker = start("id3", fill=1.0, ahead=20)
    assert worker.unmasked == pytest.approx(BUDGET * 0.98, abs=1)
    seen = [worker.trainee.unmasked()]
    for _ in range(20 - WARM_UP):
        worker.step()
        seen.append(worker.trainee.unmasked())
    assert all(later > earlier for earlier, later in pairwise(seen))
    assert seen[-1] == BUDGET


def test_with_no_fill_a_run_starts_at_its_beginning():
    worker = start("id3", fill=0.0)
    assert worker.unmasked == 0
    assert worker.trainee.unmasked() == WARM_UP * BUDGET // 1000


def test_a_window_of_ten_steps_unmasks_what_ten_steps_would():
    worker = start("id3-every-10")
    assert get_unmasker(worker.trainee.model).schedule == Schedule(every=10)
    before = worker.trainee.unmasked()
    worker.turn(1)
    assert worker.trainee.unmasked() - before == 10 * BUDGET // 1000


@pytest.mark.parametrize("method", METHODS)
def test_each_method_trains_as_many_numbers_as_it_says(method):
    if method == "supertuning" and not hasattr(peft, "SupertuningConfig"):
        pytest.skip("this PEFT does not have it")
    worker = start(method)
    model, trained = worker.trainee.model, worker.trainee.trained
    if method == "dense-id3":
        assert trained == BUDGET
    elif method == "floor":
        assert trained == 0
        assert not any(parameter.requires_grad for parameter in model.parameters())
    else:
        assert trained == sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    if method == "full":
        assert trained == worker.parameters
    if method in ("shira", "supertuning"):  # within one rank, and the head that PEFT trains beside it
        head = sum(p.numel() for name, p in model.named_parameters() if p.requires_grad and "modules_to_save" in name)
        assert head
        assert trained - head == pytest.approx(BUDGET, rel=0.3 if method == "shira" else 0.01)


@pytest.mark.parametrize("family", ["tiny", "t5-small", "deberta-v3-base", "llama-1b"])
def test_the_floor_goes_back_to_what_the_embeddings_put_out(family, monkeypatch):
    configs = {"t5-small": TINY_T5, "deberta-v3-base": TINY_DEBERTA, "llama-1b": TINY_LLAMA}
    shape = SHAPES[family]
    small = Shape(shape.build, configs.get(family, shape.config), 1, 32, shape.module, shape.task)
    monkeypatch.setitem(SHAPES, family, small)
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
        model = SHAPES[shape].build(SHAPES[shape].config)
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.1)
    assert SHAPES[shape].millions == pytest.approx(millions, rel=0.01)


def test_a_model_is_made_in_its_dtype_with_the_same_weights_each_time():
    first, second = (build(settings_of("full", dtype="bfloat16")) for _ in range(2))
    assert {parameter.dtype for parameter in first.parameters()} == {torch.bfloat16}
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert torch.get_default_dtype() == torch.float32
    assert first.training


def test_activations_can_be_checkpointed():
    plain, spared = (start("id3", checkpointing=on) for on in (False, True))
    assert not plain.trainee.model.is_gradient_checkpointing
    assert spared.trainee.model.is_gradient_checkpointing
    assert support_of(plain) == support_of(spared)


def test_a_peft_that_lacks_a_method_is_named(monkeypatch):
    monkeypatch.delattr("peft.SupertuningConfig", raising=False)
    check_installed("lora")
    with pytest.raises(SparsifyError, match=r"'supertuning' needs PEFT 0\.21 or later, and .* is installed"):
        check_installed("supertuning")
