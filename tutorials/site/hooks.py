"""mkdocs serve: watch the folders that hold pages, and not the whole repository with its virtual environments."""

from pathlib import Path
from typing import Any


def on_serve(server: Any, config: Any, **event: Any) -> None:
    """Called once, after the first build."""
    server.unwatch(config.docs_dir)
    for path in ("README.md", "tutorials", "examples", "sparsify"):
        server.watch(str(Path(config.docs_dir) / path))
