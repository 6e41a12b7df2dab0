"""The compiled loops are there where they can be, and the plain forms run where they cannot."""

import logging
import os
import platform
import shutil
import subprocess
import sys

import pytest
import torch

from sparsify.kernels.cpu import library as native
from sparsify.kernels.norm_bound import Limits, screen
from sparsify.kernels.sddmm import sddmm

IS_THERE = "from sparsify.kernels.cpu.library import library; print(library() is not None)"


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A machine that has compiled nothing yet; returns its cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.library.cache_clear()
    yield tmp_path / "sparsify"
    native.library.cache_clear()


def without_a_compiler(monkeypatch, cache):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(native, "COMPILERS", ("no-such-compiler",))


def with_no_folder_to_write_to(monkeypatch, cache):
    cache.write_text("a file is where the folder should be")


def without_a_home(monkeypatch, cache):
    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(native.Path, "home", home)


def with_a_broken_file(monkeypatch, cache):
    cache.mkdir()
    path = cache / "native.so"
    path.write_bytes(b"no library")
    monkeypatch.setattr(native, "_compiled", lambda compiler: path)


FAILING = {
    "no compiler": without_a_compiler,
    "a failing compiler": lambda monkeypatch, cache: monkeypatch.setenv("CXX", "/bin/false"),
    "a compiler that makes nothing": lambda monkeypatch, cache: monkeypatch.setenv("CXX", "/bin/true"),
    "a broken variable": lambda monkeypatch, cache: monkeypatch.setenv("CXX", 'g++ "-O3'),
    "no folder to write to": with_no_folder_to_write_to,
    "no home": without_a_home,
    "a broken file": with_a_broken_file,
}


def test_a_c_compiler_makes_the_library_too(monkeypatch, fresh):
    """PEFT's BOFT leaves ``CXX=gcc`` behind, which links no C++ library by itself."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    monkeypatch.setenv("CXX", "gcc")
    # an older processor's code has calls where newer ones' is inlined
    monkeypatch.setattr(native, "FLAGS", tuple(flag for flag in native.FLAGS if not flag.startswith("-march")))
    assert native.library() is not None


@pytest.mark.parametrize("way", FAILING)
def test_without_a_library_the_plain_forms_run_and_a_warning_comes_once(monkeypatch, caplog, fresh, way):
    FAILING[way](monkeypatch, fresh)
    with caplog.at_level(logging.WARNING, "sparsify"):
        assert native.library() is native.library() is None
    assert len(caplog.records) == 1
    assert "the plain torch forms run" in caplog.text


@pytest.mark.parametrize(("word", "is_off"), [("0", True), (" OFF ", True), ("1", False), ("", False)])
def test_the_loops_are_switched_off_by_a_word(monkeypatch, fresh, word, is_off, caplog):
    monkeypatch.setattr(native, "_compiled", lambda compiler: "the library")
    monkeypatch.setattr(native, "_compiler", lambda: ["c++"])
    monkeypatch.setattr(native, "_load", lambda path: path)
    monkeypatch.setenv("SPARSIFY_NATIVE", word)
    assert native.library() == (None if is_off else "the library")
    assert not caplog.records


def test_the_first_compilation_is_told_and_the_next_load_is_not(monkeypatch, fresh, caplog):
    monkeypatch.setenv("CXX", "c++ -O0")
    monkeypatch.setattr(native, "_run", made)
    monkeypatch.setattr(native, "_load", lambda path: path)
    with caplog.at_level(logging.INFO, "sparsify"):
        first = native.library()
        native.library.cache_clear()  # another process
        assert native.library() == first
    assert first.exists()
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", f"compiling the C++ loops with `c++ -O0`, once for this machine, into {first}")
    ]


def made(command):
    """A compiler that makes what it is asked for at once."""
    if "-o" in command:
        open(command[command.index("-o") + 1], "w").close()
    return "compiler 1.0"


@pytest.mark.parametrize("processor", ["x86-64", pytest.param("x86-64-v3", marks=pytest.mark.slow), "x86-64-v4"])
def test_the_loops_are_the_same_on_an_older_processor(monkeypatch, fresh, processor):
    if native._compiler() is None or platform.machine() != "x86_64":
        pytest.skip("needs a compiler for x86-64")
    if processor == "x86-64-v4" and torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("needs a CPU with AVX-512")
    flags = [f"-march={processor}" if flag.startswith("-march") else flag for flag in native.FLAGS]
    monkeypatch.setattr(native, "FLAGS", tuple(flags))
    library = native.library()
    assert library is not None
    assert not library.has_matrix_units()  # which asks the system for them
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(70, 40, generator=generator), torch.randn(70, 50, generator=generator)
    indices = torch.arange(0, 2000, 7)
    product = left.t() @ right
    torch.testing.assert_close(sddmm(left, right, indices), product.take(indices))
    found = screen(left, right, indices, indices[:0], torch.full((40,), 20.0), Limits(2000, 1 << 20))
    torch.testing.assert_close(found.taken, product.take(indices))
    assert found.indices.sort().values.equal((product.abs().view(-1) >= 20).nonzero().squeeze(1))


def running(cache, code):
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    return subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_processes_may_compile_at_once_and_the_next_finds_it_compiled(tmp_path):
    if native.library() is None:
        pytest.skip("needs a compiler")
    both = [running(tmp_path, IS_THERE) for _ in range(2)]
    assert [process.communicate(timeout=300)[0].strip() for process in both] == ["True", "True"]
    left = list((tmp_path / "sparsify").iterdir())
    assert [path.suffix for path in left] == [".so"], "half-made files are gone"
    never = "import subprocess; subprocess.run = lambda command, **_: 1 / 0 if '-c' in command else run(command, **_)\n"
    code = "import subprocess; run = subprocess.run\n" + never + IS_THERE
    assert running(tmp_path, code).communicate(timeout=100)[0].strip() == "True"
