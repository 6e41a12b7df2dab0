"""Beside AdapterHub's own `adapters`: ours compute what theirs do, and theirs are trained by ``sparsify``.

``adapters`` pins an older transformers: test_compat_adapterhub.py makes an environment of its own and runs this there.
"""

import copy

import adapters
import pytest
import torch
from architectures import build
from oracle import unmasked_sets
from safetensors.torch import load_file
from twins import Twins

from sparsify import SparseDelta, base_weights, desparsify, sparsify
from sparsify.adapters import add_adapters, load_adapters, save_adapters
from sparsify.training.plan import find_new

FACTOR, BUDGET, STEPS = 4, 60, 3
CONFIGS = {"pfeiffer": "seq_bn", "houlsby": "double_seq_bn"}
FIVE = ["bert", "roberta", "deberta-v2", "t5", "llama"]
# AdapterHub's other methods; a masked module of each kind is among them
METHODS = {
    "inverted": "seq_bn_inv",
    "parallel": "scaled_par_bn",
    "gated": "seq_bn[use_gating=True]",
    "lora": "lora",
    "dora": "dora",
    "vera": "vera",
    "ia3": "ia3",
    "loreft": "loreft[dropout=0.0]",
    "noreft": "noreft[dropout=0.0]",
    "prompt": "prompt_tuning",
    "prefix": "prefix_tuning",
    "flat-prefix": "prefix_tuning_flat",
    "unipelt": "unipelt",
    "compacter": "compacter[phm_dim=2,reduction_factor=4]",
}
BOTTLENECKS = [pytest.param(name, config, id=f"{name}-{config}") for name in FIVE for config in CONFIGS.values()]
OTHERS = [pytest.param("bert", config, id=f"bert-{method}") for method, config in METHODS.items()]
ours_and_theirs = pytest.mark.parametrize(
    ("name", "kind"), [pytest.param(name, kind, id=f"{name}-{kind}") for name in FIVE for kind in CONFIGS]
)
every_method = pytest.mark.parametrize(("name", "config"), [*BOTTLENECKS, *OTHERS])


@pytest.fixture(autouse=True)
def double():
    """AdapterHub makes new parameters, and some intermediate results, in the default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def hub_model(model, config, large=True):
    """Gives a model AdapterHub's adapters, in place, to be trained; large enough to matter."""
    adapters.init(model)
    torch.manual_seed(1)
    config = adapters.AdapterConfig.load(config, **({"reduction_factor": FACTOR} if "_bn" in config else {}))
    model.add_adapter("default", config=config)
    model.train_adapter("default")
    model.to(torch.get_default_dtype())  # Compacter's are always made in single precision
    if large:
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.requires_grad and "parametrizations" not in name:  # an orthogonal one stays so
                    parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def trainable(model):
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def adapter_state(model):
    return {key: value for key, value in model.state_dict().items() if ".adapters.default." in key}


def logits(model, batch):
    with torch.no_grad():
        return model.eval()(**batch).logits


@ours_and_theirs
def test_names_shapes_initial_weights_and_what_is_trained_are_adapterhubs(name, kind):
    base, _ = build(name)
    theirs = hub_model(copy.deepcopy(base), CONFIGS[kind], large=False)
    torch.manual_seed(1)
    ours = add_adapters(base, kind, FACTOR)
    expected, found = adapter_state(theirs), adapter_state(ours)
    assert list(found) == list(expected)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert trainable(ours) == trainable(theirs)


@ours_and_theirs
def test_each_library_loads_what_the_other_wrote_with_the_same_outputs_and_gradients(name, kind, tmp_path):
    base, batches = build(name)
    theirs = hub_model(copy.deepcopy(base), CONFIGS[kind])
    keys = trainable(theirs)  # heads are among them
    base.load_state_dict({key: theirs.state_dict()[key] for key in keys if key in base.state_dict()}, strict=False)
    theirs.save_adapter(str(tmp_path / "theirs"), "default", use_safetensors=True, with_head=False)
    ours = load_adapters(copy.deepcopy(base), tmp_path / "theirs")
    for batch in batches:
        results = [model(**batch) for model in (ours, theirs)]
        torch.testing.assert_close(results[0].logits, results[1].logits, rtol=1e-12, atol=1e-12)
        for result in results:
            result.loss.backward()
    for key in keys:
        gradients = [model.get_parameter(key).grad for model in (ours, theirs)]
        torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)
    save_adapters(ours, tmp_path / "ours")
    left, right = (load_file(tmp_path / whose / "adapter.safetensors") for whose in ("ours", "theirs"))
    assert left.keys() == right.keys()
    assert all(torch.equal(left[key], right[key]) for key in left)
    adapters.init(base)
    base.load_adapter(str(tmp_path / "ours"), use_safetensors=True, set_active=True)
    assert torch.equal(logits(base, batches[0]), logits(theirs, batches[0]))


@every_method
def test_training_is_the_oracles_and_copies_deltas_and_saved_adapters_are_the_model(name, config, tmp_path):
    base, (batch, *others) = build(name)
    plain = copy.deepcopy(base)
    hub_model(base, config)
    new = {key for key, _ in base.named_parameters()} - {key for key, _ in plain.named_parameters()}
    assert set(find_new(base)) == new, "AdapterHub's parameters and no others"
    dense, sparse = copy.deepcopy(base), copy.deepcopy(base)
    budget = min(BUDGET, sum(base.get_parameter(key).numel() for key in trainable(base)) // 2)
    sparsify(sparse, budget, "id3", steps=STEPS)
    Twins(dense, sparse, budget, STEPS).train([batch, *others])
    unmasked = unmasked_sets(sparse)
    assert set(unmasked) == set(trainable(base))
    assert sum(map(len, unmasked.values())) == budget

    before, expected = logits(base, batch), logits(sparse, batch)
    assert not torch.equal(before, expected)
    assert torch.equal(logits(copy.deepcopy(sparse), batch), expected)
    with base_weights(sparse):
        torch.testing.assert_close(logits(sparse, batch), before, rtol=1e-12, atol=1e-12)

    delta = SparseDelta.from_model(sparse)
    delta.save(tmp_path / "delta")
    assert set(delta.tensors) | set(delta.whole) <= set(trainable(base)) | new
    # a copy: saving makes a LoReFT orthogonal anew
    copy.deepcopy(sparse).save_adapter(str(tmp_path / "adapter"), "default", with_head=False)
    saved = torch.load(tmp_path / "adapter" / "pytorch_adapter.bin", weights_only=True)
    assert not [key for key in saved if "sparse_" in key]
    loaded = hub_model(copy.deepcopy(plain), config)
    loaded.load_adapter(str(tmp_path / "adapter"), set_active=True)
    heads = [key for key in trainable(base) if key in plain.state_dict()]
    loaded.load_state_dict({key: sparse.state_dict()[key] for key in heads}, strict=False)
    assert torch.equal(logits(loaded, batch), expected)

    SparseDelta.load(tmp_path / "delta").apply(base)
    assert torch.equal(logits(base, batch), expected)
    desparsified = desparsify(sparse)
    assert desparsified.state_dict().keys() == base.state_dict().keys()
    assert torch.equal(logits(desparsified, batch), expected)
