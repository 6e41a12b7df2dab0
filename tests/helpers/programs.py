"""Random training programs, each made from a seed; ``run(program(7).but(script=...))`` makes a failing one smaller."""

import random
from types import SimpleNamespace

import torch
from program_models import HEADS, PARTS, TOKENS, VOCABULARY, Network
from program_oracle import IMPORTANCES, OPTIMIZERS

# of actions, those named often more often
KINDS = {
    "backward": ("one", "one", "one", "summed", "pending", "retained", "kept"),
    "fail": ("forward", "backward", "recomputed"),
    "evaluate": ("no grad", "inference", "eval", "dropped", "base"),
    "resume": ("state_dict", "trained_state"),
    "copy": ("deepcopy", "pickle"),
}


class Program(SimpleNamespace):
    """A random model and a script of actions, each the name of a method of ``Run`` and its arguments."""

    def but(self, **changes):
        return Program(**{**vars(self), **changes})

    def __str__(self):
        settings = [f"{name:12} = {value!r}" for name, value in vars(self).items() if name != "script"]
        actions = [f"    {name}({', '.join(map(repr, arguments))})" for name, *arguments in self.script]
        return "\n".join([*settings, "script:", *actions])

    def model(self):
        torch.manual_seed(self.seed)
        model = Network(self.parts, self.checkpointed, self.head, self.padding)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(0.4 * torch.randn(parameter.shape) + (0.5 if parameter.dim() < 2 else 0))
                if self.coarse:
                    parameter.copy_((4 * parameter).round() / 4)
        for name in self.frozen:
            model.get_submodule(name).requires_grad_(False)
        return model.to(self.dtype).train()

    def batches(self):
        """Tokens, labels and the numbers of the parts that are skipped, of ten batches."""
        generator = torch.Generator().manual_seed(self.seed)
        rng, batches = random.Random(self.seed), []
        for _ in range(10):
            tokens, labels = torch.randint(VOCABULARY, (2, rng.randint(1, 3), TOKENS), generator=generator)
            skipped = tuple(number for number in range(len(self.parts)) if rng.random() < 0.15)
            batches.append((tokens, labels, skipped))
        return batches


def program(seed):
    """The program of a seed; kinds of parts and optimizers take turns, the rest is drawn."""
    rng = random.Random(seed)
    kinds, optimizers = list(PARTS), list(OPTIMIZERS)
    parts = (kinds[seed % len(kinds)], *rng.choices(kinds, k=rng.randint(1, 3)))
    checkpointed = tuple(rng.random() < 0.3 for _ in parts)
    importance = rng.choice(["D3", "D3", "D3", *IMPORTANCES])
    static = 4 if importance in ("smallest", "largest") else 0  # the others would need a calibration
    selection = rng.choices(["increment", "repeat", "static", "given"], [14, 2, static, 1])[0]
    schedule = {
        "shape": rng.choice(["uniform", "uniform", "linear", "cubic", "cosine"]),
        "every": rng.choice([1, 1, 1, 2, 3]),
        "until": rng.choice([1.0, 1.0, 0.5]),
    }
    steps, dtype = rng.randint(2, 6), rng.choices([torch.float64, torch.float32, torch.bfloat16], [6, 2, 1])[0]
    return Program(
        seed=seed, parts=parts, checkpointed=checkpointed, head=rng.choice(HEADS),
        padding=rng.choice([None, None, 0, VOCABULARY - 1]),
        frozen=tuple(f"parts.{number}" for number in range(len(parts)) if rng.random() < 0.1),
        coarse=rng.random() < 0.3,  # weights are multiples of 1/4, so that many are equal
        dtype=dtype, importance=importance,
        selection=selection,  # or "given": a set that is drawn
        share=rng.choice([0.002, 0.01, 0.05, 0.05, 0.3, 0.95]),  # of the candidates
        steps=steps, schedule=schedule if selection == "increment" else {},
        optimizer=optimizers[seed % len(optimizers)],
        scaled=rng.random() < 0.3,  # by GradScaler
        clip=rng.choice([None, None, 0.1]), set_to_none=rng.random() < 0.8,
        tiny=rng.random() < 0.4,  # small tensors go the ways of large ones
        script=tuple(_script(rng, steps + rng.randint(-1, 1), len(parts))),
    )  # fmt: skip


def _script(rng, steps, parts):
    place, batch = (lambda: rng.randrange(parts + 1)), (lambda: rng.randrange(10))
    yield ("sparsify",)
    for _ in range(max(1, steps)):
        overflowing = rng.random() < 0.12
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            if rng.random() < 0.12:
                yield "fail", rng.choice(KINDS["fail"]), place(), batch()
            if rng.random() < 0.12:
                yield "evaluate", rng.choice(KINDS["evaluate"]), batch()
            kind, overflow = rng.choice(KINDS["backward"]), place() if overflowing and rng.random() < 0.6 else None
            yield "backward", kind, batch(), batch(), overflow
        yield ("step",)
        if rng.random() < 0.12:
            yield "resume", rng.choice(KINDS["resume"])
        if rng.random() < 0.1:
            yield "copy", rng.choice(KINDS["copy"])
    yield ("export",)
