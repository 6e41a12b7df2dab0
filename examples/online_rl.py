"""Online reinforcement learning in two processes: one trains, the other generates with weights that follow by updates.

    python -m examples.online_rl --out online_rl
    python -m examples.online_rl --model MODEL --tasks train_gsm8k.jsonl.gz --new-tokens 256 --budget 0.001 --lr 1e-4
    python -m examples.online_rl --model MODEL --vllm http://localhost:8000 --out online_rl

    trainer                                                              sampler
    the update to version v, and prompts   ------- bytes, texts ------>  applies it, generates with version v
    rewards, a policy gradient step        <----- v, mask, tokens -----

The loss is REINFORCE's, with each reward compared to those of the other answers to its prompt, as in GRPO, and a bonus
for entropy, without which all answers soon are the same. A right answer has a reward of 0.8; an answer that ends by
itself, in a number, 0.2. By default the tasks are sums of two small numbers, and the model is a tiny one with random
weights, whose tokens are characters.

With ``--vllm`` the sampler is a vLLM server of the same model, which is started with ``VLLM_SERVER_DEV_MODE=1`` in its
environment and ``--weight-transfer-config '{"backend": "sparsify"}'``; ``--save FOLDER`` writes the tiny model for it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import urllib.request
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from examples.paper.answers import is_right
from examples.rows import read_jsonl
from sparsify import DeltaPublisher, DeltaSubscriber, DeltaUpdate, sparsify
from sparsify.integrations.vllm import VLLMPublisher

Ask = Callable[[DeltaUpdate, Sequence[str]], tuple[int, Tensor, Tensor]]  # version, mask of prompts, tokens
LARGEST = 3  # number in a sum
ENTROPY = 0.05  # weight of the bonus in the loss


def load(name: str | None, heads: int = 4) -> tuple[nn.Module, PreTrainedTokenizerFast]:
    """The base, the same in both processes, and its tokenizer."""
    if name is not None:
        tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        return AutoModelForCausalLM.from_pretrained(name, dtype="auto"), tokenizer
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<end>", *"0123456789+="])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    characters.pre_tokenizer, characters.decoder = pre_tokenizers.Split(Regex("."), "isolated"), decoders.Fuse()
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": heads}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(vocabulary), initializer_range=0.1, eos_token_id=1, **shape))
    special = {"pad_token": "<pad>", "eos_token": "<end>", "padding_side": "left"}
    return model, PreTrainedTokenizerFast(tokenizer_object=characters, **special)


def sample(connection: Connection, options: argparse.Namespace) -> None:
    """The sampler's process: brings its model to each version that comes, and answers prompts with it."""
    model, tokenizer = load(options.model)
    follower = DeltaSubscriber(model.eval())
    while (request := connection.recv()) is not None:
        update, prompts = request
        version = follower.apply(update)
        torch.manual_seed(version)
        encoded = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
        tokens = model.generate(
            **encoded, num_return_sequences=options.samples, max_new_tokens=options.new_tokens, do_sample=True, top_k=0,
            top_p=1.0, temperature=1.0, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
        connection.send((version, encoded.attention_mask.repeat_interleave(options.samples, 0).numpy(), tokens.numpy()))


def ask_process(connection: Connection) -> Ask:
    def ask(update: DeltaUpdate, prompts: Sequence[str]) -> tuple[int, Tensor, Tensor]:
        connection.send((bytes(update), prompts))
        version, mask, tokens = connection.recv()
        return version, torch.tensor(mask), torch.tensor(tokens)

    return ask


def ask_vllm(url: str, options: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> Ask:
    """Has vLLM take each update, and answer prompts by OpenAI's API."""
    publisher = VLLMPublisher(None, url)

    def ask(update: DeltaUpdate, prompts: Sequence[str]) -> tuple[int, Tensor, Tensor]:
        publisher(update)
        encoded = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
        given = [ids[mask.bool()].tolist() for ids, mask in zip(*encoded.values(), strict=True)]
        body = {"prompt": given, "n": options.samples, "max_tokens": options.new_tokens, "temperature": 1.0}
        body |= {"seed": update.version, "return_token_ids": True, "top_p": 1.0, "top_k": -1}
        publisher.wait()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request) as answer:
            choices = json.load(answer)["choices"]
        answers = [choice["token_ids"] for choice in sorted(choices, key=lambda choice: choice["index"])]
        answers = [ids + [tokenizer.pad_token_id] * (options.new_tokens - len(ids)) for ids in answers]
        ids, mask = (encoded[key].repeat_interleave(options.samples, 0) for key in ("input_ids", "attention_mask"))
        return update.version, mask, torch.cat([ids, torch.tensor(answers)], 1)

    return ask


def find_tasks(file: str | None) -> list[tuple[str, str]]:
    """Prompts and answers: sums, or the rows of a file, which is looked for in ``$SPARSIFY_DATA/math``, too."""
    if file is None:
        return [(f"{a}+{b}=", str(a + b)) for a in range(LARGEST + 1) for b in range(LARGEST + 1)]
    path = Path(file) if Path(file).exists() else Path(os.environ.get("SPARSIFY_DATA", ""), "math", file)
    return [(f"{row['instruction'].strip()}\nAnswer:", row["answer"]) for row in read_jsonl(path)]


def policy_loss(model: nn.Module, tokens: Tensor, prompts: Tensor, answers: Tensor, advantages: Tensor) -> Tensor:
    """REINFORCE's loss of answers, less the bonus; the masks of prompts and answers are (n, length) each."""
    mask, width = torch.cat([prompts, answers], 1), prompts.shape[1]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(input_ids=tokens, attention_mask=mask, position_ids=positions).logits[:, width - 1 : -1]
    logps = logits.float().log_softmax(2)
    taken = logps.gather(2, tokens[:, width:, None]).squeeze(2)
    entropy = -(logps.exp() * logps).sum(2)
    return -((advantages[:, None] * taken + ENTROPY * entropy) * answers).sum() / answers.sum()


def reward(text: str, ended: bool, right: str) -> float:
    """Of an answer, for its form and for being right."""
    return 0.2 * (ended and text.rstrip(" .")[-1:].isdigit()) + 0.8 * is_right(right, text)


def score(
    tokenizer: PreTrainedTokenizerFast, answers: Tensor, right: Sequence[str], samples: int
) -> tuple[Tensor, Tensor]:
    """Rewards (prompts, samples) of the answers' tokens (n, length), and the mask (n, length) of those that count."""
    ends = (answers == tokenizer.eos_token_id).int()
    counts = (ends.cumsum(1) - ends == 0).long()  # to the first end, included
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    rights = [each for each in right for _ in range(samples)]
    return torch.tensor(list(map(reward, texts, ends.any(1).tolist(), rights))).view(-1, samples), counts


def train(
    model: nn.Module, tokenizer: PreTrainedTokenizerFast, ask: Ask, options: argparse.Namespace
) -> list[dict[str, float]]:
    """Each version's mean reward, and the bytes that it took to send it."""
    print(f"all weights: {sum(parameter.nbytes for parameter in model.parameters()):,} bytes")
    model = sparsify(model.train(), options.budget, "id3", steps=options.steps, schedule="early")
    optimizer = torch.optim.AdamW([model.sparse_values], options.lr, weight_decay=0)
    publisher, tasks, rng, curve = DeltaPublisher(model), find_tasks(options.tasks), random.Random(0), []
    update = publisher.snapshot()
    for _ in range(options.steps):
        prompts, right = zip(*rng.choices(tasks, k=options.prompts), strict=True)
        version, mask, tokens = ask(update, prompts)
        assert version == update.version  # the answers have to be those of the policy that learns from them
        answers = tokens[:, mask.shape[1] :]
        rewards, counts = score(tokenizer, answers, right, options.samples)
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        policy_loss(model, tokens, mask, counts, advantages.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        curve.append({"version": version, "reward": rewards.mean().item(), "bytes": len(bytes(update))})
        print("version {version}: reward {reward:.3f}, {bytes:,} bytes".format(**curve[-1]), flush=True)
        update = publisher.update()
    return curve


def draw(curve: list[dict[str, float]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    for axes, key in zip(figure.subplots(1, 2), ("reward", "bytes"), strict=True):
        axes.plot([point[key] for point in curve])
        axes.set(xlabel="version", ylabel=key, ylim=(0, None))
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a causal language model; default: a tiny one")
    parser.add_argument("--tasks", help="JSON Lines with instruction and answer; default: sums")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--prompts", type=int, default=16, help="of a step")
    parser.add_argument("--samples", type=int, default=16, help="answers to a prompt")
    parser.add_argument("--new-tokens", type=int, default=3, help="of an answer, at most")
    parser.add_argument("--budget", type=float, default=0.1, help="share of the weights")
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--vllm", metavar="URL", help="of a server to sample from; default: a process")
    parser.add_argument("--save", type=Path, help="write the model to a folder, for vLLM to serve, and do nothing else")
    parser.add_argument("--out", type=Path, help="folder for curve.json and curve.png (extra plot)")
    options = parser.parse_args()
    model, tokenizer = load(options.model, 4 if options.save is None else 2)  # vLLM's kernels need 32 numbers a head
    if options.save is not None:
        model.save_pretrained(options.save)
        tokenizer.save_pretrained(options.save)
        return
    if options.vllm is None:
        connection, theirs = multiprocessing.Pipe()
        multiprocessing.get_context("spawn").Process(target=sample, args=(theirs, options), daemon=True).start()
        theirs.close()  # so that the end of the sampler is an error here
        curve = train(model, tokenizer, ask_process(connection), options)
        connection.send(None)
    else:
        curve = train(model, tokenizer, ask_vllm(options.vllm, options, tokenizer), options)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "curve.json").write_text(json.dumps(curve, indent=1) + "\n")
        draw(curve, options.out / "curve.png")


if __name__ == "__main__":
    main()
