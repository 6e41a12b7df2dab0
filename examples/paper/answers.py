"""The answer in a generated text: its last number, or a choice's letter; and whether it is right."""

from __future__ import annotations

import re

TOLERANCE = 1e-3  # of numbers
# A minus after a digit, a letter or a bracket is an operator; a comma before three digits is a thousands' comma.
NUMBER = re.compile(r"((?<![\w)])-)?(?:\$\s?(-)?)?(\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d*\.?\d+)")
# from the surest to the least sure; the last match of the first that matches
LETTERS = [
    re.compile(pattern) for pattern in (r"[Aa]nswer\s*(?:is|:)\s*:?\s*\(?([A-E])\b", r"\(([A-E])\)", r"\b([A-E])\b")
]


def number(text: str) -> float | None:
    """The last number of a text, without currency, thousands' commas and percent sign; ``None`` if there is none."""
    found = list(NUMBER.finditer(text.replace("\N{MINUS SIGN}", "-")))
    if not found:
        return None
    before, after, digits = found[-1].groups()
    value = float(digits.replace(",", ""))
    return -value if before or after else value


def letter(text: str) -> str | None:
    """The letter that a text names as its answer, or else its last in brackets, or its last."""
    for pattern in LETTERS:
        if found := pattern.findall(text):
            return found[-1]
    return None


def is_right(answer: str | float | list, text: str) -> bool:
    """Whether a text ends with the answer, a letter or a number; numbers are the same however they are written."""
    gold = str(answer[0] if isinstance(answer, list) else answer).strip()
    if gold.isalpha():
        return letter(text) == gold
    found, expected = number(text), number(gold)
    return found is not None and expected is not None and abs(found - expected) <= TOLERANCE
