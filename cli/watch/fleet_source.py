"""The fleet.toml of `watch`, read again when it changes; while it is invalid, the last valid file stays in use."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from cutline.cli.watch.schedule import TaskKind
from cutline.fleet.config import Fleet, WatchTable, check_drill, load_fleet
from cutline.snapshots.listing.name_templates import NUMBER, TIME, read_template
from cutline.snapshots.records.store_identity import (
    IdentityLostError,
    StoreNotInitialisedError,
    check_takes_snapshots,
    read_identity,
)
from cutline.storage.errors import SnapshotError, UsageError
from cutline.storage.store import ObjectStore
from cutline.wal.segments.own_store import store_gone_error

# How often WAL is archived between increments that are further apart, and how often snapshots are pruned.
ARCHIVE_SECONDS, PRUNE_SECONDS = 60.0, 86400.0
# How many reads must fail in a row before the failures are reported.
MISSING_TIMES = 5
WATCH_AGAIN = "to use the store as it is now, restart the watch"


class FleetSource(Struct):
    """The file and the fleet that was last read from it."""

    path: Path
    fleet: Fleet
    body: bytes
    accepted: bytes
    # The problem with the current file; None if the file was accepted.
    problem: SnapshotError | None = None
    _missing: int = 0
    # The fleet to which the store belonged when it was first opened.
    _fleet_id: str | None = None

    @classmethod
    def read(cls, path: Path) -> FleetSource:
        """Read the file; raises FleetFileError, and UsageError if a watch can't use it."""
        # Read the bytes first: if the file changes before it is loaded, it is read again.
        body = _body(path)
        return cls(path, _load(path), body, body)

    @property
    def copy(self) -> Path:
        """Write the last accepted file for the commands that the watch runs, and return its path."""
        # This process's own folder, which it deletes when it ends.
        copy = Path(tempfile.gettempdir()) / "fleet.toml"
        # Replace the file as a whole: a running check may be reading it.
        new = copy.with_suffix(".new")
        new.touch(mode=0o600)
        new.write_bytes(self.accepted)
        return new.replace(copy)

    @property
    def rules(self) -> WatchTable:
        """The file's `[watch]` table."""
        return rules_of(self.fleet)

    def open_store(self) -> ObjectStore:
        """Open the store; raise StoreGoneError if it is gone or a different store, and the errors of read_identity."""
        store = self.fleet.store.open()
        try:
            identity = read_identity(store, self.fleet)
        except IdentityLostError:
            raise
        except StoreNotInitialisedError as error:
            if self._fleet_id is None:
                raise
            raise store_gone_error(store, None, WATCH_AGAIN) from error
        check_takes_snapshots(identity, store)
        fleet_id = identity.fleet_id
        self._fleet_id = self._fleet_id or fleet_id
        if fleet_id != self._fleet_id:
            raise store_gone_error(store, fleet_id, WATCH_AGAIN)
        return store

    def reload(self, log: Callable[..., None]) -> bool:
        """Read the file if it has changed; return whether the fleet has changed."""
        body = _body(self.path)
        # The file may be missing for a moment while an editor replaces it.
        self._missing = 0 if body else self._missing + 1
        if self._missing == MISSING_TIMES:
            self.problem = UsageError(f"{self.path} can't be read", hint="put it back")
            log(f"{self.problem.message}; the watch continues with the previous file", hint=self.problem.hint)
        if body == self.accepted:
            self.problem = None
        if body == self.body or not body:
            return False
        self.body = body
        try:
            fleet = _load(self.path)
            if _identity(fleet) != _identity(self.fleet):
                raise UsageError(
                    f"{self.path} now names another fleet or store than this watch serves",
                    hint="start a second watch for it, or restart this one",
                )
        except SnapshotError as error:
            self.problem = error
            log(f"{error.message}; the watch continues with the previous file", hint=error.hint)
            return False
        self.fleet, self.accepted, self.problem = fleet, body, None
        log(f"{self.path} has changed and was reloaded")
        return True


def rules_of(fleet: Fleet) -> WatchTable:
    """Return the `[watch]` table of fleet.toml; raise UsageError if the file does not contain it."""
    if fleet.watch is None:
        raise UsageError(
            f"{fleet.path} does not contain [watch]",
            hint=["add the schedule, for example (docs/operations.md lists all keys):", "[watch]", 'every = "5min"'],
        )
    template = read_template(fleet.watch.name)
    if not template.fields & {TIME, NUMBER}:
        raise UsageError(
            f"{fleet.path}: [watch] name {fleet.watch.name!r} produces only one name per day",
            hint="a second full snapshot may be needed on the same day: add {time} or {n}",
        )
    return fleet.watch


def _load(path: Path) -> Fleet:
    """Read the file; raises FleetFileError, and UsageError if a watch can't use it."""
    fleet = load_fleet(path)
    rules_of(fleet)
    # Report problems with drills now, long before a drill is due.
    check_drill(fleet)
    if fleet.notify and shutil.which(fleet.notify[0]) is None:
        raise UsageError(
            f"{path}: [notify] command {fleet.notify[0]} is not a program on this machine",
            hint="name a program that this process finds on its PATH, best by its full path; until then, nobody is"
            " notified of failures",
        )
    return fleet


def intervals_of(fleet: Fleet) -> dict[TaskKind, float]:
    """Return the interval of each task in seconds; 0 means never."""
    rules = rules_of(fleet)
    return {
        TaskKind.FULL: rules.full,
        TaskKind.INCREMENT: rules.every,
        TaskKind.ARCHIVE: ARCHIVE_SECONDS if rules.every > ARCHIVE_SECONDS else 0.0,
        TaskKind.CHECK: rules.check,
        TaskKind.PRUNE: PRUNE_SECONDS,
        TaskKind.DRILL: rules.drill,
        TaskKind.MERGE: fleet.retention.merge_seconds,
        TaskKind.COPY: rules.copy if fleet.copies else 0.0,
        TaskKind.GC: rules.gc,
    }


def _identity(fleet: Fleet) -> tuple[object, ...]:
    return fleet.name, fleet.store.url, fleet.store.options.get("endpoint_url")


def _body(path: Path) -> bytes:
    """Return the file's bytes; b"" if it can't be read, for example while an editor replaces it."""
    try:
        return path.read_bytes()
    except OSError:
        return b""
