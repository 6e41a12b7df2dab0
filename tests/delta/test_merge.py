"""A merged or patched checkpoint loads as the model that `apply` makes, bit for bit; or nothing is written at all."""

import copy
import json
import os

import pytest
import torch
from checkpoints import MODELS, bert, dinov2, files, gpt2, make_delta, mixtral, patched, save
from deltas import bits
from limits import needs_limits, within_limits
from requirements import fuses_at_load, needs_transformers_5
from safetensors.torch import load_file, save_file

from sparsify.delta import merge as merging
from sparsify.delta.merge import CheckReport, WeightPatch
from sparsify.delta.sparse_delta import SparseDelta
from sparsify.errors import BaseMismatchError, SparsifyError


@pytest.fixture
def model():
    return bert()


@pytest.fixture
def base(model, tmp_path):
    """The folder of a sharded checkpoint, which the test must leave as it is."""
    folder = save(model, tmp_path / "base")
    before = files(folder)
    yield folder
    assert files(folder) == before


@pytest.fixture
def out(tmp_path):
    return tmp_path / "merged"


@pytest.fixture
def nothing_written(base, tmp_path):
    yield
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def load(like, folder, **options):
    return type(like).from_pretrained(folder, **options)


@pytest.mark.parametrize("architecture", MODELS)
@pytest.mark.parametrize(("dtype", "shards"), [(torch.float32, True), (torch.bfloat16, False)])
def test_a_merged_or_patched_checkpoint_loads_as_the_model_that_apply_makes(tmp_path, out, architecture, dtype, shards):
    model = MODELS[architecture]().to(dtype)
    delta = make_delta(model)
    base = save(model, tmp_path / "base", shards)
    before = files(base), bits(model)
    expected = CheckReport(len(delta.tensors), delta.num_entries)
    assert delta.check(model) == delta.check(base) == delta.check(str(base)) == expected
    assert delta.merge(base, out) == out
    patches = list(delta.patches(base))
    assert sum(patch.values.numel() for patch in patches) == delta.num_entries
    assert (files(base), bits(model)) == before
    assert files(out).keys() == files(base).keys()
    assert os.access(next(out.glob("*.safetensors")), os.W_OK)
    expected = bits(delta.apply(model))
    assert bits(load(model, out, dtype=dtype)) == expected
    assert bits(load(model, patched(base, patches), dtype=dtype)) == expected


def with_two_copies(base, change=0.0):
    """A GPT-2's checkpoint that stores the table of its embedding and its head each, the last entry changed."""
    tensors = load_file(save(gpt2(), base, shards=False) / "model.safetensors")
    head = tensors["transformer.wte.weight"].clone()
    head.view(-1)[-1] += change
    tensors |= {"lm_head.weight": head}
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    return tensors


def test_both_stored_copies_of_a_tied_tensor_are_changed(tmp_path, out):
    with_two_copies(tmp_path / "base")
    model = gpt2()
    delta = make_delta(model)
    delta.merge(tmp_path / "base", out)
    merged = load(model, out)
    assert merged.lm_head.weight is merged.transformer.wte.weight
    assert bits(merged) == bits(delta.apply(model))


@needs_transformers_5("4 ties whatever the config ties")
def test_a_tensor_that_is_tied_no_more_is_left_alone(tmp_path, out):
    tensors = with_two_copies(tmp_path / "base", change=1.0)  # `from_pretrained` does not tie those that differ
    model = load(gpt2(), tmp_path / "base")
    assert model.lm_head.weight is not model.transformer.wte.weight
    name = "transformer.wte.weight"
    delta = SparseDelta({name: make_delta(model).tensors[name]})
    delta.merge(tmp_path / "base", out)
    merged = load_file(out / "model.safetensors")
    assert torch.equal(merged["lm_head.weight"], tensors["lm_head.weight"])
    assert not torch.equal(merged[name], tensors[name])
    assert [patch.name for patch in delta.patches(tmp_path / "base")] == [name]


@fuses_at_load
def test_a_tensor_that_is_transposed_under_its_own_name_is_changed_where_it_lies(tmp_path, out, monkeypatch):
    from transformers import conversion_mapping
    from transformers.core_model_loading import Transpose, WeightConverter

    name = "attention.output.dense.weight"
    mapping = {"bert": [WeightConverter(name, name, [Transpose(0, 1)])], "legacy": []}
    monkeypatch.setattr(conversion_mapping, "_checkpoint_conversion_mapping_cache", mapping)
    model = bert()
    delta = make_delta(model)
    base = save(model, tmp_path / "base")
    stored = load_file(next(base.glob("model-00001*")))["bert.encoder.layer.0.attention.output.dense.weight"]
    assert torch.equal(stored, model.bert.encoder.layer[0].attention.output.dense.weight.T)
    delta.merge(base, out)
    assert bits(load(model, out)) == bits(delta.apply(model))


def test_another_dtype_is_cast_with_one_warning(model, tmp_path, out):
    base = save(copy.deepcopy(model).bfloat16(), tmp_path / "base")
    delta = make_delta(model)
    with pytest.warns(UserWarning, match=r"the checkpoint holds torch.bfloat16 .*41 tensors in all\)") as caught:
        delta.merge(base, out)
    assert caught[0].filename == __file__
    half = load(model, base, dtype=torch.bfloat16)
    for like in (half, base):
        report = delta.check(like)
        assert report.unchecked == tuple(delta.tensors)
        assert str(report) == (
            f"{delta.num_entries:,} entries in 41 tensors: names and shapes fit; the base has 41 tensors "
            "(`bert.embeddings.word_embeddings.weight`) in another dtype than the delta was trained on, or not "
            "quantized as then, so the values there cannot be checked."
        )
    with pytest.warns(UserWarning, match="cannot be checked"):
        delta.apply(half)
    assert bits(load(model, out, dtype=torch.bfloat16)) == bits(half)


@needs_transformers_5("4 loads no head beside an encoder that is stored without its prefix")
@pytest.mark.parametrize("shards", [True, False])
def test_a_new_head_gets_a_shard_and_the_config_says_so(tmp_path, out, shards):
    trained = bert(num_labels=3)
    base = save(trained.bert, tmp_path / "base", shards)
    delta = make_delta(trained)
    for name in ("classifier.weight", "classifier.bias"):
        delta.whole[name] = torch.randn(delta.tensors.pop(name).shape)
    labels = {"num_labels": 3, "id2label": {"0": "no", "2": "yes"}, "problem_type": "single_label_classification"}
    delta.config |= {"architecture": "BertForSequenceClassification", "model_config": labels}
    report = delta.check(base)
    assert set(report.missing) == {"classifier.weight", "classifier.bias"}
    assert str(report).endswith("trained on. 2 tensors stored whole, 2 of them not in the base.")
    delta.merge(base, out)
    number = len(list(base.glob("*.safetensors"))) + 1
    names = [f"model-{position:05d}-of-{number:05d}.safetensors" for position in range(1, number + 1)]
    assert sorted(path.name for path in out.glob("*.safetensors")) == names
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"]["classifier.weight"] == names[-1]
    assert index["metadata"]["total_size"] == 4 * sum(tensor.numel() for tensor in trained.parameters())
    merged, report = type(trained).from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert merged.config.id2label == {0: "no", 1: "LABEL_1", 2: "yes"}
    assert merged.config.label2id == {"no": 0, "LABEL_1": 1, "yes": 2}
    assert merged.config.problem_type == "single_label_classification"
    assert json.loads((out / "config.json").read_text())["architectures"] == ["BertForSequenceClassification"]
    assert bits(merged) == bits(delta.apply(trained))


@pytest.mark.parametrize(
    "config",
    [
        {"architecture": "a.b", "model_config": {"auto_map": {"AutoModel": "stranger/code--m.M"}, "hidden_size": 9}},
        {"architecture": 3, "model_config": {"num_labels": 10**9}},
        {"model_config": {"id2label": {"x": "a", "1": []}}},
        {"model_config": [2]},
    ],
)
def test_a_strangers_config_changes_nothing_but_labels(model, base, out, config):
    SparseDelta({}, {"classifier.weight": torch.zeros(2, 16)}, config).merge(base, out)
    assert (out / "config.json").read_bytes() == (base / "config.json").read_bytes()


@needs_limits
def test_labels_are_believed_as_far_as_the_head_has_values(model, base, out):
    """A name for each of 10^9 labels would take 60 GB, on the word of a file of less than 1 kB."""
    whole = {"classifier.weight": torch.zeros(2, 16), "empty": torch.zeros(10**9, 0)}
    delta = SparseDelta({}, whole, {"model_config": {"num_labels": 10**9}})
    within_limits(lambda: delta.merge(base, out))
    assert (out / "config.json").read_bytes() == (base / "config.json").read_bytes()


@needs_limits
@pytest.mark.parametrize("key", ["num_hidden_layers", "num_labels", "vocab_size"])
def test_a_config_of_a_billion_layers_is_not_built(model, tmp_path, out, key):
    base = save(model, tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, key: 10**9}))
    delta = make_delta(model)
    within_limits(lambda: delta.merge(base, out), seconds=10)
    assert files(out).keys() == files(base).keys()


def test_what_describes_the_model_comes_along_and_nothing_else(model, tmp_path, out):
    base = save(model, tmp_path / "base", shards=False)
    kept = ["tokenizer.json", "vocab.txt", "LICENSE", "modeling_mine.py", "1_Pooling/config.json"]
    left = [
        "pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json", "optimizer.pt",
        "rng_state.pth", "trainer_state.json", "training_args.bin", ".gitattributes", ".cache/huggingface/x.lock",
        "checkpoint-5/config.json", "checkpoint-5/trainer_state.json", "onnx/model.onnx", "tf_model.h5",
        "flax_model.msgpack", "consolidated.safetensors", "model.fp16.safetensors",
    ]  # fmt: skip
    for name in [*kept, *left]:
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        (base / name).write_text("{}")
    make_delta(model).merge(base, out)
    assert files(out).keys() == {"config.json", "model.safetensors", *kept}


def test_links_to_files_are_followed_and_links_to_folders_and_pipes_left_out(model, base, tmp_path, out):
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key").write_text("mine")
    source = tmp_path / "downloaded"  # a download's cache has links
    (source / "extra").mkdir(parents=True)
    (source / "extra" / "kept.json").write_text("{}")
    links = {path.name: path for path in base.iterdir()}
    links |= {"extra/back": "..", "extra/nowhere": "nothing", "secret": tmp_path / "secret"}
    for name, target in links.items():
        (source / name).symlink_to(target)
    for name in ("pipe", "extra/pipe"):
        os.mkfifo(source / name)
    make_delta(model).merge(source, out)
    assert files(out).keys() == files(base).keys() | {"extra/kept.json"}
    assert not any(path.is_symlink() for path in out.iterdir())
    assert bits(load(model, out)) == bits(make_delta(model).apply(model))


def test_the_wrong_base_or_the_name_of_a_files_metadata_is_refused_before_anything_is_written(
    base, out, nothing_written
):
    other = bert()
    with torch.no_grad():
        other.classifier.bias += 1  # the last tensor
    with pytest.raises(BaseMismatchError, match=r"`classifier.bias` does not hold the values"):
        make_delta(other).merge(base, out)
    with pytest.raises(SparsifyError, match="cannot have a tensor that is called `__metadata__`"):
        SparseDelta({}, {"__metadata__": torch.ones(2)}).merge(base, out)


def test_a_failure_midway_leaves_nothing_behind(model, base, out, nothing_written, monkeypatch):
    copyfile, copied = merging.shutil.copyfile, []

    def fail_at_the_second_shard(source, target, **options):
        copied.extend([source] if source.suffix == ".safetensors" else [])
        if len(copied) == 2:
            raise OSError("no space left on device")
        return copyfile(source, target, **options)

    monkeypatch.setattr(merging.shutil, "copyfile", fail_at_the_second_shard)
    with pytest.raises(OSError, match="no space left"):
        make_delta(model).merge(base, out)


def test_the_folder_may_be_a_link_or_the_one_that_we_are_in(model, base, tmp_path, monkeypatch):
    for name in ("real", "here"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    delta = make_delta(model)
    delta.merge(base, tmp_path / "link")
    monkeypatch.chdir(tmp_path / "here")
    delta.merge(base, ".")
    monkeypatch.chdir(tmp_path)
    assert (tmp_path / "link").is_symlink()
    assert files(tmp_path / "real") == files(tmp_path / "here") != {}


@pytest.mark.parametrize(
    ("folders", "match"),
    [
        (("base", "taken"), "is there already and is not an empty folder: delete it, or give another"),
        (("base", "base/../base"), "is the base itself, which a merge leaves as it is"),
        (("base/model.safetensors", "merged"), r"is not a folder: give the one with the base's `config.json`"),
    ],
)
def test_folders_that_cannot_be_used_are_refused(model, base, tmp_path, folders, match):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes.txt").write_text("mine")
    with pytest.raises(SparsifyError, match=match):
        make_delta(model).merge(*(tmp_path / folder for folder in folders))
    with pytest.raises(SparsifyError, match=r"`merge` works on files, and got a BertFor.*`apply` the delta to the mo"):
        make_delta(model).merge(model, tmp_path / "merged")
    assert files(tmp_path / "taken") == {"notes.txt": b"mine"}
    assert not (tmp_path / "merged").exists()


def test_the_fields_are_those_of_vllm():
    """CheckpointWeightPatch(name, shape, dtype, values, indices=None); positions are int64, values one-dimensional."""
    assert WeightPatch._fields == ("name", "shape", "dtype", "values", "indices")
    assert WeightPatch._field_defaults == {"indices": None}
    model = bert()
    delta = make_delta(model)
    delta.whole["bert.pooler.dense.weight"] = torch.ones(16, 16)
    del delta.tensors["bert.pooler.dense.weight"]
    patches = list(delta.patches())
    for patch in patches:
        assert patch.values.dtype == patch.dtype
        assert patch.values.dim() == 1
        assert patch.indices is None or patch.indices.dtype == torch.int64
    dense = [patch.indices is None for patch in patches]
    assert dense == sorted(dense), "the sparse ones first, since an engine takes them in calls of their own"
    assert sum(dense) == 1


@fuses_at_load
def test_tensors_stored_whole_are_patched_whole(tmp_path):
    model = mixtral()
    whole = {
        "model.layers.0.mlp.experts.gate_up_proj": torch.randn(3, 48, 16),
        "model.norm.weight": torch.randn(16),
        "score.weight": torch.randn(2, 16),
    }
    delta = SparseDelta({}, whole)
    patches = list(delta.patches(save(model, tmp_path)))
    parts = {f"{expert}.{part}.weight" for expert in range(3) for part in ("w1", "w3")}
    names = {patch.name for patch in patches if patch.shape == (24, 16)}
    assert names == {f"model.layers.0.block_sparse_moe.experts.{part}" for part in parts}
    assert patches[-1].name == "score.weight"
    loaded = load(model, patched(tmp_path, patches))
    del delta.whole["score.weight"]
    assert bits(loaded) == bits(delta.apply(model))


@fuses_at_load
def test_a_part_of_a_stored_tensor_is_patched_at_its_entries(tmp_path):
    model = dinov2()
    name = next(key for key in model.state_dict() if key.endswith("mlp.up_proj.weight"))
    delta = SparseDelta({}, {name: torch.randn_like(model.state_dict()[name])})
    (patch,) = delta.patches(save(model, tmp_path))
    assert patch.indices.numel() == delta.whole[name].numel() < torch.Size(patch.shape).numel()
    assert bits(load(model, patched(tmp_path, [patch]))) == bits(delta.apply(model))


def test_differences_need_the_base(tmp_path):
    model = bert()
    delta = (0.5 * make_delta(model)).on(model, kind="add")
    with pytest.raises(SparsifyError, match=r"is stored as differences, .* give the base's checkpoint, `patches\("):
        delta.patches()
    patches = delta.patches(save(model, tmp_path))
    assert bits(load(model, patched(tmp_path, patches))) == bits(delta.apply(model))


def test_two_tensors_that_a_checkpoint_ties_are_refused(tmp_path):
    model = gpt2()
    delta = make_delta(model)
    delta.tensors["lm_head.weight"] = delta.tensors["transformer.wte.weight"]
    with pytest.raises(BaseMismatchError, match=r"wte.weight` and `lm_head.weight` are one tensor in the checkpoint"):
        delta.check(save(model, tmp_path))
