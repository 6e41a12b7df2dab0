"""A model and its sparsified twin: the dense oracle trains one, the library the other, and they stay the same."""

import torch
from models import loss_of as loss_of_output
from oracle import DenseOracle, unmasked_sets

from sparsify import get_engine


def sgd(parameters, lr=0.05):
    return torch.optim.SGD(parameters, lr=lr)


def trainable(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def masks_of(model):
    masks = {name: torch.zeros_like(p, dtype=torch.bool) for name, p in model.named_parameters()}
    for name, indices in unmasked_sets(model).items():
        masks[name].view(-1)[indices] = True
    return masks


def assert_close(found, expected, tolerance=1e-9, **options):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, **options)


class Twins:
    """Trains both on the same batches, and compares losses, unmasked sets and weights after every step.

    ``run`` is called in place of ``sparse``, as its compiled form; ``sets`` gives the unmasked sets of ``sparse``. A
    step has a backward pass for each of ``micro`` batches; that of the oracle is of the sum of their losses.
    """

    def __init__(
        self, dense, sparse, budget, steps, make_optimizer=sgd, *, run=None, loss_of=loss_of_output, tolerance=1e-9,
        sets=unmasked_sets, micro=1, **options,
    ):  # fmt: skip
        self.dense, self.sparse, self.run, self.micro = dense, sparse, run, micro
        self.make_optimizer, self.loss_of, self.tolerance, self.sets = make_optimizer, loss_of, tolerance, sets
        self.oracle = DenseOracle(dense, make_optimizer(trainable(dense)), budget, steps, **options)
        self.new_optimizer()

    def new_optimizer(self):
        self.optimizer = self.make_optimizer(trainable(self.sparse))

    def train(self, batches):
        for start in range(0, len(batches), self.micro):
            losses = []
            for model in (self.dense, self.sparse if self.run is None else self.run):
                torch.manual_seed(self.oracle.step_number)  # for models that draw numbers in their forward
                losses.append([self.loss_of(model, batch) for batch in batches[start : start + self.micro]])
            self.assert_close(losses[1], losses[0])
            self.oracle.step(sum(losses[0]))
            self.optimizer.zero_grad()
            for loss in losses[1]:
                loss.backward()
            self.optimizer.step()
            found, expected = self.sets(self.sparse), self.oracle.unmasked_sets()
            assert found == {name: expected[name] for name in found}
            self.check_weights()
        return self

    def check_weights(self):
        weights = dict(self.sparse.named_parameters())
        weights |= {tensor.name: tensor.weight for tensor in get_engine(self.sparse).tensors}  # of quantized ones too
        for name, parameter in self.dense.named_parameters():
            self.assert_close(weights[name].detach(), parameter.detach(), check_device=False)

    def assert_close(self, found, expected, **options):
        assert_close(found, expected, self.tolerance, **options)
