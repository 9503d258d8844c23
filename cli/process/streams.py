"""The standard streams of a command: replacements for characters they can't encode, and failed writes.

A character that the locale lacks never ends a command.

A full disk, a closed stream or a reader that has exited never ends an operation. Text that can't be written to stderr
is lost. If the result can't be written to stdout, `unwritten` returns the reason, and the command exits with UNWRITTEN,
unless its exit code is already different from 0. A reader that closes its pipe, as `head` does, has read enough.

This module must stay cheap to import: `snapshot --help` imports it.
"""

from __future__ import annotations

import codecs
import io
import os
import select
import sys
from contextlib import suppress
from typing import TextIO

# The name under which the rule is registered as an error handler for Python's codecs.
RULE = "cutline.ascii"
# Levels, the lowest first.
BLOCKS, ASCII_LEVELS = "▁▂▃▄▅▆▇█", "_.-:=+*#"
# Replacements for the characters that Cutline and rich draw: single characters where the alignment of columns depends
# on it. A spinner still turns.
FORMS = {
    **dict(zip(BLOCKS, ASCII_LEVELS, strict=True)),
    **dict(zip("⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏", "|/-\\" * 2 + "|/", strict=True)),
    "░": "/",
    "▒": "~",
    "·": ".",
    "✓": "+",
    "✗": "x",
    "━": "-",
    "╸": "-",
    "╺": "-",
    "•": "*",
    "→": ">",
    "\u2013": "-",
    "—": "-",
    "\xa0": " ",
    "…": "...",
}


def _replace(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(
        FORMS.get(character) or _escape(character) for character in error.object[error.start : error.end]
    ), error.end


def _escape(character: str) -> str:
    return character.encode("ascii", "backslashreplace").decode()


codecs.register_error(RULE, _replace)


def writable(text: str, encoding: str | None) -> str:
    """Return the text as a stream in this encoding shows it, so that its width is known.

    With None, any text can be written.
    """
    if encoding is None or text.isascii():
        return text
    try:
        return text.encode(encoding, RULE).decode(encoding)
    except LookupError:
        return text.encode("ascii", RULE).decode()


STANDARD = (0, 1, 2)


class _Unfailing(io.RawIOBase):
    """A file descriptor whose writes never fail.

    `problem` is the first error; a reader that has exited is not an error, but `is_read` is then false.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.problem: OSError | None = None
        self.is_read = True

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: object) -> int:
        view = memoryview(data)  # type: ignore[arg-type]  # any buffer
        size = len(view)
        while len(view):
            try:
                view = view[os.write(self._descriptor, view) :]
            except BlockingIOError:
                select.select([], [self._descriptor], [])
            except BrokenPipeError:
                self.is_read = False
                break
            except OSError as error:
                self.problem = self.problem or error
                break
        return size


# The stream below stdout, once secure_streams has been called.
_stdout: list[_Unfailing] = []


def secure_streams() -> None:
    """Make the streams of this process unfailing, and open closed streams, or other files would get their descriptors.

    Must be called before anything is opened or written.
    """
    closed = [descriptor for descriptor in STANDARD if not _is_open(descriptor)]
    for descriptor in closed:
        # open() uses the lowest free number. Writing to stdout still fails.
        os.open(os.devnull, os.O_RDONLY if descriptor == 1 else os.O_RDWR)
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: PTH123, SIM115  # stays open until the process ends
    out, err = _Unfailing(1), _Unfailing(2)
    _stdout[:] = [out]
    sys.stdout, sys.stderr = _text_of(out, sys.stdout), _text_of(err, sys.stderr, is_unbuffered=True)


def _is_open(descriptor: int) -> bool:
    with suppress(OSError):
        os.fstat(descriptor)
        return True
    return False


def _text_of(raw: _Unfailing, before: TextIO | None, *, is_unbuffered: bool = False) -> io.TextIOWrapper:
    if before is not None:
        with suppress(OSError):
            before.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=getattr(before, "encoding", None) or "utf-8",
        errors=RULE,
        line_buffering=is_unbuffered or raw.isatty(),
        write_through=is_unbuffered,
    )


def is_stdout_read() -> bool:
    """Whether what is written to stdout may still be read: false once the reader of a pipe has exited."""
    return all(raw.is_read for raw in _stdout)


def unwritten() -> str:
    """Return why the result could not be written to stdout; "" if it was written or its reader has exited."""
    for raw in _stdout:
        sys.stdout.flush()
        if raw.problem is not None:
            return raw.problem.strerror or str(raw.problem)
    return ""
