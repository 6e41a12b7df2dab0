"""Labelled text that every installation of Python has: the docstrings of its standard library.

The task is to tell from its first words whether a docstring documents a module, a class, or a function or method.
Sources are parsed and never imported. No file has both training and held-out examples, and no two are nearly the same.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsify.errors import SparsifyError

LABELS = ("module", "class", "function")
LABEL_OF = {ast.Module: 0, ast.ClassDef: 1, ast.FunctionDef: 2, ast.AsyncFunctionDef: 2}
MIN_WORDS, MAX_WORDS = 4, 32  # of a docstring, from its start
MAX_PER_LABEL = 700
NEARLY_SAME = 0.8  # share of the two texts' words that both have
HELD_OUT_OF_FILES = 4  # one file in this many is held out
# Not part of every installation, not written as documentation, or generated.
SKIPPED = {"antigravity", "idlelib", "lib2to3", "test", "this", "tkinter", "turtledemo", "distutils", "ensurepip"}


@dataclass(frozen=True)
class Example:
    """One docstring."""

    text: str  # its first words, on one line
    label: int  # of what it documents, a position in LABELS
    file: str  # its source, relative to the standard library

    @property
    def is_held_out(self) -> bool:
        """Whether its file is held out; depends on the file's name alone."""
        return _digest(self.file)[0] % HELD_OUT_OF_FILES == 0


def load_examples(root: Path | None = None) -> tuple[list[Example], list[Example]]:
    """Returns training and held-out examples, at most ``MAX_PER_LABEL`` of each label, in a fixed order.

    ``root`` is the folder of the standard library, this interpreter's by default.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    found = [example for path in source_files(root) for example in read_examples(path, root)]
    found.sort(key=lambda example: _digest(example.file + example.text))
    examples: list[Example] = []
    counts: Counter[int] = Counter()
    seen: list[set[str]] = []
    for example in found:
        words = set(re.findall(r"[a-z]+", example.text.lower()))
        if counts[example.label] < MAX_PER_LABEL and not any(are_nearly_same(words, others) for others in seen):
            examples.append(example)
            seen.append(words)
            counts[example.label] += 1
    if not examples:
        raise SparsifyError(
            f"no docstrings in {root}: the demo reads the sources of Python's standard library; use a Python that is "
            "installed with them."
        )
    training = [example for example in examples if not example.is_held_out]
    return training, [example for example in examples if example.is_held_out]


def source_files(root: Path) -> Iterator[Path]:
    """Yields the source files of the standard library's modules and packages, without its tests."""
    for name in sorted(sys.stdlib_module_names - SKIPPED):
        if (root / f"{name}.py").is_file():
            yield root / f"{name}.py"
        for path in sorted((root / name).rglob("*.py")):
            if SKIPPED.isdisjoint(path.relative_to(root).parts[:-1]):
                yield path


def read_examples(path: Path, root: Path) -> Iterator[Example]:
    """Yields the docstrings of one source file, in order; none where this Python cannot parse it."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in _documented(tree):
        words = (ast.get_docstring(node) or "").split()[:MAX_WORDS]
        if len(words) >= MIN_WORDS:
            yield Example(" ".join(words), LABEL_OF[type(node)], path.relative_to(root).as_posix())


def are_nearly_same(words: set[str], others: set[str]) -> bool:
    """Whether two texts share ``NEARLY_SAME`` of their words."""
    shared = len(words & others)
    return shared >= NEARLY_SAME * (len(words) + len(others) - shared)


def _documented(node: ast.AST) -> Iterator[Any]:
    """Yields a module and every class and function in it."""
    if type(node) in LABEL_OF:
        yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr):  # which is most of a tree, and has no docstrings
            yield from _documented(child)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
