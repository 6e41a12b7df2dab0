"""Model cards, and deltas on the hub: pushed and loaded with its client, against a server that speaks its endpoints."""

import os
import re
import shutil
import warnings
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from multiprocessing import get_context
from pathlib import Path
from unittest import mock

import pytest
import torch
from hub_server import OWNER, Repo, client_environment, hub_server
from huggingface_hub import ModelCard
from models import build, train
from transformers import BertForSequenceClassification

from sparsify import Magnitude, SparseDelta, SparsifyError, Static, Strategy, desparsify, sparsify
from sparsify.common.raw_bits import digest
from sparsify.delta.entries import TensorDelta
from sparsify.delta.format import FILE_NAME
from sparsify.delta.hub import is_repo_id, model_card, public_config, update_card
from sparsify.strategies.strategy import PRESETS

REPO = f"{OWNER}/my-delta"
FILES = {"README.md", "sparse_delta.safetensors", "sparse_delta_config.json"}
BASE = "google-bert/bert-base-uncased"


def run_client(folder, blocks):
    """What the blocks print, each up to an error of ours, and then what comes as warnings."""
    os.chdir(folder)
    names = {"SparseDelta": SparseDelta, "first": SparseDelta.load("first"), "second": SparseDelta.load("second")}
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err, warnings.catch_warnings():
        warnings.simplefilter("always")
        for block in blocks:
            try:
                exec(block, names)
            except SparsifyError as error:  # any other error fails the test
                print(type(error).__name__, "from", type(error.__cause__).__name__, "-", error)
    return out.getvalue() + err.getvalue()


@pytest.fixture(scope="module")
def connected(tmp_path_factory):
    """A hub, a process to whose client it is the only one, and that one's cache."""
    home = tmp_path_factory.mktemp("hf")
    with hub_server() as hub, ProcessPoolExecutor(1, get_context("spawn")) as process:
        with mock.patch.dict(os.environ, client_environment(hub, home), clear=True):
            process.submit(os.getpid).result()  # it starts here
        yield hub, process, home / "hub"


@pytest.fixture
def hub(connected):
    hub, _, cache = connected
    hub.repos.clear()
    shutil.rmtree(cache, ignore_errors=True)
    return hub


def make_delta(value=2.0, base=BASE):
    values, base_sha256 = torch.tensor([value]), digest(torch.zeros(1))
    entry = TensorDelta(torch.tensor([3]), values, (2, 4), torch.float32, "replace", base_sha256)
    strategy = {"importance": {"name": "d3", "exp": 2, "eps": 1}, "selection": {"name": "increment"}}
    config = {"base_model_name_or_path": base, "strategy": strategy}
    return SparseDelta({"encoder.layer.0.query.weight": entry}, config=config)


@pytest.fixture
def client(connected, tmp_path):
    make_delta().save(tmp_path / "first")
    make_delta(value=7.0).save(tmp_path / "second")
    return lambda *blocks: connected[1].submit(run_client, tmp_path, blocks).result(120)


def test_a_pushed_delta_is_loaded_by_id_and_by_revision(hub, client):
    printed = client(f"""
one = first.push_to_hub("my-delta", private=True)
two = second.push_to_hub("{REPO}", commit_message="Trained longer")
print(type(two).__name__, [SparseDelta.load("{REPO}", revision=r).tensors.popitem()[1].values.item()
    for r in (None, "main", one.oid, two.oid)])
print(SparseDelta.load("{REPO}", revision=one.oid, local_files_only=True))
""")
    assert "CommitInfo [7.0, 7.0, 2.0, 7.0]" in printed
    assert "SparseDelta(1 entry in 1 tensor" in printed
    repo = hub.repos[REPO]
    assert repo.private
    assert repo.messages == ["initial commit", "Upload a sparse delta", "Trained longer"]
    assert set(repo.files()) == FILES
    card = repo.files()["README.md"].decode()
    assert f"base_model: {BASE}" in card
    assert f'load_model("{BASE}", "{REPO}")' in card


def test_a_branch_is_made_and_a_pull_request_leaves_main_alone(hub, client):
    printed = client(f"""
first.push_to_hub("{REPO}", revision="longer")
info = second.push_to_hub("{REPO}", create_pr=True)
print(info.pr_revision, SparseDelta.load("{REPO}", revision="longer"))
print(SparseDelta.load("{REPO}", revision=info.pr_revision))
SparseDelta.load("{REPO}")
""")
    assert printed.startswith("refs/pr/1 SparseDelta(1 entry")
    assert set(hub.repos[REPO].files("longer")) == set(hub.repos[REPO].files("refs/pr/1")) == FILES
    assert hub.repos[REPO].files() == {}
    assert "there is no `sparse_delta.safetensors` at" in printed


def test_a_second_push_renews_the_generated_part_of_the_card_only(hub, client):
    client(f'first.push_to_hub("{REPO}")')
    repo = hub.repos[REPO]
    edited = repo.files()["README.md"].decode().replace("1 changed entries", "no entries") + "\n## Limits\n\nSmall.\n"
    repo.commit("main", {"README.md": edited.encode()}, "by hand")
    client(f'second.push_to_hub("{REPO}")')
    assert repo.files()["README.md"].decode() == edited.replace("no entries", "1 changed entries")


def test_the_path_of_a_base_is_not_published(hub, client, tmp_path):
    make_delta(base=str(tmp_path / "private" / "bert")).save(tmp_path / "homemade")
    printed = client(f'SparseDelta.load("homemade").push_to_hub("{REPO}")')
    assert "the base is recorded as a path of this machine, which is left out of what is published" in printed
    assert all(str(tmp_path).encode() not in content for content in hub.repos[REPO].files().values())
    card = hub.repos[REPO].files()["README.md"].decode()
    assert "base_model:" not in card
    assert f'load_model("path/to/the/base", "{REPO}")' in card


@pytest.mark.parametrize("path", ["/home/me/bert", "../a/b", "C:\\models\\bert", "a/b/bert", "out/bert", "", None])
def test_a_base_that_is_no_id_is_not_public(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out" / "bert").mkdir(parents=True)
    config = {"base_model_name_or_path": path, "base_model_revision": "abc", "budget": 5}
    assert public_config(config) == {**config, "base_model_name_or_path": None, "base_model_revision": None}


def test_base_and_delta_from_the_hub_make_the_trained_model(hub, client, tmp_path):
    model, batches = build("bert")
    model.bert.save_pretrained(tmp_path / "base")
    base = hub.repos["a/base"] = Repo()
    trained_on = base.commit("main", {f.name: f.read_bytes() for f in (tmp_path / "base").iterdir()}, "weights")
    build("bert", seed=1)[0].bert.save_pretrained(tmp_path / "later")
    base.commit("main", {f.name: f.read_bytes() for f in (tmp_path / "later").iterdir()}, "other weights")

    model = BertForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=5).train()
    train(sparsify(model, 40, "id3", steps=1, modules_to_save=["classifier"]), batches[:1])
    delta = SparseDelta.from_model(model)
    delta.config |= {"base_model_name_or_path": "a/base", "base_model_revision": trained_on}
    delta.save(tmp_path / "tuned")
    model = desparsify(model).eval()
    torch.save((batches[-1]["input_ids"], model(batches[-1]["input_ids"]).logits), tmp_path / "expected.pt")
    printed = client(f"""
import torch
from sparsify import load_model

SparseDelta.load("tuned").push_to_hub("{REPO}")
tokens, expected = torch.load("expected.pt")
for base in (None, "a/base"):
    print(torch.equal(load_model(base, "{REPO}")(tokens).logits, expected))
load_model("a/base", "{REPO}", revision="main")
""")
    assert printed.startswith("True\nTrue\nBaseMismatchError")


def test_what_cannot_be_loaded_or_pushed_says_why_and_what_to_do(hub, client):
    hub.repos |= {"a/private": Repo(private=True), "a/gated": Repo(gated=True), "a/empty": Repo(), "a/theirs": Repo()}
    expected = {
        '"a/nothing"': r"RepositoryNotFoundError - `a/nothing` of the hub at http\S+: it is neither a path here",
        '"a/private", token=False': "RepositoryNotFoundError - `a/private` .*if it is private, log in with `hf",
        '"a/gated", token=False': "GatedRepoError - `a/gated` .*: it is gated: ask for access on its page",
        '"a/empty", revision="v9"': "RevisionNotFoundError - `a/empty` .*: it has no revision 'v9': give one",
        '"a/empty"': "EntryNotFoundError - `a/empty` .*: there is no `sparse_delta.safetensors` at revision 'main'",
        '"a/cached", local_files_only=True': "LocalEntryNotFoundError - `a/cached` .*: it is not in",
    }
    expected = {f"SparseDelta.load({arguments})": pattern for arguments, pattern in expected.items()}
    expected |= {
        'first.push_to_hub("a/theirs", token="hf_reader")': ".*if it is a matter of rights, log in with",
        """from unittest import mock
with mock.patch("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9"):
    first.push_to_hub("a/b")
""": "Connect.*`a/b` of the hub at http://127.0.0.1:9: .*check the network",
    }
    for line, pattern in zip(client(*expected).splitlines(), expected.values(), strict=True):
        assert re.match(rf"SparsifyError from \w*{pattern}", line), line
    assert hub.repos["a/theirs"].messages == ["initial commit"]


@pytest.mark.filterwarnings("error")
def test_a_push_to_no_repository_is_refused_before_any_request(tmp_path):
    for repo in ["a/b/c", "", "a/", "/a", "./first", "me/na me", "me/x.git", "https://hub.co/me/x", 5, None, Path("a")]:
        message = re.escape(f"{repo!r} is no repository's id: expected one such as 'user/name'")
        with pytest.raises(SparsifyError, match=message):
            make_delta(base=str(tmp_path)).push_to_hub(repo)


def test_a_path_that_exists_is_not_asked_for_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_delta().save("user/name")
    assert SparseDelta.load("user/name") == make_delta()
    with pytest.raises(SparsifyError, match=r"revision='v1' of `user/name`, which is taken for a path"):
        SparseDelta.load("user/name", revision="v1")
    Path("user/empty").mkdir()
    Path("user/lora").mkdir()
    Path("user/lora/adapter_config.json").write_text("{}")
    with pytest.raises(SparsifyError, match=r"`user/lora` has an adapter of PEFT: SparseDelta.from_peft\(path, base\)"):
        SparseDelta.load("user/lora")
    with pytest.raises(SparsifyError, match="does not exist, so there is no delta to load"):
        SparseDelta.load("user/empty")


@pytest.mark.parametrize(
    "path", ["my-delta", "out/a.safetensors", "a/b/c", "/a/b", "./a", "a/..", "-a/b", Path("user/name")]
)
def test_a_missing_path_is_never_a_repository(path):
    assert is_repo_id("user/name")
    with pytest.raises(SparsifyError, match="does not exist, so there is no delta to load"):
        SparseDelta.load(path)


CONFIG = {
    "base_model_name_or_path": "google-bert/bert-base-uncased",
    "base_model_revision": "86b5e0934494bd15c9632b12f734a8a67f723594",
    "architecture": "BertForSequenceClassification",
    "strategy": PRESETS["id3"].to_dict(),
    "budget": 38_000,
    "steps": 1_000,
    "steps_done": 900,
    "versions": {"sparsify": "0.1", "torch": "2.13"},
}


def entries(count):
    return TensorDelta(torch.arange(count), torch.ones(count), (10, 10), torch.float32, "replace", "0" * 64)


TENSORS = {
    "bert.embeddings.word_embeddings.weight": entries(4),
    "bert.encoder.layer.10.attention.self.query.weight": entries(40),
    "bert.encoder.layer.2.attention.self.query.weight": entries(20),
    "bert.encoder.layer.2.output.dense.bias": entries(16),
}
WHOLE = {"classifier.weight": torch.zeros(3, 4)}


def make_card(tensors=TENSORS, whole=WHOLE, config=CONFIG):
    return model_card(tensors, whole, config, repo_id="user/name", file_bytes=268_000)


def test_a_card_tells_the_base_what_was_trained_and_how_to_load_it():
    card = ModelCard(make_card())
    assert card.data.to_dict() == {
        "base_model": "google-bert/bert-base-uncased",
        "base_model_relation": "adapter",
        "library_name": "sparsify",
        "tags": ["sparsify", "sparse", "selective-fine-tuning", "id3"],
    }
    expected = """\
| base revision | 86b5e0934494bd15c9632b12f734a8a67f723594 |
| architecture | BertForSequenceClassification |
| strategy | id3 |
| budget | 38,000 |
| optimizer steps | 900 |
| file | 0.27 MB |
| made with | sparsify 0.1, torch 2.13 |
model = load_model("google-bert/bert-base-uncased", "user/name")
delta = SparseDelta.load("user/name")
| bert.embeddings.word_embeddings.weight | 4 | 5.0% |
| bert.encoder.layer.2 | 36 | 45.0% |
| bert.encoder.layer.10 | 40 | 50.0% |
| classifier.weight | 12 | stored whole |
"""
    lines = card.text.splitlines()
    assert [line for line in lines if line in expected.splitlines() and line] == expected.splitlines()
    assert ": 80 changed entries in 4 tensors (20.000% of their entries) and" in card.text


@pytest.mark.parametrize(
    ("config", "tag"),
    [
        *(({"strategy": PRESETS[name].to_dict()}, [name]) for name in PRESETS),
        ({"strategy": Strategy(Magnitude(largest=True), Static()).to_dict()}, ["largest-static"]),
        ({}, []),
        ({"strategy": "id3", "versions": 3, "budget": "many", "steps": None}, ["id3"]),
        ({"strategy": {"importance": None, "selection": {"name": "given"}}}, ["given"]),
        ({"strategy": {"importance": {"name": ["a"]}, "selection": {"name": "static"}}}, ["static"]),
    ],
)
def test_a_config_of_any_kind_gives_a_card_with_the_strategys_name_for_a_tag(config, tag):
    data = ModelCard(make_card(config=config)).data.to_dict()
    assert data == {"library_name": "sparsify", "tags": ["sparsify", "sparse", "selective-fine-tuning", *tag]}


HOSTILE = [
    "<script>alert(1)</script>",
    "[click](https://evil.example)",
    "![](https://evil.example/x.png)",
    "a|b\n\n# Owned\n\n---\nlicense: mit\n---",
    "`x` **bold** {rows} &lt; <!-- sparsify: end of the generated part -->",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_names_are_text_and_nothing_else(name):
    strategy = {"importance": {"name": name, name: name}, "selection": {"name": name}}
    config = {**CONFIG, "architecture": name, "strategy": strategy, "base_model_revision": name}
    config |= {"versions": {name: name}, "budget": name, "steps_done": name}
    plain = ModelCard(make_card({"x.weight": entries(1)}, {"x.bias": torch.zeros(1)}))
    hostile = ModelCard(make_card({name: entries(1)}, {f"{name}.bias": torch.zeros(1)}, config))
    assert set(hostile.data.to_dict()) == set(plain.data.to_dict())
    assert len(hostile.text.splitlines()) == len(plain.text.splitlines())
    assert not any(mark in hostile.text for mark in ("<script", "](https://evil", "![", "**bold**", "\n# Owned"))
    assert hostile.text.count("<!--") == 2


def test_a_card_stays_small_whatever_the_number_of_tensors():
    many = {f"m.{index}.x{index}.weight": entries(1) for index in range(2_000)}
    card = make_card(many, {f"h{index}": torch.zeros(1) for index in range(500)})
    assert "| 2,380 more | | |" in card
    assert len(card) < 40_000


@pytest.mark.parametrize(
    "present",
    [
        "# Mine\n",
        "",
        "---\nlicense: mit\n---\n# Mine\n",
        "---\n: : [\n---\nbroken",
        pytest.param(make_card().replace("---\n", "---\n: : [\n", 1), id="generated, with broken metadata"),
    ],
)
def test_a_hand_written_or_broken_card_is_left_unchanged(present):
    assert update_card(present, make_card(whole={})) == present


def test_the_generated_part_is_renewed_and_the_rest_is_kept():
    first = make_card().replace("---\n", "---\nlicense: mit\nmetrics:\n- f1\ntags:\n- mine\n", 1)
    first = first.replace("tags:\n- sparsify\n- sparse\n- selective-fine-tuning\n- id3\n", "")
    first = first.replace("# name\n", "# name\n\nOld words.\n")
    present = ModelCard(first + "\n## Limits\n\nMine.\n")
    present.text = f"\nBefore.\n{present.text}"
    generated = make_card(whole={}, config={**CONFIG, "budget": 5, "base_model_name_or_path": "user/other"})
    updated = ModelCard(update_card(str(present), generated))
    assert (updated.data.get("license"), updated.data.get("metrics")) == ("mit", ["f1"])
    assert updated.data.base_model == "user/other"
    assert updated.data.tags == ["mine", "sparsify", "sparse", "selective-fine-tuning", "id3"]
    assert updated.text.startswith("\nBefore.\n")
    assert updated.text.endswith("## Limits\n\nMine.\n")
    assert "Old words" not in updated.text
    assert "| budget | 5 |" in updated.text
    assert update_card(str(updated), generated) == str(updated)


def test_a_file_that_is_no_delta_is_not_overwritten(tmp_path):
    file = tmp_path / FILE_NAME
    file.write_text("precious")
    with pytest.raises(SparsifyError, match=f"`{file}` is there already and is no delta, so it is left as it is"):
        make_delta().save(tmp_path)
    assert file.read_text() == "precious"
    file.write_bytes(b"")  # of tempfile
    for _ in range(2):
        make_delta().save(tmp_path)
    assert SparseDelta.load(tmp_path) == make_delta()
