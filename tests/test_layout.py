"""The layout of the package: imports point downwards, and ``import sparsify`` is lean."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import sparsify

PACKAGE = Path(sparsify.__file__).parent
# from the ground up: a package, or a module at the top, imports from itself and from those above it here
FLOORS = [
    {"errors"},
    {"core"},
    {"common"},
    {"kernels", "delta", "strategies"},
    {"stream", "masked"},
    {"selection", "adapters"},
    {"training"},
    {"api", "loading"},
    {""},  # the package itself: the public names
    {"analysis", "integrations"},
    {"peft"},
    {"cli"},
    {"__main__"},
]
HEAVY = ["transformers", "peft", "accelerate", "matplotlib", "scipy", "typer", "rich", "sklearn", "pandas", "datasets"]
HEAVY += ["huggingface_hub", "yaml", "bitsandbytes", "torchao", "triton"]
FILES = sorted(PACKAGE.rglob("*.py"))


def module_name(path):
    """``sparsify.masked.linear``; a package has the name of its folder."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in FILES}


def room(name):
    """The package, or the module at the top, that a module belongs to; empty for ``sparsify`` itself."""
    return f"{name}.".split(".")[1]


def floor(name):
    found = [level for level, rooms in enumerate(FLOORS) if room(name) in rooms]
    assert found, f"sparsify/{room(name)} has no floor in this test: add it where it belongs"
    return found[0]


@cache
def imports(name):
    """The dotted names that a module imports, anywhere in it: in functions and for type checkers too."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} line {node.lineno}: imports here are absolute"
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {each if each in MODULES else node.module for each in full}
    return frozenset(found)


def imported(name):
    return imports(name) & MODULES.keys()


def reachable(name):
    seen, waiting = set(), [name]
    while waiting:
        here = waiting.pop()
        if here not in seen:
            seen.add(here)
            waiting += imported(here)
    return seen


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_downwards(name):
    for other in imported(name):
        inside = room(name) and room(other) == room(name)
        assert inside or floor(other) < floor(name), f"{name} imports {other}"


def test_no_module_imports_itself_through_others():
    for name in MODULES:
        assert all(name not in reachable(other) for other in imported(name) if other != name), name


def test_the_core_imports_torch_and_errors_alone():
    for name in MODULES:
        for other in imports(name) if room(name) == "core" else ():
            known = other.split(".")[0] in sys.stdlib_module_names | {"torch"}
            assert known or other.startswith(("sparsify.core", "sparsify.errors")), name


def test_the_core_can_be_read_in_an_hour():
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert sum(number for path, number in lines.items() if path.parent.name == "core") <= 1_600
    assert sum(lines.values()) <= 16_033  # 14 000 without sparsify.peft, what lets PEFT load deltas, engines and vLLM
    assert max(lines.values()) <= 400


@pytest.mark.parametrize("name", ["delta.sparse_delta", "stream.publisher", "stream.subscriber"])
def test_deltas_and_streams_need_no_training_code(name):
    modules = reachable(f"sparsify.{name}")
    own = {"common", "delta", "errors", room(f"sparsify.{name}")}
    assert {"common", "delta", "errors"} <= {room(other) for other in modules} <= own | {"core"}
    assert {other for other in modules if room(other) == "core"} <= {
        "sparsify.core", "sparsify.core.devices", "sparsify.common.interrupts",
    }  # fmt: skip


def test_importing_sparsify_is_lean_and_silent():
    code = f"import sys, sparsify.analysis; print(sorted(set({HEAVY!r}) & set(sys.modules)))"
    run = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", code],
        capture_output=True, text=True, timeout=120, check=True, cwd=PACKAGE.parent,
    )  # fmt: skip
    assert run.stdout.strip() == "[]"
    assert run.stderr == ""


def test_every_file_says_what_it_is_and_type_checkers_are_told_that_there_are_types():
    assert (PACKAGE / "py.typed").exists()
    assert '"py.typed"' in (PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8"), "it belongs into the wheel"
    for path in FILES:
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), path
