"""A follower holds at every version, to the bit, what a delta of the model in training would make of its base."""

import copy
import pickle
import threading

import pytest
import torch
from checkpoints import MODELS, patched, save
from deltas import bits, unchanged
from peft import LoraConfig, get_peft_model
from quantized_models import quantize
from streams import BUDGET, STEPS, Run, until
from torch import nn
from torch.optim.swa_utils import AveragedModel

from sparsify import DeltaPublisher, DeltaSubscriber, SparseDelta, desparsify, get_engine, sparsify
from sparsify.delta.patch_plan import PlannedWrite
from sparsify.errors import BaseMismatchError, DeltaFormatError, MissingUpdateError, SparsifyError, StaleUpdateError


def with_lora(model):
    return get_peft_model(model, LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS"))


@pytest.mark.parametrize(
    ("name", "dtype", "options"),
    [
        ("mlp", torch.float32, {}),
        ("mlp", torch.bfloat16, {"strategy": "bitfit", "budget": None}),
        ("bert", torch.float32, {"modules_to_save": ["classifier"]}),
        ("bert", torch.bfloat16, {"strategy": "pafi"}),
        ("bert", torch.float32, {"prepare": with_lora}),
        ("gpt2", torch.bfloat16, {"strategy": "d3-repeat"}),  # its token table is tied
        ("llama", torch.bfloat16, {}),
    ],
)
def test_a_follower_holds_every_version_to_the_bit(name, dtype, options):
    run = Run(name, dtype=dtype, **options)
    follower = run.follower()
    assert bits(follower.model) == run.expected()
    for version in range(1, STEPS + 3):
        (update,) = run.updates(1)
        assert follower.apply(update) == follower.version == version
        assert bits(follower.model) == run.expected()


@pytest.mark.parametrize("scheme", ["nf4", "int8"])
def test_a_quantized_base_is_followed_quantized(scheme):
    run = Run("mlp", 40, prepare=lambda model: quantize(model, scheme), target_modules=["first", "second"])
    follower, x = run.follower(), run.batches[0]["x"]
    for _ in range(5):
        follower.apply(run.updates(1)[0])
        expected = SparseDelta.from_model(run.model).apply(copy.deepcopy(run.base))
        assert torch.equal(follower.model.first(x), expected.first(x))
        assert torch.equal(follower.model.second.quantized_delta_values, expected.second.quantized_delta_values)


def test_a_follower_in_another_dtype_holds_what_a_delta_makes_of_it():
    run = Run()
    base = copy.deepcopy(run.base).bfloat16()
    follower = DeltaSubscriber(copy.deepcopy(base))
    run.step().publisher.update()
    with pytest.warns(UserWarning, match="the model holds torch.bfloat16 where the delta was trained on torch.float32"):
        follower.apply(run.snapshot())
    for update in run.updates(3):
        follower.apply(update)
    with pytest.warns(UserWarning, match="the values are cast|trained values are cast"):
        assert bits(follower.model) == run.expected(base)


def test_a_steady_update_takes_two_bytes_an_entry_and_bits_that_stay_are_not_sent():
    base = nn.Sequential(*(nn.Linear(200, 200) for _ in range(10))).bfloat16()
    model = sparsify(copy.deepcopy(base), 40_000, "random")
    publisher, follower = DeltaPublisher(model), DeltaSubscriber(base)
    follower.apply(bytes(publisher.snapshot()))
    model.sparse_values.data.normal_()
    sizes = []
    for changed in (40_000, 1_000, 0):
        model.sparse_values.data[torch.randperm(40_000)[:changed]] += 1
        update = bytes(publisher.update())
        sizes.append(len(update))
        follower.apply(update)
        assert all(torch.equal(own.weight, layer.weight) for own, layer in zip(base, model, strict=True))
    assert 2 * 40_000 < sizes[0] < 2 * 40_000 + 1_000
    assert sizes[1] < 4 * 1_000 + 1_000
    assert sizes[2] < 1_000


def test_the_bytes_are_those_of_the_version_whenever_they_are_asked_for():
    run = Run("bert", modules_to_save=["classifier"])
    follower, made = run.follower(), []
    for _ in range(4):
        made.append((run.step().publisher.update(), run.expected()))
    for update, expected in made:
        follower.apply(update)
        assert bits(follower.model) == expected
    assert repr(update) == "DeltaUpdate(version 4)"
    assert repr(run.publisher.snapshot()) == "DeltaUpdate(snapshot of version 4)"
    assert len({run.snapshot() for _ in range(8)}) == 1


def test_a_snapshot_is_a_delta_file(tmp_path):
    run = Run("bert", modules_to_save=["classifier"])
    run.updates(3)
    path = tmp_path / "snapshot.safetensors"
    path.write_bytes(run.snapshot())
    loaded = SparseDelta.load(path)
    assert loaded == SparseDelta.from_model(run.model)
    assert loaded.config.pop("stream")["version"] == 3
    assert loaded.config == SparseDelta.from_model(run.model).config
    path.write_bytes(run.updates(1)[0])
    with pytest.raises(DeltaFormatError, match="is there, contrary to its metadata"):
        SparseDelta.load(path)


def refused(follower, message, error, text):
    at = follower.chain, follower.version
    with unchanged(follower.model), pytest.raises(error, match=text):
        follower.apply(message)
    assert (follower.chain, follower.version) == at


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda follower: pickle.loads(pickle.dumps(follower))])
def test_a_copy_of_a_follower_goes_on_by_itself(copied):
    run = Run("mlp")
    follower = run.follower()
    other = copied(follower)
    run.step()
    assert (other.apply(run.publisher.update()), follower.version) == (1, 0)


def test_messages_out_of_order_are_refused_by_name():
    run = Run()
    new, follower, first = DeltaSubscriber(copy.deepcopy(run.base)), run.follower(), run.snapshot()
    updates = run.updates(5)
    refused(new, updates[0], MissingUpdateError, r"makes version 1 from version 0, .* holds no version yet: .*snapshot")
    follower.apply(updates[0])
    follower.apply(updates[1])
    refused(follower, updates[3], MissingUpdateError, "version 4 from version 3, and the model holds version 2: ask")
    refused(follower, updates[1], StaleUpdateError, "version 2 of this run, and the model holds version 2: drop it")
    refused(follower, updates[0], StaleUpdateError, "version 1 of this run")
    refused(follower, first, StaleUpdateError, "version 0 of this run")
    assert follower.apply(run.snapshot()) == 5
    assert bits(follower.model) == run.expected()
    assert follower.apply(run.updates(1)[0]) == 6


def test_another_life_of_the_trainer_is_noticed():
    first, second = Run(), Run(strategy="pafi")
    follower = first.follower()
    follower.apply(first.updates(1)[0])
    late, late_snapshot = first.updates(1)[0], first.snapshot()
    updates = second.updates(2)
    refused(follower, updates[1], MissingUpdateError, "holds version 1 of another run: ask the publisher for `snapshot")
    follower.apply(second.snapshot())
    assert bits(follower.model) == second.expected()
    for stale in (late, late_snapshot):
        refused(follower, stale, StaleUpdateError, "of an earlier run, and the model holds version 2 of a later")
    follower.apply(second.updates(1)[0])
    assert bits(follower.model) == second.expected()


@pytest.mark.parametrize("by", ["state dict", "average"])
def test_entries_that_stay_are_not_sent_again_when_a_state_is_loaded(by):
    run = Run("bert")
    model = run.model if by == "state dict" else AveragedModel(run.model)
    publisher, follower = DeltaPublisher(model), DeltaSubscriber(copy.deepcopy(run.base))
    follower.apply(publisher.snapshot())
    for _ in range(STEPS):
        run.step()
        if by == "state dict":
            model.load_state_dict(copy.deepcopy(model.state_dict()))
        else:
            model.update_parameters(run.model)
        update = publisher.update()
        assert not update.is_snapshot
        follower.apply(update)
        assert bits(follower.model) == bits(SparseDelta.from_model(model).apply(copy.deepcopy(run.base)))


def test_another_base_is_refused():
    run = Run()
    other = copy.deepcopy(run.base)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 1
    run.updates(1)
    refused(DeltaSubscriber(other), run.snapshot(), BaseMismatchError, "does not hold the values that the delta was")
    follower = run.follower()
    with torch.no_grad():
        for name, parameter in follower.model.named_parameters():  # all that are not trained yet
            parameter[parameter == run.base.get_parameter(name)] += 1
    refused(follower, run.updates(1)[0], SparsifyError, "does not hold the values that the delta was trained on")


@pytest.mark.parametrize("change", [
    lambda model, base: [parameter.data.normal_() for parameter in model.parameters()],
    lambda model, base: model.bfloat16().float(),
    lambda model, base: model.load_state_dict(base.state_dict()),
], ids=["drawn", "cast twice", "the base's"])  # fmt: skip
def test_a_model_that_something_else_has_changed_is_refused(change):
    run = Run(strategy="pafi")
    follower = run.follower()
    follower.apply(run.updates(1)[0])
    change(follower.model, run.base)
    text = "no longer holds .*: load the base afresh, make a new DeltaSubscriber"
    for message in (run.updates(1)[0], run.snapshot()):
        refused(follower, message, SparsifyError, text)


@pytest.mark.parametrize("left_out", ["values", "head"])
def test_an_update_of_a_part_is_refused_where_something_else_has_changed_it(left_out):
    run = Run("bert", strategy="pafi", modules_to_save=["classifier"])
    follower = run.follower()
    follower.apply(run.updates(1)[0])
    run.model.sparse_values.data[: 3 if left_out == "values" else None] += 1
    if left_out == "values":
        for parameter in run.model.classifier.parameters():
            parameter.data += 1
    update = bytes(run.publisher.update())
    for slot in range(3):
        before = copy.deepcopy(follower.model.state_dict())
        tensor = next(tensor for tensor in get_engine(run.model).tensors if slot in tensor.slots)
        follower.model.get_parameter(tensor.name).data.view(-1)[tensor.indices[tensor.slots == slot]] += 1
        refused(follower, update, SparsifyError, f"`{tensor.name}` no longer holds the values of version 1 ")
        follower.model.load_state_dict(before)
    follower.apply(update)
    assert bits(follower.model) == run.expected()


@pytest.mark.parametrize("message", ["update", "snapshot"])
def test_a_write_that_fails_leaves_the_version_before(monkeypatch, message):
    run = Run("bert", modules_to_save=["classifier"])
    follower = run.follower()
    follower.apply(run.updates(1)[0])
    (data,) = run.updates(1)
    data = data if message == "update" else run.snapshot()
    write, left = PlannedWrite.write, [3]

    def fail_at_the_third(patch, target):
        write(patch, target)
        left[0] -= 1
        if not left[0]:
            raise MemoryError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(PlannedWrite, "write", fail_at_the_third)
        refused(follower, data, MemoryError, "out of memory")
    assert left[0] < 0
    follower.apply(data)
    assert bits(follower.model) == run.expected()


def test_the_default_device_does_not_matter():
    run = Run("bert", modules_to_save=["classifier"])
    follower = run.follower()
    for few in (False, True):
        run.step()
        with torch.device("meta"):
            if few:
                run.model.sparse_values.data[:2] += 1
            update = run.publisher.update()
            follower.apply(bytes(update))
            assert all(patch.values.device.type == "cpu" for patch in update.patches())
            late = DeltaSubscriber(copy.deepcopy(run.base))
            late.apply(bytes(run.publisher.snapshot()))
        assert bits(follower.model) == bits(late.model) == run.expected()


def test_what_cannot_publish_or_follow_is_refused():
    run = Run()
    with pytest.raises(SparsifyError, match=r"this MLP is not sparsified; .*which entries are trained in full"):
        DeltaPublisher(run.base)
    with pytest.raises(SparsifyError, match="this model is sparsified"):
        DeltaSubscriber(run.model)
    follower = run.follower()
    (update,) = run.updates(1)
    with follower.reading():
        refused(follower, update, SparsifyError, "would wait for itself")
    desparsify(run.model)
    with pytest.raises(SparsifyError, match="the model was desparsified since"):
        run.publisher.update()
    with pytest.raises(SparsifyError, match="patches goes by the base's own tensors"):
        Run("bert", prepare=with_lora).publisher.update().patches()


def test_a_new_tensor_that_is_a_known_one_in_the_follower_is_refused():
    base = nn.ModuleList([nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)])
    base[1].load_state_dict(base[0].state_dict())
    model = sparsify(copy.deepcopy(base), 4, "id3", steps=2)
    base[1].weight = base[0].weight
    publisher, follower = DeltaPublisher(model), DeltaSubscriber(base)
    follower.apply(bytes(publisher.snapshot()))
    optimizer = torch.optim.SGD([model.sparse_values], lr=0)
    for layer in model:  # entries of the one in version 1, of the other in version 2
        layer(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        last = bytes(publisher.update())
        if layer is model[0]:
            follower.apply(last)
    refused(follower, last, BaseMismatchError, "`0.weight` and `1.weight` are one tensor in this model")


@pytest.mark.parametrize("architecture", MODELS)
def test_patches_bring_an_engines_checkpoint_from_version_to_version(tmp_path, architecture):
    model = MODELS[architecture]().bfloat16()
    base = copy.deepcopy(model)
    save(model, tmp_path / "base")
    save(model, tmp_path / "engine")  # what the engine has loaded, which the patches change
    masks = {name: torch.rand(p.shape) < 0.05 for name, p in model.named_parameters() if "embeddings" not in name}
    model = sparsify(model, None, masks)
    publisher = DeltaPublisher(model)
    for number in range(3):
        chosen = torch.rand(model.sparse_values.shape) < 0.3
        model.sparse_values.data[chosen] += 1
        patches = list(publisher.update().patches(tmp_path / "base"))
        fields = [(patch.indices.dtype, patch.indices.dim(), patch.values.dim()) for patch in patches]
        assert set(fields) == {(torch.int32, 1, 1)}
        assert sum(patch.indices.numel() for patch in patches) <= int(chosen.sum()), number
        loaded = type(base).from_pretrained(patched(tmp_path / "engine", patches), dtype=torch.bfloat16)
        assert bits(loaded) == bits(SparseDelta.from_model(model).apply(copy.deepcopy(base)))


def test_updates_and_patches_are_of_dense_tensors_too_and_of_entries_that_leave_and_come_back():
    run = Run("bert", modules_to_save=["classifier"])
    follower, state, holds = run.follower(), copy.deepcopy(run.base.state_dict()), copy.deepcopy(run.model.state_dict())

    def take(message):
        for patch in message.patches():
            where = slice(None) if patch.indices is None else patch.indices.long()
            state[patch.name].view(-1)[where] = patch.values
        model = copy.deepcopy(run.base)
        model.load_state_dict(state)
        assert bits(model) == run.expected()

    def update():
        message = run.publisher.update()
        take(message)
        assert follower.apply(message) == message.version
        assert bits(follower.model) == run.expected()
        return message

    run.step()
    dense = {patch.name for patch in update().patches() if patch.indices is None}
    assert dense == {"classifier.weight", "classifier.bias"}
    take(run.publisher.snapshot())
    early = copy.deepcopy(run.model.state_dict())
    run.step()
    assert not update().is_snapshot
    for earlier in (early, holds):  # in which some entries are the base's again, or all of them
        run.model.load_state_dict(earlier)
        assert update().is_snapshot
    run.step()
    assert not update().is_snapshot


def test_threads_that_read_see_one_version_while_updates_arrive():
    run = Run("llama", 2_000, "random")
    follower, first = DeltaSubscriber(copy.deepcopy(run.base).eval()), run.snapshot()
    updates, outputs, batch = run.updates(12), {}, run.batches[0]["input_ids"]
    twin = DeltaSubscriber(copy.deepcopy(follower.model))
    for message in (first, *updates):
        twin.apply(message)
        outputs[twin.version] = twin.model(batch).logits.detach()
    seen, stop = [], threading.Event()

    @torch.no_grad()
    def generate():
        while not stop.is_set():
            with follower.reading() as version:
                seen.append((version, follower.model(batch).logits))

    follower.apply(first)
    readers = [threading.Thread(target=generate, daemon=True) for _ in range(2)]
    for reader in readers:
        reader.start()
    until(lambda: seen)
    for update in updates:
        follower.apply(update)
        until(lambda: seen[-1][0] == follower.version)
    stop.set()
    for reader in readers:
        reader.join(20)
    assert {version for version, _ in seen} >= set(range(1, 13))
    assert len({logits.sum().item() for logits in outputs.values()}) == 13
    assert all(torch.equal(logits, outputs[version]) for version, logits in seen)


def test_snapshots_are_taken_in_another_thread_while_training_goes_on():
    run = Run("mlp", BUDGET, "random")
    follower, stop, errors, taken = DeltaSubscriber(copy.deepcopy(run.base)), threading.Event(), [], []

    def ask():
        while not stop.is_set():
            try:
                taken.append(follower.apply(bytes(run.publisher.snapshot())))
            except StaleUpdateError:
                pass
            except Exception as error:
                errors.append(error)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    run.updates(60)
    stop.set()
    asking.join(20)
    assert not errors
    assert taken
    if follower.version < 60:
        follower.apply(run.snapshot())
    assert bits(follower.model) == run.expected()
