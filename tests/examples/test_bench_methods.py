"""Each benchmarked method trains what it says, from the same filled buffers and on the same batches."""

import pytest
from safetensors.torch import save_file
from step_bench.methods import METHODS
from step_bench.settings import WARM_UP, Settings
from step_bench.worker import Worker, make_state

from sparsify import get_engine

BUDGET = 2_000


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


@pytest.mark.parametrize("method", METHODS)
def test_each_method_trains_as_many_numbers_as_it_says(start, method):
    worker = start(method)
    model, trained = worker.trainee.model, worker.trainee.trained
    if method == "dense-id3":
        assert trained == BUDGET
    else:
        assert trained == sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert (trained == 0) == (method == "floor")
    assert (trained == worker.parameters) == (method == "full")
    if method == "shira":  # within one rank, and PEFT's head
        head = sum(p.numel() for name, p in model.named_parameters() if p.requires_grad and "modules_to_save" in name)
        assert head
        assert trained - head == pytest.approx(BUDGET, rel=0.3)
