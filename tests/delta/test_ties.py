"""TIES and DARE against PEFT's functions for dense task vectors."""

import pytest
import torch
from deltas import fine_tuned, make_base, task
from peft.utils.merge_utils import ties

from sparsify import SparseDelta, SparsifyError, merge_deltas

WEIGHTS = [1.0, 0.5, 2.0]


@pytest.fixture
def base():
    return make_base(torch.float64)


@pytest.mark.parametrize("sign", ["total", "frequency"])
@pytest.mark.parametrize(("share", "density"), [(0.5, 1.0), (1.1, 0.4)])
def test_ties_is_that_of_peft(base, sign, share, density):
    tuned = [fine_tuned(base, seed, share) for seed in range(3)]
    deltas = [SparseDelta.diff(base, model, progress=False) for model in tuned]
    merged = merge_deltas(deltas, WEIGHTS, density=density, majority_sign_method=sign)
    with merged.applied(base):
        found = {name: parameter.detach().clone() for name, parameter in base.named_parameters()}
    for name, parameter in base.named_parameters():
        changes = [dict(model.named_parameters())[name].detach() - parameter.detach() for model in tuned]
        if int(density * parameter.numel()) == round(density * parameter.numel()):
            expected = parameter + ties(changes, torch.tensor(WEIGHTS).double(), density, sign)
            torch.testing.assert_close(found[name], expected.detach())


@pytest.mark.parametrize("method", ["dare_linear", "dare_ties"])
def test_dare_drops_a_share_and_scales_the_others_up(base, method):
    delta = SparseDelta.diff(base, fine_tuned(base, 1, share=1.1), progress=False)
    merged = [merge_deltas([delta], method=method, density=0.5, seed=seed).on(base, "add") for seed in (0, 0, 1)]
    assert merged[0] == merged[1] != merged[2]
    assert 0.2 < merged[0].num_entries / delta.num_entries < 0.8
    for name, part in merged[0].tensors.items():
        change = (delta.tensors[name].values - dict(base.named_parameters())[name].detach().flatten())[part.indices]
        torch.testing.assert_close(part.values, change * 2)


def test_what_cannot_be_merged_is_refused_and_a_merge_is_no_term(base):
    a, b = task(base, 1), task(base, 2)
    for options, problem in [
        ({"method": "tie"}, "method is 'tie', expected one of ties, dare_ties, dare_linear"),
        ({"density": 0.0}, "density is 0.0, expected a share"),
        ({"majority_sign_method": "most"}, "majority_sign_method is 'most'"),
        ({"weights": [1.0]}, r"weights \[1.0\], expected a weight for each of 2 deltas"),
    ]:
        with pytest.raises(SparsifyError, match=problem):
            merge_deltas([a, b], **options)
    with pytest.raises(SparsifyError, match=r"a DeltaMerge is no plain sum: evaluate it first, `.on\(base\)`"):
        merge_deltas([a, b]) + a
    a.whole["head"] = torch.ones(2)
    assert merge_deltas([a, b]).entries_only().on(base) == merge_deltas([a.entries_only(), b]).on(base)
