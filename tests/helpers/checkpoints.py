"""Tiny real models saved as checkpoints in the layouts that transformers writes, and deltas for them."""

import copy

import torch
import transformers
from safetensors.torch import load_file, save_file

from sparsify.delta.sparse_delta import SparseDelta

_SIZES = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
_TOKENS = {"bos_token_id": 1, "eos_token_id": 2}


def _build(model, **config):
    torch.manual_seed(0)
    model_class = getattr(transformers, model)
    return model_class(model_class.config_class(**config))


def bert(head="ForSequenceClassification", **options):
    return _build(f"Bert{head}", **_SIZES, intermediate_size=24, max_position_embeddings=12, **options)


def dinov2():
    """Its gated MLP is stored as one tensor, of which the two projections are parts."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    return _build("Dinov2Model", **sizes, use_swiglu_ffn=True)


def gpt2():
    return _build("GPT2LMHeadModel", vocab_size=40, n_positions=12, n_embd=16, n_layer=2, n_head=2, **_TOKENS)


def mixtral():
    experts = {"num_local_experts": 3, "num_experts_per_tok": 2, "intermediate_size": 24}
    return _build("MixtralForCausalLM", **_SIZES, **_TOKENS, **experts, num_key_value_heads=1)


def qwen2_moe():
    experts = {"num_experts": 11, "num_experts_per_tok": 2, "moe_intermediate_size": 8}  # 10 comes after 9, not after 1
    shared = {"shared_expert_intermediate_size": 8, "intermediate_size": 24, "num_key_value_heads": 1}
    return _build("Qwen2MoeForCausalLM", **_SIZES, **_TOKENS, **experts, **shared)


MODELS = {"bert": bert, "gpt2": gpt2, "mixtral": mixtral, "qwen2_moe": qwen2_moe}


def save(model, folder, shards=True):
    model.save_pretrained(folder, max_shard_size="15KB" if shards else "1GB")
    return folder


def tuned(model, every=3, seed=1):
    torch.manual_seed(seed)
    result = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in result.parameters():
            changed = torch.rand(parameter.shape) < 1 / every
            changed.view(-1)[0] = True
            parameter[changed] += 0.5
    return result


def make_delta(model, **options):
    return SparseDelta.diff(model, tuned(model, **options), progress=False)


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def patched(folder, patches):
    patches = list(patches)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for patch in patches:
            if patch.name in tensors:
                tensor = tensors[patch.name]
                assert (patch.shape, patch.dtype) == (tuple(tensor.shape), tensor.dtype)
                if patch.indices is None:
                    tensor.copy_(patch.values.view(patch.shape))
                else:
                    tensor.view(-1)[patch.indices] = patch.values
        save_file(tensors, file, metadata={"format": "pt"})
    return folder
