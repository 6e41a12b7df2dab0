"""Lists of parameters, which are never called: each read of a masked one is a tap."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sparsify.core.module import MaskedModule


class MaskedParameterList(MaskedModule, nn.ParameterList):
    """An ``nn.ParameterList`` whose slices hold taps; a plain one would make new, detached parameters of them."""

    plain_class = nn.ParameterList

    def __setitem__(self, idx: int, param: Any) -> None:
        if isinstance(param, Tensor) and (not param.is_leaf or torch.compiler.is_dynamo_compiling()):
            self._parameters[self._get_abs_string_index(idx)] = param  # type: ignore[assignment]
        else:
            super().__setitem__(idx, param)
