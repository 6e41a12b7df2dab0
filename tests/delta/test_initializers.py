"""Initial values that are generated again from a recipe, to the bit."""

import math

import pytest
import torch

from sparsify.delta.entries import MAX_SEED, InitializerRecipe
from sparsify.errors import SparsifyError


def test_golden_values():
    """Equal to the bit to those of the first files."""
    assert InitializerRecipe("uniform", 1.0, 7).values("w", (4,), torch.float32).tolist() == [
        0.9116402268409729, 0.7215184569358826, -0.7385434508323669, 0.363336980342865,
    ]  # fmt: skip
    assert InitializerRecipe("normal", 1.0, 7).values("w", (3,), torch.float32).tolist() == [
        0.2730712890625, 1.6658782958984375, -0.4732208251953125,
    ]  # fmt: skip
    assert InitializerRecipe("constant", 0.5, 7).values("w", (2,), torch.bfloat16).tolist() == [0.5, 0.5]


def test_values_are_independent_of_chunks(monkeypatch):
    for distribution in ("uniform", "normal"):
        whole = InitializerRecipe(distribution, 0.1).values("w", (1000,), torch.float32)
        monkeypatch.setattr("sparsify.delta.entries._DRAWN_AT_ONCE", 96)
        assert torch.equal(InitializerRecipe(distribution, 0.1).values("w", (1000,), torch.float32), whole)
        monkeypatch.undo()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("cauchy", 1.0, 0), "distribution is 'cauchy', expected one of constant, uniform, normal"),
        (("normal", math.inf, 0), "scale is inf, expected a finite number"),
        (("normal", True, 0), "scale is True, expected a finite number"),
        (("normal", "1", 0), "scale is '1', expected a finite number"),
        (("normal", 1.0, MAX_SEED + 1), "expected an integer from 0 to 2"),
        (("normal", 1.0, True), "seed is True, expected an integer"),
    ],
)
def test_a_bad_recipe_is_refused(settings, message):
    with pytest.raises(SparsifyError, match=message):
        InitializerRecipe(*settings)
