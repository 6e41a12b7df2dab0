"""Labelled text that every installation of Python has: the docstrings of its standard library.

The task is to tell from its first words whether a docstring documents a module, a class, or a function or method.
Sources are parsed and never imported. No file has both training and held-out examples, and no two are nearly the same.
"""

from __future__ import annotations

import ast
import hashlib
import math
import re
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sparsify.errors import SparsifyError

LABELS = ("module", "class", "function")
MAX_WORDS = 32  # of a docstring, from its start
MIN_WORDS = 4
MAX_PER_LABEL = 700
MIN_EXAMPLES = 1_000
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

    ``root`` is the folder of the standard library, this interpreter's by default. Too few docstrings in it are an
    error, as where Python is installed without its sources.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    found = [example for path in source_files(root) for example in read_examples(path, root)]
    found.sort(key=lambda example: _digest(example.file + example.text))
    examples = _balanced_without_near_copies(found)
    if len(examples) < MIN_EXAMPLES:
        raise SparsifyError(
            f"only {len(examples):,} docstrings in {root}; expected {MIN_EXAMPLES:,} or more. The demo reads the "
            "sources of Python's standard library: use a Python that is installed with them."
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
    for label, node in [("module", tree), *_definitions(tree)]:
        words = (ast.get_docstring(node) or "").split()[:MAX_WORDS]
        if len(words) >= MIN_WORDS:
            yield Example(" ".join(words), LABELS.index(label), path.relative_to(root).as_posix())


def are_nearly_same(words: frozenset[str], others: frozenset[str]) -> bool:
    """Whether two texts share ``NEARLY_SAME`` of their words.

    Example:
        >>> are_nearly_same(words_of("Return the next item, or None."), words_of("return the next item or None"))
        True
    """
    return len(words & others) >= NEARLY_SAME * len(words | others)


def words_of(text: str) -> frozenset[str]:
    """The words of a text, in lower case, without digits and punctuation."""
    return frozenset(re.findall(r"[a-z]+", text.lower()))


def _balanced_without_near_copies(found: list[Example]) -> list[Example]:
    """The first examples of each label, without those that nearly repeat an earlier one."""
    kept: list[Example] = []
    counts = [0] * len(LABELS)
    seen: dict[int, list[frozenset[str]]] = {}  # by number of words: texts of very different sizes are not the same
    for example in found:
        words = words_of(example.text)
        size = len(words)
        sizes = range(math.ceil(NEARLY_SAME * size), int(size / NEARLY_SAME) + 1)
        is_full = counts[example.label] == MAX_PER_LABEL
        if is_full or any(are_nearly_same(words, others) for near in sizes for others in seen.get(near, ())):
            continue
        kept.append(example)
        counts[example.label] += 1
        seen.setdefault(size, []).append(words)
    return kept


def _definitions(node: ast.AST) -> Iterator[tuple[str, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yields every class and function under a node, with its label."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield "class", child
        elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield "function", child
        if not isinstance(child, ast.expr):
            yield from _definitions(child)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
