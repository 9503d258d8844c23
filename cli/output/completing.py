"""Shell completion of snapshot names, and of the ids of operations without an outcome.

This module must stay cheap to import: `snapshot --help` imports it.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import TYPE_CHECKING

from cutline.cli.output.fleet_option import FLEET_VARIABLE, check_found, default_fleet_path, given_fleet

if TYPE_CHECKING:
    from cutline.storage.store import ObjectStore

# How long a user waits, at most, after pressing Tab if the store does not answer.
SECONDS_MAX = 5.0
# The variables in which completion scripts pass the command line: in bash, and in the other shells.
LINE_VARIABLES = ("COMP_WORDS", "_TYPER_COMPLETE_ARGS")


def complete_snapshots(incomplete: str) -> list[str]:
    """List the snapshots in the store of the command line's fleet; return nothing if they can't be read."""

    def list_names(store: ObjectStore) -> Iterable[str]:
        from cutline.snapshots.records.proven_chains import snapshot_names

        return snapshot_names(store)

    return _complete(list_names, incomplete)


def complete_operations(incomplete: str) -> list[str]:
    """List the operations without an outcome."""

    def list_ids(store: ObjectStore) -> Iterable[str]:
        from cutline.snapshots.operations.open_operations import document_names
        from cutline.snapshots.records.operation_records import OUTCOMES

        return [operation for operation, names in document_names(store).items() if names.isdisjoint(OUTCOMES)]

    return _complete(list_ids, incomplete)


def _complete(read: Callable[[ObjectStore], Iterable[str]], incomplete: str) -> list[str]:
    answers: Queue[list[str]] = Queue()

    def ask() -> None:
        try:
            answers.put(sorted(read(_open_store())))
        except BaseException:  # noqa: BLE001  # a message would garble the line that the user is typing
            answers.put([])

    # The process does not wait for a daemon thread.
    Thread(target=ask, daemon=True).start()
    try:
        found = answers.get(timeout=SECONDS_MAX)
    except Empty:
        return []
    return [name for name in found if name.startswith(incomplete)]


def _open_store() -> ObjectStore:
    from cutline.fleet.config import load_fleet

    line = next((text for name in LINE_VARIABLES if (text := os.environ.get(name))), "")
    given = given_fleet(_words_of(line)) or os.environ.get(FLEET_VARIABLE)
    if given is None:
        check_found(default_fleet_path())
    return load_fleet(Path(given) if given else default_fleet_path()).store.open()


def _words_of(line: str) -> Sequence[str]:
    try:
        return shlex.split(line)
    except ValueError:  # an unterminated quote
        return line.split()
