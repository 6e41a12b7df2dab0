"""A delta is checked against a base in memory or on disk, and nothing is changed."""

import copy

import pytest
import torch
from checkpoints import MODELS, bert, bits, files, gpt2, make_delta, mixtral, save
from requirements import fuses_at_load

from sparsify.delta.patches import CheckReport
from sparsify.errors import BaseMismatchError


@pytest.mark.parametrize("architecture", MODELS)
def test_the_base_fits_in_memory_and_on_disk(tmp_path, architecture):
    model = MODELS[architecture]()
    delta = make_delta(model)
    save(model, tmp_path)
    before = bits(model), files(tmp_path)
    expected = CheckReport(len(delta.tensors), delta.num_entries)
    assert delta.check(model) == delta.check(tmp_path) == delta.check(str(tmp_path)) == expected
    assert (bits(model), files(tmp_path)) == before


@fuses_at_load
@pytest.mark.parametrize("on_disk", [False, True])
def test_another_base_is_named_by_tensor(tmp_path, on_disk):
    model = mixtral()
    delta = make_delta(model)
    other = copy.deepcopy(model)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    with torch.no_grad():
        other.get_parameter(name)[delta.tensors[name].indices[-1] // (48 * 16)] += 1
    base = save(other, tmp_path) if on_disk else other
    with pytest.raises(BaseMismatchError, match=f"tensor `{name}` does not hold the values that the delta was trained"):
        delta.check(base)


def test_another_dtype_cannot_be_checked_and_the_report_says_so(tmp_path):
    model = bert()
    delta = make_delta(model)
    half = copy.deepcopy(model).bfloat16()
    for base in (half, save(half, tmp_path)):
        report = delta.check(base)
        assert report.unchecked == tuple(delta.tensors)
        assert str(report) == (
            f"{delta.num_entries:,} entries in 41 tensors: names and shapes fit; the base has 41 tensors "
            "(`bert.embeddings.word_embeddings.weight`) in another dtype than the delta was trained on, or not "
            "quantized as then, so the values there cannot be checked."
        )


def test_a_head_that_a_checkpoint_lacks_is_reported(tmp_path):
    model = bert()
    delta = make_delta(model.bert)
    delta.whole["classifier.weight"] = torch.zeros(3, 16)
    report = delta.check(save(model.bert, tmp_path))
    assert report.missing == ("classifier.weight",)
    assert str(report).endswith("trained on. 1 tensor stored whole, 1 of them not in the base.")


def test_two_tensors_that_a_checkpoint_ties_are_refused(tmp_path):
    model = gpt2()
    delta = make_delta(model)
    delta.tensors["lm_head.weight"] = delta.tensors["transformer.wte.weight"]
    with pytest.raises(BaseMismatchError, match=r"wte.weight` and `lm_head.weight` are one tensor in this checkpoint"):
        delta.check(save(model, tmp_path))
