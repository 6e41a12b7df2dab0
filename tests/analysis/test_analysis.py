"""Analysis: the trajectory against a record of it, shares, pictures, and the correlation of changes."""

import copy
import math
import warnings
from unittest.mock import Mock

import matplotlib.pyplot
import numpy
import pytest
import torch
from models import ARCHITECTURES, build, loss_of
from quantized_models import quantized_build
from scipy.stats import spearmanr
from sparsify.analysis.plots import NONE_COLOR
from torch import nn

from sparsify import (
    BaseMismatchError,
    Schedule,
    SparseDelta,
    SparsifyError,
    desparsify,
    get_unmasker,
    sparsify,
    summary,
)
from sparsify.analysis import change_correlation, plot_shares, plot_trajectory, shares, trajectory
from sparsify.analysis.shares import places, tables
from sparsify.common.extras import MissingExtraError
from sparsify.delta.entries import TensorDelta

STEPS, BUDGET = 8, 60


@pytest.fixture(autouse=True)
def pictures_go_nowhere():
    matplotlib.use("Agg")
    yield
    matplotlib.pyplot.close("all")


def train(model, batches, steps=STEPS, lr=1e-2, after_step=lambda: None):
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=lr)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, batches[step]).backward()
        optimizer.step()
        after_step()
    return model


def trained(name="mlp", strategy="id3", steps=STEPS, budget=BUDGET, seed=0, **settings):
    """A trained sparsified model and its base."""
    model, batches = build(name, seed=0)
    base = copy.deepcopy(model)
    sparsify(model, None if strategy in ("full", "bitfit") else budget, strategy, steps=STEPS, seed=seed, **settings)
    return train(model, batches, steps), base


def entries(values, indices=(0, 2), shape=(2, 3)):
    """Differences to add to one tensor."""
    return TensorDelta(torch.tensor(indices), torch.tensor(values), shape, torch.float32, "add", "0" * 64)


# ------------------------------------------------------------------------------------ trajectory


def as_numbers(found):
    return (found.step, found.unmasked, found.tensor_sparsity, pytest.approx(found.selection_entropy))


def recorded(model, batches, steps):
    """The summary before training and after each step, recorded during training."""
    record = [summary(model)]
    train(model, batches, steps, after_step=lambda: record.append(summary(model)))
    return [as_numbers(found) for found in record]


def numbers(model, points=100):
    return [(p.step, p.unmasked, p.tensor_sparsity, p.selection_entropy) for p in trajectory(model, points)]


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("strategy", ["id3", "pafi"])
def test_the_trajectory_is_what_the_summary_said_step_by_step(name, strategy):
    model, batches = build(name)
    record = recorded(sparsify(model, BUDGET, strategy, steps=STEPS), batches, STEPS)
    assert numbers(model) == record
    assert len({unmasked for _, unmasked, *_ in record}) == (STEPS + 1 if strategy == "id3" else 1)
    assert len({(row.layer, row.kind) for row in shares(model)}) == len(shares(model)), "no two have one place"


@pytest.mark.parametrize(
    "schedule", ["linear", "cosine", Schedule(every=3), Schedule("cubic", until=0.5), Schedule(every=5, until=0.9)]
)
@pytest.mark.parametrize("steps", [5, STEPS + 3])
def test_it_holds_for_every_schedule_in_mid_run_and_beyond_the_plan(schedule, steps):
    model, batches = build("mlp")
    record = recorded(sparsify(model, BUDGET, steps=STEPS, schedule=schedule), batches, steps)
    loss_of(model, batches[steps]).backward()  # not stepped
    assert numbers(model) == record
    again = sparsify(build("mlp", seed=0)[0], BUDGET, steps=STEPS, schedule=schedule)
    again.load_state_dict(model.state_dict())
    assert numbers(again) == record


def test_what_has_no_trajectory_says_why():
    model, _ = trained()
    for draw in (trajectory, plot_trajectory):
        with pytest.raises(SparsifyError, match=r"expected a sparsified model, got .*plot_shares\(\) show"):
            draw(SparseDelta({}))
    for points in (1, 2.5, True, None):
        with pytest.raises(SparsifyError, match=r"points=.*; expected an int of at least 2"):
            trajectory(model, points)
    get_unmasker(model).steps = None
    with pytest.raises(SparsifyError, match=r"set get_unmasker\(model\).steps to what it was in training"):
        trajectory(model)
    with pytest.raises(SparsifyError, match=r"Repeat\(.*\) selects its entries afresh at each step"):
        trajectory(trained(strategy="d3-repeat", budget=5)[0])
    with pytest.raises(SparsifyError, match="this Linear is not sparsified"):
        trajectory(nn.Linear(2, 2))


def test_points_are_spread_over_the_steps():
    model, _ = trained()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a run that kept to its schedule
        every = numbers(model)
    assert [step for step, *_ in numbers(model, points=5)] == [0, 2, 4, 6, 8]
    assert [step for step, *_ in numbers(model, points=2)] == [0, 8]
    assert all(point in every for point in numbers(model, points=5))


def test_steps_that_could_not_fill_their_quota_are_told():
    embedding = sparsify(nn.Embedding(6, 2), 8, steps=4)
    optimizer = torch.optim.SGD([embedding.sparse_values], lr=0.1)
    for row in (0, 0, 0, 1):  # a single row has two entries with a gradient, enough for the first step only
        optimizer.zero_grad()
        embedding(torch.tensor([row])).square().sum().backward()
        optimizer.step()
    with pytest.warns(
        UserWarning, match=r"been updated 14 times in 4 steps, and the model counts 10: some steps found"
    ):
        found = trajectory(embedding)
    assert (found[-1].step, found[-1].unmasked) == (4, summary(embedding).unmasked)


# ---------------------------------------------------------------------------------------- shares


@pytest.mark.parametrize(
    ("names", "kinds"),
    [
        (
            ["bert.encoder.layer.3.output.dense.bias", "bert.pooler.dense.weight", "classifier.weight"],
            ["output.dense.bias", "pooler.dense.weight", "classifier.weight"],
        ),
        (["encoder.layer.0.q.bias", "embeddings.LayerNorm.bias"], ["q.bias", "embeddings.LayerNorm.bias"]),
        (
            ["shared.weight", "encoder.block.0.layer.1.wi.weight", "decoder.block.0.layer.1.wi.weight"],
            ["shared.weight", "encoder.block.layer.1.wi.weight", "decoder.block.layer.1.wi.weight"],
        ),
        (
            ["model.encoder.layers.0.fc1.bias", "model.decoder.layers.0.fc1.bias", "model.encoder.norm.bias"],
            ["encoder.layers.fc1.bias", "decoder.layers.fc1.bias", "encoder.norm.bias"],
        ),
        (["layers.0.experts.7.w1.weight", "layers.0.experts.w1"], ["experts.*.w1.weight", "experts.w1"]),
        (["layers.0.mlp.experts.expert_12.wi.weight"], ["mlp.experts.*.wi.weight"]),
        (["layers.0.other_experts.7.weight"], ["other_experts.7.weight"]),
        (["0.weight", "2.weight"], ["weight", "weight"]),
        (["0.weight", "body.0.weight"], ["weight", "body.weight"]),
        (["prompts.0", "prompts.1"], ["prompts", "prompts"]),
        (["0"], ["0"]),
        (["weight", "layer1.weight"], ["weight", "layer1.weight"]),
        ([], []),
    ],
)
def test_kinds_of_other_architectures(names, kinds):
    assert [kind for _, kind in places(names).values()] == kinds


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_a_row_is_what_the_summary_counts_and_a_delta_has_those_of_its_tensors(name):
    model, _ = trained(name, "random", budget=1_000)
    found, rows = summary(model), shares(model)
    assert {row.name: row.unmasked for row in rows} == found.counts
    assert {row.name: row.size for row in rows} == found.sizes
    in_delta = {row.name: row for row in shares(SparseDelta.from_model(model))}
    assert in_delta == {row.name: row for row in rows if row.unmasked}


def test_several_sources_are_sorted_by_all_their_names():
    encoder = SparseDelta({"encoder.block.0.weight": entries([1.0, 2.0])})
    decoder = SparseDelta({"decoder.block.0.weight": entries([1.0, 2.0])})
    found = tables({"one": encoder, "other": decoder})
    assert [row.kind for rows in found.values() for row in rows] == ["encoder.block.weight", "decoder.block.weight"]


def test_anything_else_has_no_shares():
    for source, text in ((nn.Linear(2, 2), "not sparsified"), (None, "model or a SparseDelta, got")):
        with pytest.raises(SparsifyError, match=text):
            shares(source)


# -------------------------------------------------------------------------------------- pictures


def test_the_curves_are_the_trajectory_from_the_first_unmasked_entry_on():
    model, _ = trained()
    entropy, sparsity = plot_trajectory(model).axes
    points = trajectory(model)[1:]
    assert entropy.lines[0].get_xydata().tolist() == [[p.step, p.selection_entropy] for p in points]
    assert sparsity.lines[0].get_xydata().tolist() == [[p.step, 100 * p.tensor_sparsity] for p in points]
    assert sparsity.get_legend() is None


def test_several_models_are_drawn_over_each_other_on_axes_that_are_given():
    models = {"id3": trained()[0], "pafi": trained(strategy="pafi")[0]}
    figure, (entropy, sparsity, shared) = matplotlib.pyplot.subplots(1, 3)
    assert plot_trajectory(models, [entropy, sparsity]) is plot_shares(models["id3"], shared) is figure
    assert [text.get_text() for text in sparsity.get_legend().get_texts()] == ["id3", "pafi"]
    assert len({(line.get_color(), line.get_linestyle()) for line in entropy.lines}) == 2
    assert shared.collections


@pytest.mark.parametrize("draw", [plot_trajectory, plot_shares])
def test_what_cannot_be_drawn_says_why(draw):
    model, _ = trained()
    for ax in (matplotlib.pyplot.subplots(1, 3)[1], "right", 1):
        with pytest.raises(SparsifyError, match=r"ax=.*; expected [12] of matplotlib's axes, or None for a new figure"):
            draw(model, ax)
    with pytest.raises(SparsifyError, match="expected a sparsified model"):
        draw([model, model])
    with pytest.raises(SparsifyError, match="there is nothing to draw: no tensor has entries"):
        plot_shares(SparseDelta({}))


def cells(panel):
    """The drawn cells: (column, row) -> share, None where nothing is unmasked."""
    [mesh] = panel.collections
    return {
        (x, y): float(value) if value >= mesh.norm.vmin else None
        for y, row in enumerate(mesh.get_array())
        for x, value in enumerate(row)
        if value is not numpy.ma.masked
    }


def test_every_tensor_is_a_cell():
    model, _ = trained("bert")
    [panel] = plot_shares(model).axes
    kinds = [label.get_text() for label in panel.get_yticklabels()]
    expected = {
        (0 if row.layer is None else row.layer + 1, kinds.index(row.kind)): row.share or None for row in shares(model)
    }
    assert cells(panel) == expected
    assert [label.get_text() for label in panel.get_xticklabels()] == ["none", "0", "1"]
    assert panel.get_title() == f"{BUDGET} unmasked entries"


def test_what_has_nothing_unmasked_is_grey():
    [panel] = plot_shares(sparsify(build("bert")[0], BUDGET, steps=STEPS)).axes
    [bar] = panel.child_axes
    assert set(cells(panel).values()) == {None}
    assert bar.get_ylabel() == "unmasked share (grey: none)"
    model, _ = trained("bert", "bitfit")
    [mesh] = plot_shares(model).axes[0].collections
    grey = matplotlib.colors.to_rgba(NONE_COLOR)
    num_grey = (mesh.to_rgba(mesh.get_array()) == grey).all(-1).sum()
    assert 0 < num_grey == sum(row.unmasked == 0 for row in shares(model))


def test_deltas_side_by_side_share_rows_and_colours():
    deltas = {name: SparseDelta.from_model(trained("bert", name)[0]) for name in ("id3", "pafi")}
    first, second = plot_shares(deltas).axes
    [bar] = second.child_axes
    assert first.collections[0].norm is second.collections[0].norm
    assert first.get_ylim() == second.get_ylim()
    assert second.get_title() == f"pafi\n{BUDGET} unmasked entries"
    assert bar.get_ylabel() == "unmasked share"  # a delta has no tensor without an entry


@pytest.mark.parametrize("draw", [plot_trajectory, plot_shares])
def test_a_picture_is_written_without_a_warning(draw, tmp_path, recwarn):
    draw({"id3": trained("bert")[0], "random": trained("t5", "random")[0]}).savefig(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 5_000
    assert not recwarn.list


@pytest.mark.parametrize("missing", ["matplotlib", "scipy"])
def test_without_the_extra_the_error_names_it(missing, monkeypatch):
    model, _ = trained()
    monkeypatch.setattr("importlib.import_module", Mock(side_effect=ModuleNotFoundError(name=missing)))
    with pytest.raises(MissingExtraError, match=rf"`{missing}` is not installed; .*'sparsify-ft\[plot\]'"):
        plot_shares(model) if missing == "matplotlib" else change_correlation(model, model)


# ----------------------------------------------------------------------------------- correlation


def dense_changes(model, base):
    """Trained minus pretrained of all parameters, flat, from the plain models."""
    plain = desparsify(copy.deepcopy(model)) if hasattr(model, "sparse_values") else model
    bases = dict(base.named_parameters())
    return torch.cat([(tuned - bases[name]).detach().flatten() for name, tuned in plain.named_parameters()])


@pytest.mark.parametrize("magnitude", [False, True])
@pytest.mark.parametrize("among", ["either", "both"])
@pytest.mark.parametrize("other", ["random", "full"])
def test_it_is_spearmans_coefficient_of_the_dense_changes(other, among, magnitude):
    (a, base), (b, _) = trained("bert"), trained("bert", other)
    x, y = dense_changes(a, base), dense_changes(b, base)
    if other == "random":  # disjoint but for a few: make sure that there are some
        (b, _) = trained("bert", "random", budget=3_000)
        y = dense_changes(b, base)
    keep = (x != 0) | (y != 0) if among == "either" else (x != 0) & (y != 0)
    x, y = (x.abs(), y.abs()) if magnitude else (x, y)
    found = change_correlation(a, b, base, among=among, magnitude=magnitude)
    assert found.num_entries == int(keep.sum()) > 2
    assert found.overall == pytest.approx(spearmanr(x[keep], y[keep]).statistic)


def test_model_delta_and_plain_model_are_the_same_source():
    (a, base), (b, _) = trained("bert"), trained("bert", "pafi")
    expected = change_correlation(a, b)
    delta, plain = SparseDelta.from_model(a), desparsify(copy.deepcopy(a))
    for source in (delta, plain):
        found = change_correlation(source, b, base)
        assert found.num_entries == expected.num_entries
        assert found.overall == pytest.approx(expected.overall)
        assert found.by_tensor.keys() == expected.by_tensor.keys()


def test_a_fine_tuning_goes_with_itself_and_against_its_opposite():
    model, base = trained()
    delta = SparseDelta.from_model(model)
    assert change_correlation(model, delta, base).overall == pytest.approx(1)
    opposite = copy.deepcopy(base)
    for (_, mirrored), tuned in zip(opposite.named_parameters(), desparsify(model).parameters(), strict=True):
        mirrored.data.mul_(2).sub_(tuned.data)
    found = change_correlation(delta, opposite, base)
    assert found.overall == pytest.approx(-1, abs=1e-3)


def added(values, indices=(0, 2), shape=(2, 3)):
    """A delta of differences, which needs no base."""
    return SparseDelta({"weight": entries(values, indices, shape)})


def test_differences_need_no_base_and_count_as_zero_where_one_has_none():
    found = change_correlation(added([1.0, 2.0]), added([5.0, -1.0], indices=(2, 4)))
    assert found.num_entries == 3
    assert found.overall == pytest.approx(spearmanr([1, 2, 0], [0, 5, -1]).statistic)
    assert found.by_tensor == {"weight": found.overall}
    assert change_correlation(added([1.0, 0.0, 2.0], (0, 1, 2)), added([1.0, 3.0])).num_entries == 2  # 0 is no change


def test_equal_changes_and_single_entries_have_no_correlation_and_short_dtypes_do():
    found = change_correlation(added([1.0, 1.0]), added([1.0, 2.0]))
    assert math.isnan(found.overall)
    assert math.isnan(found.by_tensor["weight"])
    base = nn.Linear(3, 2).bfloat16()
    tuned = copy.deepcopy(base)
    with torch.no_grad():
        tuned.weight[0] += torch.tensor([1.0, 2.0, 3.0])
        tuned.bias[0] += 1
    found = change_correlation(tuned, tuned, base)
    assert found.by_tensor["weight"] == pytest.approx(1)
    assert math.isnan(found.by_tensor["bias"])


def test_a_quantized_model_is_compared_by_its_changes():
    model, batches = quantized_build("bert", "torchao-int8")
    delta = SparseDelta.from_model(train(sparsify(model, BUDGET, steps=STEPS, target_modules="all-linear"), batches))
    delta.tensors = {name: part for name, part in delta.tensors.items() if part.kind == "add" and part.count > 2}
    found = change_correlation(model, delta).by_tensor
    assert delta.tensors
    assert {name: found[name] for name in delta.tensors} == pytest.approx(dict.fromkeys(delta.tensors, 1.0))


def test_what_one_side_trained_whole_is_left_out():
    (a, base), (b, _) = trained("bert", modules_to_save=["classifier"]), trained("bert", "full")
    expected = [name for name in change_correlation(b, b, base).by_tensor if not name.startswith("classifier")]
    assert list(change_correlation(a, b, base).by_tensor) == expected
    assert list(change_correlation(b, SparseDelta.from_model(a), base).by_tensor) == expected


def test_nothing_is_changed_by_the_comparison():
    (a, base), (b, _) = trained("bert"), trained("bert", "full")
    before = [copy.deepcopy(model.state_dict()) for model in (a, b, base)]
    change_correlation(a, b, base)
    for model, state in zip((a, b, base), before, strict=True):
        assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def sparsified(*sizes):
    return sparsify(nn.Linear(*sizes), 3, "pafi")


def test_sources_that_cannot_be_compared_say_why():
    model, base = trained()
    delta, some, plain = SparseDelta.from_model(model), added([1.0, 2.0]), nn.Linear(3, 2)
    inner = sparsify(nn.Sequential(nn.Linear(3, 2)), 3, "pafi")
    for a, b, of, text in [
        (model, delta, None, r"b is a SparseDelta, which has trained values .* as base="),
        (base, model, None, "a is a MLP, which has trained values"),
        (base, model, model, "base is a sparsified MLP; expected the plain pretrained model"),
        (base, model, {}, "base is a dict; expected the plain pretrained model"),
        (model, delta, build("mlp", seed=1)[0], "does not hold the values that the delta was trained on"),
        (plain, plain, nn.Sequential(nn.Linear(3, 2)), "the base has none of the tuned model's tensors"),
        (plain, plain, nn.Linear(3, 4), r"shape \(4, 3\) in the base, \(2, 3\) in the tuned model"),
        (some, sparsified(4, 2), None, r"tensor `weight` has shape \(2, 3\) in a, \(2, 4\) in b"),
        (some, added([1.0, 2.0], shape=(3, 2)), None, r"tensor `weight` has shape \(2, 3\) in a, \(3, 2\) in b"),
        (inner, some, None, r"tensor `weight` has shape None in a, \(2, 3\) in b"),
        (sparsified(4, 2), sparsified(4, 2), None, r"either of a and b changed 0 of the entries .* needs at least 2"),
        (some, {}, None, "b is a dict; expected a model or a SparseDelta"),
    ]:
        with pytest.raises(SparsifyError, match=text) as caught:
            change_correlation(a, b, of)
        assert isinstance(caught.value, BaseMismatchError) == (isinstance(of, nn.Module) and of is not model)
    with pytest.raises(SparsifyError, match=r'both of a and b changed 1 of the entries .* among="either"'):
        change_correlation(some, added([1.0, 2.0], indices=(2, 3)), among="both")
    with pytest.raises(SparsifyError, match="among='all'; expected one of 'either', 'both'"):
        change_correlation(some, some, among="all")
