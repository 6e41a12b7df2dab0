"""A collector that selects nothing and remembers what masked modules hand it; and a whole model's gradients."""

import torch
from oracle import padding_rows
from torch import nn

from sparsify import D3, Increment, Strategy, get_engine, sparsify
from sparsify.core.entries import Entries
from sparsify.core.install import frozen_row
from sparsify.core.tensor import Use
from sparsify.masked.recompute import recomputable
from sparsify.masked.swap import swap
from sparsify.masked.tensor import ModelTensor


class Recorder:
    recompute, compiled, in_forward = staticmethod(recomputable), None, False

    def __init__(self, sizes):
        self.gradients, self.begun = {}, []
        self.listening = self.wanted = True
        self.entries = Entries(nn.Module(), sizes)
        self.entries.register(1000, torch.float64, torch.float64, torch.empty(0).device)

    def uses(self, tensors):
        root, listening = torch.zeros((), requires_grad=True), self.listening and torch.is_grad_enabled()
        return [Use(tensor, root) if listening else None for tensor in tensors]

    def warn_of_read(self, tensor):
        """As an engine may."""

    def begin(self, tensor, root, around=-1):
        self.begun.append(tensor.name)
        return self.wanted

    def collect(self, tensor, gradient):
        self.gradients.setdefault(tensor.name, []).append(gradient)

    def dense(self, tensor):
        total = torch.zeros_like(tensor.matrix)
        for gradient in [gradient.dense() for gradient in self.gradients[tensor.name]]:
            rows = torch.arange(len(total)) if gradient.rows is None else gradient.rows
            total.index_add_(0, rows, gradient.values.to(total.dtype))
        return total.view(tensor.parameter.shape)


def mask(module, *attributes):
    """Masks parameters of one module (all of its own if none is named); returns the recorder and the tensors."""
    named = dict(module.named_parameters(recurse=False))
    for parameter in named.values():
        parameter.requires_grad_(False)
    tensors, offset = {}, 0
    for attribute in attributes or named:
        row = frozen_row([(module, attribute)])
        tensors[attribute] = ModelTensor(len(tensors), module, attribute, attribute, offset, row)
        offset += tensors[attribute].numel
    recorder = Recorder([tensor.numel for tensor in tensors.values()])
    for tensor in tensors.values():
        tensor.collector = recorder
    swap(module, tensors)
    return recorder, tensors


def unmask(tensor, indices, base):
    entries = tensor.collector.entries
    counts = [0] * len(entries.counts)
    counts[tensor.number] = indices.numel()
    entries.append(indices + entries.offsets[tensor.number], base, counts)


def sparsify_fully(model, steps=1):
    budget = sum(parameter.numel() for parameter in set(model.parameters()) if parameter.requires_grad)
    padding = sum(model.get_parameter(name).shape[-1] for name in padding_rows(model))
    return sparsify(model, budget - padding, Strategy(D3(exp=0), Increment()), steps=steps)


def model_gradients(model):
    gradients = {}
    for tensor in get_engine(model).tensors:
        gradient = torch.zeros(tensor.parameter.numel(), dtype=model.sparse_values.dtype)
        gradient[tensor.indices] = model.sparse_values.grad[tensor.slots]
        gradients[tensor.name] = gradient.view(tensor.parameter.shape)
    return gradients
