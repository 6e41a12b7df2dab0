"""Every verb of the command line, through the function that the console script calls."""

import copy
import hashlib
import json
import runpy
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import safetensors.torch
import torch
from checkpoints import bert, save
from deltas import fine_tuned, make_base, task
from hub_server import OWNER, client_environment, hub_server
from peft import get_peft_model

import sparsify
from sparsify import SparseDelta, SparsifyError
from sparsify.common.raw_bits import digest
from sparsify.delta.sparse_delta import TensorDelta
from sparsify.peft import SparseConfig


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs ``sparsify ...`` as the console script does; returns what it printed, or the error it ended with."""
    (script,) = entry_points(group="console_scripts", name="sparsify")

    def run(*arguments, fails=False, columns=200):
        monkeypatch.setattr(sys, "argv", ["sparsify", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", str(columns))
        with pytest.raises(SystemExit) as ending:
            script.load()()
        printed, code = "".join(capsys.readouterr()), ending.value.code
        assert isinstance(code, str) if fails else code == 0, code
        return code if fails else printed

    return run


@pytest.fixture
def base(tmp_path):
    model = make_base()
    (tmp_path / "base").mkdir()
    safetensors.torch.save_file(model.state_dict(), tmp_path / "base" / "model.safetensors")
    return model


@pytest.fixture
def out(tmp_path, base):
    """Options that name the base, and where to write."""
    return ["--base", tmp_path / "base", "--out", tmp_path / "out"]


@pytest.fixture
def saved(tmp_path, base):
    """A delta with a head, in a folder ``delta``."""
    delta = task(base, 1)
    delta.whole["head.weight"] = torch.ones(2, 3)
    delta.config = {"base_model_name_or_path": "user/base", "strategy": {"importance": "d3"}, "budget": 12, "steps": 7}
    delta.save(tmp_path / "delta")
    return delta


@pytest.fixture
def plain(tmp_path, base):
    """The file of a delta without a head, in a folder ``delta``."""
    task(base, 1).save(tmp_path / "delta")
    return tmp_path / "delta" / "sparse_delta.safetensors"


def test_info_shows_where_the_entries_are(run, tmp_path, saved, monkeypatch):
    text = run("info", tmp_path / "delta")
    for part in (f"{saved.num_entries} in", "user/base", "head.weight (2, 3)", "an entry, all included", "█"):
        assert part in text
    size = (tmp_path / "delta" / "sparse_delta.safetensors").stat().st_size
    assert f"{size:,}" in text
    narrow = run("info", tmp_path / "delta", columns=80)
    assert "█" * 20 in narrow
    assert "█…" not in narrow
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")  # as of a file on Windows
    assert "?" * 20 in subprocess.check_output(
        [sys.executable, "-m", "sparsify", "info", tmp_path / "delta"], text=True
    )
    found = json.loads(run("info", tmp_path / "delta" / "sparse_delta.safetensors", "--json"))
    assert found["entries"] == saved.num_entries
    counts = {name: part.count for name, part in saved.tensors.items()}
    assert {name: row["entries"] for name, row in found["tensors"].items()} == counts
    assert found["config"] == saved.config
    assert found["whole"] == {"head.weight": {"shape": [2, 3], "dtype": "float32"}}


def test_a_file_does_not_steer_the_terminal_or_turn_the_direction_of_writing(run, tmp_path, base, out):
    for number in (1, 2):
        delta = task(base, number)
        delta.config = {"base_model_name_or_path": "\x1b[2J[red]evil[/red] ü-漢"}
        delta.tensors = {"layers.0.[bold]": delta.tensors["0.weight"]}
        delta.whole["head.\u200f.weight"] = torch.full((2,), float(number))
        delta.save(tmp_path / str(number))
    text = run("add", tmp_path / "1", tmp_path / "2", *out, fails=True)
    text += run("info", tmp_path / "1") + str(SparsifyError("tensor `a\u202e\x1b[2J`"))
    assert text.count("\\u200f") == 2
    assert text.endswith("tensor `a\\u202e\\x1b[2J`")
    assert "\\x1b[2J[red]evil[/red] ü-漢" in text
    assert "[bold]" in text
    assert not {"\u200f", "\x1b"} & set(text)


def test_info_of_a_sparse_lora(run, tmp_path):
    SparseDelta({}, {"layers.0.lora_A": torch.ones(4, 2)}, {"entries_in_whole": 7}).save(tmp_path)
    text = run("info", tmp_path)
    assert "7 trained in tensors stored whole" in text
    assert "0 in 0 tensors" not in text


def test_verify_accepts_the_base_and_refuses_another_and_a_changed_bit(run, tmp_path, plain):
    good = plain.read_bytes()
    payload_start = 8 + int.from_bytes(good[:8], "little")
    sha = hashlib.sha256(good[payload_start:]).hexdigest()
    verdict, payload = run("verify", tmp_path / "delta", "--base", tmp_path / "base").splitlines()
    assert f"{SparseDelta.load(plain).num_entries}" in verdict
    assert payload == f"payload: as it was written (SHA-256 {sha})"
    safetensors.torch.save_file(make_base(seed=4).state_dict(), tmp_path / "other.safetensors")
    text = run("verify", tmp_path / "delta", "--base", tmp_path / "other.safetensors", fails=True)
    assert "does not hold the values" in text
    plain.write_bytes(good[:payload_start] + bytes([good[payload_start] ^ 1]) + good[payload_start + 1 :])
    text = run("verify", tmp_path / "delta", "--base", tmp_path / "base", fails=True)
    assert "its payload does not have the SHA-256 that its metadata records" in text


def test_diff_takes_a_delta_from_two_checkpoints(run, tmp_path, base, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)  # no config says that names are to be converted
    safetensors.torch.save_file(fine_tuned(base, 1).state_dict(), tmp_path / "tuned.safetensors")
    arguments = ["diff", tmp_path / "base", tmp_path / "tuned.safetensors", "--out"]
    assert run(*arguments, tmp_path / "delta", "--budget", 4).startswith("4 of ")
    assert SparseDelta.load(tmp_path / "delta").num_entries == 4
    (tmp_path / "file").write_text("precious")
    assert run(*arguments, tmp_path / "share", "--budget", 0.1).startswith("7 of ")  # of 73 entries
    text = run(*arguments, tmp_path / "share", "--budget", "1.5", fails=True)
    assert "budget=1.5; expected a number of entries, at least 1, a share of all as a float in (0, 1)" in text
    text = run(*arguments, tmp_path / "file", fails=True)
    assert text.startswith("sparsify: ")
    assert "is a file, and a delta is saved into a folder" in text
    assert run(*arguments, tmp_path / "file" / "x", fails=True).startswith("sparsify: [Errno 20] Not a dir")
    assert (tmp_path / "file").read_text() == "precious"


def test_add_weighs_the_deltas_and_says_where_they_meet(run, tmp_path, base, out):
    a, b = task(base, 1), task(base, 2)
    a.save(tmp_path / "a")
    b.save(tmp_path / "b")
    text = run("add", tmp_path / "a", tmp_path / "b", "--weights", "1,-0.5", *out, "--kind", "add")
    assert "Jaccard" in text
    assert "opposite directions" in text
    with (a - 0.5 * b).applied(base):
        expected = base[0].weight.detach().clone()
    with SparseDelta.load(tmp_path / "out").applied(base):
        torch.testing.assert_close(base[0].weight.detach(), expected)
    for weights in ("1,x", "1,2,3", "nan,1"):
        text = run("add", tmp_path / "a", tmp_path / "b", "--weights", weights, *out, fails=True)
        assert "expected 2 finite numbers, comma-separated" in text


def test_add_takes_stages_whose_second_began_where_the_first_had_ended(run, tmp_path, base, out):
    middle = copy.deepcopy(base)
    middle[0].weight.data[:2] += 1
    tuned = copy.deepcopy(middle)
    tuned[0].weight.data[1:3] += 1
    SparseDelta.diff(base, middle).save(tmp_path / "a")
    SparseDelta.diff(middle, tuned).save(tmp_path / "b")
    assert "entries shared" in run("add", tmp_path / "a", tmp_path / "b", *out)
    assert torch.equal(SparseDelta.load(tmp_path / "out").apply(base)[0].weight, tuned[0].weight)


def test_add_leaves_out_the_heads_of_different_tasks_if_asked_to(run, tmp_path, saved, out):
    saved.whole["head.weight"] = torch.zeros(2, 3)
    saved.save(tmp_path / "other")
    arguments = ["add", tmp_path / "delta", tmp_path / "other", *out]
    assert "`head.weight` is stored whole by several deltas" in run(*arguments, fails=True)
    run(*arguments, "--entries-only")
    assert not SparseDelta.load(tmp_path / "out").whole


def test_push_publishes_and_info_reads_from_the_hub(tmp_path, saved):
    repo = f"{OWNER}/from-the-command-line"
    with hub_server() as hub:
        environment = client_environment(hub, tmp_path / "hf")

        def script(*arguments):
            command = [Path(sys.executable).parent / "sparsify", *arguments]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environment)
            assert done.stderr == ""  # other libraries' warnings and bars
            return done.stdout

        options = ["--private", "--message", "First", "--base-model", "me/base"]
        assert f"{hub.endpoint}/{repo}" in script("push", "delta", repo, *options)
        assert hub.repos[repo].private
        assert hub.repos[repo].messages[-1] == "First"
        shown = script("info", repo)
        assert f"{saved.num_entries} in" in shown
        assert "me/base" in shown
        assert SparseDelta.load(tmp_path / "delta") == saved


def test_a_push_that_fails_offline_is_one_line(run):
    text = run("push", "no/path", "me/name", fails=True)
    assert "unset HF_HUB_OFFLINE and try again, or give the path of a copy, which `no/path` is not" in text
    assert len(text.splitlines()) == 1


def test_no_input_is_overwritten(run, tmp_path, base, plain):
    task(base, 2).save(tmp_path / "other")
    safetensors.torch.save_file(fine_tuned(base, 1).state_dict(), tmp_path / "tuned.safetensors")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    diff, add = ["diff", tmp_path / "base", tmp_path / "tuned.safetensors"], ["add", plain, tmp_path / "other"]
    add += ["--base", tmp_path / "base"]
    weights = tmp_path / "base" / "model.safetensors"
    for arguments, out in [
        (diff, weights), (diff, tmp_path / "base"), (diff, tmp_path / "tuned.safetensors"), (add, weights),
        (add, tmp_path / "delta"), (add, plain), (add, tmp_path / "other" / plain.name),
        (["from-checkpoint", weights], weights),
    ]:  # fmt: skip
        text = run(*arguments, "--out", out, fails=True)
        assert "is also an input, which is left as it is" in text or "is no delta, so it is left as it is" in text
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_verify_that_compared_nothing_is_no_success(run, tmp_path, base, plain):
    safetensors.torch.save_file(base.half().state_dict(), tmp_path / "half.safetensors")
    text = run("verify", plain, "--base", tmp_path / "half.safetensors", fails=True)
    assert text == "sparsify: not verified: the values of the base were not all compared with those of the training."
    SparseDelta({}, {"0.weight": torch.ones(5, 6)}).save(tmp_path / "head")
    assert "not verified" in run("verify", tmp_path / "head", "--base", tmp_path / "base", fails=True)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sparse_delta_config.json", "the description of a delta, for people"),
        ("config.json", "the config of a model"),
        ("other.json", "JSON text"),
        ("weights.pt", "a zip file, as torch.save writes it"),
    ],
)
def test_info_says_what_another_file_is(run, tmp_path, name, kind):
    (tmp_path / name).write_text(json.dumps({"format_version": 1}, indent=2))
    if kind.startswith("a zip"):
        torch.save({}, tmp_path / name)
    assert f"it is {kind}, and a delta is `sparse_delta.safetensors`" in run("info", tmp_path / name, fails=True)


def test_a_checkpoint_in_training_is_shown_and_becomes_a_delta(run, tmp_path):
    model = sparsify.sparsify(make_base(), 8, "id3", steps=2)
    model(torch.ones(4, 6)).square().sum().backward()
    torch.optim.SGD([model.sparse_values], lr=0.1).step()
    checkpoint = tmp_path / "checkpoint-1"
    checkpoint.mkdir()
    safetensors.torch.save_file(sparsify.trained_state(model), checkpoint / "model.safetensors")
    assert "4 in " in run("info", checkpoint)
    assert json.loads(run("info", checkpoint, "--json"))["payload_sha256"] is None
    assert "4 entries after 1 steps" in run("from-checkpoint", checkpoint, "--out", tmp_path / "delta")
    assert SparseDelta.load(tmp_path / "delta") == SparseDelta.from_model(model)


def test_an_adapter_of_peft_is_shown_and_verified(run, tmp_path):
    bert().save_pretrained(tmp_path / "base")
    config = SparseConfig(budget=8, strategy="random", task_type="SEQ_CLS")
    get_peft_model(bert(), config).save_pretrained(tmp_path / "adapter")
    assert "8 in " in run("info", tmp_path / "adapter")
    assert "has no hash of it" in run("verify", tmp_path / "adapter", "--base", tmp_path / "base")


def test_warnings_are_lines_and_transformers_is_not_imported_to_merge_plain_names(run, tmp_path, monkeypatch, capsys):
    save(bert(), tmp_path / "base", shards=False)
    with safetensors.safe_open(tmp_path / "base" / "model.safetensors", "pt") as file:
        name = next(name for name in file.keys() if "query.weight" in name)  # noqa: SIM118
        old = file.get_tensor(name).flatten()
    part = TensorDelta(torch.tensor([3]), old[3:4] + 1, (16, 16), torch.float32, "replace", digest(old[3:4]))
    SparseDelta({name: part}).save(tmp_path / "delta")
    part = replace(part, values=part.values.half(), dtype=torch.float16)
    SparseDelta({name: part}).save(tmp_path / "half")
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()  # transformers' bar
    wrote, warning = run("merge", "half", "--base", "base", "--out", "merged").splitlines()
    assert wrote == "wrote merged"
    assert warning.startswith("sparsify: the checkpoint holds torch.float32 where the delta was trained on torch.float")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert run("merge", "delta", "--base", "base", "--out", "again") == "wrote again\n"


@pytest.mark.parametrize("command", ["", "info", "verify", "merge", "diff", "add", "push", "from-checkpoint"])
def test_help_teaches(run, command):
    text = run(*command.split(), "--help")
    assert ("Example: sparsify " + command in text) if command else ("verify" in text and "--version" in text)


def test_the_module_is_the_command_line_and_says_its_version(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["sparsify", "--version"])
    with pytest.raises(SystemExit):
        runpy.run_module("sparsify", run_name="__main__")
    assert capsys.readouterr().out == f"sparsify {sparsify.__version__}\n"


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_it_is_one_line(run, missing, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    expected = f"sparsify: `{missing}` is not installed; it comes with: pip install 'sparsify-ft[cli]'"
    assert run("--help", fails=True) == expected
