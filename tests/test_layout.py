"""The layout of the package: imports point downwards, and ``import sparsify`` is lean."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import sparsify

PACKAGE = Path(sparsify.__file__).parent
# from the ground up; a module imports those of lower layers, and its neighbours within a subpackage
LAYERS = [
    {"errors", "interrupts", "version"},
    {"allocation", "counters", "draws", "extras", "importance", "index_buffers", "layout", "names", "schedules"}
    | {"ranks", "streams", "values"},
    {"entries", "stepping", "trainable"},
    {"kernels"},
    {"costs"},
    {"quantized", "shards"},
    {"strategies", "targets", "conversion"},
    {"metadata", "adapters", "overlay"},
    {"format", "edits", "checkpoint", "hub"},
    {"checking"},
    {"algebra", "card", "diffing", "merging", "patches", "peft_files"},
    {"exchange"},
    {"delta", "selection"},
    {"comparing", "extensions", "switching"},
    {"loading"},
    {"masked.handles"},
    {"masked.tensor"},
    {"masked.module", "masked.recompute", "masked.tied", "masked.foreign"},
    {"masked.product"},
    {"masked.arithmetic"},
    {"masked.compiled"},
    {"masked.linear", "masked.embedding", "masked.generic"},
    {"masked.conv1d", "masked.quantized"},
    {"masked.bitsandbytes"},
    {"masked.swap", "masked"},
    {"anchors", "export", "fresh", "ranking", "search", "calibration", "budget"},
    {"screen", "small"},
    {"choosers", "device_pool", "settings", "static", "verification"},
    {"agreement", "consensus", "dense_form", "sharding"},
    {"backward", "growth", "weights"},
    {"compiled"},
    {"collection"},
    {"unmasker"},
    {"resuming"},
    {"packed", "state", "report"},
    {"preparation"},
    {"api"},
    {""},  # the package itself: the public names
    {"analysis", "integrations"},
    {"demo"},
    {"cli", "commands", "bench"},
    {"__main__"},
]
TRAINING = {
    "agreement",
    "allocation",
    "anchors",
    "api",
    "backward",
    "budget",
    "calibration",
    "fresh",
    "growth",
    "choosers",
    "compiled",
    "consensus",
    "counters",
    "dense_form",
    "device_pool",
    "costs",
    "export",
    "importance",
    "index_buffers",
    "kernels",
    "masked",
    "packed",
    "preparation",
    "ranking",
    "ranks",
    "sharding",
    "shards",
} | {
    "report",
    "resuming",
    "schedules",
    "screen",
    "settings",
    "search",
    "small",
    "selection",
    "state",
    "static",
    "stepping",
    "strategies",
    "streams",
    "targets",
    "trainable",
    "unmasker",
    "collection",
    "weights",
    "values",
    "verification",
}
HEAVY = ["transformers", "peft", "accelerate", "matplotlib", "scipy", "typer", "rich", "sklearn", "pandas", "datasets"]
HEAVY += ["huggingface_hub", "yaml", "bitsandbytes", "torchao", "triton"]
FILES = sorted(PACKAGE.rglob("*.py"))


def module_name(path):
    """The module's name inside the package: ``masked.linear``; the package itself is the empty one."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in FILES}


def layer(name):
    """The layer of a module, or of the nearest package above it that has one."""
    while True:
        for level, names in enumerate(LAYERS):
            if name in names:
                return level
        if "." not in name:
            raise LookupError(f"sparsify/{name} has no place in the layers of this test: add it where it belongs")
        name = name.rpartition(".")[0]


@cache
def imported(path):
    """The modules of this package that a file imports, anywhere in it, functions included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            full = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} line {node.lineno}: imports here are absolute"
            full = [
                f"{node.module}.{alias.name}" if module_exists(f"{node.module}.{alias.name}") else node.module
                for alias in node.names
            ]
        else:
            continue
        found |= {name.removeprefix("sparsify").lstrip(".") for name in full if name.split(".")[0] == "sparsify"}
    return frozenset(found)


def module_exists(full):
    return full.startswith("sparsify.") and full.removeprefix("sparsify.") in MODULES


def reachable(name):
    """All modules of this package that importing one brings in, the package's own ``__init__`` apart."""
    seen, waiting = set(), [name]
    while waiting:
        here = waiting.pop()
        if here not in seen:
            seen.add(here)
            waiting += imported(MODULES[here])
    return seen


@pytest.mark.parametrize("name", MODULES, ids=lambda name: name or "sparsify")
def test_imports_point_downwards(name):
    subpackage = name.partition(".")[0]
    for other in imported(MODULES[name]):
        inside = subpackage not in ("", "masked") and other.partition(".")[0] == subpackage
        assert inside or layer(other) < layer(name), f"sparsify.{name} imports sparsify.{other}"


def test_no_module_imports_itself_through_others():
    for name in MODULES:
        assert all(name not in reachable(other) for other in imported(MODULES[name]) if other != name), name


@pytest.mark.parametrize("name", ["delta", "format", "names"])
def test_loading_a_delta_needs_no_training_code(name):
    assert not {other.partition(".")[0] for other in reachable(name)} & TRAINING


@pytest.mark.parametrize("name", [name for name in MODULES if name.startswith("masked")])
def test_a_masked_module_does_not_know_who_selects(name):
    assert not reachable(name) & {"selection", "screen", "unmasker", "strategies", "importance", "schedules", "anchors"}


def test_every_public_name_is_there_and_they_are_sorted_out():
    assert len(set(sparsify.__all__)) == len(sparsify.__all__)
    assert all(hasattr(sparsify, name) for name in sparsify.__all__)


def test_importing_sparsify_is_lean_and_silent():
    code = f"import sys, sparsify; print(sorted(set({HEAVY!r}) & set(sys.modules)))"
    run = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", code],
        capture_output=True, text=True, timeout=120, check=True, cwd=PACKAGE.parent,
    )  # fmt: skip
    assert run.stdout.strip() == "[]"
    assert run.stderr == ""


def test_type_checkers_are_told_that_the_package_has_types():
    assert (PACKAGE / "py.typed").exists()
    assert '"py.typed"' in (PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8"), "it belongs into the wheel"


def test_every_file_says_what_it_is():
    for path in FILES:
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), path
