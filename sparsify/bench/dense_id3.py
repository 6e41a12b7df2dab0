"""ID3 as it is usually implemented: a dense mask, dense gradients, dense scores, dense optimizer states.

This is what the library is compared with. It is written as a toolkit would write it, without waste: bool masks, one
pass of scores, ``torch.topk`` over all of them, the gradients masked in place.

    backward            the gradient of every parameter
    mask_gradients()    score every masked entry, unmask the best, zero the gradient of the others
    optimizer.step()    AdamW over every parameter; without weight decay, which would move the masked entries
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from sparsify.strategies.importance import D3
from sparsify.strategies.schedules import Schedule


class DenseID3:
    """The paper's Algorithm 1 with dense masks.

    Args:
        parameters: what is trained, by name.
        budget: entries.
        steps: planned number of optimizer steps.

    Example:
        >>> weight = nn.Parameter(torch.tensor([0.0, 1.0, 2.0]))
        >>> id3 = DenseID3({"weight": weight}, budget=2, steps=2)
        >>> weight.grad = torch.tensor([1.0, 8.0, 3.0])
        >>> id3.mask_gradients()
        >>> weight.grad
        tensor([0., 8., 0.])
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], budget: int, steps: int) -> None:
        self.parameters = dict(parameters)
        self.masks = {name: torch.zeros_like(parameter, dtype=torch.bool) for name, parameter in parameters.items()}
        self.budget, self.steps = budget, steps
        self.step = self.unmasked = 0
        self._importance, self._schedule = D3(exp=2, eps=1), Schedule()

    def resume(self, support: Mapping[str, Tensor], step: int) -> None:
        """Goes on from where flat indices (n,) of each tensor are unmasked, and ``step`` optimizer steps are done."""
        for name, indices in support.items():
            self.masks[name].view(-1)[indices.to(self.masks[name].device)] = True
        self.unmasked, self.step = sum(int(mask.count_nonzero()) for mask in self.masks.values()), step

    @torch.no_grad()
    def mask_gradients(self) -> None:
        """Unmasks the best masked entries, as many as the schedule says, and zeroes the gradient of the others."""
        wanted = self._schedule.quota(self.step, self.steps, self.budget, self.unmasked)
        if wanted:
            self._unmask(wanted)
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                parameter.grad *= self.masks[name]
        self.step += 1

    def _unmask(self, wanted: int) -> None:
        used = [
            (parameter, self.masks[name]) for name, parameter in self.parameters.items() if parameter.grad is not None
        ]
        best = torch.topk(torch.cat([self._scores(*pair) for pair in used]), wanted, sorted=False).indices
        for _, mask in used:
            mask.view(-1)[best[(best >= 0) & (best < mask.numel())]] = True
            best = best - mask.numel()
        self.unmasked += wanted

    def _scores(self, parameter: nn.Parameter, mask: Tensor) -> Tensor:
        assert parameter.grad is not None
        return self._importance.score(parameter, parameter.grad).masked_fill_(mask, -torch.inf).flatten()
