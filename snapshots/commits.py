"""Committing, and reading back what is committed.

A commit is one conditional put. When its answer is lost it is read back; when that does not tell, the
outcome is indeterminate, and the next command settles it before it does anything else (docs/architecture.md,
invariant 3).
"""

from __future__ import annotations

import json
import re
import time
from typing import Any

from fleet.hints import NEW_CHAIN
from snapshots.commit_file import commit_from_json, commit_to_json
from snapshots.manifest import Chain, Commit, ManifestError
from storage.digest import digest
from storage.errors import IndeterminateError, RefusedError, SnapshotError, UnreachableError, UsageError
from storage.store import AnswerLostError, ObjectExistsError, ObjectMissingError, ObjectStore

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
READ_BACK_PAUSES_SECONDS = (0.2, 1.0, 3.0)


class SnapshotMissingError(RefusedError):
    """There is no snapshot, or no increment, of that name and number."""


class SnapshotExistsError(RefusedError):
    """Another operation has committed this snapshot or increment."""


class CommitIndeterminateError(IndeterminateError):
    """The commit's answer was lost, and reading it back did not tell."""


def check_name(name: str) -> str:
    """Return `name` if a snapshot can be called so; raise UsageError if not."""
    if not NAME.fullmatch(name):
        raise UsageError(
            f"a snapshot can't be called {name!r}",
            hint="up to 63 letters, digits, dots, dashes and underscores, beginning with a letter or digit",
        )
    return name


def commit_key(name: str, increment: int) -> str:
    """The key of a commit file; increment 0 is the full snapshot."""
    if increment == 0:
        return f"snapshots/{name}/snapshot.json"
    return f"snapshots/{name}/increments/{increment:016d}.json"


def publish(store: ObjectStore, commit: Commit) -> None:
    """Make the snapshot or increment exist.

    Raises SnapshotExistsError if another operation did, CommitIndeterminateError if nobody can tell.
    """
    key = commit_key(commit.snapshot, commit.increment)
    body = sealed(commit_to_json(commit))
    try:
        store.create(key, body)
    except ObjectExistsError as error:
        if operation_of(store, key) != commit.operation:
            raise _taken(commit) from error
    except AnswerLostError as error:
        _read_back(store, key, commit, error)


def _read_back(store: ObjectStore, key: str, commit: Commit, lost: SnapshotError) -> None:
    for pause in READ_BACK_PAUSES_SECONDS:
        time.sleep(pause)
        try:
            found = operation_of(store, key)
        except ObjectMissingError:
            # Not stored, or not yet: a put that is still under way may arrive later.
            continue
        except UnreachableError:
            continue
        if found == commit.operation:
            return
        raise _taken(commit) from lost
    raise CommitIndeterminateError(
        f"whether {_called(commit)} was stored is not known: the answer to its commit was lost",
        hint="run: snapshot list   once the store answers; the next command settles it",
        details={"snapshot": commit.snapshot, "increment": commit.increment, "operation": commit.operation},
    ) from lost


def operation_of(store: ObjectStore, key: str) -> str:
    """The operation that wrote the commit file `key`; raises ObjectMissingError."""
    return str(read_json(store, key).get("operation", ""))


def _called(commit: Commit) -> str:
    return f"increment {commit.increment} of {commit.snapshot}" if commit.increment else commit.snapshot


def _taken(commit: Commit) -> SnapshotExistsError:
    return SnapshotExistsError(
        f"{_called(commit)} was committed by another operation in the meantime",
        hint="nothing of this attempt remains visible; see: snapshot list",
        details={"snapshot": commit.snapshot, "increment": commit.increment},
    )


def read_json(store: ObjectStore, key: str) -> dict[str, Any]:
    """Read a JSON object; raise ManifestError if it is none."""
    return parsed(key, store.read(key))


def parsed(key: str, body: bytes) -> dict[str, Any]:
    """The JSON object in `body`; raise ManifestError if there is none."""
    try:
        document = json.loads(body)
        if not isinstance(document, dict):
            raise TypeError("not an object")
    except (ValueError, TypeError) as error:
        raise ManifestError(f"object {key} is not JSON: {error}", details={"object": key}) from error
    return document


def sealed(document: dict[str, Any]) -> bytes:
    """The bytes of a commit file: its document in one fixed form, with the digest of that form in it."""
    content = {name: value for name, value in document.items() if name != "digest"}
    return json.dumps(content | {"digest": digest(json.dumps(content, indent=1).encode())}, indent=1).encode()


def read_sealed(store: ObjectStore, key: str) -> dict[str, Any]:
    """Read a commit file; raise ManifestError unless every byte of it is as it was sealed."""
    body = store.read(key)
    document = parsed(key, body)
    if sealed(document) != body:
        raise ManifestError(
            f"object {key}: its bytes are not those that were committed",
            hint="restore the object from a copy; without it the snapshot can't be trusted",
            details={"object": key},
        )
    return document


def read_commit(store: ObjectStore, name: str, increment: int) -> Commit:
    """Read one commit; raise SnapshotMissingError or ManifestError."""
    key = commit_key(name, increment)
    try:
        commit = commit_from_json(key, read_sealed(store, key))
    except ObjectMissingError as error:
        if any(number > increment for number in increment_numbers(store, name)):
            raise commit_gone(name, increment) from error
        what = f"increment {increment} of snapshot {name}" if increment else f"snapshot {name}"
        raise SnapshotMissingError(
            f"there is no {what}",
            hint="see: snapshot list",
            details={"snapshot": name, "increment": increment, "object": key},
        ) from error
    if (commit.snapshot, commit.increment) != (name, increment):
        raise ManifestError(
            f"object {key} is the commit of {_called(commit)}",
            hint="somebody copied objects by hand",
            details={"object": key},
        )
    return commit


def commit_gone(name: str, increment: int) -> SnapshotMissingError:
    """The error for a commit that was there: later ones are, or an operation says so."""
    key = commit_key(name, increment)
    what = f"increment {increment} of snapshot {name}" if increment else f"the full snapshot {name}"
    return SnapshotMissingError(
        f"{what} was committed, and its commit file is gone from the store: {key}",
        hint=f"put it back from a copy of the store; or {NEW_CHAIN}",
        details={"snapshot": name, "increment": increment, "object": key},
    )


def increment_numbers(store: ObjectStore, name: str) -> list[int]:
    """The numbers of the increments that are committed, in order."""
    found = store.list_children(f"snapshots/{name}/increments")
    return sorted(int(child.removesuffix(".json")) for child in found if re.fullmatch(r"\d{16}\.json", child))


def read_chain(store: ObjectStore, name: str, increment: int | None = None) -> Chain:
    """Read a snapshot with its increments up to `increment` (None: all).

    Raises SnapshotMissingError where a commit is missing, also one in the middle, and ManifestError where
    one belongs to another chain.
    """
    full = read_commit(store, check_name(name), 0)
    newest = max(increment_numbers(store, name), default=0)
    last = newest if increment is None else increment
    if last > newest:
        raise SnapshotMissingError(
            f"there is no increment {last} of snapshot {name}",
            hint=f"its newest is {newest}" if newest else "it has none; 0 is the full snapshot",
            details={"snapshot": name, "increment": last},
        )
    increments = tuple(read_commit(store, name, number) for number in range(1, last + 1))
    for commit in increments:
        if commit.chain != full.chain:
            raise ManifestError(
                f"{_called(commit)} belongs to another chain",
                hint="the snapshot was deleted and taken anew by hand; delete what is left of the old one",
                details={"snapshot": name, "increment": commit.increment},
            )
    return Chain(full, increments)


def snapshot_names(store: ObjectStore) -> list[str]:
    """Every snapshot that is committed, by name."""
    return [name for name in store.list_children("snapshots") if store.exists(commit_key(name, 0))]
