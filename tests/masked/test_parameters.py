"""Masked parameters that are read by anything but their own layer get the gradients that they have in plain torch."""

import copy
import io

import pytest
import torch
from models import descend
from oracle import model_gradients, sparsify_fully
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from sparsify import SparseDelta, desparsify, sparsify, summary
from sparsify.errors import SparsifyError

DIM = 4


class Model(nn.Module):
    """``rule(model, hidden)`` is the part of its forward that reads weights in a way of its own."""

    def __init__(self, rule=None):
        super().__init__()
        self.table, self.norm = nn.Embedding(6, DIM), nn.LayerNorm(DIM)
        self.layer, self.scale = nn.Linear(DIM, DIM), nn.Parameter(torch.full((DIM,), 1.5))
        self.rule = rule

    def hidden(self, ids):
        return self.norm(torch.tanh(self.layer(self.table(ids))))

    def forward(self, ids):
        hidden = self.hidden(ids)
        return (hidden if self.rule is None else self.rule(self, hidden)).square().sum()


def squares(parameters):
    return sum(parameter.square().sum() for parameter in parameters)


def functional(module, **replaced):
    return lambda hidden: functional_call(module, replaced, (hidden,))


def eagerly(function):
    """A frame that the compiler leaves, and whose calls it may compile one by one."""
    for _ in range(1):
        torch._dynamo.graph_break()
        result = function()
    return result


IN_FORWARD = {
    "attribute": lambda m, h: h @ m.table.weight.T,
    "parameters": lambda m, h: h + squares(m.layer.parameters()),
    "named_parameters": lambda m, h: h * dict(m.named_parameters())["norm.weight"],
    "state_dict": lambda m, h: h @ m.state_dict(keep_vars=True)["layer.weight"],
    "bias of another": lambda m, h: functional(m.layer, bias=m.layer.bias * m.scale)(h),
    "weight of others": lambda m, h: functional(m.layer, weight=m.layer.weight + m.layer.weight @ m.layer.weight)(h),
    "weight made in forward": lambda m, h: functional(m.layer, weight=m.layer(h)[:DIM])(h),
    "norm": lambda m, h: functional(m.norm, weight=m.norm.weight * m.scale)(h),
    "own parameters": lambda m, h: functional(m.layer, **dict(m.layer.named_parameters()))(h),
    "checkpointed": lambda m, h: checkpoint(lambda x: x * m.scale * m.scale, h, use_reentrant=False),
    "in code that is not compiled": lambda m, h: eagerly(lambda: h * m.norm.weight + squares(m.layer.parameters())),
}
OUTSIDE = {
    "loss with the table as head": lambda m, ids: (m.hidden(ids) @ m.table.weight.T).square().sum(),
    "penalty after the forward": lambda m, ids: m(ids) + squares(p for n, p in m.named_parameters() if n[:2] != "sp"),
    "penalty before the forward": lambda m, ids: squares([*m.layer.parameters(), m.scale]) + m(ids),
    "distance": lambda m, ids: m(ids) + (torch.cat([m.scale, m.layer.bias]) - 1).abs().sum(),
    "in place": lambda m, ids: m(ids) * torch.ones(DIM).double().add_(m.scale).sum(),
    "lists": lambda m, ids: m(ids) + sum(torch._foreach_norm([m.layer.weight, m.scale])),
    "part of its forward": lambda m, ids: m.norm(m.table(ids)).square().sum(),
}
CALLS = {**{name: (rule, lambda m, ids: m(ids)) for name, rule in IN_FORWARD.items()}}
CALLS |= {name: (None, loss) for name, loss in OUTSIDE.items()}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_weight_has_plain_torchs_gradient_wherever_it_is_read(name, compiled):
    rule, loss = CALLS[name]
    plain = Model(rule).double()
    masked, ids = sparsify_fully(copy.deepcopy(plain)), torch.arange(6)
    if compiled:
        torch.compiler.reset()  # what fails to compile too often runs as it is, and shows nothing
        masked.compile(backend="aot_eager")
    parameters = dict(masked.named_parameters())
    for model in (plain, masked):
        loss(model, ids).backward()
    for tensor, gradient in model_gradients(masked).items():
        expected = plain.get_parameter(tensor).grad
        torch.testing.assert_close(gradient, torch.zeros_like(gradient) if expected is None else expected)
    assert all(parameter is parameters[name] for name, parameter in masked.named_parameters())


class Product(torch.autograd.Function):
    """As a fused kernel: of a weight that is given to it, autograd shows no operation."""

    @staticmethod
    def forward(ctx, hidden, weight):
        ctx.save_for_backward(hidden, weight)
        return hidden @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        hidden, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ hidden


def tied_head(weight_of):
    return lambda m, ids: Product.apply(m.hidden(ids), weight_of(m.table.weight)).square().sum()


UNFOLLOWED = {
    r"`table\.weight` was given to a torch\.autograd\.Function.*view_as": tied_head(lambda weight: weight),
    "given to torch.vmap outside of": lambda m, ids: torch.vmap(torch.sum)(m.table.weight).sum(),
    r"in a transform of torch\.func.*functional_call": lambda m, ids: torch.vmap(m)(ids[:, None]).sum(),
    r"`scale` has no gradient.*model\.sparse_values": lambda m, ids: torch.autograd.grad(m(ids), [m.scale]),
    "hooks work on `model.sparse_values`": lambda m, ids: m.scale.register_hook(print),
}


@pytest.mark.parametrize("match", UNFOLLOWED)
def test_a_use_whose_gradient_would_be_lost_is_refused_by_name(match):
    with pytest.raises(SparsifyError, match=match):
        UNFOLLOWED[match](sparsify(Model(), 10, "id3", steps=2), torch.arange(6))


def test_the_ways_that_such_an_error_names_are_right():
    plain, ids = Model().double(), torch.arange(6)
    masked = sparsify_fully(copy.deepcopy(plain))
    for model in (plain, masked):
        tied_head(lambda weight: weight.view_as(weight))(model, ids).backward()
    torch.testing.assert_close(model_gradients(masked)["table.weight"], plain.table.weight.grad)
    with torch.no_grad():
        tied_head(lambda weight: weight)(masked, ids)
    tied_head(lambda weight: weight.detach())(masked, ids)
    values, jacobians = {name: p.detach() for name, p in plain.named_parameters()}, []
    for model in (plain, masked):
        model.rule = IN_FORWARD["norm"]
        call = lambda scale: functional_call(model, values | {"scale": scale}, (ids,))  # noqa: B023, E731
        jacobians.append(torch.func.jacrev(call)(values["scale"]))
    torch.testing.assert_close(*jacobians)


def test_a_transform_over_the_flat_delta_is_refused_and_a_call_without_one_is_not():
    model, ids = sparsify(Model(), 10, "random"), torch.arange(6)
    values = {"sparse_values": torch.ones(10)}
    with pytest.raises(SparsifyError, match="`sparse_values` was used in a transform of"):
        torch.func.grad(lambda values: functional_call(model, {"sparse_values": values}, (ids,)))(*values.values())
    assert functional_call(model, values, (ids,)) != model(ids)


@torch.no_grad()
def reset(model):
    model.layer.weight[1].mul_(3)


WRITES = {
    "a row": reset,
    "reset_parameters": lambda m: m.layer.reset_parameters(),
    "torch.nn.init": lambda m: nn.init.constant_(m.table.weight, 0.25),
    "data": lambda m: setattr(m.norm.weight, "data", torch.full((DIM,), 0.5, dtype=torch.float64)),
}


@pytest.mark.filterwarnings("ignore:other pretrained weights")
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("share", [1, 0.5])
def test_what_is_written_into_a_weight_in_place_is_trained_on(write, share):
    """Where frozen entries change, too, it is the base from then on."""
    plain, ids = Model(lambda m, h: h * m.scale).double(), torch.arange(6)
    masked = sparsify_fully(copy.deepcopy(plain)) if share == 1 else sparsify(copy.deepcopy(plain), share, "random")
    for model in (plain, masked):
        for _ in range(2):
            trained = [p for p in model.parameters() if p.requires_grad]
            for parameter, grad in zip(trained, torch.autograd.grad(model(ids), trained), strict=True):
                parameter.grad = grad
            torch.optim.SGD(trained, lr=0.01).step()
            torch.manual_seed(1)
            write(model)
    written = {name: masked.get_parameter(name).detach().clone() for name, _ in plain.named_parameters()}
    descend(masked, [ids], lr=0.0)
    for name, before in written.items():
        torch.testing.assert_close(masked.get_parameter(name).detach(), before)
        torch.testing.assert_close(before, plain.get_parameter(name).detach()) if share == 1 else None
    assert summary(masked, verify=True).verification.ok


def test_a_weight_in_a_short_type_that_is_written_as_it_is_loses_nothing():
    model = sparsify(Model().bfloat16(), 40, "random")
    descend(model, [torch.arange(6)] * 3)
    values = model.sparse_values.detach().clone()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.clone())
    model(torch.arange(6))
    assert model.sparse_values.equal(values)


def test_a_weight_that_is_tied_to_another_one_afterwards_is_refused_by_name():
    model = sparsify(nn.ModuleList([nn.Linear(DIM, DIM) for _ in range(2)]), 10, "random")
    weight = model[1].weight
    with pytest.raises(SparsifyError, match=r"`1\.weight` was tied to `0\.weight` after sparsify\(\)"):
        model[1].weight = model[0].weight
    assert model[1].weight is weight


@pytest.mark.parametrize("name", ["table.weight", "layer.weight", "layer.bias", "norm.weight", "scale"])
@pytest.mark.parametrize("make", [lambda outer: outer, lambda outer: 2 * outer], ids=["leaf", "computed"])
def test_weights_from_outside_get_their_gradient(name, make):
    plain, ids, gradients = Model(IN_FORWARD["attribute"]), torch.arange(6), []
    masked = sparsify(copy.deepcopy(plain), 10, "id3", steps=2)
    for model in (plain, masked):
        own = plain.get_parameter(name)
        outer = nn.Parameter(torch.linspace(-1, 1, own.numel()).view_as(own))
        functional_call(model, {name: make(outer)}, (ids,)).backward()
        gradients.append(outer.grad)
    torch.testing.assert_close(*gradients)


def test_a_masked_parameter_is_an_ordinary_one_to_what_looks_at_it():
    model = sparsify(Model(), 10, "pafi")
    weight = model.layer.weight
    assert isinstance(weight, nn.Parameter)
    assert not weight.requires_grad
    assert weight.to(torch.float32) is weight.cpu() is weight
    assert type(weight.detach()) is type(weight.data) is torch.Tensor
    assert not nn.Parameter(weight, requires_grad=False).requires_grad
    assert weight.numpy().shape == (DIM, DIM)
    assert torch.equal(copy.deepcopy(weight), weight)
    file = io.BytesIO()
    torch.save([weight], file)
    assert len(file.getvalue()) < 5000, "the model came along"
    file.seek(0)
    assert type(torch.load(file)[0]) is nn.Parameter
    torch.save(model.layer, file := io.BytesIO())
    file.seek(0)
    assert torch.load(file, weights_only=False)(torch.ones(1, DIM)).equal(model.layer(torch.ones(1, DIM)))
    assert type(desparsify(model).layer.weight) is nn.Parameter


def test_a_module_may_checkpoint_over_its_own_parameter_after_the_budget_is_spent():
    model = Model(IN_FORWARD["checkpointed"])
    nn.init.constant_(model.scale, 50.0)  # so large that no entry of it is unmasked
    descend(sparsify(model, 2, "id3", steps=1), [torch.arange(6)] * 3, lr=0.0)


def test_buffers_can_still_be_resized_in_place():
    model = nn.Linear(DIM, DIM)
    model.register_buffer("seen", torch.ones(3))
    tuned = copy.deepcopy(model)
    nn.init.zeros_(tuned.weight)
    SparseDelta.diff(model, tuned, progress=False)
    sparsify(model, 5, "pafi")
    assert model.seen.resize_(7).numel() == tuned.seen.resize_(7).numel() == 7


def test_a_parameter_that_is_replaced_for_good_is_refused_by_name():
    model = sparsify(Model(), 10, "pafi")
    optimizer = torch.optim.SGD([model.sparse_values], lr=0.1)
    model.layer.weight = nn.Parameter(torch.zeros(DIM, DIM))
    model(torch.arange(6)).backward()
    with pytest.raises(SparsifyError, match=r"`layer\.weight` was replaced after sparsify"):
        optimizer.step()


def test_a_graph_that_was_built_before_desparsify_is_refused():
    model = sparsify(Model(), 10, "id3", steps=2)
    loss = model(torch.arange(6))
    desparsify(model)
    with pytest.raises(SparsifyError, match=r"built before desparsify\(\)"):
        loss.backward()


@pytest.mark.parametrize(("inputs", "outputs"), [(DIM, 0), (0, DIM)])
@pytest.mark.parametrize("strategy", ["id3", "pafi"])
def test_layers_without_inputs_or_outputs_change_nothing(inputs, outputs, strategy):
    model = nn.ModuleList([nn.Linear(DIM, DIM), nn.Linear(inputs, outputs)])
    sparsify(model, 5, strategy, steps=2 if strategy == "id3" else None)
    x = torch.randn(3, DIM)
    (model[0](x).square().sum() + model[1](x[:, :inputs]).square().sum()).backward()
    assert model.sparse_values.grad.any()


@pytest.mark.parametrize("copied", [nn.Parameter, copy.deepcopy], ids=["parameter", "deepcopy"])
def test_a_copy_of_a_masked_weight_trains_as_a_parameter_of_its_own(copied):
    model = sparsify(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), 5, "id3", steps=3)
    probe, x = nn.Linear(4, 4), torch.randn(3, 4)
    probe.weight = copied(model[0].weight).requires_grad_()
    before = model[0].weight.detach().clone()
    probe(x).sum().backward()
    torch.testing.assert_close(probe.weight.grad, x.sum(0).expand(4, 4))
    assert torch.equal(model[0].weight, before)
