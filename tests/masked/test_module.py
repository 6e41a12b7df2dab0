"""What no masked module can do is refused by name, and leaves the model as it was."""

import io

import pytest
import torch
from quantized_models import quantize
from torch import nn
from transformers.pytorch_utils import Conv1D

from sparsify import SparsifyError, sparsify

TWICE = r"create_graph=True reached a sparsified model, .*double backward.* train the plain model: desparsify\(model\)"
EXPORTED = r"cannot be exported or traced \(torch.export, torch.jit.trace, .*in place: desparsify\(model\)"
REFERENCE_CYCLE = pytest.mark.filterwarnings(r"ignore:Using backward\(\) with create_graph")

LAYERS = {
    "linear": lambda: nn.Linear(4, 4),
    "transposed": lambda: Conv1D(4, 4),
    "norm": lambda: nn.LayerNorm(4),
    "embedding": lambda: nn.Embedding(5, 4),
    "quantized": lambda: quantize(nn.Sequential(nn.Linear(4, 4)), "torchao-int8")[0],
}


def build(kind):
    """A sparsified model with one kind of layer, and its input."""
    torch.manual_seed(0)
    model = nn.Sequential(LAYERS[kind](), nn.Tanh())
    candidates = ["0"] if kind == "quantized" else None
    model = sparsify(model, 8, "id3", steps=4, target_modules=candidates)
    return model, torch.tensor([0, 3, 3]) if kind == "embedding" else torch.randn(3, 4)


def loss_of(model, x):
    return model(x).square().sum()


def train_a_step(model, x):
    """The losses before and after a step, which shows that the model trains as ever."""
    optimizer = torch.optim.SGD([model.sparse_values], lr=0.1)
    losses = [loss_of(model, x)]
    losses[0].backward()
    optimizer.step()
    return [loss.item() for loss in (*losses, loss_of(model, x))]


DIFFERENTIATE = {
    "gradient of the delta": lambda loss, values: torch.autograd.grad(loss, values, create_graph=True),
    "backward": lambda loss, values: loss.backward(create_graph=True),
}


@REFERENCE_CYCLE
@pytest.mark.parametrize("differentiate", DIFFERENTIATE)
@pytest.mark.parametrize("kind", LAYERS)
def test_double_backward_is_refused_and_the_model_trains_on(kind, differentiate):
    model, x = build(kind)
    expected = train_a_step(*build(kind))
    with pytest.raises(SparsifyError, match=TWICE):
        DIFFERENTIATE[differentiate](loss_of(model, x), model.sparse_values)
    assert model.sparse_values.grad is None
    assert train_a_step(model, x) == expected


@REFERENCE_CYCLE
def test_double_backward_through_a_compiled_model_is_refused():
    model, x = build("linear")
    loss = loss_of(torch.compile(model, backend="aot_eager"), x)
    with pytest.raises(SparsifyError, match=TWICE):
        loss.backward(create_graph=True)


WAYS = {
    "export": lambda model, x: torch.export.export(model, (x,), strict=False),
    "strict export": lambda model, x: torch.export.export(model, (x,), strict=True),
    "trace": lambda model, x: torch.jit.trace(model, (x,)),
    "trace without gradients": lambda model, x: torch.no_grad()(torch.jit.trace)(model, (x,)),
    "onnx": lambda model, x: torch.onnx.export(model, (x,), io.BytesIO(), dynamo=False),
}


@pytest.mark.parametrize(
    ("kind", "way"), [*(("linear", way) for way in WAYS), ("norm", "trace"), ("embedding", "trace")]
)
@pytest.mark.filterwarnings("ignore")
def test_export_is_refused_and_the_model_trains_on(kind, way):
    model, x = build(kind)
    expected = train_a_step(*build(kind))
    for part in (model, model[0]) if kind == "linear" else (model,):
        with pytest.raises(SparsifyError, match=EXPORTED):
            WAYS[way](part.eval(), x)
    assert train_a_step(model.train(), x) == expected


@pytest.mark.parametrize("kind", LAYERS)
def test_a_cast_that_swaps_parameters_is_refused_and_the_model_trains_on(kind):
    model, x = build(kind)
    expected = train_a_step(*build(kind))
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with pytest.raises(SparsifyError, match=r"set_swap_module_params_on_conversion\(True\).*before sparsify\(\)"):
            model.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert train_a_step(model, x) == expected
