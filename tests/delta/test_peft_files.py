"""Deltas as PEFT's sparse adapters and back: PEFT itself loads what is written and trains what is read."""

import copy
import json
import re
from collections import OrderedDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import bert, gpt2
from peft import LoraConfig, PeftModel, ShiraConfig, SupertuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn

from sparsify import BaseMismatchError, DeltaFormatError, SparseDelta, SparsifyError, sparsify
from sparsify.common.raw_bits import digest
from sparsify.delta.peft import PeftAdapter
from sparsify.delta.peft.methods import METHODS, find_differences
from sparsify.delta.sparse_delta import TensorDelta

QUERY, OUTPUT = "bert.encoder.layer.0.attention.self.query.weight", "bert.encoder.layer.1.output.dense.weight"
BOTH = pytest.mark.parametrize("method", METHODS)
TOKENS = torch.arange(24).reshape(4, 6)


def make_base(dtype=torch.float32):
    torch.manual_seed(0)
    model = bert()[0].eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)  # far enough from zero that every entry shows in the outputs
    return model.to(dtype)


def entries(tensor, count, seed=0, scale=0.5, name="replace"):
    """A part of a delta: some entries, moved."""
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randperm(tensor.numel(), generator=generator)[:count].sort().values
    base = tensor.detach().take(indices)
    moves = scale * torch.randn(count, generator=generator)
    values = moves if name == "add" else (base.float() + moves).to(base.dtype)
    return TensorDelta(indices, values, tuple(tensor.shape), base.dtype, name, digest(base))


def make_delta(model, whole=None):
    """A delta with unequal counts: 30 entries of the query (16 x 16), 9 of the output (16 x 24)."""
    weights = dict(model.named_parameters())
    return SparseDelta({QUERY: entries(weights[QUERY], 30), OUTPUT: entries(weights[OUTPUT], 9, seed=1)}, whole)


def head(model):
    return {f"classifier.{key}": torch.full_like(tensor, 0.25) for key, tensor in model.classifier.state_dict().items()}


@torch.no_grad()
def outputs(model):
    return model(input_ids=TOKENS).logits


def loss(model):
    return model(input_ids=TOKENS, labels=torch.tensor([0, 1, 2, 0])).loss


def train(model, lr):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    for _ in range(4):
        loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()


def load(model, folder, **options):
    return PeftModel.from_pretrained(copy.deepcopy(model), folder, **options).eval()


def assert_same(base, delta, folder):
    """PEFT computes with the adapter what the delta's model computes."""
    tuned = delta.apply(copy.deepcopy(base))
    torch.testing.assert_close(outputs(load(base, folder)), outputs(tuned), rtol=0, atol=1e-6)


@pytest.fixture
def base():
    return make_base()


@pytest.fixture
def delta(base):
    return make_delta(base)


# PEFT loads what was written


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_peft_computes_the_same_outputs_and_weights(method, dtype, tmp_path):
    base = make_base(dtype)
    delta = make_delta(base)
    adapter = delta.to_peft(tmp_path, method, base)
    tuned, loaded = delta.apply(copy.deepcopy(base)), load(base, tmp_path)
    assert (outputs(tuned) - outputs(base)).abs().max() > 1e-2
    torch.testing.assert_close(outputs(loaded), outputs(tuned), rtol=0, atol=1e-6)
    for name, tensor in loaded.merge_and_unload().state_dict().items():
        assert torch.equal(tensor, tuned.state_dict()[name]), name
    assert adapter.entries == 39
    if method == "supertuning" and dtype == torch.bfloat16:
        assert adapter.corrections > 0, "it adds in the weight's dtype, which cannot hold every difference"


@BOTH
def test_a_module_stored_whole_in_part_is_completed_from_base_and_entries(base, delta, method, tmp_path):
    delta.whole["classifier.bias"] = torch.ones(3)
    delta.tensors["classifier.weight"] = entries(base.classifier.weight, 5)
    delta.to_peft(tmp_path, method, base)
    assert_same(base, delta, tmp_path)


def test_transformers_loads_supertuning(base, delta, tmp_path):
    delta.to_peft(tmp_path, "supertuning", base)
    loaded = copy.deepcopy(base)
    loaded.load_adapter(str(tmp_path))
    torch.testing.assert_close(outputs(loaded.eval()), outputs(delta.apply(base)), rtol=0, atol=1e-6)


@BOTH
def test_a_trained_delta_goes_to_peft_and_back(method, tmp_path):
    base = make_base()
    model = copy.deepcopy(base)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.endswith("bias") or "classifier" in name)
    train(sparsify(model, 60, steps=4, target_modules=["query", "dense"], modules_to_save=["classifier"]), lr=0.01)
    delta = SparseDelta.from_model(model)
    adapter = delta.to_peft(tmp_path, method, base)
    assert adapter.corrections == 0, "what training made by adding in float32 needs no correction"
    loaded = load(base, tmp_path, is_trainable=True)
    loss(loaded).backward()
    assert any(parameter.grad is not None and parameter.grad.any() for parameter in loaded.parameters())
    delta.to_peft(tmp_path, method, base)  # replaces the first
    assert_same(base, delta, tmp_path)
    assert SparseDelta.from_peft(tmp_path, base) == delta, "without the padding"


# What is in the folder


@BOTH
def test_the_folder_is_as_pefts_own(base, delta, method, tmp_path):
    delta.config["base_model_name_or_path"], delta.config["base_model_revision"] = "someone/bert", "abc"
    delta.whole |= head(base)
    adapter = delta.to_peft(tmp_path, method, base)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["target_modules"] == [QUERY.removesuffix(".weight"), OUTPUT.removesuffix(".weight")]
    assert (config["base_model_name_or_path"], config["revision"]) == ("someone/bert", "abc")
    assert config["peft_type"] == method.upper()
    assert adapter.saved_modules == tuple(config["modules_to_save"]) == ("classifier",)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert set(tensors) == {
        f"base_model.model.{name.removesuffix('weight')}{key}"
        for name in (QUERY, OUTPUT)
        for key in (METHODS[method].values_key, METHODS[method].indices_key)
    } | {"base_model.model.classifier.weight", "base_model.model.classifier.bias"}
    assert adapter.num_bytes == (tmp_path / "adapter_model.safetensors").stat().st_size


@BOTH
def test_the_smallest_setting_that_fits_is_taken_and_its_padding_reported(base, delta, method, tmp_path):
    adapter = delta.to_peft(tmp_path, method, base)
    if method == "shira":
        assert adapter.settings == {"r": 1}
        assert adapter.padding == (32 - 30) + (40 - 9)
    else:
        assert adapter.settings == {"sparsity": pytest.approx(1 - 30 / 256)}
        assert adapter.padding == 384 * 30 // 256 - 9
    assert str(adapter).splitlines()[1].startswith(f"  padding: {adapter.padding} places (")
    values = load_file(tmp_path / "adapter_model.safetensors").values()
    zeros = sum(int((tensor == 0).sum()) for tensor in values if tensor.is_floating_point())
    assert zeros == adapter.padding


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 3000), st.floats(0, 1)), min_size=1, max_size=4))
def test_supertunings_sparsity_gives_every_layer_enough_places(layers):
    needs = {str(i): (max(1, round(share * 7 * rows)), (rows, 7)) for i, (rows, share) in enumerate(layers)}
    method = METHODS["supertuning"]
    chosen = method.fit(needs)
    SupertuningConfig(**chosen)
    assert all(count <= method.places(chosen, shape) <= shape[0] * 7 for count, shape in needs.values())
    fullest = max(needs.values(), key=lambda need: need[0] / (need[1][0] * 7))
    assert method.places(chosen, fullest[1]) == fullest[0]


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_base_may_be_a_checkpoint_and_is_read_in_the_deltas_dtype(base, method, dtype, tmp_path):
    base.save_pretrained(tmp_path / "base")
    base = base.to(dtype)
    delta = make_delta(base, head(base))
    delta.to_peft(tmp_path / "adapter", method, tmp_path / "base")
    assert_same(base, delta, tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "base")
    if dtype == torch.float32:
        back = SparseDelta.from_peft(tmp_path / "adapter", tmp_path / "base").apply(copy.deepcopy(base))
        assert torch.equal(outputs(back), outputs(delta.apply(copy.deepcopy(base))))


def test_differences_are_written_too_and_a_wrapped_base_is_seen_through(base, tmp_path):
    delta = SparseDelta({QUERY: entries(dict(base.named_parameters())[QUERY], 12, name="add")})
    delta.to_peft(tmp_path, "supertuning", nn.ModuleDict({"module": base}))  # as in DDP
    assert_same(base, delta, tmp_path)


@BOTH
def test_buffers_that_training_changed_are_kept(method, tmp_path):
    base = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).eval()
    changed = {"1.running_mean": torch.ones(6), "1.num_batches_tracked": torch.tensor(7)}
    delta = SparseDelta({"0.weight": entries(base[0].weight, 5)}, changed)
    delta.to_peft(tmp_path, method, base)
    x, loaded = torch.randn(3, 6), load(base, tmp_path)
    torch.testing.assert_close(loaded(x), delta.apply(copy.deepcopy(base))(x), rtol=0, atol=1e-6)
    back = SparseDelta.from_peft(tmp_path, base)
    assert torch.equal(back.whole["1.num_batches_tracked"], torch.tensor(7))


def nested():
    """Layers one of whose names is another's ending."""
    inner = nn.Sequential(OrderedDict(fc=nn.Linear(6, 6)))
    return nn.Sequential(OrderedDict(block=inner, fc=nn.Linear(6, 6)))


@BOTH
def test_a_layer_whose_name_ends_anothers_is_the_only_one_that_matches(method, tmp_path):
    base = nested()
    delta = SparseDelta({"fc.weight": entries(base.fc.weight, 5)})
    delta.to_peft(tmp_path, method, base)
    loaded = load(base, tmp_path)
    assert type(loaded.base_model.model.block.fc) is nn.Linear
    x = torch.randn(3, 6)
    torch.testing.assert_close(loaded(x), delta.apply(base)(x), rtol=0, atol=1e-6)


# What PEFT's format cannot hold


def with_entries(delta, base, counts):
    """The delta with entries in further tensors of the base."""
    delta.tensors |= {name: entries(base.get_parameter(name), count) for name, count in counts.items()}
    return delta


def of_one(base, name, count=2):
    return SparseDelta({name: entries(base.get_parameter(name), count)}), base


def misnamed(base):
    delta = make_delta(base)
    delta.tensors[QUERY.replace("query", "qeury")] = delta.tensors.pop(QUERY)
    return delta, base


def not_linear(base):
    names = (
        "embeddings.word_embeddings.weight",
        "encoder.layer.0.output.dense.bias",
        "encoder.layer.0.output.LayerNorm.weight",
    )
    return with_entries(make_delta(base), base, {f"bert.{name}": 3 for name in names}), base


def tied_and_whole(base):
    base = gpt2()[0]
    base.extra = nn.Linear(4, 4)
    whole = {"lm_head.weight": torch.zeros_like(base.lm_head.weight)}
    return SparseDelta({"extra.weight": entries(base.extra.weight, 1)}, whole), base


def tied(base):
    base = nn.ModuleDict({"one": nn.Linear(4, 4), "two": nn.Linear(4, 4)})
    base["two"].weight = base["one"].weight
    return of_one(base, "one.weight")


def overflowing(base):
    base = nn.Sequential(nn.Linear(2, 2)).half()
    nn.init.constant_(base[0].weight, 60000.0)
    values, held = torch.tensor([-60000.0]).half(), digest(base[0].weight.detach()[0, 1])
    part = TensorDelta(torch.tensor([1]), values, (2, 2), torch.float16, "replace", held)
    return SparseDelta({"0.weight": part}), base


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda base: (make_delta(base), None), r"PEFT's adapters hold differences .*give the base, as in `to_peft\("),
        (misnamed, f"no tensor `.*qeury.weight` .*near: `{QUERY}`.*: give the base"),
        (
            not_linear,
            r"3 of the delta's 5 tensors are not: .*word_embeddings.weight` \(Embedding's weight\), .*bias` "
            r"\(Linear's bias\), .*\(LayerNorm's weight\). Nothing was written: freeze them before",
        ),
        (lambda base: of_one(gpt2()[0], "transformer.h.0.mlp.c_fc.weight"), r"c_fc.weight` \(Conv1D's weight\)"),
        (
            lambda base: of_one(nn.ModuleDict({"attention": nn.MultiheadAttention(4, 2)}), "attention.out_proj.weight"),
            "NonDynamicallyQuantizableLinear's weight",
        ),
        (lambda base: of_one(nn.Linear(4, 4), "weight"), "of the model itself, not of a layer"),
        (lambda base: (SparseDelta({}, {"bias": torch.zeros(4)}), nn.Linear(4, 4)), "`bias` .of the model itself. can"),
        (lambda base: (SparseDelta({}, head(base)), base), "has no entries in a linear layer's weight"),
        (
            lambda base: (SparseDelta({}, {"fc.weight": torch.zeros(6, 6), "fc.bias": torch.zeros(6)}), nested()),
            "`fc` is stored whole, and PEFT would take `block.fc` for it, too",
        ),
        (tied, r"`one.weight` \(tied to `two.weight`\)"),
        (tied_and_whole, "`lm_head` is stored whole and holds `lm_head.weight`, which is tied to"),
        (overflowing, "`0.weight`: 1 of 1 values are too far"),
    ],
    ids=[
        "no base", "missing", "not linear", "Conv1D", "attention", "root", "root's whole", "no entries", "ambiguous",
        "tied", "tied and whole", "overflow",
    ],
)  # fmt: skip
def test_a_delta_that_pefts_format_cannot_hold_is_refused(base, tmp_path, make, match):
    delta, base = make(base)
    with pytest.raises(SparsifyError, match=match):
        delta.to_peft(tmp_path / "adapter", "supertuning", base)
    assert not (tmp_path / "adapter").exists()


def test_a_peft_without_the_method_is_refused(base, delta, tmp_path, monkeypatch):
    monkeypatch.delattr("peft.SupertuningConfig")
    with pytest.raises(SparsifyError, match="has no `SupertuningConfig`: upgrade it"):
        delta.to_peft(tmp_path, "supertuning", base)


def test_messages_name_the_first_few_of_many(base, tmp_path):
    many = SparseDelta({}, {f"x{i}": torch.zeros(1) for i in range(3_000)})
    with pytest.raises(SparsifyError, match=r"^`x0` .{,200} `x4` \(of the model itself\) and 2,995 more cannot be"):
        many.to_peft(tmp_path / "adapter", "shira", base)
    with pytest.raises(SparsifyError, match=r"method='x{99}; expected one of 'shira', 'supertuning'"):
        many.to_peft(tmp_path / "adapter", "x" * 40_000, base)
    written = PeftAdapter(tmp_path, "shira", {"r": 1}, 1, 1, 0, 0, tuple(f"layer.{i}" for i in range(3_000)), 9)
    assert str(written).endswith("layer.4 and 2,995 more")


def test_a_layer_too_small_for_shira_is_named(base, delta, tmp_path):
    with_entries(delta, base, {QUERY: 100, "classifier.weight": 1})
    message = r"needs r=4 for its 100 entries: .*1 layer can have: `classifier.weight` \(3 x 16, asked for 76\)"
    with pytest.raises(SparsifyError, match=message + '.*use method="supertuning"'):
        delta.to_peft(tmp_path, "shira", base)
    delta.to_peft(tmp_path, "supertuning", base)
    assert_same(base, delta, tmp_path)


@BOTH
def test_a_checkpoint_without_the_head_is_named_as_the_class_that_was_trained(base, delta, method, tmp_path):
    """Of a `BertModel` the layers are called `encoder...`, of any class with a head `bert.encoder...`."""
    base.bert.save_pretrained(tmp_path / "base")
    delta.whole["classifier.bias"] = torch.ones(3)
    delta.whole["classifier.weight"] = torch.ones(3, 16)
    with pytest.raises(SparsifyError, match="not in the config's architecture"):
        delta.to_peft(tmp_path / "adapter", method, tmp_path / "base")
    delta.config["architecture"] = type(base).__name__
    delta.to_peft(tmp_path / "adapter", method, tmp_path / "base")
    assert_same(base, delta, tmp_path / "adapter")
    assert set(SparseDelta.from_peft(tmp_path / "adapter", tmp_path / "base").whole) == set(delta.whole)


def test_a_checkpoint_whose_model_cannot_be_built_is_refused(base, delta, tmp_path):
    save_file({QUERY: torch.zeros(16, 16)}, tmp_path / "model.safetensors")
    with pytest.raises(SparsifyError, match=r"nn.Linear layers only, and which .* not known, .*give the base as a"):
        delta.to_peft(tmp_path, "supertuning", tmp_path)


# Adapters that PEFT trained


def train_with_peft(base, folder, config):
    model = get_peft_model(copy.deepcopy(base), config)
    train(model, lr=0.1)
    model.save_pretrained(folder)
    return model.eval()


CONFIGS = {
    "shira": lambda **options: ShiraConfig(r=2, random_seed=0, **options),
    "supertuning": lambda **options: SupertuningConfig(sparsity=0.8, **options),
}


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_that_peft_trained_is_read(method, dtype, tmp_path):
    base = make_base(dtype)
    config = CONFIGS[method](target_modules=["query", "output.dense"], modules_to_save=["classifier"])
    trained = train_with_peft(base, tmp_path, config)
    delta = SparseDelta.from_peft(tmp_path, base)
    assert set(delta.whole) == {"classifier.bias", "classifier.weight"}
    assert all(part.kind == "replace" for part in delta.tensors.values())
    assert delta.config["converted_from"]["peft_type"] == method.upper()
    tuned = delta.apply(copy.deepcopy(base))
    assert torch.equal(outputs(tuned), outputs(trained))
    delta.save(tmp_path / "delta")
    assert torch.equal(outputs(SparseDelta.load(tmp_path / "delta").apply(copy.deepcopy(base))), outputs(trained))


@settings(max_examples=60)
@given(st.data(), st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64]))
@BOTH
def test_any_values_come_back_exactly(method, data, dtype):
    wide = st.floats(-1e4, 1e4, width=16)
    numbers = data.draw(st.lists(st.tuples(wide, wide, st.floats(0.5, 2, width=32)), min_size=1, max_size=8))
    first, second, factor = torch.tensor(numbers, dtype=torch.float64).unbind(1)
    base, trained = (first * factor).to(dtype), (second / factor).to(dtype)
    owners, differences = find_differences(METHODS[method], base, trained)
    assert torch.equal(METHODS[method].add(base, owners, differences), trained)


def test_positions_that_windows_stored_as_floats_are_read(base, delta, tmp_path):
    delta.to_peft(tmp_path, "shira", base)
    edit_tensors(tmp_path, lambda name, tensor: tensor if "weight" in name else tensor.float())
    back = SparseDelta.from_peft(tmp_path, base)
    assert all(torch.equal(back.tensors[name].indices, part.indices) for name, part in delta.tensors.items())


def test_an_adapter_that_changes_nothing_is_an_empty_delta(base, tmp_path):
    get_peft_model(copy.deepcopy(base), ShiraConfig(r=1, target_modules=["query"])).save_pretrained(tmp_path)
    assert SparseDelta.from_peft(tmp_path, base).num_entries == 0


# Adapters that cannot be read


def edit_tensors(folder, change):
    file = folder / "adapter_model.safetensors"
    tensors = {name: change(name, tensor) for name, tensor in load_file(file).items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}, file)


def unreadable(folder, base, match, error=DeltaFormatError):
    with pytest.raises(error, match=match):
        SparseDelta.from_peft(folder, base)


@pytest.fixture(params=METHODS)
def folder(request, base, delta, tmp_path):
    delta.to_peft(tmp_path, request.param, base)
    return tmp_path


@pytest.mark.filterwarnings("ignore:save_precomputed_indices")
@pytest.mark.parametrize(
    ("config", "match"),
    [
        (LoraConfig(), r"`peft_type` is 'LORA', and only SHIRA and SUPERTUNING .*use `SparseDelta.diff\(base"),
        (SupertuningConfig(sparsity=0.9, r=2), r"has a LoRA part \(`r` is 2, the Supra hybrid\)"),
        (SupertuningConfig(sparsity=0.9, save_precomputed_indices=False), "saved without its indices"),
    ],
    ids=["LoRA", "Supra", "no indices"],
)
def test_adapters_of_other_kinds_are_refused(base, tmp_path, config, match):
    config.target_modules = {"query"}
    train_with_peft(base, tmp_path, config)
    unreadable(tmp_path, base, match)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (None, "adapter_config.json` is no JSON .*there is no such file"),
        ("[" * 100_000, "adapter_config.json` is no JSON"),
        ('{"peft_type": ["SHIRA"]}', "`peft_type` is .'SHIRA'."),
        ('{"peft_type": "SHIRA"}', "its `adapter_config.json` gives no number of entries"),
        ('{"peft_type": "SHIRA", "r": "x"}', "its `adapter_config.json` gives no number of entries"),
        ('{"peft_type": "SHIRA", "r": NaN}', "its `adapter_config.json` gives no number of entries"),
        ('{"peft_type": "SHIRA", "r": 1, "scaling": 2.0}', "it has a `scaling`"),
    ],
)
def test_a_broken_config_is_refused(base, delta, tmp_path, content, match):
    delta.to_peft(tmp_path, "shira", base)
    (tmp_path / "adapter_config.json").unlink()
    if content is not None:
        (tmp_path / "adapter_config.json").write_text(content)
    unreadable(tmp_path, base, match)


def test_a_folder_without_weights_or_with_others_is_refused(folder, base):
    file = folder / "adapter_model.safetensors"
    save_file({"other": torch.zeros(1)}, file)
    unreadable(folder, base, "no tensor in it is called `<layer>.s")
    file.write_bytes(b"nothing")
    unreadable(folder, base, "is no adapter that can become a delta")
    file.rename(folder / "adapter_model.bin")
    unreadable(folder, base, "no `adapter_model.safetensors`: give the folder .* `adapter_model.bin` can run code")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda tensor: tensor + 1_000, "indices go from 10.. to .*, expected 0 to"),
        (lambda tensor: -tensor - 1, "indices go from -"),
        (lambda tensor: tensor[..., :-1], "for .* values"),
        (lambda tensor: tensor.reshape(1, 1, -1), "indices have shape"),
        (lambda tensor: tensor.to(torch.uint8), "indices are torch.uint8, expected torch.int32"),
        (lambda tensor: tensor.float() + 0.5, "indices are no whole numbers"),
        (lambda tensor: tensor.float() * float("inf"), "indices"),
        (lambda tensor: None, "is there without"),
    ],
)
def test_broken_indices_are_refused(folder, base, change, match):
    edit_tensors(folder, lambda name, tensor: change(tensor) if "indices" in name else tensor)
    unreadable(folder, base, match)


@pytest.mark.parametrize(
    ("change", "match", "error"),
    [
        (lambda tensor: tensor[:-1], "values of shape .*, where the adapter's config has", BaseMismatchError),
        (lambda tensor: tensor.int(), "values are torch.int32", DeltaFormatError),
        (lambda tensor: tensor * float("nan"), "values are not finite", DeltaFormatError),
        (lambda tensor: tensor + 3e38, "values are not finite", DeltaFormatError),
    ],
)
def test_broken_values_are_refused(folder, base, change, match, error):
    with torch.no_grad():
        base.bert.encoder.layer[0].attention.self.query.weight.fill_(3e38)
    edit_tensors(folder, lambda name, tensor: tensor if "indices" in name else change(tensor))
    unreadable(folder, base, match, error)


def test_another_base_is_refused_on_reading(folder, base):
    other = nn.Sequential(nn.Linear(2, 2))
    unreadable(folder, other, "the base has no tensor `bert.*the base that was fine-tuned", BaseMismatchError)
    query = base.bert.encoder.layer[0].attention.self.query
    query.weight = nn.Parameter(torch.zeros(16, 16, dtype=torch.int8), requires_grad=False)
    unreadable(folder, base, "is torch.int8; .*give the base that it was trained on, unquantized", BaseMismatchError)


def test_a_tied_weight_is_refused_on_reading(folder, base):
    layers = base.bert.encoder.layer
    layers[1].attention.self.query.weight = layers[0].attention.self.query.weight
    unreadable(folder, base, f"`{QUERY}`, which in this base is one tensor with `.*layer.1.attention.self.query")


def test_tensors_that_belong_nowhere_are_refused(folder, base):
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "base_model.model.head.weight": torch.zeros(2)}, file)
    unreadable(folder, base, "`head.weight` is neither a tensor of the base nor in one of its `modules_to_save`")
    save_file({**tensors, "base_model.model.classifier.bias": torch.zeros(9)}, file)
    unreadable(folder, base, r"`classifier.bias` has shape \(3,\) in the model, \(9,\)", BaseMismatchError)


def test_no_checkpoint_at_the_path_is_not_the_adapters_fault(folder, tmp_path):
    with pytest.raises(SparsifyError, match=f"`{re.escape(str(tmp_path / 'no'))}` does not exist"):
        SparseDelta.from_peft(folder, tmp_path / "no")
