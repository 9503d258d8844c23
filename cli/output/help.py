"""`--help` as plain text: usage, description, arguments and options.

This module must stay cheap to import: `snapshot --help` imports it.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

WIDTH_MAX = 100
INDENT = "  "
# If a name is wider than this, its text goes on the next line.
NAME_WIDTH_MAX = 24
HELP_OPTION = "--help"
# A title, and pairs of a name and its text.
Section = tuple[str, Sequence[tuple[str, str]]]


def usage_of(command: Any, path: str) -> str:
    """Return the first line: the command with its arguments; arguments in brackets are optional."""
    words = [path, *(_argument(one) for one in command.params if one.param_type_name == "argument")]
    if hasattr(command, "commands"):
        words.append("[COMMAND …]" if command.invoke_without_command else "COMMAND …")
    return " ".join([*words, "[OPTIONS]"])


def help_text(
    command: Any, path: str, before: Iterable[Section] = (), after: Iterable[Section] = (), *, note: str = ""
) -> str:
    """Return the help for a command that is called as `path`, with sections around its options, and a final note."""
    width = min(shutil.get_terminal_size().columns, WIDTH_MAX)
    blocks = [f"Usage: {usage_of(command, path)}"]
    blocks += [textwrap.fill(text, width, break_on_hyphens=False) for text in _paragraphs(command.help or "")]
    shown = [one for one in command.params if not getattr(one, "hidden", False)]
    arguments = [(one.metavar or one.name.upper(), _described(one)) for one in shown if _is_argument(one)]
    options = [(_option(one), _described(one)) for one in shown if not _is_argument(one)]
    options.append((HELP_OPTION, "Show this help."))
    for title, rows in (("Arguments", arguments), *before, ("Options", options), *after):
        if rows:
            blocks.append("\n".join([f"{title}:", *rows_text(rows, width)]))
    blocks += [textwrap.fill(note, width, break_on_hyphens=False)] * bool(note)
    return "\n\n".join(blocks) + "\n"


def rows_text(rows: Sequence[tuple[str, str]], width: int) -> list[str]:
    """Format names and their texts in two columns."""
    column = max((len(name) for name, _ in rows if len(name) <= NAME_WIDTH_MAX), default=NAME_WIDTH_MAX) + 2
    lines = list[str]()
    for name, text in rows:
        wrapped = textwrap.wrap(text, max(width - len(INDENT) - column, 20), break_on_hyphens=False) or [""]
        if len(name) > NAME_WIDTH_MAX:
            lines.append(f"{INDENT}{name}")
        else:
            wrapped[0] = f"{INDENT}{name:{column}}{wrapped[0]}"
        first = 0 if len(name) > NAME_WIDTH_MAX else 1
        lines += wrapped[:first] + [f"{INDENT}{'':{column}}{line}" for line in wrapped[first:]]
    return [line.rstrip() for line in lines]


def _paragraphs(text: str) -> list[str]:
    return [" ".join(part.split()) for part in text.split("\n\n") if part.strip()]


def _is_argument(parameter: Any) -> bool:
    return bool(parameter.param_type_name == "argument")


def _argument(parameter: Any) -> str:
    name = parameter.metavar or parameter.name.upper()
    return name if parameter.required else f"[{name}]"


def _option(parameter: Any) -> str:
    names = ", ".join(parameter.opts)
    if getattr(parameter, "is_flag", False):
        return names
    return f"{names} {parameter.metavar or parameter.name.upper()}"


def _described(parameter: Any) -> str:
    text = " ".join((parameter.help or "").split())
    default = parameter.default
    if isinstance(default, int | float) and not isinstance(default, bool):
        return f"{text} Default: {default:g}."
    return text
