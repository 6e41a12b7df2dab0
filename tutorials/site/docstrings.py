"""Adapts the docstrings to mkdocstrings: ``Example:`` becomes a section of code, a Sphinx role plain code."""

import re

import griffe


class Docstrings(griffe.Extension):
    """Rewrites each docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        """``Example:`` -> ``Examples:``; ``:class:`sparsify.Static` `` -> `` `Static` ``."""
        if obj.docstring is not None:
            text = re.sub(r"(?m)^( *)Example:$", r"\1Examples:", obj.docstring.value)
            obj.docstring.value = re.sub(r":(?:class|func|meth|mod|attr):`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", text)
