"""How many variants of each kernel a training run compiles on a GPU: each takes half a second in a backward pass."""

import pytest
import torch
from models import train
from products import triton_kernels
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

from sparsify import sparsify

KERNELS = ("_select", "_cut", "_sddmm", "_scatter")
SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
FREE = {"number", "start", "stop", "offset", "size", "limit", "id_digits"}  # do_not_specialize


class Recorded:
    """A kernel that notes what Triton would compile a variant for."""

    def __init__(self, kernel):
        self.kernel, self.variants = kernel, set()

    def __getitem__(self, grid):
        def launch(*arguments, **constants):
            self.variants.add((*map(self.key, self.kernel.fn.__code__.co_varnames, arguments), *constants.items()))
            return self.kernel[grid](*arguments, **constants)

        return launch

    def key(self, name, argument):
        if isinstance(argument, torch.Tensor):
            return name, argument.dtype, argument.data_ptr() % 16 == 0
        if name in FREE:
            return name, type(argument), int(argument).bit_length() > 31
        return name, argument == 1, argument % 16 == 0 if isinstance(argument, int) else type(argument)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_run_compiles_few_variants_however_its_tensors_and_batches_differ(name, monkeypatch):
    triton = triton_kernels(torch.device("cpu"))
    monkeypatch.setattr("sparsify.core.devices.AHEAD", ("cpu",))
    monkeypatch.setattr("sparsify.kernels.sddmm.MOVED", {True: (0, 0), False: (0, 0)})  # so that entries are sampled
    monkeypatch.setattr("sparsify.selection.joined.LARGEST", 100)  # biases and norms
    recorded = {name: Recorded(getattr(triton, name)) for name in KERNELS}
    for name, kernel in recorded.items():
        monkeypatch.setattr(triton, name, kernel)
    if name == "bert":
        model = BertForSequenceClassification(BertConfig(**SIZES))
    else:
        model = LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=1, tie_word_embeddings=True))
    sparsify(model.bfloat16(), 300, "id3", steps=2)
    for step in range(4):
        ids = torch.randint(5, 96, (2, 7 + 9 * step))
        train(model, [{"input_ids": ids, "labels": torch.tensor([0, 1]) if name == "bert" else ids}])
    counts = {name: len(kernel.variants) for name, kernel in recorded.items()}
    assert counts["_cut"] == counts["_scatter"] == 1
    assert 1 < counts["_select"] <= 3  # with ids, without, and of a gradient in float32
    assert 1 <= counts["_sddmm"] <= 2  # of tokens by 16, and of others
