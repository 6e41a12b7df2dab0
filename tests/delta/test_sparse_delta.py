"""Taking a delta from a model, saving, loading, applying and reverting it: exact, or not at all."""

import copy
import json
import pickle
from dataclasses import replace

import pytest
import torch
from checkpoints import files
from deltas import bits, make_base, unchanged
from torch import nn

from sparsify import sparsify, summary
from sparsify.common.raw_bits import digest
from sparsify.delta.sparse_delta import SparseDelta, TensorDelta
from sparsify.errors import BaseMismatchError, SparsifyError

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
CONFIG = {"base_model": "openai-community/gpt2", "revision": "main", "strategy": "id3", "budget": 9436, "steps": 1000}


def tied():
    weight = nn.Parameter(torch.randn(6, 4))
    return nn.ModuleDict({name: nn.ParameterDict({"weight": weight}) for name in ("embed", "head")})


def trained_entries(tensor, indices):
    indices = torch.tensor(indices)
    base = tensor.detach().take(indices)
    return TensorDelta(indices, base + 1, tuple(tensor.shape), tensor.dtype, "replace", digest(base))


def make_delta(model, whole=None):
    entries = {
        "0.weight": trained_entries(model[0].weight, [0, 7, 19]),
        "2.bias": trained_entries(model[2].bias, [1]),
        "2.weight": trained_entries(model[2].weight, [11]),
    }
    return SparseDelta(entries, whole, dict(CONFIG))


def added(tensor, differences, indices=(0,)):
    indices = torch.tensor(indices)
    base = tensor.detach().take(indices)
    values = torch.tensor(differences)
    return TensorDelta(indices, values, tuple(tensor.shape), tensor.dtype, "add", digest(base))


@pytest.fixture
def model():
    return make_base()


@pytest.fixture
def delta(model):
    return make_delta(model)


@pytest.fixture
def left_alone(model):
    with unchanged(model):
        yield


def test_the_engine_is_found_within_wrappers(model):
    as_in_ddp = nn.ModuleDict({"module": sparsify(model, 1, "pafi")})
    assert SparseDelta.from_model(as_in_ddp).num_entries == 1


def assert_same(left, right):
    assert left == right
    assert (list(left.tensors), left.config) == (list(right.tensors), right.config)


def test_a_folder_round_trip_keeps_everything(tmp_path, model):
    delta = make_delta(model, {"1.running_mean": torch.tensor([1.0, float("nan"), -0.0, 2.0, 3.0])})
    delta.tensors["0.bias"] = added(model[0].bias, [0.5])
    folder = tmp_path / "new" / "folder"
    delta.save(folder)
    assert {file.name for file in folder.iterdir()} == {"sparse_delta.safetensors", "sparse_delta_config.json"}
    assert_same(SparseDelta.load(folder), delta)
    assert_same(SparseDelta.load(str(folder / "sparse_delta.safetensors")), delta)
    assert json.loads((folder / "sparse_delta_config.json").read_text())["config"] == delta.config
    delta.save(tmp_path / "sub" / "a.safetensors")
    assert [file.name for file in (tmp_path / "sub").iterdir()] == ["a.safetensors"]


def test_what_cannot_be_saved_leaves_no_folder_and_no_file_behind(tmp_path, delta):
    (tmp_path / "notes").write_text("precious")
    with pytest.raises(SparsifyError, match=r"`.*notes` is a file, and a delta is saved into a folder"):
        delta.save(tmp_path / "notes")
    delta.config = {"when": object()}
    for path in (tmp_path / "a" / "b", tmp_path / "c" / "delta.safetensors"):
        with pytest.raises(SparsifyError, match="config does not go into JSON"):
            delta.save(path)
    assert [file.name for file in tmp_path.iterdir()] == ["notes"]


def test_a_complex_buffer_is_put_back_and_one_without_a_file_dtype_is_refused(tmp_path):
    model = nn.Linear(2, 2)
    model.register_buffer("phases", torch.zeros(3, dtype=torch.complex128))
    delta = SparseDelta({}, {"phases": torch.full((3,), 1j, dtype=torch.complex128)})
    with delta.applied(model):
        assert model.phases[0] == 1j
    assert not model.phases.any()
    with pytest.raises(SparsifyError, match=r"safetensors has no dtype torch.complex128"):
        delta.save(tmp_path / "new")
    assert not any(tmp_path.iterdir())


def test_the_default_device_does_not_matter(tmp_path, model):
    delta = make_delta(model, {"1.running_mean": torch.ones(5), "0.bias": torch.ones(5)})
    delta.save(tmp_path / "one")
    with unchanged(model), torch.device("meta"):
        loaded = SparseDelta.load(tmp_path / "one")
        assert loaded == delta
        loaded.save(tmp_path / "two")
        loaded.apply(model)
        applied = model[0].weight.detach().clone()
        loaded.revert(model)
        loaded.check(model)
    assert files(tmp_path / "one") == files(tmp_path / "two")
    assert applied.flatten()[[0, 7, 19]].tolist() == delta.tensors["0.weight"].values.tolist()


def test_deltas_are_equal_where_they_do_the_same_to_the_same_base(delta):
    assert SparseDelta(dict(reversed(copy.deepcopy(delta.tensors).items()))) == delta != "a delta"
    with pytest.raises(TypeError, match="unhashable type: 'SparseDelta'"):  # since it may change
        hash(delta)


@pytest.mark.parametrize(
    "change",
    [
        lambda delta: delta.tensors.pop("2.bias"),
        lambda delta: delta.whole.clear(),
        lambda delta: delta.whole["1.running_mean"].neg_(),  # -0.0 is no 0.0
        lambda delta: delta.tensors["0.weight"].values[1].add_(1),
        lambda delta: delta.tensors["0.weight"].indices[1].add_(1),
        lambda delta: rename(delta.tensors, "2.bias", "0.bias"),
        lambda delta: with_changed(delta, "2.bias", base_sha256="0" * 64),
        lambda delta: with_changed(delta, "2.bias", kind="add"),
        lambda delta: with_changed(delta, "0.weight", shape=(6, 5)),
    ],
)
def test_deltas_that_differ_in_anything_that_they_do_are_not_equal(change):
    delta = make_delta(make_base(), {"1.running_mean": torch.zeros(5)})
    other = copy.deepcopy(delta)
    change(other)
    assert delta != other


def rename(tensors, old, new):
    tensors[new] = tensors.pop(old)


def with_changed(delta, name, **fields):
    delta.tensors[name] = replace(delta.tensors[name], **fields)


def test_what_was_trained_in_tensors_stored_whole_is_said():
    whole = {"a": torch.ones(4), "b": torch.ones(8)}
    alone = SparseDelta({}, whole, {"entries_in_whole": 9})
    assert repr(alone) == "SparseDelta(2 tensors stored whole, with 9 trained entries)"
    assert alone.entries_only().whole == {}
    for nonsense in (0, -1, 13, True, "9", None, 2.0):
        assert SparseDelta({}, whole, {"entries_in_whole": nonsense}).entries_in_whole == 0


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", DTYPES)
def test_apply_writes_the_trained_values_and_revert_restores_every_bit(dtype):
    model = make_base(dtype)
    model[0].weight.data.view(-1)[:8] = torch.tensor([-0.0, 0.0, 1e-7, -1e-7, 1.5, 2.5, 3.5, -0.0])
    delta, expected = make_delta(model), copy.deepcopy(model)
    for name, part in delta.tensors.items():
        expected.get_parameter(name).data.view(-1)[part.indices] = part.values
    with unchanged(model):
        assert delta.apply(model) is model
        assert bits(model) == bits(expected)
        assert delta.revert(model) is model


@pytest.mark.parametrize("dtype", DTYPES)
def test_differences_are_added_in_float32_at_least_and_reverted_exactly(dtype):
    model = make_base(dtype)
    start, wide = model[0].weight.detach().flatten()[3].clone(), torch.promote_types(dtype, torch.float32)
    with unchanged(model), SparseDelta({"0.weight": added(model[0].weight, [0.3333], [3])}).applied(model):
        assert torch.equal(model[0].weight.flatten()[3], (start.to(wide) + torch.tensor(0.3333).to(wide)).to(dtype))


def test_parameters_of_any_layout_are_written_in_row_major_order(model):
    delta = make_delta(model)
    expected = bits(delta.apply(copy.deepcopy(model)))
    model[0].weight = nn.Parameter(model[0].weight.detach().t().contiguous().t())
    model[2].weight = nn.Parameter(torch.zeros(3, 11)[:, ::2][:, :5].copy_(model[2].weight.detach()))
    assert not model[0].weight.is_contiguous()
    assert not model[2].weight.is_contiguous()
    storage = model[0].weight.data_ptr()
    with unchanged(model), delta.applied(model):
        assert bits(model) == expected
        assert model[0].weight.data_ptr() == storage


def test_a_tied_tensor_goes_by_its_first_name_and_one_that_was_not_tied_by_another():
    model = tied()
    weight = model.embed["weight"]
    value, part = weight.flatten()[5].item(), added(weight, [1.0], [5])
    with unchanged(model), SparseDelta({"embed.weight": part}).applied(model):
        assert model.head["weight"] is model.embed["weight"] is weight
        assert weight.flatten()[5].item() == pytest.approx(value + 1)
    with unchanged(model), pytest.raises(BaseMismatchError, match=r"`embed.weight` and `head.weight` are one tensor"):
        SparseDelta({"head.weight": part}).apply(model)


@pytest.mark.parametrize("tie", ["one parameter", "one storage"])
def test_two_tensors_of_the_delta_that_are_one_in_the_model_are_an_error(tie):
    model = tied()
    if tie == "one storage":
        model.head["weight"] = nn.Parameter(model.embed["weight"].detach())
    part = added(model.embed["weight"], [1.0])
    message = "`embed.weight` and `head.weight` are one tensor in this model"
    with unchanged(model), pytest.raises(BaseMismatchError, match=message):
        SparseDelta({"embed.weight": part, "head.weight": part}).apply(model)


def test_writing_is_seen_by_autograd(model, delta):
    output = model[2](torch.ones(1, 5, requires_grad=True))
    delta.apply(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_applied_reverts_after_an_exception(model, delta, left_alone):
    with pytest.raises(ZeroDivisionError), delta.applied(model) as applied:
        raise ZeroDivisionError if applied is model else KeyError


def test_one_delta_serves_many_models_and_keeps_none_alive(delta):
    models = [make_base(), make_base()]
    before = bits(models[0])
    for model in models:
        delta.apply(model)
    delta.revert(models[0])
    assert bits(models[0]) == before != bits(models[1])
    del model, models
    assert len(delta._applied) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_model_that_was_cast_is_reverted_to_the_cast_base(model, delta, dtype):
    expected = bits(make_base().to(dtype))
    delta.apply(model)
    model.to(dtype)
    delta.revert(model)
    assert bits(model) == expected


def test_deltas_are_reverted_in_reverse_order(model, left_alone):
    first, refused = make_delta(model), pytest.raises(SparsifyError, match=r"no longer holds .* in the reverse order")
    with first.applied(model), make_delta(model).applied(model), unchanged(model), refused:
        first.revert(model)


@pytest.mark.parametrize(("name", "factor"), [("2.bias", 2), ("1.running_mean", 2), ("0.bias", -1)])
def test_revert_refuses_to_undo_what_came_after_a_zeros_sign_too(model, name, factor):
    delta = make_delta(model, {"1.running_mean": torch.ones(5), "0.bias": torch.zeros(5)})
    delta.apply(model)
    model.state_dict()[name].mul_(factor)
    message = f"tensor `{name}` no longer holds the delta's values"
    with unchanged(model), pytest.raises(SparsifyError, match=message):
        delta.revert(model)


def test_swap_leaves_what_applying_the_other_alone_would_or_fails_and_changes_nothing(model, delta, left_alone):
    other = SparseDelta({"0.weight": added(model[0].weight, [1.0, 2.0], [7, 8])}, {"1.running_mean": torch.ones(5)})
    with other.applied(model):
        expected = bits(model)
    delta.apply(model)
    assert delta.swap(model, other) is model
    assert bits(model) == expected
    with unchanged(model), pytest.raises(BaseMismatchError, match=r"tensor `2.bias` does not hold the values"):
        other.swap(model, SparseDelta({"2.bias": added(torch.randn(3), [1.0])}))
    other.swap(model, delta)
    delta.revert(model)


def test_reverting_what_is_not_applied_is_an_error(model, delta, left_alone):
    with delta.applied(make_base()):
        for call in (delta.revert, lambda model: delta.swap(model, make_delta(model))):
            with pytest.raises(SparsifyError, match="not applied to this model: pass the object that `apply` got"):
                call(model)


@pytest.mark.parametrize("clone", [copy.deepcopy, copy.copy, lambda delta: pickle.loads(pickle.dumps(delta))])
def test_a_copy_of_a_delta_is_applied_to_nothing(model, delta, clone):
    delta.apply(model)
    same = clone(delta)
    assert_same(same, delta)
    with pytest.raises(SparsifyError, match="not applied to this model"):
        same.revert(model)
    assert bits(same.apply(make_base())) == bits(model)
    delta.revert(model)


def another_name(delta, model):
    rename(delta.tensors, "2.weight", "2.wieght")
    rename(delta.tensors, "2.bias", "other")


def whole(name, tensor):
    return lambda delta, model: delta.whole.update({name: tensor})


UNFIT = {
    "`2.weight` does not hold the values": lambda delta, _: with_changed(delta, "2.weight", base_sha256="0" * 64),
    r"no tensor `2.wieght` \(near: `2.weight`.*\); 2 names missing in all. Load the base": another_name,
    r"no tensor `classifier.weight`; .*: build the model with that head": whole("classifier.weight", torch.zeros(2, 2)),
    r"`0.bias` has shape \(5,\) in the model, \(7,\) in the delta.*build the model": whole("0.bias", torch.zeros(7)),
    "`2.bias` is there twice": whole("2.bias", torch.zeros(3)),
    "`0.bias` is torch.float32 in the model, torch.int32 in the delta": whole("0.bias", torch.zeros(5).int()),
    "`2.bias` has shape": lambda delta, _: delta.tensors.update({"2.bias": added(torch.zeros(9), [1.0])}),
    r"tensor `2.weight` is torch.int8 in the model.*load the base unquantized": lambda delta, model: setattr(
        model[2], "weight", nn.Parameter(torch.zeros(3, 5).char(), False)
    ),
}


@pytest.mark.parametrize("message", UNFIT)
def test_a_model_that_does_not_fit_is_refused_by_tensor(model, delta, message):
    UNFIT[message](delta, model)
    error = SparsifyError if "twice" in message else BaseMismatchError
    with unchanged(model), pytest.raises(error, match=message):
        delta.apply(model)


def test_applying_twice_is_refused(model, delta):
    delta.apply(model)
    with unchanged(model):
        with pytest.raises(SparsifyError, match=r"already applied to this model.*`revert\(model\)` first"):
            delta.apply(model)
        with pytest.raises(BaseMismatchError, match="revert any other delta first"):
            copy.deepcopy(delta).apply(model)


@pytest.mark.parametrize("make", [nn.Module.state_dict, str, list], ids=["state dict", "str", "list"])
def test_what_is_no_model_is_refused(model, delta, make):
    wrong = make(model) if make is not list else [model]
    for call in (summary, delta.apply, (delta + delta).apply, lambda model: delta.applied(model).__enter__()):
        with pytest.raises(SparsifyError, match=r"expected a torch\.nn\.Module, got \w+: load the model first"):
            call(wrong)
    if make is not str:  # a path
        with pytest.raises(SparsifyError, match=r"the base is a (OrderedDict|list), expected a model, or the path"):
            delta.check(wrong)


def test_a_sparsified_model_is_refused_both_ways(model, delta):
    delta.apply(model)
    sparsify(model[0], 1, "pafi")
    for call in (delta.revert, copy.deepcopy(delta).apply):
        message = r"this model is sparsified: .*Call `desparsify\(model\)` first"
        with unchanged(model), pytest.raises(SparsifyError, match=message):
            call(model)


@pytest.mark.parametrize("written", [True, False])
def test_a_write_that_fails_midway_is_rolled_back(model, delta, left_alone, monkeypatch, written):
    put, calls = torch.Tensor.index_copy_, []

    def fail_once(tensor, *args):
        calls.append(tensor)
        if len(calls) != 2 or written:
            put(tensor, *args)
        if len(calls) == 2:
            raise RuntimeError("device lost")
        return tensor

    monkeypatch.setattr(torch.Tensor, "index_copy_", fail_once)
    with pytest.raises(RuntimeError, match="device lost"):
        delta.apply(model)
    with pytest.raises(SparsifyError, match="not applied"):
        delta.revert(model)


def test_a_model_made_in_inference_mode_is_written_and_reverted(delta):
    with torch.inference_mode():
        model = make_base()
    expected = bits(delta.apply(make_base()))
    with unchanged(model), delta.applied(model):
        assert bits(model) == expected


def test_another_dtype_is_cast_with_one_warning(delta):
    model = make_base(torch.bfloat16)
    delta.whole["2.bias"] = delta.tensors.pop("2.bias").values.expand(3).clone()
    message = r"holds torch.bfloat16 where the delta was trained on torch.float32 .*3 tensors in all\): whether it is"
    with unchanged(model):
        with pytest.warns(UserWarning, match=message) as caught:
            delta.apply(model)
        part = delta.tensors["0.weight"]
        assert torch.equal(model[0].weight.detach().take(part.indices), part.values.bfloat16())
        delta.revert(model)
    assert [warning.filename for warning in caught] == [__file__]
    model.half()
    delta = SparseDelta({"0.bias": added(torch.zeros(5), [1e6])})
    message = "1 of 1 trained values are not finite in the model's torch.float16"
    with unchanged(model), pytest.raises(BaseMismatchError, match=message):
        delta.apply(model)
