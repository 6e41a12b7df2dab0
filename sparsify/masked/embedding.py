"""An embedding whose gradient covers only the rows that the batch looked up.

forward    y = W[ids]
backward   one row of gradient per distinct id, the sum over the id's positions, handed to ``collect``; also of the
           padding row, whose entries are no candidates
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparsify.core.gradients import row_gradient
from sparsify.core.tensor import Use
from sparsify.masked.module import MaskedModule, announce_use, first_order, frozen_if_masked


class MaskedEmbedding(MaskedModule, nn.Embedding):
    """An ``nn.Embedding`` whose frozen table is trained at its unmasked entries; ``padding_idx`` is no candidate."""

    plain_class = nn.Embedding

    def forward(self, input: Tensor) -> Tensor:
        """Returns the rows (..., dim) of the table for ids (...)."""
        if torch.compiler.is_dynamo_compiling():
            from sparsify.masked.compiled import compiled_embedding

            return compiled_embedding(self, input)
        use, weight = announce_use(self, "weight"), frozen_if_masked(self, "weight")
        if use is None:
            return F.embedding(input, weight, self.padding_idx)
        rows: Tensor = _MaskedEmbedding.apply(input, weight, use.anchor, use)
        return rows


class _MaskedEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, anchor: Tensor, use: Use) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.use, ctx.height = use, weight.shape[0]
        return F.embedding(ids, weight)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_y: Tensor) -> tuple[None, ...]:
        (ids,) = ctx.saved_tensors
        ctx.use.collect(row_gradient(ids, grad_y, ctx.height) if ctx.use.wanted() else None)
        return None, None, None, None
