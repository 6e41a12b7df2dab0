"""Small models whose linear layers are quantized, by every scheme that runs on a CPU, and their dequantized twins."""

import copy

import pytest
import torch
from models import build
from torch import nn

SCHEMES = ["nf4", "fp4", "nf4-double", "int8", "torchao-int8", "torchao-int4"]


def quantize(model, scheme, leave_out=("head", "classifier", "lm_head"), compute_dtype=None):
    """The model with its linear layers quantized in place, but for the output layers; skips without the library."""
    if scheme.startswith("torchao"):
        pytest.importorskip("torchao", reason="torchao comes with the extra `quantized`")
        from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup, quantize_

        config = Int8WeightOnlyConfig()
        if scheme.endswith("int4"):
            config = IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(2))
        quantize_(model, config, lambda module, name: type(module) is nn.Linear and not name.endswith(leave_out))
        return model
    pytest.importorskip("bitsandbytes", reason="bitsandbytes comes with the extra `quantized`")
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and not name.endswith(leave_out):
            model.set_submodule(name, _bitsandbytes_layer(module, scheme, compute_dtype))
    return model


def _bitsandbytes_layer(linear, scheme, compute_dtype):
    import bitsandbytes as bnb

    sizes, has_bias = (linear.in_features, linear.out_features), linear.bias is not None
    if scheme == "int8":
        layer = bnb.nn.Linear8bitLt(*sizes, has_bias, has_fp16_weights=False)
        layer.weight = bnb.nn.Int8Params(linear.weight.data, requires_grad=False, has_fp16_weights=False)
    else:
        options = {"quant_type": scheme[:3], "compress_statistics": scheme.endswith("double")}
        layer = bnb.nn.Linear4bit(*sizes, has_bias, compute_dtype, **options)
        layer.weight = bnb.nn.Params4bit(linear.weight.data, requires_grad=False, module=layer, **options)
        layer.support_avx512bf16_for_cpu = False  # else some CPUs repack it for evaluation, 32 rows at a time
    layer.bias = linear.bias
    return layer.to("cpu").train(linear.training)


def quantized_build(name, scheme, **options):
    model, batches = build(name, **options)
    return quantize(model, scheme), batches


def dequantized(model):
    from sparsify.common.quantized import is_quantized, quantized_weight

    twin = copy.deepcopy(model)
    for name, module in list(twin.named_modules()):
        if is_quantized(module._parameters.get("weight")):
            values = quantized_weight(module).dequantize()
            linear = nn.Linear(values.shape[1], values.shape[0], module.bias is not None, dtype=values.dtype)
            linear.weight, linear.bias = nn.Parameter(values.clone()), module.bias
            twin.set_submodule(name, linear)
    return twin
