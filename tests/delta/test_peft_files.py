"""PEFT's SHiRA and Supertuning adapters, read as deltas that compute what PEFT computes."""

import copy
import shutil

import pytest
import torch
from models import bert, train
from peft import LoraConfig, ShiraConfig, SupertuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from sparsify import BaseMismatchError, DeltaFormatError, SparseDelta
from sparsify.delta.peft_files import METHODS

WEIGHTS = "adapter_model.safetensors"
QUERY = "bert.encoder.layer.0.attention.self.query.weight"
TOKENS = torch.arange(24).reshape(4, 6)


def make_base(dtype=torch.float32):
    torch.manual_seed(0)
    model = bert()[0].eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)  # far enough from zero that every entry shows in the outputs
    return model.to(dtype)


@torch.no_grad()
def outputs(model):
    return model(input_ids=TOKENS).logits


@pytest.fixture
def base():
    return make_base()


def train_with_peft(base, folder, config):
    model = get_peft_model(copy.deepcopy(base), config)
    train(model, [{"input_ids": TOKENS, "labels": torch.tensor([0, 1, 2, 0])}] * 4, lr=0.1)
    model.save_pretrained(folder)
    return model.eval()


CONFIGS = {
    "shira": lambda **options: ShiraConfig(r=2, random_seed=0, **options),
    "supertuning": lambda **options: SupertuningConfig(sparsity=0.8, **options),
}


@pytest.fixture(scope="module", params=METHODS)
def trained(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("peft") / request.param
    config = CONFIGS[request.param](target_modules=["query", "layer.1.output.dense"], modules_to_save=["classifier"])
    train_with_peft(make_base(), folder, config)
    return folder


@pytest.fixture
def folder(trained, tmp_path):
    """The files of an adapter, which a test may change; it is called like the method."""
    return shutil.copytree(trained, tmp_path / trained.name)


@pytest.mark.parametrize("method", METHODS)
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


def test_positions_that_windows_stored_as_floats_are_read_and_an_adapter_that_changes_nothing(folder, base):
    expected = SparseDelta.from_peft(folder, base)
    edit_tensors(folder, indices(lambda tensor: tensor.float()))
    assert SparseDelta.from_peft(folder, base) == expected
    get_peft_model(copy.deepcopy(base), ShiraConfig(r=1, target_modules=["query"])).save_pretrained(folder)
    assert SparseDelta.from_peft(folder, base).num_entries == 0


def test_differences_at_one_position_add_up(folder, base):
    def repeat_first(name, tensor):
        tensor[..., 1] = tensor[..., 0] if "indices" in name else 2 * tensor[..., 0]
        return tensor

    edit_tensors(folder, repeat_first)
    tensors = load_file(folder / WEIGHTS).items()
    stored = {name.rpartition(".")[2]: tensor for name, tensor in tensors if "0.att" in name}
    first, second = stored[METHODS[folder.name]][:2]
    position = stored[f"{folder.name}_indices"][..., 0].flatten()
    position = position[-1] + (16 * position[0] if folder.name == "shira" else 0)
    tuned = SparseDelta.from_peft(folder, base).apply(copy.deepcopy(base)).get_parameter(QUERY)
    torch.testing.assert_close(tuned.view(-1)[position], base.get_parameter(QUERY).view(-1)[position] + first + second)


def edit_tensors(folder, change):
    file = folder / WEIGHTS
    tensors = {name: change(name, tensor) for name, tensor in load_file(file).items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}, file)


def unreadable(folder, base, match, error=DeltaFormatError):
    with pytest.raises(error, match=match):
        SparseDelta.from_peft(folder, base)


@pytest.mark.filterwarnings("ignore:save_precomputed_indices")
@pytest.mark.parametrize(("config", "match"), [
    (LoraConfig(), r"`peft_type` is 'LORA', and only SHIRA and SUPERTUNING .*use `SparseDelta.diff\(base"),
    (SupertuningConfig(sparsity=0.9, r=2), r"has a LoRA part \(`r` is 2, the Supra hybrid\)"),
    (SupertuningConfig(sparsity=0.9, save_precomputed_indices=False), "saved without its indices"),
], ids=["LoRA", "Supra", "no indices"])  # fmt: skip
def test_adapters_of_other_kinds_are_refused(base, tmp_path, config, match):
    config.target_modules = {"query"}
    get_peft_model(copy.deepcopy(base), config).save_pretrained(tmp_path)
    unreadable(tmp_path, base, match)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (None, "adapter_config.json` is no JSON .*there is no such file"),
        ("[" * 100_000, "adapter_config.json` is no JSON"),
        ('{"peft_type": ["SHIRA"]}', "`peft_type` is .'SHIRA'."),
        ('{"peft_type": "METHOD", "sparsity": NaN}', "its `adapter_config.json` gives no number of entries"),
    ],
)
def test_a_broken_config_is_refused(folder, base, content, match):
    (folder / "adapter_config.json").unlink()
    if content is not None:
        (folder / "adapter_config.json").write_text(content.replace("METHOD", folder.name.upper()))
    unreadable(folder, base, match)


def test_a_folder_without_weights_or_with_others_is_refused(folder, base):
    file = folder / WEIGHTS
    save_file({"other": torch.zeros(1)}, file)
    unreadable(folder, base, "no tensor in it is called `<layer>.s")
    file.write_bytes(b"nothing")
    unreadable(folder, base, "is no adapter that can become a delta")
    file.rename(folder / "adapter_model.bin")
    unreadable(folder, base, "no `adapter_model.safetensors`: give the folder .* `adapter_model.bin` can run code")


def indices(change):
    return lambda name, tensor: change(tensor) if "indices" in name else tensor


def values(change):
    return lambda name, tensor: tensor if "indices" in name else change(tensor)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (indices(lambda tensor: tensor + 1_000), "indices go from 10.. to .*, expected 0 to"),
        (indices(lambda tensor: tensor[..., :-1]), "for .* values"),
        (indices(lambda tensor: tensor.reshape(1, 1, -1)), "indices have shape"),
        (indices(lambda tensor: tensor.to(torch.uint8)), "indices are torch.uint8, expected torch.int32"),
        (indices(lambda tensor: tensor.float() + 0.5), "indices are no whole numbers"),
        (indices(lambda tensor: None), "is there without"),
        (values(lambda tensor: tensor[:-1]), "values of shape .*, where the adapter's config has"),
        (values(lambda tensor: tensor * float("nan")), "values are not finite"),
        (values(lambda tensor: tensor + 3e38), "values are not finite"),
    ],
)
def test_broken_tensors_are_refused(folder, base, change, match):
    with torch.no_grad():
        base.bert.encoder.layer[0].attention.self.query.weight.fill_(3e38)
    edit_tensors(folder, change)
    unreadable(folder, base, match, BaseMismatchError if "the adapter's config" in match else DeltaFormatError)


def test_another_base_or_one_with_a_tied_weight_is_refused_on_reading(folder, base):
    other = nn.Sequential(nn.Linear(2, 2))
    unreadable(folder, other, "the base has no tensor `bert.*the base that was fine-tuned", BaseMismatchError)
    query, other = (base.bert.encoder.layer[number].attention.self.query for number in (0, 1))
    other.weight = query.weight
    unreadable(folder, base, f"`{QUERY}`, which in this base is one tensor with `.*layer.1.attention.self.query")
    query.weight = nn.Parameter(torch.zeros(16, 16, dtype=torch.int8), requires_grad=False)
    unreadable(folder, base, "is torch.int8; .*give the base that it was trained on, unquantized", BaseMismatchError)


def test_tensors_that_belong_nowhere_are_refused(folder, base):
    file = folder / WEIGHTS
    tensors = load_file(file)
    save_file({**tensors, "base_model.model.head.weight": torch.zeros(2)}, file)
    unreadable(folder, base, "`head.weight` is neither a tensor of the base nor in one of its `modules_to_save`")
    save_file({**tensors, "base_model.model.classifier.bias": torch.zeros(9)}, file)
    unreadable(folder, base, r"`classifier.bias` has shape \(3,\) in the model, \(9,\)", BaseMismatchError)


@pytest.mark.parametrize("is_tied", [False, True])
def test_an_adapter_on_the_output_layer_is_read_where_that_is_a_tensor_of_its_own(is_tied, tmp_path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=40, tie_word_embeddings=is_tied)).eval()
    base.save_pretrained(tmp_path / "base")
    model = get_peft_model(copy.deepcopy(base), ShiraConfig(target_modules=["lm_head"], r=2))
    for name, parameter in model.named_parameters():
        if "shira" in name:
            parameter.data += 1
    model.save_pretrained(tmp_path / "shira", save_embedding_layers=False if is_tied else "auto")
    for given in (base, tmp_path / "base"):
        if is_tied:
            unreadable(tmp_path / "shira", given, "`lm_head.weight`, which in this base is one tensor with")
        else:
            tuned = SparseDelta.from_peft(tmp_path / "shira", given).apply(copy.deepcopy(base))
            ids = torch.arange(6)[None]
            assert torch.equal(tuned(ids).logits, model(ids).logits)
