"""How many variants of each kernel a training run compiles on a GPU: each takes half a second in a backward pass."""

import pytest
import torch
from models import train
from products import triton_kernels
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

from sparsify import sparsify

KERNELS = ("_select", "_cut", "_sddmm", "_scatter")
VARIANTS = {  # by model, of each kernel; select: with ids, without, and of an embedding's rows in float32
    "bert": (3, 1, 0, 1),  # whose gradients are all joined, so that no entry is sampled
    "llama": (2, 1, 2, 1),  # samples those of its tied table, of tokens by 16 and of others
}
SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}


class Recorded:
    """A kernel that notes what Triton would compile a variant for."""

    def __init__(self, kernel):
        self.kernel, self.variants = kernel, set()

    def __getitem__(self, grid):
        def launch(*arguments, **constants):
            self.variants.add((*map(self.key, self.kernel.arg_names, arguments), *constants.items()))
            return self.kernel[grid](*arguments, **constants)

        return launch

    def key(self, name, argument):
        if isinstance(argument, torch.Tensor):
            return name, argument.dtype, argument.data_ptr() % 16 == 0
        if name in self.kernel.fn.__annotations__:  # a tl.constexpr, which a variant is compiled for whatever its value
            return name, argument
        if name in self.kernel.kwargs["do_not_specialize"]:
            return name, type(argument), int(argument).bit_length() > 31
        return name, argument == 1, argument % 16 == 0 if isinstance(argument, int) else type(argument)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_run_compiles_few_variants_however_its_tensors_and_batches_differ(name, monkeypatch):
    triton = triton_kernels(torch.device("cpu"))
    monkeypatch.setattr("sparsify.core.devices.AHEAD", ("cpu",))
    monkeypatch.setattr("sparsify.kernels.sddmm.MOVED", {True: (0, 0), False: (0, 0)})  # so that entries are sampled
    monkeypatch.setattr("sparsify.selection.joined.LARGEST", 100)  # biases and norms
    monkeypatch.setattr("sparsify.selection.joined.AT_ONCE", 1500)  # so that others are joined to few, or to none
    recorded = {kernel_name: Recorded(getattr(triton, kernel_name)) for kernel_name in KERNELS}
    for kernel_name, kernel in recorded.items():
        monkeypatch.setattr(triton, kernel_name, kernel)
    if name == "bert":
        model = BertForSequenceClassification(BertConfig(**SIZES))
    else:
        model = LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=1, tie_word_embeddings=True))
    sparsify(model.bfloat16(), 300, "id3", steps=2)
    for step in range(5):
        ids = torch.randint(5, 96, (2, 5 + 9 * step))
        train(model, [{"input_ids": ids, "labels": torch.tensor([0, 1]) if name == "bert" else ids}])
    assert tuple(len(kernel.variants) for kernel in recorded.values()) == VARIANTS[name]
