"""Models with PEFT's adapters, and twins of them: one is trained densely by the oracle, the other is sparsified."""

import peft
import torch
from architectures import build
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.pytorch_utils import Conv1D
from twins import Twins, masks_of, sgd

from sparsify import sparsify

STEPS, RANK = 8, 2
ATTENTION = ["query", "value"]  # BERT's
LLAMA = ["q_proj", "v_proj", "down_proj"]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x, labels):
        x = self.embed(x)
        logits = self.head(self.attention(x, x, x)[0].mean(1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Shapes(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(12, 6, padding_idx=0)
        self.conv1d, self.conv2d, self.conv3d = nn.Conv1d(1, 4, 3), nn.Conv2d(4, 4, 3, groups=2), nn.Conv3d(1, 2, 2)
        self.norm, self.transposed = nn.LayerNorm(4), Conv1D(8, 4)
        self.head = nn.Linear(8, 3)

    def forward(self, ids, labels):
        x = self.embedding(ids)  # (n, length, 6)
        x = torch.relu(self.conv1d(x.flatten(0, 1)[:, None]).unflatten(0, ids.shape)).transpose(1, 2)
        x = torch.relu(self.conv2d(x))[:, None]
        x = torch.relu(self.conv3d(x)).mean((3, 4)).transpose(1, 2)
        logits = self.head(torch.tanh(self.transposed(self.norm(torch.cat([x, x], -1)))).mean(1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


OWN_MODELS = {
    "attention": (Attention, lambda: {"x": torch.randn(5, 4, 6).double(), "labels": torch.randint(3, (5,))}),
    "shapes": (Shapes, lambda: {"ids": torch.randint(12, (5, 7)), "labels": torch.randint(3, (5,))}),
}


def lora(**options):
    return LoraConfig(**{"r": RANK, "lora_alpha": 4, **options})


def on(base, config, **options):
    return base, lambda: getattr(peft, config)(**{"target_modules": ATTENTION, **options})


ADAPTERS = {
    "LoRA": ("bert", lambda: lora(target_modules=ATTENTION)),
    "DoRA": ("bert", lambda: lora(target_modules=ATTENTION, use_dora=True)),
    "LoRA with a bias": ("bert", lambda: lora(target_modules=ATTENTION, lora_bias=True)),
    "LoRA on an embedding": ("bert", lambda: lora(target_modules=["word_embeddings", "query"])),
    "DoRA on an embedding": ("bert", lambda: lora(target_modules=["word_embeddings", "query"], use_dora=True)),
    "LoRA on Conv1D": ("gpt2", lambda: lora(target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)),
    "LoRA on convolutions": ("shapes", lambda: lora(target_modules=["conv1d", "conv3d"])),
    "DoRA on convolutions": ("shapes", lambda: lora(target_modules=["conv1d", "conv3d"], use_dora=True)),
    "LoRA on attention": ("attention", lambda: lora(target_modules=["attention"])),
    "LoRA on experts": ("mixtral", lambda: lora(target_modules=["q_proj"], target_parameters=["experts.down_proj"])),
    "LoRA and modules to save": ("bert", lambda: lora(target_modules=ATTENTION, modules_to_save=["classifier"])),
    "LoHa": on("bert", "LoHaConfig", r=2),
    "IA3": on("llama", "IA3Config", target_modules=LLAMA, feedforward_modules=["down_proj"]),
    "VeRA": on("bert", "VeraConfig", r=4),
}


def saved_names(model):
    return {name for name, p in model.named_parameters() if "modules_to_save" in name.split(".") and p.requires_grad}


def base_of(name, dtype=torch.float64):
    torch.manual_seed(0)
    base, _ = ADAPTERS.get(name) or name
    if base in OWN_MODELS:
        make, batch = OWN_MODELS[base]
        return make().to(dtype).train(), [batch() for _ in range(3)]
    return build(base, dtype)


def adapted(name, *others, dtype=torch.float64, random=True):
    """A model with an adapter, one of ``ADAPTERS`` or a pair such as its values, and with others of its kind."""
    model, batches = base_of(name, torch.float32)  # some adapters' first values are computed in no other dtype
    _, config = ADAPTERS.get(name) or name
    model = get_peft_model(model, config(), autocast_adapter_dtype=False)
    for other in others:
        model.add_adapter(other, config(), autocast_adapter_dtype=False)
    if others:
        model.set_requires_grad(["default", *others])
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and random:
                parameter.add_(0.1 * torch.randn_like(parameter))
    batches = [{k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()} for batch in batches]
    return model.to(dtype).train(), batches


@torch.no_grad()
def outputs(model, batch):
    training = model.training
    logits = model.eval()(**batch)["logits"]
    model.train(training)
    return logits


class AdapterTwins(Twins):
    """Two models with adapters: the oracle trains one densely, the library the other, by "id3" or a static strategy."""

    def __init__(self, name, *others, strategy="id3", make_optimizer=sgd, steps=STEPS, random=True):
        (dense, batches), (sparse, _) = (adapted(name, *others, random=random) for _ in range(2))
        trainable = {n: p.numel() for n, p in dense.named_parameters() if p.requires_grad}
        saved = saved_names(dense)  # keep their whole gradient
        self.budget = max(2, sum(numel for n, numel in trainable.items() if n not in saved) // 4)
        sparsify(sparse, self.budget, strategy, steps=steps)
        masks = None if strategy == "id3" else masks_of(sparse)
        names = trainable.keys() - saved
        super().__init__(dense, sparse, self.budget, steps, make_optimizer, names=names, masks=masks)
        self.batches = batches

    def do(self, action):
        return [action(model) for model in (self.dense, self.sparse)]

    def train(self, steps=2):
        first = self.oracle.step_number
        super().train([self.batches[step % len(self.batches)] for step in range(first, first + steps)])
        self.check()

    def check(self):
        dense, sparse = self.do(lambda model: outputs(model, self.batches[0]))
        self.assert_close(sparse, dense)
        self.check_weights()
        return sparse
