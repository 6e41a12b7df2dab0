"""Models that accelerate has spread over devices are trained, but for offloaded parts, which are refused by name."""

import copy

import accelerate
import pytest
import torch
from models import build, loss_of, run_steps, sparsified
from oracle import unmasked_sets

from sparsify import SparseDelta, SparsifyError, base_weights, desparsify, load_model, sparsify, trained_state

BUDGET, STEPS = 30, 3
PARTS = ("bert.embeddings", "bert.encoder", "bert.pooler", "dropout", "classifier")


def train(model, batches, **options):
    return run_steps(sparsify(model, BUDGET, "id3", steps=STEPS, **options), batches[:STEPS])[0]


def dispatched(model, folder, *on_disk):
    devices = {part: "disk" if part in on_disk else "cpu" for part in PARTS}
    options = {"offload_dir": str(folder), "main_device": "cpu"} if on_disk else {"force_hooks": True}
    return accelerate.dispatch_model(model, devices, **options)


def loaded(model, folder, mapping):
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder, device_map=mapping).train()


ON_ONE_DEVICE = {
    "one device, with hooks": lambda model, folder: accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True),
    "a device for each part": dispatched,
    "loaded by itself": lambda model, folder: loaded(model, folder, "auto"),
}
OFFLOADED = {
    "cpu_offload": lambda model, folder: accelerate.cpu_offload(model, execution_device="cpu"),
    "disk_offload": lambda model, folder: accelerate.disk_offload(model, str(folder), execution_device="cpu"),
    "a part on the disk": lambda model, folder: dispatched(model, folder, "bert.encoder"),
}


@pytest.mark.parametrize("way", ON_ONE_DEVICE)
def test_a_dispatched_model_trains_as_the_plain_one(way, tmp_path):
    plain, batches = build("bert")
    model = ON_ONE_DEVICE[way](copy.deepcopy(plain), tmp_path)
    assert train(model, batches) == train(plain, batches)
    assert unmasked_sets(model) == unmasked_sets(plain)
    assert torch.equal(model.sparse_values, plain.sparse_values)


@pytest.mark.parametrize("way", OFFLOADED)
def test_an_offloaded_model_is_refused_by_name_and_left_alone(way, tmp_path):
    model, batches = build("bert")
    OFFLOADED[way](model, tmp_path)
    before = loss_of(model, batches[0])
    names = [name for name, _ in model.named_parameters()]
    with pytest.raises(SparsifyError, match=r"`bert\.\S+\.weight` cannot be masked.*offloaded.*onto a device before"):
        sparsify(model, BUDGET, "id3", steps=STEPS)
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == names
    assert torch.equal(loss_of(model, batches[0]), before)


def test_a_model_whose_frozen_parts_are_offloaded_trains(tmp_path):
    plain, batches = build("bert")
    model = dispatched(copy.deepcopy(plain), tmp_path, "bert.embeddings", "bert.pooler")
    left_out = {"exclude_modules": r"bert\.(embeddings|pooler).*"}
    assert train(model, batches, **left_out) == train(plain, batches, **left_out)
    assert unmasked_sets(model) == unmasked_sets(plain)


@pytest.mark.parametrize("way", ["cpu_offload", "disk_offload"])
def test_a_model_that_is_offloaded_after_it_was_sparsified_is_refused_until_it_is_back(way, tmp_path):
    model, batches = sparsified("bert", BUDGET, steps=STEPS)
    OFFLOADED[way](model, tmp_path)
    with pytest.raises(SparsifyError, match=r"on the meta device: it was offloaded after sparsify\(\).*Take that back"):
        loss_of(model, batches[0])
    for call in (SparseDelta.from_model, trained_state, desparsify, base_weights):
        with pytest.raises(SparsifyError, match="`sparse_values` is on the meta device"):
            call(model)
    accelerate.hooks.remove_hook_from_submodules(model)
    loss_of(model, batches[0]).backward()
    assert model.sparse_values.grad.count_nonzero() > 0
    desparsify(model)


def test_a_delta_goes_onto_a_model_whose_other_parts_are_offloaded_alone(tmp_path):
    plain, batches = build("bert")
    plain.save_pretrained(tmp_path / "base")
    train(model := copy.deepcopy(plain), batches, target_modules=[r"query"])
    delta = SparseDelta.from_model(model)
    there = dispatched(copy.deepcopy(plain), tmp_path, "bert.embeddings", "bert.pooler")
    assert torch.equal(loss_of(delta.apply(there), batches[0]), loss_of(delta.apply(copy.deepcopy(plain)), batches[0]))
    devices = {name: "cpu" for name, _ in plain.named_children()} | {"bert": "disk"}
    for way in (
        lambda: delta.apply(dispatched(copy.deepcopy(plain), tmp_path, "bert.encoder")),
        lambda: load_model(tmp_path / "base", delta, device_map=devices, offload_folder=tmp_path / "offloaded"),
    ):
        with pytest.raises(SparsifyError, match=r"`bert\.encoder.* it was offloaded .* `delta.merge\(base, out\)`"):
            way()
