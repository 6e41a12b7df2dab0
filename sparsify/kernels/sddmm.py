"""Single entries of a product left^T right: sampled dense-dense matrix multiplication (SDDMM), k dot products.

Shapes and dtype alone decide whether that costs less than the dense product, in whose entries costs are counted. A
CPU's were measured once, with 1024 tokens; a GPU's on an H100 in bfloat16, with 4096 tokens: there a dense product in
matrix units costs less than the transposed factors of most layers. Without the units it takes 14 times as long.
"""

import warnings
from functools import cache

import torch
from torch import Tensor

from sparsify.core.devices import runs_ahead
from sparsify.kernels import has_triton

SHORT = (torch.float32, torch.bfloat16, torch.float16)  # dtypes of the Triton form
TOKENS_AT_ONCE = 256  # rows of the factors that are transposed together on a CPU
ENTRY = 70  # cost of a dot product on a CPU
# of a byte that a GPU moves for each token, to transpose a factor or for an entry, with matrix units and without
MOVED = {True: (960, 110), False: (70, 8)}


def sampling_pays(left: Tensor, right: Tensor, number: int) -> bool:
    """Whether computing so many entries of left^T right costs no more than the dense product."""
    rows, cols = left.shape[1], right.shape[1]
    cost = number * ENTRY
    if runs_ahead(left.device):
        if left.dtype not in SHORT or not has_triton(left.device):
            return False
        tf32 = torch.backends.cuda.matmul  # whose older getters raise where the newer switch, of torch 2.9, was used
        rounds = tf32.fp32_precision == "tf32" if hasattr(torch.backends, "fp32_precision") else tf32.allow_tf32
        in_units = left.dtype.itemsize == 2 or rounds
        transposed, read = MOVED[in_units]
        # the factors are read and written to be transposed, then both are read for each entry
        cost = 2 * ((rows + cols) * transposed + number * read) * left.dtype.itemsize if number else 0
    return cost <= rows * cols


def sddmm(left: Tensor, right: Tensor, indices: Tensor) -> Tensor:
    """Computes entries (k,) of left^T right, (n, rows) and (n, cols), at flat indices (k,), in float32 or float64."""
    short = left.dtype in SHORT and right.dtype in SHORT
    if short and runs_ahead(left.device) and has_triton(left.device) and left.shape[0] and indices.numel():
        from sparsify.kernels.triton import sddmm as fused

        return fused(left, right, indices)
    return plain_sddmm(left, right, indices)


def plain_sddmm(left: Tensor, right: Tensor, indices: Tensor) -> Tensor:
    """The plain torch form of :func:`sddmm`: torch's sampled product, of some tokens after the others."""
    (rows, cols), dtype = (left.shape[1], right.shape[1]), torch.promote_types(left.dtype, torch.float32)
    ordered, places = indices.unique(return_inverse=True)
    starts = torch.searchsorted(ordered, torch.arange(0, (rows + 1) * cols, max(1, cols), device=ordered.device))
    _pass_over_beta_warning()
    total = torch.zeros(ordered.numel(), dtype=dtype, device=left.device)
    total = torch.sparse_csr_tensor(starts, ordered % cols, total, (rows, cols), check_invariants=False)
    for some_left, some_right in zip(left.split(TOKENS_AT_ONCE), right.split(TOKENS_AT_ONCE), strict=True):
        total = torch.sparse.sampled_addmm(total, some_left.t().to(dtype), some_right.to(dtype))
    return total.values()[places]


@cache  # to change the filters of warnings each time would show other, repeated ones again
def _pass_over_beta_warning() -> None:
    """Makes torch give its only warning, that compressed rows are in beta state, where it is not shown."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.eye(1, device="cpu").to_sparse_csr()
