"""The generic form: any module that owns parameters trains as it would when plain, and keeps its class."""

import copy
import pickle
import types

import pytest
import torch
from recorder import mask, model_gradients, sparsify_fully
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from sparsify import desparsify, get_unmasker, sparsify

DIM = 4


class Scalar(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return x * self.scale


class ClassToken(nn.Module):
    """As in a vision transformer: a token in front, and learned positions."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, DIM))
        self.positions = nn.Parameter(torch.randn(1, 4, DIM))

    def forward(self, x):
        return torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.positions


class Experts(nn.Module):
    """As in a mixture of experts: one 3-D parameter, of which each token sees a slice."""

    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.randn(3, DIM, DIM))

    def forward(self, x):
        return torch.stack([x[:, i] @ self.weights[i % 2] for i in range(x.shape[1])], dim=1)


class UsedTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM))

    def forward(self, x):
        return torch.tanh(x * self.weight) + self.weight


class Recursive(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM))

    def forward(self, x, depth=2):
        return torch.tanh(self(x * self.weight, depth - 1) + self.weight) if depth else x * self.weight


class ScaledLinear(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(DIM, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


class Lists(nn.Module):
    """Parameters that are held by modules which are never called, and read in every way that there is."""

    def __init__(self):
        super().__init__()
        self.listed = nn.ParameterList([torch.randn(DIM) for _ in range(5)])
        self.named = nn.ParameterDict({name: torch.randn(DIM) for name in "abcde"})

    def forward(self, x):
        first, *_ = self.listed
        x = torch.tanh(x * first + self.listed[1] + self.listed[-1]) + sum(self.listed[2:4])
        x = torch.tanh(x * self.named["a"] + self.named.get("b")) * self.named.c
        return x + next(value for key, value in self.named.items() if key == "d") * list(self.named.values())[4]


MODULES = {
    "LayerNorm": lambda: nn.LayerNorm(DIM),
    "RMSNorm": lambda: nn.RMSNorm(DIM),
    "BatchNorm1d": lambda: nn.Sequential(nn.Flatten(), nn.BatchNorm1d(3 * DIM)),
    "GroupNorm": lambda: nn.GroupNorm(3, 3),
    "PReLU": lambda: nn.PReLU(3),
    "Conv1d": lambda: nn.Conv1d(3, 5, 2),
    "Conv2d": lambda: nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv2d(1, 2, 2)),
    "ConvTranspose1d": lambda: nn.ConvTranspose1d(3, 2, 2),
    "GRUCell": lambda: nn.Sequential(nn.Flatten(), nn.GRUCell(3 * DIM, 2)),
    "subclass of Linear": lambda: ScaledLinear(DIM, 2),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(DIM, 2)),
    "attention": Attention,
    "encoder layer": lambda: nn.TransformerEncoderLayer(DIM, 2, 6, dropout=0.0, batch_first=True),
    "lists": Lists,
    "scalar": Scalar,
    "class token": ClassToken,
    "3-D experts": Experts,
    "used twice": UsedTwice,
    "recursive": Recursive,
}


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_output_input_gradient_and_gradients_are_the_plain_modules(name, dtype):
    plain = nn.Sequential(MODULES[name]()).to(dtype)
    masked = sparsify_fully(copy.deepcopy(plain))
    x, results = torch.randn(2, 3, DIM, dtype=dtype), []
    for model in (masked, plain):
        leaf = x.clone().requires_grad_()
        y = model(leaf)
        y.pow(3).sum().backward()
        results.append((y.detach(), leaf.grad))
    assert torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-6, atol=1e-6)
    gradients = model_gradients(masked)
    expected = {parameter_name: p.grad for parameter_name, p in plain.named_parameters() if p.requires_grad}
    assert gradients.keys() == expected.keys()
    for parameter_name, grad in expected.items():
        torch.testing.assert_close(gradients[parameter_name], grad, rtol=1e-6, atol=1e-6)
    assert any(grad.any() for grad in expected.values())


class Positions(nn.Module):
    """The gradient of an addition is one tensor, shared by autograd between the input and the parameter."""

    def __init__(self):
        super().__init__()
        self.pos = nn.Parameter(torch.randn(3, DIM))

    def forward(self, x):
        return x + self.pos


@pytest.mark.parametrize("uses", [1, 2])
def test_a_gradient_that_autograd_shares_is_not_written_to(uses):
    positions = Positions()
    plain = nn.Sequential(nn.Linear(DIM, DIM), *[positions] * uses, nn.Linear(DIM, 2)).double()
    masked = sparsify_fully(copy.deepcopy(plain), steps=4)
    x = torch.randn(3, DIM).double()
    plain(x).square().sum().backward()
    optimizer = torch.optim.SGD([masked.sparse_values], lr=0.0)
    for _ in range(4):  # the entries that are unmasked are cleared before the others are offered
        optimizer.zero_grad()
        masked(x).square().sum().backward()
        for tensor in get_unmasker(masked).tensors:
            expected = plain.get_parameter(tensor.name).grad.take(tensor.indices)
            torch.testing.assert_close(masked.sparse_values.grad[tensor.slots], expected, rtol=1e-12, atol=1e-12)
        optimizer.step()
    assert get_unmasker(masked).unmasked == masked.sparse_values.numel()


def test_clearing_unmasked_entries_leaves_the_inputs_gradient_alone():
    plain = nn.Sequential(Positions(), nn.Linear(DIM, 2)).double()
    model = copy.deepcopy(plain)
    recorder, _ = mask(model[0])
    x = torch.randn(3, DIM).double().requires_grad_()
    original = recorder.use

    def clear_at_once(tensor):
        use = original(tensor)
        use.collect = lambda gradient: gradient.clear(torch.arange(6))
        return use

    recorder.use = clear_at_once
    model(x).square().sum().backward()
    expected = x.detach().clone().requires_grad_()
    plain(expected).square().sum().backward()
    assert torch.equal(x.grad, expected.grad)


class Failing(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM))
        self.bias = nn.Parameter(torch.randn(DIM))
        self.fails = False

    def forward(self, x):
        seen = x * self.weight
        if self.fails:
            raise RuntimeError("out of memory")
        return seen + self.bias


def test_parameters_are_tapped_in_forward_and_back_in_place_after_it():
    module = Failing()
    inside = []
    module.register_forward_pre_hook(lambda m, args: None)
    parameters = dict(module.named_parameters())
    mask(module)
    module.register_forward_pre_hook(lambda m, args: inside.append(m._parameters["weight"]))
    module(torch.randn(2, DIM))
    assert inside[0] is not parameters["weight"]
    assert inside[0].grad_fn is not None
    assert {name: id(p) for name, p in module.named_parameters()} == {n: id(p) for n, p in parameters.items()}


@pytest.mark.parametrize("where", ["forward", "later pre-hook", "earlier pre-hook"])
def test_a_forward_that_fails_leaves_the_plain_parameters_in_place(where):
    module = Failing()
    parameters = dict(module.named_parameters())

    def fail(module, args):
        if module.fails:
            raise RuntimeError("out of memory")

    if where == "earlier pre-hook":
        module.register_forward_pre_hook(fail)
    recorder, tensors = mask(module)
    if where == "later pre-hook":
        module.register_forward_pre_hook(fail)
    for _ in range(2):
        module.fails = True
        with pytest.raises(RuntimeError, match="out of memory"):
            module(torch.randn(2, DIM))
        assert all(module._parameters[name] is parameter for name, parameter in parameters.items())
        assert not any(module._parameters.taps.values())
        module.fails = False
        x = torch.randn(2, DIM)
        recorder.gradients.clear()
        module(x).sum().backward()
        torch.testing.assert_close(recorder.dense(tensors["weight"]), x.sum(0))


def test_a_recursive_forward_that_fails_leaves_the_plain_parameters_in_place():
    module = Recursive()
    weight = module.weight
    mask(module)
    with pytest.raises(TypeError):
        module(torch.randn(2, DIM), depth="many")
    assert module._parameters["weight"] is weight
    assert not any(module._parameters.taps.values())


def test_without_gradients_nothing_is_tapped():
    module = Failing()
    recorder, _ = mask(module)
    inside = []
    module.register_forward_pre_hook(lambda m, args: inside.append(m.weight))
    with torch.no_grad():
        module(torch.randn(2, DIM))
    assert inside.pop() is module.weight
    recorder.listening = False
    module.weight.requires_grad_(True)  # as PEFT does behind our back
    assert not module(torch.randn(2, DIM)).requires_grad
    assert not inside.pop().requires_grad


def test_an_unwanted_gradient_is_reported_as_a_use():
    module = nn.LayerNorm(DIM)
    recorder, _ = mask(module)
    recorder.wanted = False
    module(torch.randn(2, DIM)).sum().backward()
    assert recorder.gradients == {"weight": [None], "bias": [None]}


@pytest.mark.parametrize("kind", ["linear", "embedding"])
def test_a_module_whose_forward_was_replaced_on_the_instance_still_trains(kind):
    def doubled_linear(self, x):
        return 2 * F.linear(x, self.weight, self.bias)

    def doubled_embedding(self, ids):
        return 2 * F.embedding(ids, self.weight)

    def build():
        torch.manual_seed(1)
        layer = nn.Linear(DIM, DIM) if kind == "linear" else nn.Embedding(6, DIM)
        layer.forward = types.MethodType(doubled_linear if kind == "linear" else doubled_embedding, layer)
        return nn.Sequential(layer, nn.Linear(DIM, 2)).double()

    plain, masked = build(), sparsify_fully(build())
    assert type(masked[0]) is type(plain[0])
    x = torch.randn(3, DIM).double() if kind == "linear" else torch.tensor([1, 1, 4])
    for model in (plain, masked):
        model(x).square().sum().backward()
    for name, gradient in model_gradients(masked).items():
        torch.testing.assert_close(gradient, plain.get_parameter(name).grad, rtol=1e-12, atol=1e-12)


def test_accelerates_hooks_on_a_module_are_kept():
    accelerate_hooks = pytest.importorskip("accelerate.hooks")
    plain = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, 2)).double()
    masked = copy.deepcopy(plain)
    accelerate_hooks.add_hook_to_module(masked[0], accelerate_hooks.ModelHook())
    sparsify_fully(masked)
    x = torch.randn(3, DIM).double()
    for model in (plain, masked):
        model(x).square().sum().backward()
    for name, gradient in model_gradients(masked).items():
        torch.testing.assert_close(gradient, plain.get_parameter(name).grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_trains_by_itself(duplicate):
    model = sparsify_fully(nn.Sequential(nn.LayerNorm(DIM), nn.Conv1d(3, 2, 1)))
    twin = duplicate(model)
    x = torch.randn(2, 3, DIM)
    twin(x).square().sum().backward()
    assert model.sparse_values.grad is None
    model(x).square().sum().backward()
    for name, gradient in model_gradients(model).items():
        assert torch.equal(gradient, model_gradients(twin)[name])


class ReadDirectly(nn.Module):
    """Calls its layer or not, and reads the layer's weight in its own forward, past the layer's."""

    def __init__(self, layer, called):
        super().__init__()
        self.layer, self.called = layer, called
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x, fails=False):
        weight = self.layer.weight
        if fails:
            raise RuntimeError("out of memory")
        y = self.out(x) @ weight.reshape(-1, DIM).t()
        return y.sum() + self.layer(x.long().abs() if isinstance(self.layer, nn.Embedding) else x).sum() * self.called


LAYERS = {
    "Linear": lambda: nn.Linear(DIM, DIM),
    "Embedding": lambda: nn.Embedding(9, DIM),
    "convolution": lambda: nn.Conv1d(3, 2, DIM),
}


@pytest.fixture(params=LAYERS)
def layer(request):
    return LAYERS[request.param]()


@pytest.mark.parametrize("called", [False, True], ids=["only read", "called too"])
@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
def test_a_weight_that_is_read_past_its_module_gets_that_uses_gradient_too(layer, called, checkpointed):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = ReadDirectly(layer, called)

        def forward(self, x):
            return checkpoint(self.part, x, use_reentrant=False) if checkpointed else self.part(x)

    plain = Model().double()
    masked, x = sparsify_fully(copy.deepcopy(plain)), torch.randn(3, DIM).double()
    for model in (plain, masked):
        model(x).square().backward()
    for name, gradient in model_gradients(masked).items():
        expected = plain.get_parameter(name).grad
        expected = torch.zeros_like(gradient) if expected is None else expected
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)
    assert plain.part.layer.weight.grad.any()


def test_a_weight_is_itself_outside_of_the_models_forward(layer):
    model = nn.Sequential(ReadDirectly(layer, True))
    weight, x = layer.weight, torch.randn(3, DIM)
    sparsify_fully(model)
    assert layer.weight is weight
    model(x).backward()
    assert layer.weight is weight
    with pytest.raises(TypeError):
        model(x, True)
    assert layer.weight is weight
    model[0].register_forward_pre_hook(lambda module, args: (*args, True))
    with pytest.raises(RuntimeError, match="out of memory"):
        model(x)
    assert layer.weight is weight
    assert dict(layer.named_parameters())["weight"] is weight
    desparsify(model)
    assert type(layer._parameters) is dict
    assert layer.weight is weight


class CastsToItsLayer(nn.Module):
    """As T5's feed-forward block: it looks at a layer's weight for its dtype before it calls the layer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)

    def forward(self, x):
        return self.layer(x.to(self.layer.weight.dtype))


def test_a_weight_that_is_only_looked_at_is_still_done_with_in_its_one_uses_node(monkeypatch):
    model = sparsify_fully(nn.Sequential(CastsToItsLayer()))
    collector, whole = get_unmasker(model).backward, []
    original = collector.collect
    monkeypatch.setattr(
        collector, "collect", lambda *args, **options: (whole.append(options), original(*args, **options))
    )
    model(torch.randn(3, DIM)).sum().backward()
    assert whole == [{"whole": True}] * 2


@pytest.mark.parametrize("change", ["values", "dtype"])
def test_a_root_with_parameters_of_its_own_is_brought_in_step_before_they_are_tapped(change):
    model = sparsify(Scalar(), 1, "pafi")
    if change == "values":
        model.sparse_values.data.add_(0.5)  # behind the optimizer's back
    else:
        model.bfloat16()
    model(torch.ones(3, dtype=model.scale.dtype)).sum().backward()
    assert model.scale.item() == (2.0 if change == "values" else 1.5)
    assert model.sparse_values.grad.item() == 3.0
