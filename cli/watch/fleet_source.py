"""fleet.toml as `watch` uses it: read again when it changes; while it is wrong, the last accepted file stays in use."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cutline.cli.watch.schedule import TaskKind
from cutline.fleet.config import Fleet, WatchTable, check_drill, load_fleet
from cutline.snapshots.listing.name_templates import NUMBER, TIME, read_template
from cutline.snapshots.records.store_identity import StoreNotInitialisedError, read_identity
from cutline.storage.errors import SnapshotError, UsageError
from cutline.storage.store import ObjectStore
from cutline.wal.segments.own_store import store_gone_error

# Between increments that are further apart; and without a key of its own, pruning.
ARCHIVE_SECONDS, PRUNE_SECONDS = 60.0, 86400.0
# How often in turn the file can't be read before that is said.
MISSING_TIMES = 5
WATCH_GONE_HINT = "put it back, or mount its file system; to work with the present state, restart the watch"


@dataclass(slots=True)
class FleetSource:
    """The file and the fleet that was last read from it."""

    path: Path
    fleet: Fleet
    body: bytes
    accepted: bytes
    # The problem of the file as it is now, None if it was accepted.
    problem: SnapshotError | None = None
    _missing: int = 0
    # The fleet to which the store belonged when it was first opened.
    _fleet_id: str | None = None

    @classmethod
    def read(cls, path: Path) -> FleetSource:
        """Read the file; raises FleetFileError, and UsageError if a watch can't work by it."""
        # First: if the file changes meanwhile, it is read again.
        body = _body(path)
        return cls(path, _load(path), body, body)

    @property
    def copy(self) -> Path:
        """A file for the commands that the watch runs: they get the last accepted file, never a refused one."""
        # Of this process alone, which deletes it at the end.
        copy = Path(tempfile.gettempdir()) / "fleet.toml"
        # As a whole: a check that has begun may be reading it.
        new = copy.with_suffix(".new")
        new.touch(mode=0o600)
        new.write_bytes(self.accepted)
        return new.replace(copy)

    @property
    def rules(self) -> WatchTable:
        """`[watch]` of the file."""
        return rules_of(self.fleet)

    def open_store(self) -> ObjectStore:
        """Open the fleet's store; raise StoreGoneError if it was another one before, and what read_identity raises."""
        store = self.fleet.store.open()
        try:
            fleet_id = read_identity(store, self.fleet).fleet_id
        except StoreNotInitialisedError as error:
            if self._fleet_id is None:
                raise
            raise store_gone_error(store, None, WATCH_GONE_HINT) from error
        self._fleet_id = self._fleet_id or fleet_id
        if fleet_id != self._fleet_id:
            raise store_gone_error(store, fleet_id, WATCH_GONE_HINT)
        return store

    def reload(self, log: Callable[..., None]) -> bool:
        """Read the file if it has changed; return whether the fleet is another one now."""
        body = _body(self.path)
        # While an editor replaces it, it is not there for a moment.
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
                raise UsageError(f"{self.path}: another fleet or another store needs another watch")
        except SnapshotError as error:
            self.problem = error
            log(f"{error.message}; the watch continues with the previous file", hint=error.hint)
            return False
        self.fleet, self.accepted, self.problem = fleet, body, None
        log(f"{self.path} was read again")
        return True


def rules_of(fleet: Fleet) -> WatchTable:
    """`[watch]` of the fleet's file; raise UsageError if it has none."""
    if fleet.watch is None:
        raise UsageError(
            f"{fleet.path} has no [watch]",
            hint=["add what to do, such as (docs/operations.md has all keys):", "[watch]", 'every = "5min"'],
        )
    template = read_template(fleet.watch.name)
    if not template.fields & {TIME, NUMBER}:
        raise UsageError(
            f"{fleet.path}: [watch] name {fleet.watch.name!r} makes one name a day",
            hint="a full snapshot may follow on the same day: add {time} or {n}",
        )
    return fleet.watch


def _load(path: Path) -> Fleet:
    """Read the file; raises FleetFileError, and UsageError if a watch can't work by it."""
    fleet = load_fleet(path)
    rules_of(fleet)
    # Long before one is due.
    check_drill(fleet)
    if fleet.notify and shutil.which(fleet.notify[0]) is None:
        raise UsageError(
            f"{path}: [notify] command {fleet.notify[0]} is no program here",
            hint="nobody would be notified of failures",
        )
    return fleet


def intervals_of(fleet: Fleet) -> dict[TaskKind, float]:
    """How often each task is done, in seconds; 0 is never."""
    rules, retention = rules_of(fleet), fleet.retention
    keeps = (retention.keep_full, retention.keep_days, retention.keep_increments)
    return {
        TaskKind.FULL: rules.full,
        TaskKind.INCREMENT: rules.every,
        TaskKind.ARCHIVE: ARCHIVE_SECONDS if rules.every > ARCHIVE_SECONDS else 0.0,
        TaskKind.CHECK: rules.check,
        TaskKind.PRUNE: PRUNE_SECONDS if any(keep is not None for keep in keeps) else 0.0,
        TaskKind.DRILL: rules.drill,
    }


def _identity(fleet: Fleet) -> tuple[object, ...]:
    return fleet.name, fleet.store.url, fleet.store.options.get("endpoint_url")


def _body(path: Path) -> bytes:
    """The file's bytes; b"" while it can't be read, as while an editor replaces it."""
    try:
        return path.read_bytes()
    except OSError:
        return b""
