"""The paper's algorithm with every gradient kept, pass by pass, for random training programs."""

import torch
from oracle import cumulative_target, padding_rows

from sparsify import D3, SNIP, Fisher, Magnitude

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "sgd, decay": lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.0),
    "adamw, decay": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.3),
    "adamw, fused": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.003, momentum=0.5),
}
# importance -> the library's, and the paper's score of (weight, gradient)
IMPORTANCES = {
    "D3": (D3(exp=2, eps=1), lambda w, g: g.abs() / (w.abs() + 1) ** 2),
    "D3, exp 0": (D3(exp=0), lambda w, g: g.abs()),
    "D3, exp 1": (D3(exp=1, eps=1e-3), lambda w, g: g.abs() / (w.abs() + 1e-3)),
    "D3, exp -1": (D3(exp=-1), lambda w, g: g.abs() * (w.abs() + 1)),
    "Fisher": (Fisher(), lambda w, g: g**2),
    "SNIP": (SNIP(), lambda w, g: (w * g).abs()),
    "smallest": (Magnitude(), lambda w, g: -w.abs()),
    "largest": (Magnitude(largest=True), lambda w, g: w.abs()),
}
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 2e-2}  # as a share of the largest number


class Dense:
    """The paper's algorithm with every gradient kept, over all candidates as one flat vector (N,).

    The step in progress trains ``mask``, by ``gradient``, the sum of its passes so far; ``touched`` are the entries
    that were ever trained. Each pass selects the mask anew, by the ``total`` gradient of all entries in the step's
    passes, in the first step and after a step of several passes. In any other, the first that finds entries selects.
    """

    def __init__(self, program):
        self.program, self.model = program, program.model()
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        self.names, self.parameters = zip(*named, strict=True)
        self.base = torch.cat([p.detach().reshape(-1) for p in self.parameters])
        self.delta = torch.zeros(self.base.numel(), dtype=torch.promote_types(program.dtype, torch.float32))
        self.optimizer = OPTIMIZERS[program.optimizer]([self.delta.requires_grad_()])
        self.candidates = self._candidates()
        self.budget = max(1, int(program.share * int(self.candidates.sum())))
        self.mask = torch.zeros_like(self.candidates)
        self.step_number, self.gradient, self.finite, self.selected, self.may_drop = 0, None, True, False, False
        self.passes = self.several_until = 0  # of this step; the number of the step after the last one of several
        self.score = IMPORTANCES[program.importance][1]
        self.uses_gradient = IMPORTANCES[program.importance][0].uses_gradient
        self.by_all = program.selection == "increment" and program.select == "all" and self.uses_gradient
        if program.selection in ("static", "given"):
            drawn = torch.rand(self.base.numel(), generator=torch.Generator().manual_seed(program.seed))
            scores = drawn if program.selection == "given" else self.score(self.wide_weights(), None)
            self.mask[self._best(scores, self.candidates, self.budget)] = True
        self.touched = self.mask.clone()
        self.capacity = min(int(self.candidates.sum()), self.budget * program.steps)  # of repeat-S

    def _candidates(self):
        masks = {n: torch.ones(p.shape, dtype=torch.bool) for n, p in zip(self.names, self.parameters, strict=True)}
        for name, row in padding_rows(self.model).items():
            if name in masks:
                masks[name][row] = False
        return torch.cat([mask.reshape(-1) for mask in masks.values()])

    def split(self, flat):
        parts = flat.split([parameter.numel() for parameter in self.parameters])
        return {name: part.view_as(p) for name, p, part in zip(self.names, self.parameters, parts, strict=True)}

    def wide_weights(self):
        return torch.cat([p.detach().reshape(-1) for p in self.parameters]).to(self.delta.dtype)

    def quota(self):
        """How many entries the step in progress is to add, or for repeat-S to choose."""
        program, step = self.program, self.step_number
        if program.selection == "repeat":
            return self.budget
        if program.selection != "increment" or step >= program.steps or step % program.schedule["every"]:
            return 0
        return cumulative_target(step, program.steps, self.budget, **program.schedule) - int(self.mask.sum())

    @staticmethod
    def _best(scores, candidates, number):
        order = scores.masked_fill(~candidates, -torch.inf).argsort(descending=True, stable=True)
        return order[: min(number, int(candidates.sum()))]

    def backward(self, loss, chosen, *, retain=False):
        """One backward pass; ``chosen`` are the library's entries after it."""
        grads = torch.autograd.grad(loss, self.parameters, retain_graph=retain, allow_unused=True)
        grads = [torch.zeros_like(p) if g is None else g for g, p in zip(grads, self.parameters, strict=True)]
        gradient = torch.cat([grad.reshape(-1) for grad in grads]).to(self.delta.dtype)
        again, kept = self.selected and self.selects_again and self.finite, (self.mask, self.touched)
        self.total = gradient + self.total if again else gradient
        if again:
            self.mask, self.touched = self.before
        seen, quota = self.mask.clone(), self.quota() if again or not self.selected else 0
        if quota:
            scores, candidates = self.score(self.wide_weights(), self.total), self.candidates.clone()
            if self.program.selection == "increment":
                candidates &= ~self.mask
            if self.uses_gradient:
                candidates &= (scores > 0) | scores.isnan()
                seen[:] = True
            winners = self._best(scores, candidates, quota)
            seen[winners] = True
            if self.total[seen].isfinite().all():
                self._choose(winners, scores, quota, chosen)
                self.selects_again = again or self.several_until >= self.step_number or not winners.numel()
                self.selects_again &= self.by_all
            elif again:
                self.mask, self.touched = kept
        self.passes += 1
        self.several_until = self.several_until if self.passes == 1 else self.step_number + 1
        self.may_drop |= self.selected and not retain
        self.finite &= bool(gradient[seen].isfinite().all())
        before = 0 if self.gradient is None else self.gradient
        self.gradient = (self.total if again else gradient + before).where(self.mask, 0)

    def _choose(self, winners, scores, quota, chosen):
        """Takes the winners, or the library's where the two differ by rounding alone."""
        own = torch.zeros_like(self.mask)
        own[winners] = True
        if self.program.selection == "increment":
            own |= self.mask
        elif (room := self.capacity - int(self.touched.sum())) < int((new := own & ~self.touched).sum()):
            fitting = winners[new[winners]][:room]
            own &= self.touched
            own[fitting] = True
        if not torch.equal(own, chosen):
            self._check_rounding(own, scores, quota, chosen)
        self.before = self.mask, self.touched
        self.mask, self.selected = chosen.clone(), True
        self.touched = self.touched | chosen

    def _check_rounding(self, own, scores, quota, chosen):
        """Raises unless each choice is as good as the other up to rounding, and of the same size."""
        taken, left = chosen & ~own, own & ~chosen
        assert not (taken & ~self.candidates).any(), "an entry that is no candidate was unmasked"
        slack = ROUNDING[self.program.dtype] * float(scores[self.candidates].abs().max())
        different = scores[taken | left]
        full = int(taken.sum()) == int(left.sum())
        assert full or float(different.abs().max()) <= slack, f"{int(chosen.sum())} entries, not {int(own.sum())}"
        spread = float(different.max() - different.min())
        assert spread <= slack, f"entries {taken.nonzero().tolist()} instead of {left.nonzero().tolist()}"
        differs = spread > 0 or not full or self.program.dtype != torch.float64
        assert differs, f"ties in another order: {taken.nonzero().tolist()}"

    def step(self, scale, clip):
        if self.gradient is None:
            return
        if self.finite:
            self.delta.grad = self.gradient / scale
            if clip is not None:
                torch.nn.utils.clip_grad_norm_([self.delta], clip)
            before = self.delta.detach().clone()
            self.optimizer.step()
            if not self.passes and self.delta.equal(before):
                return  # a step without a pass, which moves nothing, is not counted
            self.step_number, self.selected, self.may_drop, self.passes = self.step_number + 1, False, False, 0

    def zero_grad(self, set_to_none):
        self.finite = True
        if self.may_drop:  # without a step: the choice of the passes since the last one goes with their gradient
            (self.mask, self.touched), self.selected, self.may_drop, self.passes = self.before, False, False, 0
        if self.gradient is not None:
            self.gradient = None if set_to_none else torch.zeros_like(self.gradient)

    @torch.no_grad()
    def write(self):
        """Base + delta where anything was ever trained; the base, bit by bit, elsewhere."""
        trained = (self.base.to(self.delta.dtype) + self.delta).to(self.base.dtype)
        for name, part in self.split(trained.where(self.touched, self.base)).items():
            self.model.get_parameter(name).copy_(part)
