"""The paper's analyses: where entries are selected over the steps, and how far they move beside full fine-tuning's.

    python -m examples.paper.analysis --task sst2 --out figures
    python -m examples.paper.analysis --task sst2 --dtype bfloat16

Trains ID3 with increment-S and with repeat-S, and the whole model. Prints a table, and draws ``selection.png``: tensor
sparsity and selection entropy over the steps. Needs the extras ``paper`` and ``plot``.
"""

from __future__ import annotations

import argparse
from itertools import count
from pathlib import Path

import torch
from torch import Tensor, nn

from examples.analysis import change_correlation
from examples.paper.methods import METHODS
from examples.paper.settings import Settings
from examples.paper.tables import markdown
from examples.paper.tasks import TASKS
from examples.paper.training import Experiment, load, train
from sparsify import summary

NAMES = {"id3": "ID3, increment-S", "d3-repeat": "D3, repeat-S", "full": "full"}
POINTS = 40  # of a curve
Curve = list[tuple[int, float, float]]  # step, tensor sparsity, selection entropy


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="sst2", choices=TASKS)
    parser.add_argument("--model", default="MiniLM", help="name, path, or MiniLM")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights")
    parser.add_argument("--budget", type=int, default=38_000)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--full-rate", type=float, default=5e-5)
    parser.add_argument("--rows", type=int, default=2_000, help="of training")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--max-length", type=int, default=128)
    parser.add_argument("--steps", type=int, help="stop early, to try things out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path(), help="folder of the pictures")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    loaded: dict[str, Experiment] = {}
    curves: dict[str, Curve] = {}
    scores = {}
    for method in NAMES:
        settings = settings_of(method, options)
        loaded[method] = load(settings, options.device)
        if method != "full":
            curves[method] = recorded(loaded[method])
        scores[method] = train(loaded[method], settings)[0][-1]["score"]
    base = loaded["full"].encoder.load_model()[0].to(options.device)
    moved = {method: changes(experiment, base) for method, experiment in loaded.items()}
    print(table(moved, scores))
    common = change_correlation(loaded["id3"].model, loaded["full"].model, base, magnitude=True, among="both")
    print(f"\nSpearman's rank correlation of abs(change), ID3 and full, {common.num_entries:,} entries that both "
          f"changed: {common.overall:.3f}")  # fmt: skip
    draw_selection(curves, options.out / "selection.png")


def settings_of(method: str, options: argparse.Namespace) -> Settings:
    """The run of a method; increment-S unmasks to the last step, at a constant rate, as in the paper."""
    names = ("task", "model", "dtype", "budget", "epochs", "max_length", "rows", "steps", "seed")
    given = {name: getattr(options, name) for name in names}
    rate = options.full_rate if method == "full" else options.rate
    return METHODS[method].normalise(Settings(method=method, rate=rate, **given))


def recorded(experiment: Experiment) -> Curve:
    """A list that training fills with tensor sparsity and selection entropy, before some of its steps."""
    curve: Curve = []
    number, every = count(), max(1, experiment.steps // POINTS)

    def note(model: nn.Module, *_: object) -> None:
        if model.training and (step := next(number)) % every == 0:
            found = summary(model)
            curve.append((step, found.tensor_sparsity, found.selection_entropy))

    experiment.model.register_forward_pre_hook(note)
    return curve


def changes(experiment: Experiment, base: nn.Module) -> dict[str, Tensor]:
    """abs(trained - pretrained) of every pretrained tensor."""
    trained = dict(experiment.model.named_parameters())
    return {
        name: (trained[name].detach().float() - pretrained.detach().float()).abs()
        for name, pretrained in base.named_parameters()
        if not set(experiment.head) & set(name.split("."))
    }


def table(moved: dict[str, dict[str, Tensor]], scores: dict[str, float]) -> str:
    """A row for each method: its score, what it changed, and how far: all of that, and ID3's entries and the others."""
    of_id3 = torch.cat([change.flatten() != 0 for change in moved["id3"].values()])
    rows = []
    for method, tensors in moved.items():
        flat = torch.cat([change.flatten() for change in tensors.values()])
        changed = flat != 0
        groups = [flat[changed], flat[changed & of_id3], flat[changed & ~of_id3]]
        means = [f"{float(group.mean()):.1e}" if group.numel() else "" for group in groups]
        untouched = sum(not tensor.any() for tensor in tensors.values())
        rows.append([NAMES[method], f"{scores[method]:.1f}", f"{int(changed.sum()):,}", f"{untouched}", *means])
    header = ["method", "score", "entries changed", "tensors left alone", "mean abs(change)", "on ID3's entries",
              "on others"]  # fmt: skip
    return markdown(header, rows)


def draw_selection(curves: dict[str, Curve], path: Path) -> None:
    """Tensor sparsity and selection entropy over the steps."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(8.4, 3.2), layout="constrained")
    for method, curve in curves.items():
        steps, *values = zip(*curve, strict=True)
        for axis, own in zip(axes, values, strict=True):
            axis.plot(steps, own, label=NAMES[method])
    for axis, name in zip(axes, ("tensor sparsity", "selection entropy (nats)"), strict=True):
        axis.set(xlabel="optimizer step", ylabel=name, ylim=(0, None))
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
