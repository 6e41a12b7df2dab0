"""TRL's asynchronous GRPO trainer and its rollout worker train on the answers of a vLLM server that follows them."""

import os
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback

pytest.importorskip("vllm.entrypoints.llm", exc_type=ImportError, reason="needs vLLM: see environment.sh")
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

from datasets import Dataset
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing
from vllm_serving import greedy

from sparsify import SparseDelta, SparsifyCallback, sparsify
from sparsify.integrations.vllm import VLLMPublisher, VLLMServer

STEPS, STALENESS = 8, 2  # of the run; versions that an answer may be behind


class Versions(TrainerCallback):
    """Keeps each version of the model."""

    def __init__(self):
        self.deltas = []

    def on_step_end(self, args, state, control, **event):
        self.deltas.append(SparseDelta.from_model(event["model"]))


class WatchedQueue:
    """Keeps the answers that a trainer takes from its worker's queue, with its number of versions at that time."""

    def __init__(self, trainer):
        self._trainer, self._queue, self.taken = trainer, trainer.rollout_queue, []
        self.qsize, trainer.rollout_queue = self._queue.qsize, self

    def get(self, timeout):
        self.taken.append((self._trainer.model_version, self._queue.get(timeout=timeout)))
        return self.taken[-1][1]


def varlen_attention(query, key, value, starts, key_starts, *lengths, softmax_scale, causal, window_size):
    """What FlashAttention's ``flash_attn_varlen_func``, for GPUs, makes of (tokens, heads, size): causal segments."""
    outputs = []
    for (start, end), (first, last) in zip(pairwise(starts.tolist()), pairwise(key_starts.tolist()), strict=True):
        own = (x.transpose(0, 1) for x in (query[start:end], key[first:last], value[first:last]))
        mask = torch.ones(end - start, last - first, dtype=torch.bool).tril(last - first - (end - start))
        attend = torch.nn.functional.scaled_dot_product_attention
        outputs.append(attend(*own, mask, scale=softmax_scale, enable_gqa=True).transpose(0, 1))
    return torch.cat(outputs)


def share_of_even_numbers(completion_ids, **row):
    return [sum(number % 2 == 0 for number in ids) / len(ids) for ids in completion_ids]


@torch.no_grad()
def log_probs(model, sample):
    """Of the tokens of an answer."""
    ids, answer = torch.tensor(sample.input_ids), torch.tensor(sample.completion_mask[1:]).bool()
    every = model(input_ids=ids[None, :-1]).logits[0].log_softmax(1).gather(1, ids[1:, None])
    return every.flatten()[answer]


def test_trl_trains_on_answers_of_the_versions_that_it_counts(server, folder, tmp_path, monkeypatch):
    kernels = SimpleNamespace(flash_attn_varlen_func=varlen_attention)
    monkeypatch.setattr(packing, "_flash_attn", lambda: kernels)
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)  # asks CUDA
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, pad_token="0", eos_token="2", response_template={})
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    prompts = [[{"role": "user", "content": f"{number} {number + 1} {number + 2}"}] for number in range(10, 90, 10)]
    options = {"max_steps": STEPS, "learning_rate": 0.05, "per_device_train_batch_size": 4, "num_generations": 4}
    options |= {"max_completion_length": 8, "max_staleness": STALENESS, "queue_maxsize": 8, "report_to": []}
    options |= {"use_cpu": True, "bf16": False, "save_strategy": "no", "disable_tqdm": True}
    versions, publisher = Versions(), VLLMPublisher(None, server.url)
    trainer = AsyncGRPOTrainer(
        model=folder,
        reward_funcs=share_of_even_numbers,
        args=AsyncGRPOConfig(str(tmp_path), vllm_server_base_url=server.url, **options),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        callbacks=[SparsifyCallback(), versions],
        weight_transfer=publisher,
    )
    publisher.model = sparsify(trainer.model, 2000, "id3")
    queue = WatchedQueue(trainer)
    trainer.train()

    base = AutoModelForCausalLM.from_pretrained(folder)
    models = [base, *(delta.apply(AutoModelForCausalLM.from_pretrained(folder)) for delta in versions.deltas)]
    assert len(models) == STEPS + 1
    assert greedy(models[-1]) == server.answers() != greedy(base)
    assert VLLMServer(server.url).call("weight_info", "GET")["weight_version"].endswith(f":{STEPS}")
    is_new = []
    for count, sample in queue.taken:  # TRL counts a version more than we do, and drops what is too far behind
        sampled = torch.tensor(sample.old_log_probs)[torch.tensor(sample.completion_mask).bool()]
        errors = [float((log_probs(model, sample) - sampled).abs().max()) for model in models]
        assert min(errors[sample.model_version - 1 : count]) < 1e-3
        is_new.append(errors[0] > 1e-2 and count - sample.model_version <= STALENESS)
    assert sum(is_new) > STEPS
