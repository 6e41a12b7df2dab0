"""The command line, of typer functions that are imported only when it runs."""

import io
import logging
import sys
import warnings
from typing import Any

from sparsify import __version__
from sparsify.common.extras import require
from sparsify.errors import SparsifyError


def make_app() -> Any:
    """Returns the typer app with all commands; raises ``SparsifyError`` without typer or rich."""
    require("rich", extra="cli")
    typer = require("typer", extra="cli")
    from sparsify.cli import commands
    from sparsify.cli.demo import demo

    app = typer.Typer(name="sparsify", no_args_is_help=True, add_completion=False)

    def print_version(wanted: bool) -> None:
        if wanted:
            print(f"sparsify {__version__}")
            raise typer.Exit

    options = {"callback": print_version, "is_eager": True, "help": "Show the version and exit."}

    @app.callback()
    def root(version: bool = typer.Option(False, "--version", **options)) -> None:
        """Fine-tune a pretrained model at a few of its numbers, chosen while it trains."""

    for verb in ("info", "verify", "merge", "diff", "add", "push", "from_checkpoint"):
        app.command()(getattr(commands, verb))
    app.command()(demo)
    return app


def main() -> None:
    """The console entry point: a ``SparsifyError`` is one line and exit status 1, not a traceback, a warning a line."""
    logging.disable(logging.WARNING)  # other libraries' about their own installation
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # not every terminal or file has all of Unicode
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_: print(f"sparsify: {message}", file=sys.stderr)
            make_app()()
    except (SparsifyError, OSError) as error:  # OSError: a path that cannot be read or written
        sys.exit(f"sparsify: {error}")
    finally:
        logging.disable(logging.NOTSET)
