"""mkdocs serve: watch the folders that hold pages, and not the whole repository with its virtual environments."""

from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def on_serve(server: Any, **event: Any) -> None:
    """Called once, after the first build."""
    server.unwatch(str(ROOT))
    for path in ("README.md", "tutorials", "examples", "sparsify"):
        server.watch(str(ROOT / path))
