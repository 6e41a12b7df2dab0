"""GPT-2's linear layer, transformers' Conv1D, with its weight (in, out); imported only where a model has one."""

from torch import Tensor
from transformers.pytorch_utils import Conv1D

from sparsify.core.layers import masked_linear
from sparsify.core.module import MaskedModule


class MaskedConv1D(MaskedModule, Conv1D):
    """A transformers ``Conv1D`` whose frozen weight and bias are trained at their unmasked entries."""

    plain_class = Conv1D

    def forward(self, x: Tensor) -> Tensor:
        """Returns the plain layer's output (..., out) for x (..., in)."""
        return masked_linear(self, x, transposed=True)
