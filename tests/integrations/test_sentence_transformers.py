"""sentence-transformers on a tiny BERT: its trainers resume and load the best model, and its deltas fit BERT, too."""

import logging
from functools import partial

import pytest
import torch
from trainers import BEST, WORDS, assert_same, outcome, run_trainer, tokenizer
from transformers import BertConfig, BertModel

from sparsify import BaseMismatchError, SparseDelta, SparsifyError, load_model, sparsify, summary

st = pytest.importorskip("sentence_transformers", reason="sentence-transformers is in the extra `test`")
Dataset = pytest.importorskip("datasets", reason="datasets is in the extra `test`").Dataset

ROWS, LOSSES = {"one": WORDS[:16], "other": WORDS[8:24]}, st.sentence_transformer.losses
CACHED, SCORE = partial(LOSSES.CachedMultipleNegativesRankingLoss, mini_batch_size=2), {"score": [1.0, 0.0] * 8}
HEAD = {"modules_to_save": ["classifier"]}
KINDS = {
    "whole": ("SentenceTransformer", LOSSES.MultipleNegativesRankingLoss, {}, ROWS),
    "inner": ("SentenceTransformer", CACHED, {}, ROWS),
    "cross": ("CrossEncoder", st.cross_encoder.losses.BinaryCrossEntropyLoss, HEAD, {**ROWS, **SCORE}),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("base"))
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    BertModel(BertConfig(vocab_size=40, initializer_range=0.3, **sizes)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def load(path, kind="SentenceTransformer"):
    torch.manual_seed(0)  # of the cross encoder's head
    return getattr(st, kind)(path, device="cpu")


def encode(model):
    return model.encode(WORDS, convert_to_tensor=True)


def train(kind, path, folder, resume=None, **arguments):
    name, loss, options, rows = KINDS[kind]
    model = load(path, name).train()
    sparsify(model[0].auto_model if kind == "inner" else model, 40, "id3", exclude_modules=["pooler"], **options)
    made = partial(getattr(st, f"{name}Trainer"), loss=loss(model)), getattr(st, f"{name}TrainingArguments")
    return run_trainer(model, folder, Dataset.from_dict(rows), kind=made, resume=resume, **arguments)


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_the_whole_run_and_the_best_checkpoint_is_loaded(kind, path, tmp_path, caplog):
    whole, at_2 = train(kind, path, tmp_path), tmp_path / "checkpoint-2"
    assert (at_2 / "model.safetensors").stat().st_size < 10_000
    resumed = train(kind, path, tmp_path, str(at_2))
    assert_same(outcome(resumed), outcome(whole))
    with_best = train(kind, path, tmp_path / "best", **BEST)  # the best has the largest loss
    best = with_best.state.best_model_checkpoint.rpartition("/")[2]
    assert best == f"checkpoint-{summary(with_best.model, verify=True).step}" != "checkpoint-8"
    resumed._load_from_checkpoint(str(tmp_path / best))
    assert_same(([], {}, dict(with_best.model.state_dict())), ([], {}, dict(resumed.model.state_dict())))
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_delta_has_the_names_of_the_transformer_and_fits_whatever_holds_it(path, tmp_path):
    model = train("whole", path, tmp_path, save_strategy="no").model.eval()
    delta = SparseDelta.from_model(model)
    model.save_pretrained(str(tmp_path / "saved"))
    assert torch.equal(encode(load(str(tmp_path / "saved"))), encode(model))
    assert torch.equal(encode(delta.apply(load(path))), encode(model))
    inner, merged = load_model(path, delta), BertModel.from_pretrained(delta.merge(path, tmp_path / "merged"))
    assert all(torch.equal(value, merged.state_dict()[name]) for name, value in inner.state_dict().items())
    with pytest.raises(BaseMismatchError, match=r"no tensor `e.* \(near: `bert\.e"):
        delta.apply(load(path, "CrossEncoder"))
    with pytest.raises(SparsifyError, match=r"`delta.apply\(SentenceTransformer\(base\)\)`"):
        load_model(path, delta, model_class=st.SentenceTransformer)
    model.sparse_values.data.mul_(3)  # as for an average of the user's own
    model.save_pretrained(str(tmp_path / "moved"))
    assert torch.equal(encode(load(str(tmp_path / "moved"))), encode(model))


def test_layers_behind_the_transformer_keep_their_numbers_and_encoding_leaves_no_trace(path, tmp_path):
    load(path).append(st.sentence_transformer.modules.Dense(16, 8)).save_pretrained(str(tmp_path))
    model = sparsify(load(str(tmp_path)), 40, "id3", target_modules=["linear", "query"], steps=1)
    encode(model)
    model(model.preprocess(WORDS))["sentence_embedding"].square().sum().backward()
    encode(model)
    torch.optim.SGD([model.sparse_values], lr=0.1).step()
    delta = SparseDelta.from_model(model)
    assert not delta.whole
    assert torch.equal(encode(delta.apply(load(str(tmp_path)))), encode(model))
    encoder = SparseDelta({name: own for name, own in delta.tensors.items() if name[0] != "2"}, {}, delta.config)
    merged = tmp_path.with_name(f"{tmp_path.name}-merged")
    encoder.merge(tmp_path, merged)  # with the layers behind
    assert torch.equal(encode(load(str(merged))), encode(encoder.apply(load(str(tmp_path)))))
    with pytest.raises(BaseMismatchError, match=r"`2\.linear\..*numbered, as a SentenceTransformer's"):
        delta.apply(load(path))
