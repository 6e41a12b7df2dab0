"""Data sets that are not on the hub."""

from __future__ import annotations

import ast
import json
import sysconfig
import zlib
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from sparsify.cli.demo import source_files

Rows = list[dict]
Split = tuple[Rows, dict[str, Rows]]  # rows to train on; rows to judge on, by the name of their set
LLM_ADAPTERS = "https://raw.githubusercontent.com/AGI-Edgerunners/LLM-Adapters/main"
MATH = {"addsub": "AddSub", "multiarith": "MultiArith", "singleeq": "SingleEq", "gsm8k": "gsm8k", "aqua": "AQuA",
        "svamp": "SVAMP"}  # fmt: skip
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
HELD_OUT_OF_FILES = 4  # one file in this many is judged on


def math_sets() -> Split:
    """Math10K and the six test sets of Hu et al. 2023, arXiv 2304.01933, from the authors' repository."""
    files = {"train": "ft-training_set/math_10k.json"}
    files |= {name: f"dataset/{folder}/test.json" for name, folder in MATH.items()}
    found = {}
    for name, file in files.items():
        try:
            with urlopen(f"{LLM_ADAPTERS}/{file}", timeout=60) as reply:
                found[name] = json.load(reply)
        except URLError as error:
            raise SystemExit(
                f"{LLM_ADAPTERS}/{file} cannot be read ({error.reason}); without a network the task `math` needs "
                "train_gsm8k.jsonl and addsub.jsonl, multiarith.jsonl, ... in the folder `math` of SPARSIFY_DATA."
            ) from None
    return found.pop("train"), found


def docstrings() -> Split:
    """What every Python has: the docstrings of the standard library, with their first paragraph as the summary.

    No file has both rows to train and rows to judge on.
    """
    root = Path(sysconfig.get_path("stdlib"))
    train: Rows = []
    judged: Rows = []
    for path in source_files(root):
        is_judged = zlib.crc32(path.relative_to(root).as_posix().encode()) % HELD_OUT_OF_FILES == 0
        (judged if is_judged else train).extend(_summarized(path))
    return train, {"": judged}


def _summarized(path: Path) -> Rows:
    """The docstrings of a file that have more than one paragraph; none where this Python cannot parse it."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return []
    texts = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, DOCUMENTED)]
    parts = [text.partition("\n\n") for text in texts]
    return [
        {"document": " ".join(rest.split()), "summary": " ".join(first.split())} for first, _, rest in parts if rest
    ]
