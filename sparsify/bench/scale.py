"""What training takes on many ranks, on paper: memory of a rank and bytes that it sends a step, from formulae.

N parameters, L those of a LoRA, B entries, u entries chosen a step, W ranks. A ring all-gather or reduce-scatter of n
bytes sends n (W - 1) / W from each rank, an all-reduce twice that.

    state       full, FSDP2     N (4 weight + 4 gradient + 8 Adam) / W
                LoRA, FSDP2     N 2 / W + L 16 / W
                ID3, FSDP2      N 2 / W + B (4 delta + 4 gradient + 8 Adam + 4 copy + 8 index + 8 slot + base)
    weights     FSDP2 gathers them for forward and once more for backward, in bfloat16: 2 x 2 N
    gradients   full and LoRA: reduce-scatter of 4 N or 4 L; ID3: all-reduce of 4 B
    choosing    see :func:`choosing_bytes`
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sparsify.common.ranks import WIDTH
from sparsify.selection.distributed import MOST_ROUNDS, RAISING


@dataclass(frozen=True)
class Architecture:
    """A model as the formulae see it.

    Attributes:
        name: what it is called.
        sizes: entries of each weight tensor.
        lora: numbers of a LoRA of rank 8 on all linear layers.
        layer: entries of the largest part that FSDP2 gathers at once.
    """

    name: str
    sizes: tuple[int, ...]
    lora: int
    layer: int

    @property
    def num_parameters(self) -> int:
        return sum(self.sizes)


@dataclass(frozen=True)
class AtScale:
    """One method, in bytes: of a rank's memory, and sent by a rank in a step.

    Attributes:
        method: what it is.
        state_bytes: weights, gradients, optimizer and index buffers, between steps.
        transient_bytes: gradients that are there at once in backward, beyond those of the state.
        weight_bytes: sent to gather weights.
        averaging_bytes: sent to average gradients.
        choosing_bytes: sent at most to choose the same entries.
    """

    method: str
    state_bytes: int
    transient_bytes: int
    weight_bytes: int
    averaging_bytes: int
    choosing_bytes: int = 0


def _llama_70b() -> Architecture:
    hidden, inner, key_value, vocabulary, layers = 8192, 28672, 1024, 128256, 80
    shapes = [(hidden, hidden)] * 2 + [(hidden, key_value)] * 2 + [(hidden, inner)] * 3
    layer = [rows * cols for rows, cols in shapes] + [hidden] * 2
    sizes = layer * layers + [vocabulary * hidden] * 2 + [hidden]
    return Architecture("Llama 70B", tuple(sizes), 8 * layers * sum(map(sum, shapes)), sum(layer))


LLAMA_70B = _llama_70b()


def at_scale(model: Architecture, ranks: int, budget: int, steps: int) -> list[AtScale]:
    """The methods side by side under FSDP2, in bfloat16 with float32 training state.

    Args:
        model: what is trained.
        ranks: number of GPUs.
        budget: entries that ID3 trains.
        steps: optimizer steps over which it unmasks them.
    """
    number, wanted = model.num_parameters, -(-budget // steps)
    frozen, gathered = 2 * number // ranks, 2 * ring(2 * number, ranks)
    dense = 2 * model.layer  # FSDP2 holds a layer's gradients until they are reduced
    rows = [
        AtScale("full", 16 * number // ranks, dense, gathered, ring(4 * number, ranks)),
        AtScale("LoRA r=8", frozen + 16 * model.lora // ranks, 0, gathered, ring(4 * model.lora, ranks)),
    ]
    for mode in ("exact", "candidates"):
        state, single = frozen + delta_bytes(budget, base_bytes=2), 4 * max(model.sizes)
        read = 2 * ring(4 * wanted, ranks)  # the base values of the entries that are new
        choosing = choosing_bytes(model.sizes, wanted, ranks, mode) + read
        rows.append(AtScale(f"ID3 {mode}", state, single, gathered, 2 * ring(4 * budget, ranks), choosing))
    return rows


def ring(num_bytes: int, ranks: int) -> int:
    """Bytes that a rank sends in a ring all-gather or reduce-scatter of so many bytes; an all-reduce is two of them."""
    return num_bytes * (ranks - 1) // ranks


def delta_bytes(budget: int, base_bytes: int) -> int:
    """Memory of a rank for delta, gradient, AdamW, the copy that the weights were written from, and index buffers."""
    return budget * (4 + 4 + 8 + 4 + 8 + 8 + base_bytes)


def choosing_bytes(sizes: Iterable[int], wanted: int, ranks: int, mode: str) -> int:
    """Bytes that a rank sends at most in a step that chooses.

    Args:
        sizes: entries of each tensor.
        wanted: how many entries the step is to choose.
        ranks: number of ranks.
        mode: ``"candidates"``: a round for each tensor. ``"exact"``: as many as may be, and then the whole gradient; so
            it comes about only where the ranks' gradients have hardly anything in common.
    """
    header = 8 * WIDTH * (ranks - 1)
    total = header  # at the end
    for size in sizes:
        whole = 2 * ring(4 * size, ranks)
        most = min(size, wanted * RAISING[mode])
        indices, at_union = 4 * most * (ranks - 1), 2 * ring(4 * min(size, ranks * most), ranks)
        proposals = min(whole, indices + at_union)
        if mode == "candidates":
            total += header + proposals
        else:
            total += (MOST_ROUNDS + 1) * header + MOST_ROUNDS * proposals + whole
    return total
