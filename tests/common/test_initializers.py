"""Initial values that can be drawn again, and recognising an initialiser by what it left."""

import math

import pytest
import torch
from torch import nn

from sparsify.common.initializers import MAX_SEED, InitializerRecipe, recognise
from sparsify.errors import SparsifyError

SCALES = (0.02, 1.0, 1 / 24)


def test_golden_values():
    """Bit for bit what they were when files were first written."""
    assert InitializerRecipe("uniform", 1.0, 7).values("w", (4,), torch.float32).tolist() == [
        0.9116402268409729, 0.7215184569358826, -0.7385434508323669, 0.363336980342865,
    ]  # fmt: skip
    assert InitializerRecipe("normal", 1.0, 7).values("w", (3,), torch.float32).tolist() == [
        0.2730712890625, 1.6658782958984375, -0.4732208251953125,
    ]  # fmt: skip
    assert InitializerRecipe("constant", 0.5, 7).values("w", (2,), torch.bfloat16).tolist() == [0.5, 0.5]


def test_a_tensor_of_any_size_is_drawn_in_pieces_as_in_one(monkeypatch):
    for distribution in ("uniform", "normal"):
        whole = InitializerRecipe(distribution, 0.1).values("w", (1000,), torch.float32)
        monkeypatch.setattr("sparsify.common.initializers._CHUNK", 96)
        assert torch.equal(InitializerRecipe(distribution, 0.1).values("w", (1000,), torch.float32), whole)
        monkeypatch.undo()


def test_name_and_seed_give_other_numbers_and_the_shape_does_not():
    def first(seed, name, shape=(4, 5)):
        return InitializerRecipe("uniform", 1.0, seed).values(name, shape, torch.float64).flatten()

    assert not torch.equal(first(0, "a"), first(1, "a"))
    assert not torch.equal(first(0, "a"), first(0, "b"))
    assert torch.equal(first(0, "a"), first(0, "a", (20,)))
    assert torch.equal(first(0, "a")[:3], first(0, "a", (3,)))


def test_the_distributions_are_what_they_are_called():
    uniform = InitializerRecipe("uniform", 0.25, 3).values("w", (400, 500), torch.float64)
    assert -0.25 < uniform.min() < -0.2499
    assert 0.2499 < uniform.max() < 0.25
    assert uniform.mean().abs() < 0.001
    assert uniform.std().item() == pytest.approx(0.25 / 3**0.5, rel=0.01)
    normal = InitializerRecipe("normal", 2.0, 3).values("w", (400, 500), torch.float64)
    assert normal.mean().abs() < 0.02
    assert normal.std().item() == pytest.approx(2, rel=0.01)
    within = [(normal.abs() < 2 * k).double().mean().item() for k in (1, 2, 3)]
    assert within == pytest.approx([0.683, 0.954, 0.997], abs=0.01)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_short_dtype_gets_the_float32_value_rounded(dtype):
    draw = InitializerRecipe("normal", 0.02, 1)
    assert torch.equal(draw.values("w", (99,), dtype), draw.values("w", (99,), torch.float32).to(dtype))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("cauchy", 1.0, 0), "distribution is 'cauchy', expected one of constant, uniform, normal"),
        (("normal", math.inf, 0), "scale is inf, expected a finite number"),
        (("normal", 10**400, 0), "scale is 1000000"),
        (("normal", math.nan, 0), "scale is nan, expected a finite number"),
        (("normal", True, 0), "scale is True, expected a finite number"),
        (("normal", "1", 0), "scale is '1', expected a finite number"),
        (("normal", 1.0, -1), "seed is -1, expected an integer from 0"),
        (("normal", 1.0, MAX_SEED + 1), "expected an integer from 0 to 2"),
        (("normal", 1.0, True), "seed is True, expected an integer"),
    ],
)
def test_what_is_no_draw_is_refused(settings, message):
    with pytest.raises(SparsifyError, match=message):
        InitializerRecipe(*settings)


def initialised(how, shape=(24, 384)):
    torch.manual_seed(0)
    tensor = torch.empty(shape)
    how(tensor)
    return tensor


@pytest.mark.parametrize(
    ("how", "draw"),
    [
        (nn.init.zeros_, InitializerRecipe("constant", 0.0, 5)),
        (nn.init.ones_, InitializerRecipe("constant", 1.0, 5)),
        (lambda tensor: nn.init.kaiming_uniform_(tensor, a=math.sqrt(5)), InitializerRecipe("uniform", 384**-0.5, 5)),
        (lambda tensor: nn.init.normal_(tensor, std=0.02), InitializerRecipe("normal", 0.02, 5)),
        (nn.init.normal_, InitializerRecipe("normal", 1.0, 5)),
        (lambda tensor: nn.init.normal_(tensor, std=1 / 24), InitializerRecipe("normal", 1 / 24, 5)),
    ],
    ids=["zeros", "ones", "linear", "bert", "embedding", "gaussian lora"],
)
def test_a_known_initialiser_is_recognised_and_its_redraw_again(how, draw):
    assert recognise(initialised(how), SCALES, 5) == draw
    assert recognise(draw.values("w", (24, 384), torch.float32), SCALES, 5) == draw


@pytest.mark.parametrize(
    "how",
    [
        lambda tensor: nn.init.normal_(tensor, std=0.03),
        lambda tensor: nn.init.normal_(tensor, mean=0.01, std=0.02),
        lambda tensor: nn.init.uniform_(tensor, -0.02 * 3**0.5, 0.02 * 3**0.5),
        lambda tensor: nn.init.kaiming_uniform_(tensor),
        lambda tensor: nn.init.kaiming_uniform_(tensor, a=math.sqrt(5)).add_(torch.randn(24, 384), alpha=2e-3),
        lambda tensor: nn.init.zeros_(tensor).view(-1)[:5].fill_(0.001),
        lambda tensor: nn.init.zeros_(tensor).fill_(math.nan),
        lambda tensor: nn.init.zeros_(tensor).fill_(math.inf),
    ],
    ids=["std", "mean", "uniform std", "bound", "trained", "few entries", "nan", "inf"],
)
def test_anything_else_is_not(how):
    assert recognise(initialised(how), SCALES, 5) is None


def test_a_few_numbers_are_not_told_apart():
    assert recognise(initialised(lambda tensor: nn.init.normal_(tensor, std=0.02), (5, 5)), SCALES, 5) is None
    assert recognise(torch.tensor(3.0), SCALES, 5) == InitializerRecipe("constant", 3.0, 5)
