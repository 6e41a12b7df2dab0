"""Raw bits of tensors: hash and compare them, for any dtype and strides."""

import hashlib

import torch
from torch import Tensor

ROW, AT_ONCE = 1 << 12, 1 << 20  # words of 4 bytes: of a row, and that are hashed together
ODD = torch.randint(-(1 << 62), 1 << 62, (ROW,), generator=torch.Generator().manual_seed(0), device="cpu") * 2 + 1


def as_bits(values: Tensor) -> Tensor:
    """Views a tensor as integers, which are equal where the bits are, NaN and -0.0 included."""
    values = torch.view_as_real(values) if values.element_size() == 16 else values  # complex128
    return values.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()])


def digest(values: Tensor) -> str:
    """SHA-256, in hex, of a tensor's values, by their bytes in memory."""
    as_bytes = values.detach().cpu().reshape(-1).contiguous().view(torch.uint8)
    sha256 = hashlib.sha256()
    for part in as_bytes.split(1 << 24):
        sha256.update(part.clone().numpy().data)  # numpy() would keep the tensor's own storage from being resized
    return sha256.hexdigest()


def fingerprint(values: Tensor) -> str:
    """A hash of a tensor's values, to be compared in one process: faster than :func:`digest`, and where the tensor is.

    Of each row of words it is the sum of all, each times a random odd number, modulo 2**64: another where one word is,
    and but for one case in 2**32 where several are. (Of words of 8 bytes, pairs that differ in the sign would cancel.)
    """
    as_bytes = values.detach().reshape(-1).contiguous().view(torch.uint8)
    as_bytes = as_bytes.clone() if as_bytes.storage_offset() % 4 else as_bytes  # words begin at words
    words, rest = as_bytes[: as_bytes.numel() // 4 * 4], as_bytes[as_bytes.numel() // 4 * 4 :]
    odd, sums = ODD.to(values.device), [rest.long()]
    for part in words.view(torch.int32).split(AT_ONCE):
        rows = part[: part.numel() // ROW * ROW]
        sums.append((rows.view(-1, ROW) * odd).sum(1))
        sums.append((part[rows.numel() :] * odd[: part.numel() - rows.numel()]).sum(0, keepdim=True))
    return hashlib.sha256(f"{as_bytes.numel()}:".encode() + torch.cat(sums).cpu().numpy().tobytes()).hexdigest()


def same_values(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors are equal in dtype, shape and every bit, NaN and -0.0 included."""
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    return torch.equal(as_bits(left.detach()), as_bits(right.detach().to(left.device)))


def checksum(ids: Tensor, first: int = 0) -> Tensor:
    """A number () int64 of ids (n,) in slots from ``first`` on, to be added to that before; an average's is another."""
    slots = torch.arange(first + 1, first + 1 + ids.numel(), device=ids.device)
    return (ids * ids * slots).sum()
