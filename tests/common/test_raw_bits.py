"""Hashes of values, for a file and within a process."""

import pytest
import torch

from sparsify.common.raw_bits import ROW, fingerprint

LONG = torch.arange(5 * ROW + 3, dtype=torch.int32)


@pytest.mark.parametrize("at", [0, 1, ROW, 3 * ROW - 1, -3, -1])
@pytest.mark.parametrize("bit", [0, 15, 31])
def test_a_fingerprint_is_another_where_a_single_bit_is(at, bit):
    changed = LONG.clone()
    changed[at] ^= torch.tensor(1 << bit).int() if bit < 31 else torch.tensor(-(2**31)).int()
    assert fingerprint(changed) != fingerprint(LONG)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("number", [1, 2, 2 * ROW])
def test_a_fingerprint_is_another_where_only_signs_are(dtype, number):
    values = torch.arange(1, 4 * ROW + 4).to(dtype)
    changed = values.clone()
    changed[1 : 2 * number : 2] *= -1  # the sign of every second float32 is the highest bit of 8 bytes
    assert fingerprint(changed) != fingerprint(values)
    assert fingerprint(-values) != fingerprint(values)
    assert fingerprint(torch.zeros(number, dtype=dtype)) != fingerprint(-torch.zeros(number, dtype=dtype))


def test_a_fingerprint_is_of_values_in_their_order_and_of_nothing_else():
    values = torch.randn(70, 130)
    assert fingerprint(values.t().contiguous().t()) == fingerprint(values)
    assert fingerprint(values.view(torch.int32)) == fingerprint(values)
    assert fingerprint(values.flip(0)) != fingerprint(values)
    padded = torch.cat([values, torch.zeros(1, 130)])
    assert fingerprint(padded) != fingerprint(values)
    assert fingerprint(padded[:70]) == fingerprint(values)


@pytest.mark.parametrize("number", [0, 1, 3, 7, 8])
@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float64])
def test_a_fingerprint_takes_any_number_of_bytes(number, dtype):
    values = torch.ones(number + 1, dtype=dtype)[1:]  # not at a word's place in memory
    assert fingerprint(values) == fingerprint(values.clone())
    assert fingerprint(values) != fingerprint(torch.ones(number + 1, dtype=dtype))
