"""A bed for language models: the loss on GSM8K's answers after a short training, compared row by row.

    python -m examples.paper.language --model GEMMA --methods lora-1 random --rates 3e-3 1e-2
    python -m examples.paper.language --model GEMMA --methods lora-1 random --candidates qv --budget 368640
    python -m examples.paper.language --table

Every finished run is a line of JSON in ``--results``, with the mean loss of each held-out row; what is there is not
run again. ``--device cuda --jobs 8`` runs eight at a time on one GPU, 6 to 10 GB each. Training and held-out rows are
both of GSM8K's training split, at most ``--max-length`` tokens long: the solutions of the test splits are written by
models. Weights and what is trained are in float32, the model computes in bfloat16 (autocast), which takes half the
time. ``--table`` runs nothing and prints, for each method, the loss at each rate, and at the best rate of its first
seed the difference to ``--reference``, paired by row.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import cache, partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import peft
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from examples.paper.generation import Solver
from examples.paper.models import IGNORED
from examples.paper.rules import RULES, Moments
from examples.paper.runs import Run, append, describe, read, settings_of
from examples.paper.settings import Settings
from examples.paper.tables import markdown
from examples.paper.tasks import TASKS, choose_rows, load_rows
from examples.paper.training import MAX_NORM, facts, rate_factor, rounded
from examples.rows import LengthBatches
from sparsify import D3, SparseDelta, Static, Strategy, sparsify

RESULTS = Path(__file__).parents[1] / "results" / "gemma_gsm8k.jsonl"
RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
POOL = 5  # training rows set apart for each held-out row: many are too long
CALIBRATION, COMPARED = 8, 32  # batches of a calibration, and of one that compares them
EVALUATION_BATCH = 8
DTYPE = torch.bfloat16  # that the model computes in
TARGETS: dict[str | None, Any] = {"linear": "all-linear", "qv": ["q_proj", "v_proj"]}
Batch = dict[str, Tensor]
# by a strategy and a schedule
STRATEGIES: dict[str, tuple[Any, str]] = {
    "random": ("random", "uniform"),
    "id3-early": ("id3", "early"),
    "gradient": (Strategy(D3(exp=0, eps=1), Static()), "uniform"),
    "gsnr": ("gsnr", "uniform"),
}
LORAS: dict[str, dict[str, Any]] = {  # PEFT's options; the rank is by the budget where it is not given
    "lora-1": {"r": 1}, "lora-8": {"r": 8}, "lora": {}, "rslora-8": {"r": 8, "use_rslora": True},
    "dora-1": {"r": 1, "use_dora": True}, "dora-8": {"r": 8, "use_dora": True},
}  # fmt: skip
COLUMNS = ("standard error", "seeds", "numbers", "GB", "MB")
BESIDE_LORA = {"lora+random": 1, "lora+random-3": 3}  # the entries' rate, in terms of the LoRA's
METHODS = ["none", "full", *LORAS, *BESIDE_LORA, "shira", "supertuning", *STRATEGIES, *RULES]


class Bed:
    """The model's folder and its rows, encoded once for all runs."""

    def __init__(self, folder: str, settings: Settings, device: str = "cpu") -> None:
        self.device = device
        self.solver = Solver(TASKS["math"], [], replace(settings, model=folder))
        self.solver.settings = replace(self.solver.settings, max_length=10**9)  # what is too long is left out instead
        rows, pool = choose_rows(load_rows(TASKS["math"])[0], {}, None, POOL * (settings.held_out or 0))
        self.train = self._short(rows, settings.max_length)
        self.judged = self._short(pool[""], settings.max_length)[: settings.held_out]
        if len(self.judged) < (settings.held_out or 0):
            raise SystemExit(f"{len(self.judged)} rows are short enough to judge on; raise --max-length.")
        self.moments = cache(self._moments)

    def _short(self, rows: list[dict], length: int) -> list[tuple[dict, dict[str, Any]]]:
        pairs = [(row, self.solver.encode(row)) for row in rows]
        return [pair for pair in pairs if len(pair[1]["input_ids"]) <= length]

    def batches(self, seed: int, size: int) -> Iterator[Batch]:
        """Batches in an order that the seed decides, epoch after epoch."""
        encoded = [one for _, one in self.train]
        order = LengthBatches([len(one["input_ids"]) for one in encoded], size, seed)
        while True:
            yield from (self.solver.collate([encoded[i] for i in batch]) for batch in order)

    def load(self, dtype: torch.dtype = DTYPE) -> nn.Module:
        """The model; its output layer, which no method trains and is half of the work, is converted only once."""
        model: Any = self.solver.load_model()[0].to(self.device)
        weight = model.lm_head.weight.detach().to(dtype)
        model.lm_head.forward = lambda hidden: linear(hidden, weight)
        return model

    def _moments(
        self, seed: int, size: int, candidates: str, batches: int = CALIBRATION, dtype: torch.dtype = DTYPE
    ) -> Moments:
        """The gradients of every candidate in the first batches of training."""
        model = self.load(dtype).eval()
        names = [f"{name}.weight" for name, module in model.named_modules() if _is_target(name, module, candidates)]
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in names)
        own = {name: model.get_parameter(name) for name in names}
        sums = {name: torch.zeros_like(weight) for name, weight in own.items()}
        squares = {name: torch.zeros_like(weight) for name, weight in own.items()}
        for batch in islice(self.batches(seed, size), batches):
            grads = torch.autograd.grad(answer_loss(model, batch, dtype), list(own.values()))
            for name, grad in zip(names, grads, strict=True):
                sums[name] += grad
                squares[name].addcmul_(grad, grad)
        return Moments(sums, {name: sums[name].abs() / squares[name].sqrt().clamp(min=1e-30) for name in names})


def _is_target(name: str, module: nn.Module, candidates: str) -> bool:
    last = name.rpartition(".")[2]
    return isinstance(module, nn.Linear) and last != "lm_head" and (candidates == "linear" or last in TARGETS["qv"])


def token_losses(model: Any, batch: Batch, dtype: torch.dtype = DTYPE) -> Tensor:
    """The loss (b, t) of each token of an answer, 0 where a row has none; logits are made for these places alone."""
    places = (batch["labels"] != IGNORED).any(0).nonzero().squeeze(1)
    batch, places = {name: tensor.to(model.device) for name, tensor in batch.items()}, places.to(model.device)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.autocast(model.device.type, dtype, enabled=dtype != torch.float32):
        logits = model(**inputs, logits_to_keep=places - 1, use_cache=False).logits.float()  # (b, t, vocabulary)
    labels = batch["labels"][:, places]
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none").view_as(labels)


def answer_loss(model: Any, batch: Batch, dtype: torch.dtype = DTYPE) -> Tensor:
    """The mean over the tokens of the answers."""
    return token_losses(model, batch, dtype).sum() / (batch["labels"] != IGNORED).sum()


def row_losses(model: Any, batch: Batch) -> list[float]:
    """The mean over the tokens of each row's answer."""
    return (token_losses(model, batch).sum(1).cpu() / (batch["labels"] != IGNORED).sum(1)).tolist()


def prepare(model: nn.Module, bed: Bed, settings: Settings) -> nn.Module:
    """Leaves trainable what the method trains; returns the model to train."""
    method, targets = settings.method, TARGETS[settings.candidates]
    if method == "full":
        model.requires_grad_(False)
        for layer in _targets(model, settings):
            layer.requires_grad_(True)
        return model
    if method in LORAS:
        options = {"r": max(1, round((settings.budget or 0) / _rank_size(model, settings))), **LORAS[method]}
        lora = peft.LoraConfig("CAUSAL_LM", lora_alpha=options["r"], target_modules=targets, **options)
        return peft.get_peft_model(model, lora)
    if method in BESIDE_LORA:  # half of the budget each
        from sparsify.peft import SparseConfig

        rank = max(1, round((settings.budget or 0) / _rank_size(model, settings) / 2))
        entries: Any = {"budget": (settings.budget or 0) - rank * _rank_size(model, settings), "strategy": "random"}
        entries |= {"lora": peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=targets), "seed": settings.seed}
        return peft.get_peft_model(model, SparseConfig(task_type="CAUSAL_LM", target_modules=targets, **entries))
    if method == "shira":  # PEFT's, with as many numbers in each layer as a LoRA of rank 1
        return peft.get_peft_model(model, peft.ShiraConfig(task_type="CAUSAL_LM", r=1, target_modules=targets))
    if method == "supertuning":  # PEFT's: the largest weights, the same share of each layer
        candidates = sum(layer.weight.numel() for layer in _targets(model, settings))
        sparsity = 1 - (settings.budget or 0) / candidates
        config: Any = peft.SupertuningConfig(task_type="CAUSAL_LM", sparsity=sparsity, target_modules=targets)
        return peft.get_peft_model(model, config)
    common: dict[str, Any] = {"target_modules": targets, "seed": settings.seed}
    if method in RULES:
        batches = COMPARED if method.startswith("consistent") else CALIBRATION
        moments = bed.moments(settings.seed, settings.batch_size, settings.candidates, batches)
        return sparsify(model, None, RULES[method](moments, settings.budget or 0, settings.seed), **common)
    strategy, schedule = STRATEGIES[method]
    if number := {"gradient": CALIBRATION, "gsnr": COMPARED}.get(method):
        common |= {"calibration": islice(bed.batches(settings.seed, settings.batch_size), number)}
        common |= {"loss_fn": answer_loss}
    return sparsify(model, settings.budget, strategy, steps=settings.steps, schedule=schedule, **common)


def _targets(model: nn.Module, settings: Settings) -> list[Any]:
    return [module for name, module in model.named_modules() if _is_target(name, module, settings.candidates or "")]


def _rank_size(model: nn.Module, settings: Settings) -> int:
    """The numbers of a LoRA of rank 1."""
    return sum(layer.in_features + layer.out_features for layer in _targets(model, settings))


def run(bed: Bed, settings: Settings) -> Run:
    """Trains once; the settings, the loss of each step and of each held-out row, and the facts of the run."""
    started = time.perf_counter()
    if on_gpu := bed.device.startswith("cuda"):
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    model, losses = bed.load(), []
    if settings.method != "none":
        model = prepare(model, bed, settings)
        losses = train(model, bed.batches(settings.seed, settings.batch_size), settings)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad) if losses else 0
    trained_at = time.perf_counter()
    peak = {"peak_bytes": torch.cuda.max_memory_allocated() - held} if on_gpu else {}
    size = file_bytes(model) if settings.method not in ("none", "full") else 0
    rows = evaluate(model, bed)
    return {
        "settings": asdict(settings),
        "loss": rounded(statistics.mean(rows)),
        "rows": [rounded(loss) for loss in rows],
        "training_losses": [rounded(loss) for loss in losses],
        "trained": trained,
        "seconds": [round(trained_at - started, 1), round(time.perf_counter() - trained_at, 1)],
        **peak,
        **({"file_bytes": size} if size else {}),
        "facts": facts([row for row, _ in bed.train], [row for row, _ in bed.judged], bed.device),
    }


def train(model: nn.Module, batches: Iterator[Batch], settings: Settings) -> list[float]:
    """AdamW, the rates falling linearly to 0; returns the loss of each step."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    lora = [parameter for name, parameter in trained.items() if "lora_" in name]
    rest = [parameter for name, parameter in trained.items() if "lora_" not in name]
    groups = [{"params": lora}, {"params": rest, "lr": settings.rate * BESIDE_LORA.get(settings.method, 1)}]
    steps, losses = settings.steps or 0, []
    optimizer = torch.optim.AdamW(groups, settings.rate, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate_factor(settings, steps))
    torch.manual_seed(settings.seed)
    model.train()
    for batch in islice(batches, steps):
        loss = answer_loss(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(trained.values(), MAX_NORM)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def file_bytes(model: Any) -> int:
    """The size of what a user saves: an adapter by PEFT's ``save_pretrained``, entries as a delta."""
    with TemporaryDirectory() as folder:
        if hasattr(model, "peft_config"):
            model.save_pretrained(folder)
        else:
            SparseDelta.from_model(model).save(folder)
        return sum(path.stat().st_size for path in Path(folder).rglob("*.safetensors"))


@torch.no_grad()
def evaluate(model: nn.Module, bed: Bed) -> list[float]:
    """The mean loss of each held-out row's answer."""
    model.eval()
    rows = [encoded for _, encoded in bed.judged]
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]["input_ids"]))
    found: dict[int, float] = {}
    for start in range(0, len(order), EVALUATION_BATCH):
        own = order[start : start + EVALUATION_BATCH]
        found |= zip(own, row_losses(model, bed.solver.collate([rows[i] for i in own])), strict=True)
    return [found[i] for i in range(len(rows))]


Methods = dict[str, dict[float, dict[int, Run]]]  # by name and budget, then by rate, then by seed


def report(runs: list[Run], reference: str = "lora-1") -> str:
    """For each kind of candidates, a table of the losses at each rate, and one of the differences to the reference."""
    groups: dict[tuple, Methods] = defaultdict(lambda: defaultdict(lambda: defaultdict(dict)))
    for one in runs:
        settings = settings_of(one)
        group = (settings.model, settings.candidates, settings.steps, settings.batch_size, one["facts"]["rows_sha256"])
        name = f"{settings.method} {_spaced(settings.budget)}" if settings.budget else settings.method
        groups[group][name][settings.rate][settings.seed] = one
    return "\n\n".join(_tables(group, methods, reference) for group, methods in groups.items())


def _tables(group: tuple, methods: Methods, reference: str) -> str:
    tried = sorted({rate for own in methods.values() for rate in own if rate})
    best = {name: _best_rate(own) for name, own in methods.items()}
    order = sorted(methods, key=lambda name: _mean(methods[name][best[name]]))
    reference = next((name for name in order if name.startswith(reference)), order[0])
    rows = _any(methods[reference][best[reference]])["rows"]
    ladder, differences = [], []
    for name in order:
        own = methods[name]
        chosen = own[best[name]]
        cells = [f"{_mean(own[rate]):.4f}" if rate in own else "" for rate in tried]
        ladder.append([name, *cells, str(len(chosen))])
        mean, error, seeds = paired(chosen, methods[reference][best[reference]])
        rate = f"{best[name]:g}" + ("" if min(own) < best[name] < max(own) else " *")
        peak, size = (max(one.get(key, 0) for one in chosen.values()) for key in ("peak_bytes", "file_bytes"))
        cells = [f"{_mean(chosen):.4f}", f"{mean:+.4f}", f"{error:.4f}", str(seeds), _spaced(_any(chosen)["trained"])]
        cells += [f"{peak / 1e9:.2f}" if peak else "", f"{size / 1e6:.2f}" if size else ""]
        differences.append([name, rate, *cells])
    model, candidates, steps, size, _ = group
    return "\n\n".join([
        f"### {model}, {candidates}, {steps} steps of {size} rows, {len(rows)} held-out rows",
        markdown(["entries", *[f"{rate:g}" for rate in tried], "seeds"], ladder),
        markdown(["entries", "best rate", "loss", f"minus {reference}", *COLUMNS], differences),
        "\\* no lower or no higher rate was tried; GB: a GPU's peak, without other runs' tensors; MB: of the file",
    ])  # fmt: skip


def _best_rate(own: dict[float, dict[int, Run]]) -> float:
    """The best one of the first seed, which has the whole ladder."""
    first = min(seed for runs in own.values() for seed in runs)
    ladder = {rate: _number(runs[first]["loss"]) for rate, runs in own.items() if first in runs}
    return min(ladder, key=ladder.__getitem__)


def paired(first: dict[int, Run], second: dict[int, Run]) -> tuple[float, float, int]:
    """The mean difference of the rows' losses over common seeds, its standard error over rows, and the seeds."""
    seeds = [seed for seed in first if seed in second]
    if not seeds:
        return math.nan, math.nan, 0
    one, other = (torch.tensor([[_number(loss) for loss in runs[seed]["rows"]] for seed in seeds])
                  for runs in (first, second))  # fmt: skip
    rows = (one - other).double().mean(0)
    return float(rows.mean()), float(rows.std()) / math.sqrt(len(rows)), len(seeds)


def _spaced(number: int) -> str:
    return f"{number:,}".replace(",", " ")


def _any(runs: dict[int, Run]) -> Run:
    return next(iter(runs.values()))


def _mean(runs: dict[int, Run]) -> float:
    return statistics.mean(_number(one["loss"]) for one in runs.values())


def _number(loss: float | None) -> float:
    return math.inf if loss is None else loss


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a causal language model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, in as many processes")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument(
        "--reference", default="lora-1", help="the method, or its beginning, that others are compared to"
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, metavar="METHOD", default=[], help=", ".join(METHODS))
    parser.add_argument("--rates", nargs="+", type=float, default=RATES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--budget", type=int, default=237_312, help="default: Gemma 3 270M's LoRA of rank 1")
    parser.add_argument("--candidates", choices=("linear", "qv"), default="linear", help="qv: PEFT's protocol")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--max-length", type=int, default=128, help="longer rows are left out")
    parser.add_argument("--held-out", type=int, default=200, help="rows to judge on")
    return parser.parse_args(arguments)


def plan(options: argparse.Namespace) -> list[Settings]:
    """The runs; those of all methods at one rate before those at the next."""
    common = {name: getattr(options, name) for name in ("candidates", "steps", "batch_size", "max_length", "held_out")}
    common |= {"task": "gsm8k", "model": Path(options.model).name, "epochs": 1, "decay": "linear"}
    common |= {"shape": None, "until": None, "exp": None, "eps": None}
    wanted = []
    for seed in options.seeds:
        for rate in options.rates:
            for method in options.methods:
                budget = None if method in ("none", "full", "shira") or "r" in LORAS.get(method, {}) else options.budget
                own = 0.0 if method == "none" else rate
                wanted.append(Settings(method=method, rate=own, seed=seed, budget=budget, **common))
    return list(dict.fromkeys(wanted))


_bed = cache(Bed)


def missing_runs(wanted: list[Settings], options: argparse.Namespace) -> Iterator[Run]:
    """The runs that are not there yet, each as soon as it has ended."""
    one = partial(_run, options.model, wanted[0], options.device)
    if options.jobs == 1:  # another command may have run one in the meantime
        yield from (one(settings) for settings in wanted if settings.key not in read(options.results))
        return
    done = read(options.results)
    with get_context("spawn").Pool(options.jobs) as pool:
        yield from pool.imap_unordered(one, [settings for settings in wanted if settings.key not in done])


def _run(folder: str, first: Settings, device: str, settings: Settings) -> Run:
    """A run in this process, which has one bed for all: their rows are the same."""
    return run(_bed(folder, first, device), settings)


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    if not options.table:
        if not options.model or not options.methods:
            raise SystemExit("--model FOLDER and --methods METHOD ... say what to run; --table prints what is there.")
        for line in missing_runs(plan(options), options):
            append(options.results, line)
            print(f"{time.strftime('%H:%M')} {describe(settings_of(line))}: loss {line['loss']}", flush=True)
    print(report(list(read(options.results).values()), options.reference))


if __name__ == "__main__":
    main()
