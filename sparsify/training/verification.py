"""Proof that training changed no frozen entry: digests of the base at ``sparsify()``, and now.

A digest is taken of a tensor with its pretrained values back at the unmasked entries, so that it is the same before and
after training if, and only if, the frozen entries and the kept base values are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sparsify.common.names import listed
from sparsify.common.raw_bits import digest
from sparsify.common.shards import full_values
from sparsify.core.devices import put
from sparsify.core.entries import VALUES
from sparsify.strategies.strategy import Increment, Repeat
from sparsify.training.engine import Engine
from sparsify.training.export import find_unheld, prepare


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
            problems.append(
                f"{self.unmasked:,} entries are unmasked, the schedule says {self.expected:,} (entries without a "
                "gradient wait for one)"
            )
        if self.passes_without_step:
            problems.append(
                f"{self.passes_without_step:,} backward passes ran, and no optimizer step was counted: the optimizer "
                "does not hold `sparse_values`, or is none of torch.optim's (call optimizer_stepped(model) after its "
                "steps)"
            )
        problems += [self.unheld] if self.unheld else []
        return "; ".join(problems) or (
            f"{self.num_frozen:,} frozen entries are bit-equal to the base; {self.unmasked:,} unmasked as scheduled"
        )


def digest_base(engine: Engine) -> dict[str, tuple[torch.dtype, str]]:
    """Dtype and digest of the base of every parameter that has one and ordinary memory, by name."""
    by_name, left_out = {tensor.name: tensor for tensor in engine.tensors}, {*engine.dense_names, VALUES}
    digests = {}
    for name, parameter in engine.root.named_parameters():
        tensor = by_name.get(name)
        if tensor is not None and tensor.parameter is not parameter:
            tensor = None  # the parameter was replaced
        if name in left_out or parameter.is_meta:
            continue
        weight = full_values(parameter) if tensor is None else tensor.weight
        if tensor is not None and engine.unmasked and tensor.count:  # before training there are no counts
            weight = put(weight.clone(), tensor.indices, tensor.base.to(weight.dtype))
        if type(weight) is Tensor:
            digests[name] = (weight.dtype, digest(weight))
    return digests


def verify(engine: Engine, model: nn.Module) -> Verification:
    """Compares the engine's model, which may be a part of ``model``, with what it was at ``sparsify()``."""
    prepare(engine, "summary(verify=True)")
    now = digest_base(engine)
    parameters = dict(engine.root.named_parameters())
    before = {name: known for name, known in engine.base_digests.items() if name in parameters}  # PEFT takes some away
    recast = tuple(name for name in before if name in now and now[name][0] != before[name][0])
    changed = tuple(name for name in before if name not in recast and now.get(name) != before[name])
    sizes = {name: parameter.numel() for name, parameter in parameters.items()}
    sizes.update((tensor.name, tensor.numel) for tensor in engine.tensors)
    entries = sum(sizes[name] for name in before)
    frozen, unstepped = entries - engine.unmasked, 0 if engine.step else engine.passes
    unheld = find_unheld(engine, model)
    return Verification(frozen, changed, recast, engine.unmasked, _expected(engine), unheld, unstepped)


def _expected(engine: Engine) -> int:
    """Number of entries that should be unmasked by now."""
    if isinstance(engine.strategy.selection, Repeat):
        return engine.unmasked  # it depends on the gradients how many were ever chosen
    if not isinstance(engine.strategy.selection, Increment):
        return engine.budget
    begun = engine.step + (1 if engine.selected else 0)  # steps that have had their selection
    if engine.steps is None or not begun:
        return 0
    target = engine.schedule.target(min(begun, engine.steps) - 1, engine.steps, engine.budget)
    return max(target, engine.extended_at)  # a schedule with more steps may have to catch up with the count
