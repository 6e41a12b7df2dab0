"""A bed for reinforcement learning: GRPO on a computed reward, by full fine-tuning, LoRA, random entries and ID3.

    python -m examples.paper.reinforcement --methods full --rates 3e-5 1e-4 3e-4
    python -m examples.paper.reinforcement --methods lora random id3 --rates 1e-3 3e-3 1e-2 3e-2 --seeds 0 1 2
    python -m examples.paper.reinforcement --table

The base is a small language model whose tokens are characters, pretrained on sums half of which are wrong: it knows the
form and often samples a wrong answer. Each step samples answers, rewards them and makes one update, so that GRPO's
ratio is 1 and nothing is clipped; ``online_rl.py`` has the loss and the reward. LoRA of rank 1 in the attention has
8 192 numbers, 0.3 % of the weights; random and ID3 have as many entries in all linear layers. ID3 unmasks them in the
first fifth of the steps.

A run is a line of JSON in ``--results``, and is not run again. The score is the mean reward of the last ten steps, on
answers that were sampled before they were learned from; the bytes are those of the mean update that brings a sampler
up to date: an update of ``DeltaPublisher``, or all that is trained as it is.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import defaultdict
from copy import deepcopy
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from examples.online_rl import load, policy_loss, score
from examples.paper.models import IGNORED
from examples.paper.runs import Run, append, describe, read
from examples.paper.settings import Settings
from examples.paper.tables import markdown
from sparsify import DeltaPublisher, sparsify

RESULTS = Path(__file__).parents[1] / "results" / "grpo_sums.jsonl"
METHODS = ("full", "lora", "random", "id3")
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
BUDGET = 8_192  # a LoRA of rank 1 in the attention
TASKS = [(f"{a}+{b}=", str(a + b)) for a in range(10) for b in range(10)]
PROMPTS, SAMPLES, NEW_TOKENS = 16, 8, 3
PRETRAINING, WRONG = 1_000, 0.5  # steps, and the share of wrong sums in them
LAST = 10  # steps, whose rewards count


def pretrained(tokenizer: PreTrainedTokenizerFast) -> nn.Module:
    """The base, the same for all runs."""
    torch.manual_seed(0)
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), pad_token_id=0, eos_token_id=1, **shape))
    optimizer, rng = torch.optim.AdamW(model.parameters(), 1e-3), random.Random(0)
    for step in range(PRETRAINING):
        optimizer.param_groups[0]["lr"] = 1e-3 * (1 - step / PRETRAINING)
        sums = rng.choices(TASKS, k=64)
        texts = [prompt + (str(rng.randrange(19)) if rng.random() < WRONG else right) for prompt, right in sums]
        rows = [[*ids, tokenizer.eos_token_id] for ids in tokenizer(texts)["input_ids"]]
        ids = torch.tensor([[*row, *[IGNORED] * (7 - len(row))] for row in rows])
        logits = model(input_ids=ids.clamp(min=0)).logits[:, :-1]
        F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), ignore_index=IGNORED).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def prepare(model: Any, method: str, steps: int, seed: int) -> Any:
    """The model with what the method trains."""
    if method == "full":
        return model
    if method == "lora":
        from peft import LoraConfig, get_peft_model

        return get_peft_model(model, LoraConfig(r=1, lora_alpha=1, target_modules=ATTENTION, task_type="CAUSAL_LM"))
    return sparsify(model, BUDGET, method, steps=steps, schedule="early", target_modules="all-linear", seed=seed)


def run(model: Any, tokenizer: PreTrainedTokenizerFast, settings: Settings) -> Run:
    """Trains for some steps; returns their rewards, and the bytes of each synchronisation."""
    torch.manual_seed(settings.seed)
    start, steps = time.perf_counter(), settings.steps or 0
    model = prepare(model, settings.method, steps, settings.seed).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, rng = torch.optim.AdamW(trained, settings.rate, weight_decay=0), random.Random(settings.seed)
    publisher = DeltaPublisher(model) if hasattr(model, "sparse_values") else None
    rewards, sent = [], []
    for _ in range(steps):
        prompts, right = zip(*rng.choices(TASKS, k=PROMPTS), strict=True)
        encoded = tokenizer(list(prompts), return_tensors="pt", return_token_type_ids=False)  # all of one length
        with torch.no_grad():
            tokens = model.generate(
                **encoded, num_return_sequences=SAMPLES, max_new_tokens=NEW_TOKENS, do_sample=True, top_k=0, top_p=1.0,
                temperature=1.0, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
            )  # fmt: skip
        mask = encoded.attention_mask.repeat_interleave(SAMPLES, 0)
        found, counts = score(tokenizer, tokens[:, mask.shape[1] :], right, SAMPLES)
        advantages = (found - found.mean(1, keepdim=True)) / (found.std(1, keepdim=True) + 1e-4)
        policy_loss(model, tokens, mask, counts, advantages.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        rewards.append(found.mean().item())
        sent.append(sum(own.nbytes for own in trained) if publisher is None else len(bytes(publisher.update())))
    numbers, seconds = sum(parameter.numel() for parameter in trained), time.perf_counter() - start
    return {"settings": asdict(settings), "rewards": rewards, "bytes": sent, "trained": numbers, "seconds": seconds}


def report(runs: list[Run]) -> str:
    """A row for each method at the rate with the best mean score over the seeds; the others' scores beside it."""
    found: defaultdict[str, defaultdict[float, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for line in runs:
        found[line["settings"]["method"]][line["settings"]["rate"]].append(line)
    rows = []
    for method, by_rate in found.items():
        scores = {rate: [statistics.mean(line["rewards"][-LAST:]) for line in own] for rate, own in by_rate.items()}
        best = max(scores, key=lambda rate: statistics.mean(scores[rate]))
        spread = statistics.stdev(scores[best]) if len(scores[best]) > 1 else float("nan")
        own = by_rate[best][0]
        others = ", ".join(
            f"{statistics.mean(scores[rate]):.3f} at {rate:g}" for rate in sorted(scores) if rate != best
        )
        rows.append([
            method, f"{own['trained']:,}", f"{best:g}", f"{statistics.mean(scores[best]):.3f} ± {spread:.3f}",
            str(len(scores[best])), f"{statistics.mean(own['bytes']):,.0f}", others,
        ])  # fmt: skip
    return markdown(["method", "trained", "rate", "reward", "seeds", "bytes an update", "other rates"], rows)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--rates", nargs="+", type=float, default=(1e-3,))
    parser.add_argument("--seeds", nargs="+", type=int, default=(0,))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="run nothing")
    options = parser.parse_args(arguments)
    if not options.table:
        tokenizer = load(None)[1]
        base = pretrained(tokenizer)
        for seed, rate, method in product(options.seeds, options.rates, options.methods):
            budget = BUDGET if method in ("random", "id3") else None
            unused = dict.fromkeys(("shape", "until", "exp", "eps", "candidates"))
            settings = Settings("sums", "tiny", method, rate, seed, budget, epochs=1, steps=options.steps, **unused)
            if settings.key not in read(options.results):
                print(f"{time.strftime('%H:%M')} {describe(settings)}", flush=True)
                append(options.results, run(deepcopy(base), tokenizer, settings))
    print(report(list(read(options.results).values())))


if __name__ == "__main__":
    main()
