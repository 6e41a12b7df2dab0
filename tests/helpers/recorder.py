"""A collector that selects nothing and remembers what masked modules hand it; and a whole model's gradients."""

import torch
from oracle import padding_rows
from torch import nn

from sparsify import D3, Increment, Strategy, get_unmasker, sparsify
from sparsify.core.entries import IndexBuffers
from sparsify.core.tensor import MaskedTensor
from sparsify.masked.swap import frozen_row, swap


class Recorder:
    """Collects every gradient; ``gradients`` has those of each parameter, in order of arrival."""

    def __init__(self):
        self.gradients = {}
        self.listening = True
        self.wanted = True
        self.in_forward = self.sharded = False
        self.forward_pass = 0
        self.values = torch.empty(0)
        self.buffers = IndexBuffers(nn.Module())

    def use(self, tensor):
        return RecordedUse(self, tensor) if self.listening and torch.is_grad_enabled() else None

    def dense(self, tensor):
        """The sum of the gradients of a tensor, in its own shape."""
        total = torch.zeros_like(tensor.matrix)
        for gradient in [gradient.dense() for gradient in self.gradients[tensor.name]]:
            rows = slice(None) if gradient.rows is None else gradient.rows
            total[rows] += gradient.values.to(total.dtype)
        return total.view(tensor.parameter.shape)


class RecordedUse:
    def __init__(self, recorder, tensor):
        self.recorder, self.tensor = recorder, tensor
        self.anchor = torch.zeros((), requires_grad=True)

    def wanted(self):
        return self.recorder.wanted

    def collect(self, gradient):
        self.recorder.gradients.setdefault(self.tensor.name, []).append(gradient)


def mask(module, *attributes):
    """Masks parameters of one module (all of its own if none is named); returns the recorder and the tensors."""
    recorder, tensors = Recorder(), {}
    for attribute, parameter in module.named_parameters(recurse=False):
        parameter.requires_grad_(False)
        if not attributes or attribute in attributes:
            row = frozen_row(module)
            tensors[attribute] = MaskedTensor(len(tensors), module, attribute, attribute, 0, recorder, row)
    recorder.buffers.register(len(tensors), 1000, torch.float64, torch.get_default_device())
    swap(module, tensors)
    return recorder, tensors


def sparsify_fully(model, steps=1):
    """Sparsifies a model so that ``steps`` steps unmask every entry with a gradient."""
    budget = sum(parameter.numel() for parameter in set(model.parameters()) if parameter.requires_grad)
    padding = sum(model.get_parameter(name).shape[-1] for name in padding_rows(model))
    return sparsify(model, budget - padding, Strategy(D3(exp=0), Increment()), steps=steps)


def model_gradients(model):
    """The gradient of each tensor of a sparsified model after a backward, dense and by name."""
    gradients = {}
    for tensor in get_unmasker(model).tensors:
        gradient = torch.zeros(tensor.parameter.numel(), dtype=model.sparse_values.dtype)
        gradient[tensor.indices] = model.sparse_values.grad[tensor.slots]
        gradients[tensor.name] = gradient.view(tensor.parameter.shape)
    return gradients
