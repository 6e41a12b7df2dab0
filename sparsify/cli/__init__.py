"""The command line: a table of typer functions, ``"package.module:function"``, imported only when it runs."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from sparsify.common.extras import MissingExtraError, require
from sparsify.errors import SparsifyError
from sparsify.version import __version__

if TYPE_CHECKING:
    import typer

COMMANDS = (
    "sparsify.cli.demo:demo",
    *(f"sparsify.cli.commands:{name}" for name in ("info", "verify", "merge", "diff", "add", "push")),
)


def make_app() -> typer.Typer:
    """Returns the typer app with all commands; raises ``MissingExtraError`` without typer or rich."""
    require("rich", extra="cli")
    library = require("typer", extra="cli")
    app = library.Typer(name="sparsify", no_args_is_help=True, add_completion=False)

    def print_version(wanted: bool) -> None:
        if wanted:
            print(f"sparsify {__version__}")
            raise library.Exit

    @app.callback()
    def root(
        version: bool = library.Option(
            False, "--version", callback=print_version, is_eager=True, help="Show the version and exit."
        ),
    ) -> None:
        """Fine-tune a pretrained model at a few of its numbers, chosen while it trains."""

    for command in COMMANDS:
        module, _, function = command.partition(":")
        app.command()(getattr(require(module, extra="cli"), function))
    return app


def main() -> None:
    """The console entry point: a ``SparsifyError`` is one line and exit status 1, not a traceback."""
    try:
        make_app()()
    except (MissingExtraError, SparsifyError, OSError) as error:  # OSError: a path that cannot be read or written
        sys.exit(f"sparsify: {error}")
