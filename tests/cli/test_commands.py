"""Every verb of the command line, through the function that the console script calls."""

import copy
import hashlib
import json
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import safetensors.torch
import torch
from deltas import fine_tuned, make_base, task
from hub_server import OWNER, client_environment, hub_server
from models import bert
from peft import PeftModel

import sparsify
from sparsify import SparseDelta
from sparsify.cli.commands import parse_weights
from sparsify.common.initializers import InitializerRecipe
from sparsify.delta.sparse_delta import TensorDelta

SCRIPT = Path(sys.executable).parent / "sparsify"


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs ``sparsify ...`` as the console script does; returns its exit status and what it printed."""
    (script,) = entry_points(group="console_scripts", name="sparsify")

    def run(*arguments, columns=200):
        monkeypatch.setattr(sys, "argv", ["sparsify", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", str(columns))
        with pytest.raises(SystemExit) as ending:
            script.load()()
        printed = capsys.readouterr()
        code = ending.value.code
        return (code, printed.out) if isinstance(code, int) else (1, str(code))

    return run


@pytest.fixture
def base(tmp_path):
    model = make_base()
    (tmp_path / "base").mkdir()
    safetensors.torch.save_file(model.state_dict(), tmp_path / "base" / "model.safetensors")
    return model


@pytest.fixture
def saved(tmp_path, base):
    delta = task(base, 1)
    delta.whole["head.weight"] = torch.ones(2, 3)
    delta.config = {"base_model_name_or_path": "user/base", "strategy": {"importance": "d3"}, "budget": 12, "steps": 7}
    delta.save(tmp_path / "delta")
    return delta


def test_info_shows_where_the_entries_are(run, tmp_path, saved):
    code, text = run("info", tmp_path / "delta")
    assert code == 0
    for part in (f"{saved.num_entries} in", "user/base", "head.weight (2, 3)", "an entry, all included", "█"):
        assert part in text
    size = (tmp_path / "delta" / "sparse_delta.safetensors").stat().st_size
    assert f"{size:,}" in text
    narrow = run("info", tmp_path / "delta", columns=80)[1]
    assert "█" * 20 in narrow
    assert "█…" not in narrow


@pytest.mark.parametrize("shape", [(2, 3), (0, 3)])
def test_info_of_drawn_tensors_alone(run, tmp_path, shape):
    nothing = torch.empty(0, dtype=torch.int64), torch.empty(0)
    part = TensorDelta(*nothing, shape, torch.float32, "replace", "0" * 64, InitializerRecipe("constant", 0.0))
    SparseDelta({"layers.0.lora_A.weight": part, "lora_B.weight": part}).save(tmp_path / "delta")
    code, text = run("info", tmp_path / "delta")
    assert code == 0
    assert "0 in 2 tensors" in text
    assert "the initial values of 2 tensors that the base does not have" in text
    assert run("info", tmp_path / "delta", "--json")[0] == 0


def test_info_is_there_for_programs_too(run, tmp_path, saved):
    code, text = run("info", tmp_path / "delta" / "sparse_delta.safetensors", "--json")
    assert code == 0
    found = json.loads(text)
    assert found["entries"] == saved.num_entries
    assert {name: row["entries"] for name, row in found["tensors"].items()} == {
        name: part.count for name, part in saved.tensors.items()
    }
    assert found["config"] == saved.config
    assert found["whole"] == {"head.weight": {"shape": [2, 3], "dtype": "float32"}}


def test_info_does_not_let_a_file_steer_the_terminal(run, tmp_path, base):
    delta = task(base, 1)
    delta.config = {"base_model_name_or_path": "\x1b[2J[red]evil[/red] ü-漢"}
    delta.tensors = {"layers.0.[bold]": delta.tensors["0.weight"]}
    delta.save(tmp_path / "delta")
    code, text = run("info", tmp_path / "delta")
    assert code == 0
    assert "\\x1b[2J[red]evil[/red] ü-漢" in text
    assert "[bold]" in text
    assert "\x1b[2J" not in text


def test_verify_accepts_the_base_and_refuses_another(run, tmp_path, base, saved):
    del saved.whole["head.weight"]
    saved.save(tmp_path / "delta")
    code, text = run("verify", tmp_path / "delta", "--base", tmp_path / "base")
    assert code == 0
    assert f"{saved.num_entries}" in text
    (tmp_path / "other").mkdir()
    safetensors.torch.save_file(make_base(seed=4).state_dict(), tmp_path / "other" / "model.safetensors")
    code, text = run("verify", tmp_path / "delta", "--base", tmp_path / "other")
    assert code == 1
    assert "does not hold the values" in text


def test_verify_notices_a_changed_bit_in_a_value(run, tmp_path, base):
    task(base, 1).save(tmp_path / "delta")
    file = tmp_path / "delta" / "sparse_delta.safetensors"
    good = file.read_bytes()
    payload_start = 8 + int.from_bytes(good[:8], "little")
    sha = hashlib.sha256(good[payload_start:]).hexdigest()
    code, text = run("verify", tmp_path / "delta", "--base", tmp_path / "base")
    assert code == 0
    assert text.splitlines()[1] == f"payload: as it was written (SHA-256 {sha})"
    file.write_bytes(good[:payload_start] + bytes([good[payload_start] ^ 1]) + good[payload_start + 1 :])
    code, text = run("verify", tmp_path / "delta", "--base", tmp_path / "base")
    assert code == 1
    assert "its payload does not have the SHA-256 that its metadata records" in text


def test_info_says_that_a_file_of_version_1_has_no_hash(run):
    file = Path(__file__).parents[1] / "delta" / "golden" / "format_1.safetensors"
    assert "not checked: format version 1 has no hash of it" in run("info", file)[1]
    assert json.loads(run("info", file, "--json")[1])["payload_sha256"] is None


def test_info_says_how_much_of_a_sparse_lora_was_trained(run, tmp_path):
    whole = {"layers.0.lora_A": torch.ones(4, 2), "layers.0.lora_B": torch.ones(2, 4)}
    SparseDelta({}, whole, {"entries_in_whole": 7}).save(tmp_path)
    code, text = run("info", tmp_path)
    assert code == 0
    assert "7 trained in tensors stored whole" in text
    assert "0 in 0 tensors" not in text
    assert json.loads(run("info", tmp_path, "--json")[1])["entries_in_whole"] == 7


def test_merge_writes_what_apply_would_give(run, tmp_path, base):
    delta = task(base, 1)
    delta.save(tmp_path / "delta")
    code, _ = run("merge", tmp_path / "delta", "--base", tmp_path / "base", "--out", tmp_path / "merged")
    assert code == 0
    merged = safetensors.torch.load_file(tmp_path / "merged" / "model.safetensors")
    with delta.applied(base):
        assert all(torch.equal(merged[name], tensor) for name, tensor in base.state_dict().items())


def test_diff_takes_a_delta_from_two_checkpoints(run, tmp_path, base):
    (tmp_path / "tuned").mkdir()
    safetensors.torch.save_file(fine_tuned(base, 1).state_dict(), tmp_path / "tuned" / "model.safetensors")
    out = tmp_path / "delta"
    code, text = run("diff", tmp_path / "base", tmp_path / "tuned", "--out", out, "--budget", 4)
    assert code == 0
    assert text.startswith("4 of ")
    assert SparseDelta.load(out).num_entries == 4


def test_add_weighs_the_deltas_and_says_where_they_meet(run, tmp_path, base):
    a, b = task(base, 1), task(base, 2)
    a.save(tmp_path / "a")
    b.save(tmp_path / "b")
    out = ["--base", tmp_path / "base", "--out", tmp_path / "sum", "--kind", "add"]
    code, text = run("add", tmp_path / "a", tmp_path / "b", "--weights", "1,-0.5", *out)
    assert code == 0
    assert "Jaccard" in text
    assert "opposite directions" in text
    with (a - 0.5 * b).applied(base):
        expected = base[0].weight.detach().clone()
    with SparseDelta.load(tmp_path / "sum").applied(base):
        torch.testing.assert_close(base[0].weight.detach(), expected)


def test_add_leaves_out_the_heads_of_different_tasks_if_asked_to(run, tmp_path, base):
    for seed, name in enumerate("ab"):
        delta = task(base, seed)
        delta.whole["head.weight"] = torch.full((2, 3), float(seed))
        delta.save(tmp_path / name)
    arguments = ["add", tmp_path / "a", tmp_path / "b", "--base", tmp_path / "base", "--out", tmp_path / "sum"]
    code, text = run(*arguments)
    assert code == 1
    assert "`head.weight` is stored whole by several deltas" in text
    code, _ = run(*arguments, "--entries-only")
    assert code == 0
    assert not SparseDelta.load(tmp_path / "sum").whole


@pytest.mark.parametrize("method", ["shira", "supertuning"])
def test_to_peft_writes_an_adapter_that_peft_loads(run, tmp_path, method):
    torch.manual_seed(0)
    base = bert()[0].eval()
    base.save_pretrained(tmp_path / "base")
    tuned = copy.deepcopy(base)
    tuned.bert.encoder.layer[0].attention.self.query.weight.data.view(-1)[[3, 50, 200]] += 1
    SparseDelta.diff(base, tuned).save(tmp_path / "delta")
    places = ["--base", tmp_path / "base", "--out", tmp_path / "adapter", "--method", method]
    code, text = run("to-peft", tmp_path / "delta", *places)
    assert code == 0
    assert f"PEFT {method}" in text
    tokens = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        found = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()(tokens).logits
        torch.testing.assert_close(found, tuned(tokens).logits, rtol=0, atol=1e-6)


def test_push_publishes_and_info_reads_from_the_hub(tmp_path, saved):
    repo = f"{OWNER}/from-the-command-line"
    with hub_server() as hub:
        environment = client_environment(hub, tmp_path / "hf")
        for arguments, expected in (
            (["push", "delta", repo, "--private", "--message", "First"], f"{hub.endpoint}/{repo}"),
            (["info", repo], f"{saved.num_entries} in"),
        ):
            run = subprocess.run(
                [SCRIPT, *arguments], capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environment
            )
            assert run.returncode == 0, run.stderr
            assert expected in run.stdout
        assert hub.repos[repo].private
        assert hub.repos[repo].messages[-1] == "First"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no/path", "me/name"], "or give the path of a copy, which `no/path` is not"),
        (["delta", "me/na me"], "'me/na me' is no repository's id: expected one such as 'user/name'"),
    ],
)
def test_a_failing_push_is_one_line_and_makes_no_request(tmp_path, saved, arguments, message):
    with hub_server() as hub:
        environment = {**client_environment(hub, tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
        run = subprocess.run(
            [SCRIPT, "push", *arguments], capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environment
        )
        assert run.returncode == 1
        assert message in run.stderr
        assert len(run.stderr.splitlines()) == 1
        assert hub.requests == []


@pytest.mark.parametrize("command", ["", "info", "verify", "merge", "diff", "add", "to-peft", "push"])
def test_help_teaches(run, command):
    code, text = run(*command.split(), "--help")
    assert code == 0
    assert ("Example: sparsify " + command in text) if command else ("to-peft" in text)


def test_a_path_that_cannot_be_written_is_one_line_and_status_1(run, tmp_path, base):
    safetensors.torch.save_file(fine_tuned(base, 1).state_dict(), tmp_path / "tuned.safetensors")
    (tmp_path / "file").write_text("precious")
    for out, expected in (
        (tmp_path / "file", "is a file, and a delta is saved into a folder"),
        (tmp_path / "file" / "x", "Not a dir"),
    ):
        code, text = run("diff", tmp_path / "base", tmp_path / "tuned.safetensors", "--out", out)
        assert code == 1
        assert text.startswith("sparsify: ")
        assert expected in text
    assert (tmp_path / "file").read_text() == "precious"


def test_it_says_its_version(run):
    assert run("--version") == (0, f"sparsify {sparsify.__version__}\n")
    assert "--version" in run("--help")[1]


def test_the_module_and_the_installed_script_are_the_command_line(tmp_path):
    module = [sys.executable, "-m", "sparsify", "--version"]
    place = Path(sparsify.__file__).parent.parent
    run = subprocess.run(module, capture_output=True, text=True, timeout=120, check=True, cwd=place)
    assert run.stdout == f"sparsify {sparsify.__version__}\n"
    run = subprocess.run([SCRIPT, "info", tmp_path / "nothing"], capture_output=True, text=True, timeout=120)
    assert run.returncode == 1
    assert run.stderr.startswith("sparsify: ")


@pytest.mark.parametrize("text", ["1,x", "1,2,3"])
def test_weights_are_numbers_one_for_each_delta(text):
    with pytest.raises(ValueError, match="expected 2 numbers"):
        parse_weights(text, 2)
