"""Summaries of a sparsified model: how much is unmasked, where, what it costs, and that no frozen entry has changed.

The proof: the tensors, with their pretrained values back at the unmasked entries, have the digests that they had.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from sparsify.common.names import listed
from sparsify.common.quantized import is_quantized, quantized_weight
from sparsify.common.ranks import num_ranks
from sparsify.common.raw_bits import fingerprint
from sparsify.common.shards import full_values
from sparsify.core.entries import VALUES
from sparsify.selection.policies import target_of
from sparsify.strategies.strategy import PRESETS, Given, Repeat, Strategy
from sparsify.training.engine import Engine
from sparsify.training.entries import BUFFERS
from sparsify.training.export import prepare
from sparsify.training.plan import find_unheld

TENSORS_SHOWN = 10
FULL_RATE = 2e-5  # an example: a language model's
TIMES_FULL = 10  # what the entries with the largest gradients bear


@dataclass(frozen=True)
class Verification:
    """The result of a verification."""

    num_frozen: int  # entries that should not have changed
    changed: tuple[str, ...]  # tensors in which some of them did
    recast: tuple[str, ...]  # tensors in another dtype than at ``sparsify()``, which cannot be compared
    unmasked: int  # entries
    expected: int  # entries by the schedule; for repeat-S the number of slots in use
    unheld: str  # names parameters that train and are in no delta
    passes_without_step: int = 0  # backward passes, where no optimizer step has ever been counted

    @property
    def ok(self) -> bool:
        """Whether frozen entries are unchanged, counts are as planned, and a delta holds all that trains."""
        counts = self.unmasked == self.expected and not self.passes_without_step
        return counts and not (self.changed or self.recast or self.unheld)

    def __str__(self) -> str:
        found = ((self.changed, "differ from the base at frozen entries"), (self.recast, "were cast since sparsify()"))
        problems = [f"{len(names)} tensors {problem}: {listed(names)}" for names, problem in found if names]
        if self.unmasked != self.expected:
            scheduled = f"the schedule says {self.expected:,} (some have no gradient)"
            problems.append(f"{self.unmasked:,} entries are unmasked, {scheduled}")
        if self.passes_without_step:
            reason = "does not hold `sparse_values`, or is none of torch.optim's (call optimizer_stepped(model))"
            passes = f"{self.passes_without_step:,} backward passes ran, and no optimizer step was counted"
            problems.append(f"{passes}: the optimizer {reason}")
        problems += [self.unheld] if self.unheld else []
        proof = f"{self.num_frozen:,} frozen entries are bit-equal to the base; {self.unmasked:,} unmasked as scheduled"
        return "; ".join(problems) or proof


@dataclass(frozen=True)
class Summary:
    """The state of a sparsified model in numbers; ``print(summary(model))``, or a notebook, lays them out."""

    strategy: Strategy
    budget: int  # entries to unmask in all
    unmasked: int  # entries so far; for repeat-S, in any step so far
    num_candidates: int  # entries that may be selected
    num_dense: int  # entries trained dense (``modules_to_save``), apart from the budget
    counts: dict[str, int] = field(repr=False)  # unmasked entries by tensor name
    sizes: dict[str, int] = field(repr=False)  # entries by tensor name
    step: int = 0  # optimizer steps done
    steps: int | None = None  # optimizer steps planned, where they are known
    updates: int = 0  # entry updates so far, the trained entries summed over the steps
    state_bytes: int = 0  # that the flat delta and the entries add to the model
    verification: Verification | None = None  # of ``verify=True``
    ranks: int = 1  # processes that train together
    sent_bytes: int = 0  # by this rank, to select the same entries as the others; gradients come on top
    num_new: int = 0  # of the candidates, those that the base does not have: an adapter's
    # entries of the last selection, on this rank: computed after a factors' norms left them ("screened"), taken from
    # whole gradients ("dense"), and ruled out by the norms ("skipped")
    last_work: Counter[str] = field(default_factory=Counter)

    @property
    def static_updates(self) -> int:
        """Entry updates that a static mask of the whole budget would have made in the same steps."""
        return self.budget * self.step

    @property
    def tensor_sparsity(self) -> float:
        """Share of the tensor parameters with no unmasked entry."""
        return tensor_sparsity(self.counts)

    @property
    def selection_entropy(self) -> float:
        """-sum p log p in nats, with p each tensor's unmasked share, normalised over the tensors."""
        return selection_entropy(self.counts, self.sizes)

    def __repr__(self) -> str:
        lines = [f"{label:<18} {value}" for label, value in self._rows()]
        ranked = sorted((-count, name) for name, count in self.counts.items() if count)
        shown = [(name, -negative) for negative, name in ranked[:TENSORS_SHOWN]]
        width = max((len(name) for name, _ in shown), default=0)
        lines += ["unmasked most:"] if shown else []
        lines += [f"  {name:<{width}}  {count:>10,}  {count / self.sizes[name]:.4%}" for name, count in shown]
        more = len(ranked) - len(shown)
        return "\n".join(lines + ([f"  ... and {more:,} more tensors"] if more else []))

    def _rows(self) -> list[tuple[str, str]]:
        budget_share, unmasked_share = self.budget / self.num_candidates, self.unmasked / self.budget
        unmasked = "touched" if isinstance(self.strategy.selection, Repeat) else "unmasked"
        rows = [
            ("strategy", strategy_name(self.strategy)),
            ("step", f"{self.step:,}" + (f" of {self.steps:,}" if self.steps else "")),
            ("budget", f"{self.budget:,} of {self.num_candidates:,} candidates ({budget_share:.4%})"),
            (unmasked, f"{self.unmasked:,} ({unmasked_share:.1%} of the budget)"),
            ("trained dense", f"{self.num_dense:,} beside the budget" if self.num_dense else "nothing"),
            *([] if self.num_new else suggested_rate(self.strategy, budget_share, has_head=self.num_dense > 0)),
            ("tensor sparsity", f"{self.tensor_sparsity:.4f} ({len(self.counts):,} tensors)"),
            ("selection entropy", f"{self.selection_entropy:.4f}"),
            ("entry updates", f"{self.updates:,} (a static mask's: {self.static_updates:,})"),
            ("state", f"{self.state_bytes:,} bytes"),
        ]
        ways = [(way, number) for way in ("screened", "dense", "skipped") if (number := self.last_work[way])]
        if ways:
            short = [f"{n:,} entries {way}" if n < 100_000 else f"{n / 1e6:,.1f} M entries {way}" for way, n in ways]
            rows.append(("last selection", ", ".join(short)))
        if self.ranks > 1:
            rows.append(("sent to choose", f"{self.sent_bytes:,} bytes by this one of {self.ranks} ranks"))
        if self.verification is not None:
            rows.append(("verified" if self.verification.ok else "NOT verified", str(self.verification)))
        return rows


def suggested_rate(strategy: Strategy, share: float, *, has_head: bool) -> list[tuple[str, str]]:
    """A row: the learning rate to begin with, by the runs in tutorials/choosing.md; none where there are no runs."""
    is_spread = strategy in (PRESETS["random"], PRESETS["gsnr"])
    if strategy.importance is None or not (strategy.importance.uses_gradient or is_spread):
        return []
    factor = 1 / share if is_spread else TIMES_FULL
    example = f"{factor * FULL_RATE:.2g} where that is {FULL_RATE:g}"
    head = "; for a new head 5 to 10 times as much" if has_head and factor <= TIMES_FULL else ""
    return [("learning rate", f"try {factor:.3g} times that of full fine-tuning: {example}{head}")]


def tensor_sparsity(counts: Mapping[str, int]) -> float:
    """Share of the tensors that have no unmasked entry, from the unmasked entries by tensor name."""
    return sum(count == 0 for count in counts.values()) / len(counts)


def selection_entropy(counts: Mapping[str, int], sizes: Mapping[str, int]) -> float:
    """-sum p log p in nats, from unmasked and all entries by tensor name; p is count / size, normalised to sum 1."""
    shares = [count / sizes[name] for name, count in counts.items() if count]
    total = sum(shares)
    # + 0.0 turns the -0.0 of a single tensor into 0.0
    return -sum(share / total * math.log(share / total) for share in shares) + 0.0


def strategy_name(strategy: Strategy) -> str:
    if isinstance(strategy.selection, Given):
        return "a given set"
    parts = f"{strategy.importance!r}, {strategy.selection!r}"
    names = [name for name, preset in PRESETS.items() if preset == strategy]
    return f"{names[0]} ({parts})" if names else parts


def summarize(engine: Engine, model: nn.Module, *, verify: bool = False) -> Summary:
    """The summary of an engine's model; ``model`` is the same, or holds it."""
    engine.catch_up(by_value=True)
    counts = {tensor.name: tensor.count for tensor in engine.tensors}
    parameters = dict(engine.root.named_parameters())
    return Summary(
        strategy=engine.strategy,
        budget=engine.budget,
        unmasked=sum(counts.values()),
        num_candidates=sum(tensor.num_candidates for tensor in engine.tensors),
        num_dense=sum(parameters[name].numel() for name in engine.dense_names if name in parameters),
        step=engine.step,
        steps=engine.steps,
        updates=engine.entries.updates,
        state_bytes=engine.values.nbytes + sum(engine.root.get_buffer(name).nbytes for name in BUFFERS),
        counts=counts,
        sizes={tensor.name: tensor.numel for tensor in engine.tensors},
        verification=_verify(engine, model) if verify else None,
        ranks=num_ranks(),
        sent_bytes=engine.ranks.bytes_sent,
        num_new=sum(tensor.num_candidates for tensor in engine.tensors if tensor.name in engine.new_names),
        last_work=engine.selectors.work,
    )


def num_parameters(model: nn.Module) -> int:
    """Entries of the model without the flat delta, those of quantized weights too."""
    sizes: dict[nn.Parameter, int] = {}
    for module in model.modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None and attribute != VALUES:
                known = is_quantized(parameter) and getattr(parameter, "quant_state", True) is not None
                sizes[parameter] = quantized_weight(module, attribute).shape.numel() if known else parameter.numel()
    return sum(sizes.values())


def digest_base(engine: Engine) -> dict[str, tuple[torch.dtype, str]]:
    """Dtype and digest of the base of every parameter that has one and ordinary memory, by name."""
    masked, left_out = {tensor.parameter: tensor for tensor in engine.tensors}, {*engine.dense_names, VALUES}
    digests = {}
    for name, parameter in engine.root.named_parameters():
        if name in left_out or parameter.is_meta:
            continue
        tensor = masked.get(parameter)
        weight = full_values(parameter) if tensor is None else tensor.base_weight
        if type(weight) is Tensor:
            digests[name] = (weight.dtype, fingerprint(weight))
    return digests


def _verify(engine: Engine, model: nn.Module) -> Verification:
    """Compares the engine's model, which may be a part of ``model``, with what it was at ``sparsify()``."""
    prepare(engine, "summary(verify=True)")
    now, known = digest_base(engine), engine.weights.base_digests
    parameters = dict(engine.root.named_parameters())
    before = {name: known[name] for name in known if name in parameters}  # PEFT takes some away
    recast = tuple(name for name in before if name in now and now[name][0] != before[name][0])
    changed = tuple(name for name in before if name not in recast and now.get(name) != before[name])
    sizes = {name: parameter.numel() for name, parameter in parameters.items()}
    sizes.update((tensor.name, tensor.numel) for tensor in engine.tensors)
    frozen, unstepped = sum(sizes[name] for name in before) - engine.unmasked, 0 if engine.step else engine.passes
    unheld = find_unheld(engine, model)
    # a schedule with more steps may have to catch up with the count
    expected = max(target_of(engine.policy, engine.step + bool(engine.selected)), engine.extended_at)
    return Verification(frozen, changed, recast, engine.unmasked, expected, unheld, unstepped)
