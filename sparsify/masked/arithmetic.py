"""The arithmetic of the masked layers, whoever runs it: autograd's nodes in eager mode, or the compiled operators."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn import functional as F

from sparsify.common.devices import runs_ahead
from sparsify.common.ranks import num_ranks
from sparsify.masked.product import Product
from sparsify.masked.tensor import Gradient, as_matrix, sum_rows


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """The plain layer's own arithmetic, bit for bit: ``nn.Linear``'s, or that of transformers' Conv1D."""
    if not transposed:
        return F.linear(x, weight, bias)
    assert bias is not None
    rows = torch.addmm(bias, x.view(-1, x.shape[-1]), weight)
    return rows.view(*x.shape[:-1], weight.shape[1])


def linear_gradient(x: Tensor, grad_rows: Tensor, transposed: bool) -> Product:
    """The gradient of a linear layer's weight for inputs (..., in) and output gradients (n, out)."""
    rows = x.reshape(-1, x.shape[-1])  # (n, in)
    return Product(rows, grad_rows) if transposed else Product(grad_rows, rows)


def row_gradient(ids: Tensor, grad: Tensor, padding_idx: int | None) -> Gradient:
    """The gradient of an embedding's table for ids (...) and output gradients (..., dim)."""
    rows, values = ids.reshape(-1).long(), grad.reshape(-1, grad.shape[-1])
    padded = runs_ahead(rows.device) and num_ranks() == 1  # ranks exchange rows, each once
    if padding_idx is None:
        return sum_rows(rows, values, padded=padded)
    if padded:  # how many rows are left is not for the host to know either
        gradient = sum_rows(rows, values, padded=True)
        assert gradient.rows is not None
        gradient.values.masked_fill_((gradient.rows == padding_idx)[:, None], 0)
        return gradient
    used = rows != padding_idx
    return sum_rows(rows[used], values[used])


def tap_gradient(grad: Tensor) -> Gradient:
    """The gradient of a parameter of any shape, as its module's own autograd computes it."""
    if grad.is_sparse:  # an embedding's, where the user asked for it
        return row_gradient(grad._indices()[0], grad._values(), None)
    return Gradient(as_matrix(grad), owned=False)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast would compute in, ``None`` where it is off or leaves ``x`` alone."""
    device = x.device.type
    if not torch.is_autocast_enabled(device) or not x.is_floating_point() or x.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(device)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Arithmetic in the dtypes of its operands; entering autocast's own context takes longer, and it is seldom on."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()
