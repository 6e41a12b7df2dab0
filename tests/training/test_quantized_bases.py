"""Quantized transformers models in a real Trainer, sparsified whole or, as with QLoRA, in their adapters."""

import copy

import pytest
import torch
from models import build, train
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from safetensors.torch import load_file
from trainers import make_trainer, rows_of
from transformers import BitsAndBytesConfig, GPT2LMHeadModel, LlamaForCausalLM, TorchAoConfig

from sparsify import BaseMismatchError, SparseDelta, SparsifyCallback, SparsifyError, desparsify, load_model, sparsify
from sparsify.api import base_weights, get_engine, summary
from sparsify.common.quantized import is_quantized
from sparsify.training.plan import STATE

pytest.importorskip("bitsandbytes", reason="bitsandbytes comes with the extra `quantized`")
ao = pytest.importorskip("torchao.quantization", reason="torchao comes with the extra `quantized`")

STEPS = 4
CONFIGS = {
    "nf4": lambda: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
    "int8": lambda: BitsAndBytesConfig(load_in_8bit=True),
    "torchao-int8": lambda: TorchAoConfig(ao.Int8WeightOnlyConfig()),
    "torchao-int4": lambda: TorchAoConfig(ao.IntxWeightOnlyConfig(torch.int4, ao.PerGroup(8))),
}
SCHEMES = [*CONFIGS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    build("llama")[0].save_pretrained(path)
    return path


def load(folder, scheme=None, **options):
    config = CONFIGS[scheme]() if scheme else None
    return LlamaForCausalLM.from_pretrained(folder, quantization_config=config, **options)


def trainer(model, out, callbacks=()):
    return make_trainer(model, out, rows_of("llama"), list(callbacks), max_steps=STEPS, learning_rate=1e-3)


@pytest.mark.parametrize(("scheme", "small"), zip(SCHEMES, (False, True, False, True), strict=True))
def test_the_trainer_takes_a_quantized_model_and_goes_on_from_its_checkpoint(small, scheme, folder, tmp_path):
    models = [sparsify(load(folder, scheme), 60, "id3", steps=STEPS, target_modules="all-linear") for _ in range(2)]
    callbacks = [SparsifyCallback()] if small else []
    trainer(models[0], tmp_path, callbacks).train()
    if small:
        weights = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
        assert all(name.startswith("sparse_") for name, value in weights.items() if value.numel())
    trainer(models[1], tmp_path, callbacks).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    first, second = (model.state_dict() for model in models)
    assert all(torch.equal(first[name], second[name]) for name in STATE)
    assert get_engine(models[1]).unmasked == 60
    assert summary(models[1], verify=True).verification.ok


@pytest.mark.parametrize("scheme", SCHEMES)
def test_after_desparsify_quantizer_and_untrained_layers_are_what_they_were(scheme, folder, tmp_path):
    model = load(folder, scheme)
    kind, layers, keys = type(model.hf_quantizer), [*map(type, model.modules())], [*model.state_dict()]
    sparsify(model, 60, "id3", steps=STEPS, target_modules="all-linear")
    assert isinstance(model.hf_quantizer, kind)
    assert model.hf_quantizer.is_serializable()
    assert copy.deepcopy(model).hf_quantizer.is_qat_trainable
    desparsify(model)
    assert type(model.hf_quantizer) is kind
    assert ([*map(type, model.modules())], [*model.state_dict()]) == (layers, keys)
    with pytest.raises(ValueError, match="purely quantized models"):
        trainer(model, tmp_path)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_desparsify_refuses_until_it_may_dequantize_and_then_makes_an_ordinary_model(scheme, folder, tmp_path):
    model, batches = load(folder, scheme), build("llama")[1]
    train(sparsify(model, 60, "id3", steps=STEPS, target_modules="all-linear"), batches[:STEPS])
    before, layers = model.eval()(**batches[0]).logits, [*map(type, model.modules())]
    with pytest.raises(SparsifyError, match=r"quantized .*SparseDelta.from_model\(model\).*dequantize=True"):
        desparsify(model)
    assert [*map(type, model.modules())] == layers
    assert torch.equal(model(**batches[0]).logits, before)
    desparsify(model, dequantize=True).save_pretrained(tmp_path / "dense")
    assert not model.is_quantized
    loaded = load(tmp_path / "dense").eval()
    assert torch.equal(loaded(**batches[0]).logits, before)
    assert [*map(type, model.modules())] == [*map(type, loaded.modules())]
    assert not any(is_quantized(parameter) for parameter in model.parameters())


@pytest.mark.parametrize("scheme", SCHEMES[:2])
def test_a_model_that_is_dequantized_in_part_is_loaded_as_it_was_saved(scheme, folder, tmp_path):
    model = sparsify(load(folder, scheme).train(), 60, "id3", steps=STEPS, target_modules=["q_proj"])
    desparsify(train(model, build("llama")[1][:STEPS]), dequantize=True).save_pretrained(tmp_path)
    layers = [each.model.layers[0].self_attn for each in (model, load(tmp_path))]
    assert torch.equal(*(layer.q_proj.weight for layer in layers))
    assert all(type(layer.q_proj) is torch.nn.Linear is not type(layer.k_proj) for layer in layers)


@pytest.mark.parametrize(("scheme", "dtype"), [
    *((scheme, torch.float32) for scheme in SCHEMES), ("nf4", torch.bfloat16), ("int8", torch.bfloat16)
])  # fmt: skip
def test_what_is_saved_is_the_packed_base_and_a_delta_that_load_model_puts_together(scheme, dtype, folder, tmp_path):
    model, batches = load(folder, scheme, dtype=dtype), build("llama")[1]
    sparsify(model, 60, "id3", steps=STEPS, target_modules="all-linear", modules_to_save=["model.norm"])
    train(model, batches[:STEPS])
    with pytest.warns(UserWarning, match="trained values cannot be written into quantized weights"):
        model.save_pretrained(tmp_path)
    loaded, served = load_model(tmp_path, tmp_path).train(), load(tmp_path, dtype=dtype).train()
    assert torch.equal(served(**batches[0]).logits, loaded(**batches[0]).logits)
    assert loaded.model.norm.weight.dtype == dtype  # 8-bit weights stand for float32
    rounding = {"rtol": 0, "atol": 1e-5 if dtype == torch.float32 else 0.02}
    torch.testing.assert_close(loaded(**batches[0]).logits, model(**batches[0]).logits, **rounding)


def test_the_trainer_saves_so_too_and_of_a_part_or_inside_base_weights_only_what_was_there(folder, tmp_path):
    model, batch = (
        sparsify(load(folder, "nf4"), 60, "id3", steps=STEPS, target_modules="all-linear"),
        build("llama")[1][0],
    )
    run = trainer(model, tmp_path / "out", [SparsifyCallback()])
    run.train()
    run.save_model(tmp_path / "saved")
    assert SparseDelta.load(tmp_path / "saved") == SparseDelta.from_model(model)
    with pytest.raises(SparsifyError, match="would upload the packed base alone"):
        model.save_pretrained(tmp_path / "pushed", push_to_hub=True)
    assert copy.deepcopy(model).save_pretrained.args != (model,)
    with base_weights(model):
        model.save_pretrained(tmp_path / "plain")
    for base in (tmp_path / "plain", tmp_path / "saved" / "base"):
        assert torch.equal(load(base).train()(**batch).logits, load(folder, "nf4").train()(**batch).logits)
    whole = sparsify(torch.nn.Sequential(load(folder, "nf4")), 60, "id3", steps=STEPS, target_modules="all-linear")
    with pytest.raises(SparsifyError, match=r"saving this part of the model.*Keep the delta"):
        whole[0].save_pretrained(tmp_path / "part")
    desparsify(whole)[0].save_pretrained(tmp_path / "part")


@pytest.mark.parametrize("scheme", ["nf4", "torchao-int8"])
def test_neither_training_nor_an_applied_delta_is_lost_at_dequantize_save_and_merge(scheme, folder, tmp_path):
    model, base = (load(folder, scheme) for _ in range(2))
    delta = SparseDelta.from_model(sparsify(model, 60, "pafi", target_modules=["q_proj"]))
    with pytest.raises(SparsifyError, match=r"dequantizing it.*desparsify\(model, dequantize=True\)"):
        model.dequantize()
    for part in delta.tensors.values():
        part.values.add_(1)
    with delta.applied(base):
        for call in (base.dequantize, lambda: base.save_pretrained(tmp_path)):
            with pytest.raises(SparsifyError, match=r"drop what was trained.*for load_model\(base, delta\)"):
                call()
    base.save_pretrained(tmp_path / "packed")
    with pytest.raises(BaseMismatchError, match=r"is quantized in the checkpoint .* load_model\(base, delta\)"):
        delta.merge(tmp_path / "packed", tmp_path / "merged")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_delta_of_weights_that_were_not_quantized_goes_over_quantized_ones_with_a_warning(dtype, folder):
    plain, quantized = load(folder, dtype=dtype), load(folder, "nf4")
    delta = SparseDelta.from_model(sparsify(plain, 60, "pafi", target_modules=["q_proj"]))
    with pytest.warns(UserWarning, match="was trained on weights that were not quantized"):
        assert delta.check(quantized).unchecked == tuple(delta.tensors)
    with pytest.warns(UserWarning, match="was trained on weights that were not quantized"):
        delta.apply(quantized)
    for name, part in delta.tensors.items():
        own = quantized.get_submodule(name.removesuffix(".weight")).quantized_delta_values
        assert torch.equal(own, part.values.to(own.dtype))


def test_a_torchao_model_that_is_trained_elsewhere_saves_an_ordinary_folder(folder, tmp_path):
    model, batches = load(folder, "torchao-int8"), build("llama")[1]
    train(sparsify(model, 6, "id3", steps=STEPS, target_modules=["embed_tokens"]), batches[:STEPS])
    model.save_pretrained(tmp_path)
    assert torch.equal(load(tmp_path).train()(**batches[0]).logits, model(**batches[0]).logits)


@pytest.mark.parametrize(("scheme", "target_modules"), [
    ("nf4", None), ("int8", "all-linear"), ("torchao-int8", "all-linear")
])  # fmt: skip
def test_qlora_trains_entries_of_the_adapters_and_leaves_the_base_alone(scheme, target_modules, folder, tmp_path):
    base = load(folder, scheme)
    if scheme != "torchao-int8":
        base = prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "up_proj"], lora_dropout=0.0))
    packed = {name: copy.deepcopy(p.detach()) for name, p in model.named_parameters() if is_quantized(p)}
    assert packed
    sparsify(model, 40, "id3", steps=STEPS, target_modules=target_modules)
    engine = get_engine(model)
    assert all("lora_" in tensor.name and not tensor.is_quantized for tensor in engine.tensors)
    assert len(engine.tensors) == 8
    trainer(model, tmp_path).train()
    assert engine.unmasked == 40
    assert summary(model, verify=True).verification.ok
    for name, before in packed.items():
        now = model.get_parameter(name).detach()
        assert torch.equal(*(v.dequantize() if hasattr(v, "qdata") else v.data for v in (now, before))), name


@pytest.mark.parametrize("scheme", ["nf4", "int8"])
def test_gpt2s_transposed_layers_take_their_delta_quantized_or_dequantized_but_not_plain(scheme, tmp_path):
    plain, batches = build("gpt2")
    plain.save_pretrained(tmp_path)
    base = GPT2LMHeadModel.from_pretrained(tmp_path, quantization_config=CONFIGS[scheme]()).train()
    model = sparsify(copy.deepcopy(base), 300, "id3", steps=STEPS, target_modules=["c_proj"])
    delta = SparseDelta.from_model(train(model, batches[:STEPS]))
    assert delta.num_entries == 300  # biases have 64 in all
    delta.check(base)
    for wrong in (plain, plain.bfloat16()):
        with pytest.raises(BaseMismatchError, match=r"has shape|was transposed when it was quantized"):
            delta.apply(wrong)
    square = {name: part for name, part in delta.tensors.items() if len(set(part.shape)) < len(part.shape)}
    assert square
    with pytest.raises(BaseMismatchError, match="was transposed when it was quantized"):
        SparseDelta(square).apply(plain.float())
    dense = base.dequantize()
    delta.apply(dense)
    before = model(**batches[0]).logits
    torch.testing.assert_close(dense(**batches[0]).logits, before, rtol=1e-6, atol=1e-6)
