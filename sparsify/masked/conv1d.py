"""GPT-2's linear layer, transformers' Conv1D, with its weight (in, out); imported only where a model has one."""

from transformers.pytorch_utils import Conv1D

from sparsify.core.layers import MaskedLinearModule


class MaskedConv1D(MaskedLinearModule, Conv1D):
    """A transformers ``Conv1D`` whose frozen weight and bias are trained at their unmasked entries."""

    transposed = True
