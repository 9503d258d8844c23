"""Replace the JUnit report of an earlier run as soon as the program starts, before anything slow is imported.

A scheduled check writes to the same file each time. If the check is stopped while it is still importing its modules,
the file must not show the result of the run before. Only a report that Cutline has written is replaced: until the
command line has been parsed, it is not certain which file it names.

This module must import nothing but the standard library's basic modules.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from contextlib import suppress

OPTION, FLEET_OPTION = "--junit", "--fleet"
COMMANDS = ("check", "drill")
# The report of a command that did not finish, as cli/output/junit.py writes it.
REPORT = """<?xml version='1.0' encoding='utf-8'?>
<testsuites name="snapshot {command}">
  <testsuite name="snapshot {command}" tests="1" failures="0" errors="1" skipped="0">
    <testcase classname="snapshot {command}" name="the {command} ends">
      <error message={message} type={kind} />
    </testcase>
  </testsuite>
</testsuites>
"""
UNFINISHED = "unfinished"
# A report's beginning, and the end of the report of a command that did not finish, are within this length.
HEAD_BYTES = 1024


def find_report(words: Sequence[str]) -> tuple[str, str] | None:
    """Return the command and the file of its JUnit report, if the words ask for one; they are not validated."""
    command = file = ""
    following = iter(words)
    for word in following:
        if word == "--help":
            return None
        if word == "--":
            break
        if word == FLEET_OPTION:
            next(following, None)
        elif word == OPTION and command:
            file = next(following, "")
        elif word.startswith(f"{OPTION}=") and command:
            file = word.removeprefix(f"{OPTION}=")
        elif not word.startswith("-") and not command:
            command = word
            if command not in COMMANDS:
                return None
    return (command, file) if file else None


def replace_earlier_report(words: Sequence[str]) -> None:
    """If the words name a report that an earlier run has written, make it say that this run did not finish."""
    if found := find_report(words):
        command, file = found
        _replace(file, f'<testsuites name="snapshot {command}"', command, f"the {command} did not finish", UNFINISHED)


def name_stop(words: Sequence[str], message: str, kind: str) -> None:
    """Name the signal or the request that stopped the command, if its report says only that it did not finish."""
    if found := find_report(words):
        command, file = found
        _replace(file, f'type="{UNFINISHED}"', command, message, kind)


def _replace(file: str, text: str, command: str, message: str, kind: str) -> None:
    """Write the report if the regular file begins with XML that contains `text`; do nothing if that fails.

    The command itself reports that its file can't be written.
    """
    # A link may be another user's; cli/output/junit.py decides that later.
    flags = os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW
    with suppress(OSError), open(os.open(file, flags), "r+b") as opened:  # noqa: PTH123  # of a descriptor
        if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            return
        head = opened.read(HEAD_BYTES)
        if head.startswith(b"<?xml") and text.encode() in head:
            opened.seek(0)
            opened.truncate()
            shown = {"message": _attribute(message), "kind": _attribute(kind)}
            opened.write(REPORT.format(command=command, **shown).encode())


def _attribute(text: str) -> str:
    """Return the text as the value of an XML attribute; control characters, which XML lacks, are escaped as in Python.

    The standard library's functions for this import its HTTP client.
    """
    shown = "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)
    return '"' + shown.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;") + '"'
