"""What an engine exports again and again is at every step what ``SparseDelta.from_model`` takes, to the bit."""

import copy
from itertools import pairwise

import pytest
import torch
from models import build, run_steps
from torch import nn

from sparsify import D3, Increment, SparseDelta, SparsifyError, Strategy, extend, get_engine, sparsify
from sparsify.adapters import add_adapters

STEPS = 6


def assert_exported(export, model):
    version = export()
    tensors = {name: entries.delta() for name, entries in version.tensors.items()}
    assert SparseDelta(tensors, version.whole, version.config) == SparseDelta.from_model(model)
    assert list(version.tensors) == sorted(version.tensors)
    return version


def follow(model, batches):
    """Trains, and compares after every step."""
    export = get_engine(model).source.exporter(model)
    versions = [assert_exported(export, model)]
    for batch in batches[:STEPS]:
        run_steps(model, [batch])
        versions.append(assert_exported(export, model))
    assert versions[-1].config["steps_done"] == STEPS
    assert versions[-1].config == SparseDelta.from_model(model).config
    return versions


def test_tensors_of_several_dtypes_and_dense_ones():
    model, batches = build("bert", dtype=torch.bfloat16)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.float()
            module.register_forward_hook(lambda module, args, output: output.bfloat16())
            module.register_forward_pre_hook(lambda module, args: (args[0].float(),))
    sparsify(model, 2_000, steps=STEPS, modules_to_save=["classifier"])
    versions = follow(model, batches)
    assert {entries.values.dtype for entries in versions[-1].tensors.values()} == {torch.float32, torch.bfloat16}
    assert set(versions[0].whole) == {"classifier.weight", "classifier.bias"}
    heads = [version.whole["classifier.weight"] for version in versions]
    assert not any(torch.equal(one, other) for one, other in pairwise(heads))


def test_buffers_that_training_changes():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    sparsify(model, 20, steps=2)
    export = get_engine(model).source.exporter(model)
    assert assert_exported(export, model).whole == {}
    model(torch.randn(4, 6))
    assert set(assert_exported(export, model).whole) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}


def test_positions_and_base_values_are_copied_once_while_nothing_is_unmasked():
    model, batches = build("bert")
    before, after = follow(sparsify(model, 60, steps=STEPS - 2), batches)[-2:]
    for name, entries in after.tensors.items():
        assert entries.indices is before.tensors[name].indices
        assert entries.base is before.tensors[name].base
    changed = [not torch.equal(entries.values, before.tensors[name].values) for name, entries in after.tensors.items()]
    assert all(changed)


def test_modules_that_the_base_lacks_are_stored_whole():
    model, batches = build("bert")
    add_adapters(model, "pfeiffer", 4)
    versions = follow(sparsify(model, 60, steps=STEPS, modules_to_save=["classifier"]), batches)
    assert versions[-1].tensors == {}
    assert versions[-1].config["entries_in_whole"] == 60


def test_plain_weights_that_are_loaded():
    model, batches = build("mlp", dtype=torch.bfloat16)
    sparsify(model, 60, steps=STEPS)
    plain = copy.deepcopy(model.state_dict())
    export = get_engine(model).source.exporter(model)
    run_steps(model, batches[:4])
    assert_exported(export, model)
    torch.manual_seed(3)  # weights without entries: their deltas are rounded, the weights are as they came
    weights = {name: torch.randn_like(value) * 9 for name, value in plain.items() if not name.startswith("sparse_")}
    model.load_state_dict(weights, strict=False)
    for _ in range(2):
        assert_exported(export, model)
    run_steps(model, batches[4:5])
    assert_exported(export, model)


def test_a_run_that_is_extended():
    model, batches = build("mlp")
    sparsify(model, 60, steps=2)
    export = get_engine(model).source.exporter(model)
    run_steps(model, batches[:2])
    assert assert_exported(export, model).config["steps"] == 2
    extend(model, steps=20)
    assert export().config == SparseDelta.from_model(model).config


def test_a_module_that_was_cast():
    model, _ = build("mlp")
    sparsify(model, 60, "random")
    export = get_engine(model).source.exporter(model)
    assert_exported(export, model)
    model.second.bfloat16()  # its weight is the base's float32 value plus the delta, rounded once
    for _ in range(2):
        model.sparse_values.data.normal_(std=1e-3)
        version = assert_exported(export, model)
    assert {entries.dtype for entries in version.tensors.values()} == {torch.float32, torch.bfloat16}


def test_negative_zeros_between_backward_and_step():
    model, batches = build("mlp")
    with torch.no_grad():
        model.first.weight.fill_(-0.0)
    sparsify(model, 60, Strategy(D3(), Increment()), steps=2, target_modules=["first"])
    export = get_engine(model).source.exporter(model)
    model(**batches[0]).backward()
    version = assert_exported(export, model)
    assert version.tensors["first.weight"].values.signbit().all()


def test_values_that_are_not_finite_are_refused_and_the_tensor_is_named():
    model, batches = build("mlp")
    sparsify(model, 60, "pafi")
    export = get_engine(model).source.exporter(model)
    run_steps(model, batches[:1])
    version = export()
    good = model.sparse_values.detach().clone()
    name = next(iter(version.tensors))
    slot = int(next(t for t in get_engine(model).tensors if t.name == name).slots[0])
    model.sparse_values.data[slot] = float("nan")
    with pytest.raises(SparsifyError, match=f"tensor `{name}` cannot go into a delta: 1 of .* values are not finite"):
        export()
    model.sparse_values.data.copy_(good)
    assert_exported(export, model)
