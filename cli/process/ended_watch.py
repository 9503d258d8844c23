"""The end of `snapshot watch` by SIGTERM, with which service managers stop it: exit code 0, also while it starts.

This module must import nothing but the standard library's basic modules: cli/entry.py needs it before the imports.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

WATCH, FLEET_OPTION = "watch", "--fleet"
STOPPED = "stopped by SIGTERM"
# The result of a watch that had not begun, as cli/commands/watch.py writes it.
DOCUMENT = '{"schema": "cutline/watch/1", "operation": null, "tasks": {}}\n'


def is_watch(words: Sequence[str]) -> bool:
    """Whether the command among the words is `watch`; the words are not validated."""
    following = iter(words)
    for word in following:
        if word == FLEET_OPTION:
            next(following, None)
        elif not word.startswith("-"):
            return word == WATCH
    return False


def report_end(words: Sequence[str]) -> None:
    """Say that SIGTERM has stopped the watch before it had begun; nothing if that can't be written."""
    is_json = "--json" in words
    with suppress(OSError):
        os.write(1 if is_json else 2, (DOCUMENT if is_json else f"{STOPPED}\n").encode())
