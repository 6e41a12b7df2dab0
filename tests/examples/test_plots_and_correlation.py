"""examples/analysis: pictures of a selection, and the rank correlation of two fine-tunings' changes."""

import copy
import math

import matplotlib
import numpy
import pytest
import torch
from deltas import unchanged
from models import build, train
from scipy.stats import spearmanr
from torch import nn
from torch.nn.utils import parameters_to_vector

from examples.analysis import change_correlation, plot_shares, plot_trajectory, trajectory
from examples.analysis.plots import NONE_COLOR, tables
from sparsify import BaseMismatchError, SparseDelta, SparsifyError, desparsify, sparsify
from sparsify.analysis import shares
from sparsify.delta.entries import TensorDelta

STEPS, BUDGET = 12, 60


@pytest.fixture(autouse=True)
def pictures_go_nowhere():
    matplotlib.use("Agg")
    yield
    matplotlib.pyplot.close("all")


def trained(name="mlp", strategy="id3", budget=BUDGET, **settings):
    model, batches = build(name)
    base = copy.deepcopy(model)
    sparsify(model, None if strategy in ("full", "bitfit") else budget, strategy, steps=STEPS, **settings)
    return train(model, batches), base


def test_the_curves_are_the_trajectory_from_the_first_unmasked_entry_on():
    models = {"id3": trained()[0], "pafi": trained(strategy="pafi")[0]}
    entropy, sparsity = plot_trajectory(models).axes
    points = trajectory(models["id3"])[1:]
    assert entropy.lines[0].get_xydata().tolist() == [[p.step, p.selection_entropy] for p in points]
    assert sparsity.lines[0].get_xydata().tolist() == [[p.step, 100 * p.tensor_sparsity] for p in points]
    assert [text.get_text() for text in sparsity.get_legend().get_texts()] == ["id3", "pafi"]
    assert len({(line.get_color(), line.get_linestyle()) for line in entropy.lines}) == 2


def test_every_tensor_is_a_cell():
    model, _ = trained("bert")
    figure = plot_shares(model)
    [panel] = figure.axes
    [mesh] = panel.collections
    kinds = [label.get_text() for label in panel.get_yticklabels()]
    cells, least = numpy.ma.ndenumerate(mesh.get_array()), mesh.norm.vmin
    drawn = {(x, y): float(value) if value >= least else None for (y, x), value in cells}
    places = {(0 if row.layer is None else row.layer + 1, kinds.index(row.kind)): row.share for row in shares(model)}
    assert drawn == {place: share or None for place, share in places.items()}
    assert [label.get_text() for label in panel.get_xticklabels()] == ["none", "0", "1"]
    assert panel.get_title() == f"{BUDGET} unmasked entries"


def test_what_has_nothing_unmasked_is_grey_and_nothing_at_all_is_an_error():
    model, _ = trained("bert", "bitfit")
    [panel] = plot_shares(model).axes
    [mesh], [bar] = panel.collections, panel.child_axes
    num_grey = (mesh.to_rgba(mesh.get_array()) == matplotlib.colors.to_rgba(NONE_COLOR)).all(-1).sum()
    assert 0 < num_grey == sum(row.unmasked == 0 for row in shares(model))
    assert bar.get_ylabel() == "unmasked share (grey: none)"
    with pytest.raises(SparsifyError, match="there is nothing to draw: no tensor has entries"):
        plot_shares(SparseDelta({}))


@pytest.mark.parametrize(("among", "magnitude"), [("either", False), ("both", True)])
@pytest.mark.parametrize("other", ["random", "full"])
def test_it_is_spearmans_coefficient_of_the_dense_changes(other, among, magnitude):
    (a, base), (b, _) = trained("bert"), trained("bert", other, budget=3_000)
    with unchanged(base):
        found = change_correlation(a, b, base, among=among, magnitude=magnitude)
    plain = [desparsify(copy.deepcopy(a)), copy.deepcopy(b) if other == "full" else desparsify(copy.deepcopy(b))]
    before, *after = (parameters_to_vector(model.parameters()).detach() for model in (base, *plain))
    x, y = (tuned - before for tuned in after)
    keep = (x != 0) | (y != 0) if among == "either" else (x != 0) & (y != 0)
    x, y = (x.abs(), y.abs()) if magnitude else (x, y)
    assert found.num_entries == int(keep.sum()) > 2
    assert found.overall == pytest.approx(spearmanr(x[keep], y[keep]).statistic)
    assert change_correlation(SparseDelta.from_model(a), plain[1], base, among=among, magnitude=magnitude) == found


def test_what_one_side_trained_whole_is_left_out():
    (a, base), (b, _) = trained("bert", modules_to_save=["classifier"]), trained("bert", "full")
    expected = [name for name in change_correlation(b, b, base).by_tensor if not name.startswith("classifier")]
    assert list(change_correlation(a, b, base).by_tensor) == expected


def test_equal_changes_have_no_correlation_and_other_sources_say_why():
    base = nn.Linear(3, 2)
    tuned = copy.deepcopy(base)
    with torch.no_grad():
        tuned.weight.copy_(torch.arange(6.0).view(2, 3) + base.weight)
        tuned.bias[0] += 1
    found = change_correlation(tuned, tuned, base)
    assert found.by_tensor["weight"] == pytest.approx(1)
    assert math.isnan(found.by_tensor["bias"])
    delta = SparseDelta.diff(base, tuned, progress=False)
    with pytest.raises(BaseMismatchError, match="does not hold the values that the delta was trained on"):
        change_correlation(delta, delta, tuned)
    with pytest.raises(SparsifyError, match="either of a and b changed 0 entries"):
        change_correlation(SparseDelta({}), SparseDelta({}), base)
    with pytest.raises(SparsifyError, match="among='all'; expected one of 'either', 'both'"):
        change_correlation(tuned, tuned, base, among="all")


def test_several_sources_are_sorted_by_all_their_names():
    part = TensorDelta(torch.tensor([0, 2]), torch.tensor([1.0, 2.0]), (2, 3), torch.float32, "add", "0" * 64)
    encoder, decoder = SparseDelta({"encoder.block.0.weight": part}), SparseDelta({"decoder.block.0.weight": part})
    found = tables({"one": encoder, "other": decoder})
    assert [row.kind for rows in found.values() for row in rows] == ["encoder.block.weight", "decoder.block.weight"]
