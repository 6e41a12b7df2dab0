"""A writer that is killed leaves one whole file, the old one or the new one, and nothing that gets in the way."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from sparsify.delta.format import CONFIG_NAME, FILE_NAME
from sparsify.delta.metadata import parse
from sparsify.delta.sparse_delta import SparseDelta

ROOT = Path(__file__).parents[2]
VERSIONS = 4
# writes versions in turn, for ever; says so once the first is there
WRITER = """
import sys, torch
from sparsify.delta.sparse_delta import SparseDelta
from test_killed_writer import version
for i in range(10**9):
    version(i).save(sys.argv[1])
    if i == 0:
        print("ready", flush=True)
"""
# dies at one call of a function of the os module
DIES_AT = """
import os, signal, sys
from test_killed_writer import version
delta = version(1)
setattr(os, sys.argv[2], lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
delta.save(sys.argv[1])
"""


def version(number):
    """One of a few deltas, large enough that a write takes a while; each is one number throughout."""
    number %= VERSIONS
    return SparseDelta({}, {"w": torch.full((200_000,), float(number))}, {"version": number})


def start(code, *arguments):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)])}
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], env=environment, stdout=subprocess.PIPE, text=True
    )


def whole_version(folder):
    """The number of the version in a folder, once it is known to be complete."""
    delta = SparseDelta.load(folder)
    number = delta.config["version"]
    assert torch.equal(delta.whole["w"], version(number).whole["w"])
    return number


def leftovers(folder):
    return [item.name for item in folder.iterdir() if item.name not in (FILE_NAME, CONFIG_NAME)]


@pytest.mark.parametrize("where", ["fsync", "replace"])
def test_a_writer_killed_before_the_rename_leaves_the_old_file_whole(tmp_path, where):
    version(0).save(tmp_path)
    before = (tmp_path / FILE_NAME).read_bytes()
    writer = start(DIES_AT, tmp_path, where)
    writer.communicate(timeout=120)
    assert writer.returncode == -signal.SIGKILL
    assert (tmp_path / FILE_NAME).read_bytes() == before
    assert whole_version(tmp_path) == 0
    assert len(leftovers(tmp_path)) == 1  # so it was at work
    assert leftovers(tmp_path)[0].startswith(f".{FILE_NAME}.")
    version(2).save(tmp_path)
    assert whole_version(tmp_path) == 2
    assert len(leftovers(tmp_path)) == 1


def test_a_file_that_is_replaced_while_it_is_read_is_read_as_it_was(tmp_path, monkeypatch):
    for number in (0, 1):
        version(number).save(tmp_path / str(number))

    def replace(header):
        os.replace(tmp_path / "1" / FILE_NAME, tmp_path / "0" / FILE_NAME)
        return parse(header)

    monkeypatch.setattr("sparsify.delta.format.parse", replace)
    assert whole_version(tmp_path / "0") == 0
    assert not (tmp_path / "1" / FILE_NAME).exists()


def test_a_writer_killed_at_any_moment_leaves_one_whole_version(tmp_path):
    writer = start(WRITER, tmp_path)
    assert writer.stdout.readline() == "ready\n"
    seen = set()
    for i in range(12):
        if writer is None:
            writer = start(WRITER, tmp_path)
        for _ in range(5):  # readers never see anything but whole versions, either
            seen.add(whole_version(tmp_path))
            time.sleep(0.003 * (i % 4))
        if i % 4 == 3:
            writer.kill()
            writer.communicate(timeout=120)
            writer = None
            seen.add(whole_version(tmp_path))
    assert seen <= set(range(VERSIONS))
    version(3).save(tmp_path)
    assert whole_version(tmp_path) == 3
