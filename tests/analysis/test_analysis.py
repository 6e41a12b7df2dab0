"""Analysis: shares of tensors, and the layers and kinds that their names tell."""

import pytest
from models import build, train

from sparsify import SparseDelta, SparsifyError, sparsify, summary
from sparsify.analysis import places, shares


@pytest.mark.parametrize(
    ("names", "kinds"),
    [
        (["bert.layer.3.dense.bias", "bert.pooler.weight", "head.w"], ["dense.bias", "pooler.weight", "head.w"]),
        (["shared.w", "encoder.b.0.l.1.w", "decoder.b.0.l.1.w"], ["shared.w", "encoder.b.l.1.w", "decoder.b.l.1.w"]),
        (["m.encoder.l.0.b", "m.decoder.l.0.b", "m.encoder.norm.b"], ["encoder.l.b", "decoder.l.b", "encoder.norm.b"]),
        (["layers.0.experts.7.w1.weight", "layers.0.experts.w1"], ["experts.*.w1.weight", "experts.w1"]),
        (["layers.0.other_experts.7.weight"], ["other_experts.7.weight"]),
        (["0.weight", "body.0.weight"], ["weight", "body.weight"]),
        (["prompts.0", "prompts.1"], ["prompts", "prompts"]),
        (["0"], ["0"]),
        (["weight", "layer1.weight"], ["weight", "layer1.weight"]),
    ],
)
def test_kinds_of_other_architectures(names, kinds):
    assert [kind for _, kind in places(names).values()] == kinds


def test_a_row_is_what_the_summary_counts_and_a_delta_has_those_of_its_tensors():
    model, batches = build("bert")
    train(sparsify(model, 1_000, "random", steps=8), batches[:8])
    found, rows = summary(model), shares(model)
    assert {row.name: row.unmasked for row in rows} == found.counts
    assert {row.name: row.size for row in rows} == found.sizes
    in_delta = {row.name: row for row in shares(SparseDelta.from_model(model))}
    assert in_delta == {row.name: row for row in rows if row.unmasked}


def test_what_has_no_shares_says_why():
    with pytest.raises(SparsifyError, match=r"expected a torch\.nn\.Module, got NoneType"):
        shares(None)
