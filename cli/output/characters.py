"""Characters that a stream can't encode: those that we draw have an ASCII form, others become escapes as in Python.

An output never ends a command because the locale is another one. This module must stay cheap to import: `snapshot
--help` imports it.
"""

from __future__ import annotations

import codecs

# The name of the rule among Python's handlers of encoding errors.
RULE = "cutline.ascii"
# Levels, the lowest first.
BLOCKS, ASCII_LEVELS = "▁▂▃▄▅▆▇█", "_.-:=+*#"
# What is drawn, by us and by rich; one character becomes one where columns depend on it. What turns keeps turning.
FORMS = {
    **dict(zip(BLOCKS, ASCII_LEVELS, strict=True)),
    **dict(zip("⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏", "|/-\\" * 2 + "|/", strict=True)),
    "░": "/", "▒": "~", "·": ".", "✓": "+", "✗": "x", "━": "-", "╸": "-", "╺": "-", "•": "*", "→": ">",
    "\u2013": "-", "—": "-", "\xa0": " ", "…": "...",
}  # fmt: skip


def _replace(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(FORMS.get(one) or _escape(one) for one in error.object[error.start : error.end]), error.end


def _escape(character: str) -> str:
    return character.encode("ascii", "backslashreplace").decode()


codecs.register_error(RULE, _replace)


def writable(text: str, encoding: str | None) -> str:
    """The text as a stream of this encoding has it: what aligns it must know its width. None: any text is writable."""
    if encoding is None or text.isascii():
        return text
    try:
        return text.encode(encoding, RULE).decode(encoding)
    except LookupError:
        return text.encode("ascii", RULE).decode()
