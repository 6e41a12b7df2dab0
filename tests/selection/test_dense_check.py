"""The dense form of a step's selection agrees with the library's own, and raises where it does not."""

import pytest
import torch
from models import build, descend, loss_of
from torch import nn

from sparsify import SparsifyError, get_unmasker, sparsify
from sparsify.selection import screening
from sparsify.selection.topk import TopK, Winners
from sparsify.strategies.importance import D3, SNIP, Fisher, register_importance
from sparsify.strategies.strategy import Increment, Repeat, Strategy


@register_importance("against the weight")
def against_the_weight(weight, grad):
    return -weight * grad


pytestmark = pytest.mark.usefixtures("screened")


def checked(name, strategy="id3", dtype=torch.float32, **options):
    model, batches = build(name, dtype=dtype)
    sparsify(model, 60, strategy, steps=6, **options)
    get_unmasker(model).check = True
    return model, batches


def train(model, batches, micro_batches=1):
    optimizer = torch.optim.AdamW([model.sparse_values], lr=1e-3)
    for step in range(6):
        optimizer.zero_grad()
        for batch in batches[step : step + micro_batches]:
            loss_of(model, batch).backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("name", "dtype", "micro_batches"),
    [
        ("mlp", torch.float32, 1), ("bert", torch.float32, 1), ("gpt2", torch.float32, 1), ("mlp", torch.float64, 1),
        ("mlp", torch.bfloat16, 1), ("bert", torch.float32, 2),
    ],
)  # fmt: skip
def test_real_steps_agree_in_any_dtype_and_with_accumulated_gradients(name, dtype, micro_batches):
    model, batches = checked(name, dtype=dtype)
    train(model, batches, micro_batches)
    assert get_unmasker(model).unmasked == 60
    assert (get_unmasker(model).work.screened > 0) == (dtype != torch.float64), "screening was checked too"


@pytest.mark.parametrize(
    "importance", [D3(exp=0), D3(exp=-1), SNIP(), Fisher(), against_the_weight], ids=lambda importance: importance.name
)
@pytest.mark.parametrize("selection", [Increment(), Repeat()], ids=lambda selection: selection.name)
def test_any_importance_and_selection_agree(importance, selection):
    train(*checked("mlp", Strategy(importance, selection)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_of_which_single_entries_are_computed_agree(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(200, 300, bias=False), nn.GELU(), nn.Linear(300, 200, bias=False)).to(dtype)
    model[2].weight.data *= 3
    sparsify(model, 40, steps=4)
    get_unmasker(model).check = True
    descend(model, 2 * torch.randn(4, 500, 200, dtype=dtype))
    assert 0 < get_unmasker(model).work.verified < 200 * 300 / 70


class OwnLinear(nn.Linear):
    """Not a masked layer but a module of the generic form, whose gradient is not rounded to its dtype once more."""


class TiedTable(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.own = nn.Embedding(300, 100), OwnLinear(100, 100)
        self.head = nn.Linear(100, 300, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        x = self.table(ids)
        return self.head(x + self.own(x))


@pytest.mark.parametrize(("tied", "seed"), [(False, 0), (False, 1), (True, 7)])
def test_gradients_that_are_rounded_and_others_agree_where_they_meet_near_the_cut(monkeypatch, tied, seed):
    monkeypatch.setattr("sparsify.selection.screening.can_screen", lambda *_: False)
    monkeypatch.setattr("sparsify.selection.small_tensors.LARGEST", 1 << 14)
    torch.manual_seed(seed)
    if tied:
        model, batch = TiedTable(), torch.randint(300, (6, 9))
    else:
        model = nn.Sequential(nn.Linear(150, 150), OwnLinear(150, 150), nn.Linear(150, 150))
        batch = torch.randn(30, 150).bfloat16()
    sparsify(model.bfloat16(), 9000, steps=3)
    get_unmasker(model).check = True
    descend(model, [batch] * 3)


def test_an_overflow_is_no_difference():
    model, batches = checked("mlp")
    (loss_of(model, batches[0]) * torch.inf).backward()
    assert model.sparse_values.grad.isnan().all()
    assert get_unmasker(model).unmasked == 0


def changed(function, change):
    """A function whose result is changed on its way."""

    def call(*args, **options):
        found = function(*args, **options)
        return None if found is None else change(found)

    return call


def without_candidates(found):
    return found._replace(indices=found.indices[:0], values=found.values[:0], most=found.most[:0])


@pytest.mark.parametrize(
    ("name", "owner", "function", "change", "message"),
    [
        ("mlp", screening, "screen", without_candidates, r"entry [\d,]+ of `.*weight` was not unmasked"),
        ("bert", screening, "screen", lambda found: found._replace(most=found.most * 0.5), "was not unmasked; by the"),
        ("mlp", screening, "sddmm", lambda values: values * 1.001, "was unmasked with a score of"),
        ("mlp", TopK, "winners", lambda found: Winners(found.ids[:-1], found.grads[:-1]), "was not unmasked"),
    ],
    ids=["no candidates", "half the bound", "other gradients", "too few winners"],
)
def test_a_fault_is_caught(monkeypatch, name, owner, function, change, message):
    monkeypatch.setattr(owner, function, changed(getattr(owner, function), change))
    if function == "sddmm":  # which computes the values where these were rounded
        monkeypatch.setattr(screening, "screen", changed(screening.screen, lambda found: found._replace(rounded=True)))
    with pytest.raises(SparsifyError, match=message):
        train(*checked(name))


def test_an_entry_that_was_no_candidate_is_caught(monkeypatch):
    def with_one_again(found):
        tensor = get_unmasker(model).tensors[0]
        return Winners(torch.cat([found.ids[:-1], tensor.indices[:1]]), found.grads) if tensor.count else found

    model, batches = checked("mlp", Strategy(D3(exp=0), Increment()))
    monkeypatch.setattr(TopK, "winners", changed(TopK.winners, with_one_again))
    with pytest.raises(SparsifyError, match=r"was unmasked with a score of .*; by the dense form its score is 0,"):
        train(model, batches)


def test_a_failed_check_leaves_the_model_as_it_was(monkeypatch):
    model, batches = checked("mlp")
    with monkeypatch.context() as patch:
        patch.setattr(screening, "screen", changed(screening.screen, without_candidates))
        with pytest.raises(SparsifyError, match="was not unmasked"):
            loss_of(model, batches[0]).backward()
    assert get_unmasker(model).unmasked == 0
    train(model, batches)
    assert get_unmasker(model).unmasked == 60
