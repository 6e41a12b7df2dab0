"""A checkpoint of a run that was killed gives the delta that the model itself gave at that step."""

import copy
import json

import pytest
import torch
from huggingface_hub import save_torch_state_dict
from models import Extended, build, loss_of
from models import run_steps as run
from safetensors.torch import save_file
from torch import nn

from sparsify import DeltaFormatError, SparseDelta, SparsifyError, sparsify, trained_state
from sparsify.common.names import POSITION, SETTINGS
from sparsify.strategies.importance import SNIP
from sparsify.strategies.strategy import Prune, Strategy


def sharded(model, path):
    path.mkdir()
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_torch_state_dict(state, path, max_shard_size=2_000)
    assert len(list(path.glob("*.safetensors"))) > 1


def of_accelerate(model, path):
    path.mkdir()
    torch.save(model.state_dict(), path / "pytorch_model.bin")


WRITERS = {
    "trained state": lambda model, path: torch.save(trained_state(model), path),
    "safetensors": lambda model, path: save_file(trained_state(model), path),
    "not zipped": lambda model, path: torch.save(model.state_dict(), path, _use_new_zipfile_serialization=False),
    "an item": lambda model, path: torch.save({"step": 2, "model": model.state_dict(), "lr": {"a": 1}}, path),
    "wrapped": lambda model, path: torch.save(nn.ModuleDict({"module": model}).state_dict(), path),
    "shards": sharded,
    "accelerate": of_accelerate,
}


@pytest.fixture
def model():
    """Stopped after 2 of 5 steps; a head that is trained whole, new parameters, buffers, a module left out."""
    options = {"modules_to_save": ["head"], "fresh_modules": ["adapter"], "exclude_modules": ["frozen"]}
    model = sparsify(Extended(), 60, "id3", steps=5, **options)
    run(model, build("mlp")[1][:2])
    return model


@pytest.mark.parametrize("writer", WRITERS)
def test_any_way_of_writing_a_checkpoint_gives_the_delta_of_the_model(model, writer, tmp_path):
    path = tmp_path / ("state.safetensors" if writer == "safetensors" else "state")
    WRITERS[writer](model, path)
    expected, found = SparseDelta.from_model(model), SparseDelta.from_checkpoint(path)
    assert found == expected
    assert {"head.weight", "adapter.weight", "norm.running_mean"} <= found.whole.keys()
    assert 0 < found.num_entries + found.entries_in_whole == found.config["budget"] < 60
    del expected.config["versions"]
    assert found.config == json.loads(json.dumps(expected.config))
    if path.is_dir():
        assert SparseDelta.load(path) == found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_state_dict_of_another_dtype_and_of_pruned_tensors(dtype):
    plain, batches = build("mlp")
    strategy = Strategy(SNIP(), Prune(pretrained=True))
    options = {"target_modules": ["second"], "calibration": batches[:2], "loss_fn": loss_of}
    pruned = sparsify(copy.deepcopy(plain), 0.5, strategy, **options)
    for state in (pruned.state_dict(), trained_state(pruned)):
        assert SparseDelta.from_checkpoint(state) == SparseDelta.from_model(pruned)
    model = sparsify(nn.Linear(9, 4).to(dtype), 7, "id3", steps=2)
    model(torch.ones(2, 9, dtype=dtype)).square().sum().backward()
    torch.optim.SGD([model.sparse_values], lr=0.3).step()
    assert SparseDelta.from_checkpoint(model.state_dict()) == SparseDelta.from_model(model)


def test_what_is_no_checkpoint_in_training_is_told_apart(model, tmp_path):
    state = model.state_dict()
    settings = torch.tensor(list(b'{"budget": 3}'), dtype=torch.uint8)
    known = json.loads(bytes(state[SETTINGS].tolist()))
    known["delta"]["tensors"] = [(name, shape, 32, scheme) for name, shape, _, scheme in known["delta"]["tensors"]]
    damaged = torch.tensor(list(json.dumps(known).encode()), dtype=torch.uint8)
    two = nn.ModuleList([sparsify(nn.Linear(4, 4), 3, "random") for _ in range(2)]).state_dict()
    (tmp_path / "file").write_text("no weights")
    for given, error, problem in [
        (Extended().state_dict(), SparsifyError, r"is of 0 sparsified models, .* take SparseDelta.diff\(base, tuned\)"),
        ({**state, SETTINGS: settings}, DeltaFormatError, "no checkpoint that can be used: .*take an earlier one"),
        ({**state, SETTINGS: damaged}, DeltaFormatError, "no checkpoint that can be used: .*take an earlier one"),
        ({**state, SETTINGS: settings[1:]}, DeltaFormatError, "no checkpoint that can be used: .*take an earlier one"),
        ({**state, "sparse_ids": state["sparse_ids"] + 10**6}, DeltaFormatError, "no checkpoint that can be used"),
        ({**state, "sparse_ids": state["sparse_ids"].flip(0)}, DeltaFormatError, "are not those that were saved"),
        (
            {**state, POSITION: state[POSITION] - torch.tensor([0, 0, 1, 0])},
            DeltaFormatError,
            "not those that were saved",
        ),
        ({n: t for n, t in state.items() if n != "head.bias"}, DeltaFormatError, "it lacks `head.bias`, which"),
        (model, SparsifyError, r"got a model: SparseDelta.from_model\(model\) is its delta"),
        (two, SparsifyError, "is of 2 sparsified models, .* of several parts the state dict"),
        (tmp_path / "file", SparsifyError, "cannot be read as weights .* what torch.save"),
        (tmp_path, SparsifyError, "holds no checkpoint"),
    ]:
        with pytest.raises(error, match=problem):
            SparseDelta.from_checkpoint(given)
    with pytest.raises(SparsifyError, match="there is no delta to load"):
        SparseDelta.load(tmp_path)
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:-9])
    with pytest.raises(SparsifyError, match="no safetensors file"):
        SparseDelta.from_checkpoint(tmp_path)
