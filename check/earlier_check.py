"""Find the record of an earlier check that a check may rest on, or the reason why there is none.

A record counts only if nothing suggests that it describes something else: another chain or other commits, another
store or a copy of it, another version or other rules of checking, a wrong clock, or the time before conflicts were
found. Damage can't change a record unnoticed, because the document has a digest. A user who can write to the
store can forge a record, and also a commit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Set
from contextlib import suppress
from datetime import datetime, timedelta
from functools import cache
from importlib.metadata import version
from pathlib import Path

from msgspec import Struct

from cutline.check.copies import Copies
from cutline.check.new_part import NewPart
from cutline.check.read_times import LastReads, milliseconds_of, moment_of
from cutline.fleet.record import Time
from cutline.snapshots.operations.ended_operations import (
    AHEAD_SECONDS_MAX,
    REMOVAL_READ_MAX,
    EndedCheck,
    NewestChecks,
    read_checks,
)
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.operation_records import CONFLICTS, OUTCOMES, ReadTimes
from cutline.snapshots.records.store_identity import FLEET_KEY, FOLDER_URL
from cutline.storage.location import StoreLocation
from cutline.storage.store import ObjectStore

# Increase this number with every change that lets a check find more, or lets a record mean something else.
RULES = 3
AHEAD_MAX = timedelta(seconds=AHEAD_SECONDS_MAX)
NO_RECORD = "there is no record of a check that found this chain valid"


class UnusableError(Exception):
    """No check may rest on this record, for this reason."""


class EarlierCheck(Struct, frozen=True):
    """A check that a new check may rest on."""

    check: EndedCheck
    read: ReadTimes
    times: LastReads

    @property
    def increment(self) -> int:
        """The increment up to which it checked the chain."""
        return self.check.point.increment

    @property
    def compared_by(self) -> str:
        """The operation that read and compared everything."""
        return self.read.compared_by or self.check.operation


def store_digest(location: StoreLocation, fleet_id: str) -> str:
    """Return a digest that identifies the store by its address; for a folder, also by the file of its fleet.json.

    A copy of a folder has another file there, even under the same path. A copy of the file system's blocks has the same
    file; nothing that is stable distinguishes it: device numbers change when a file system is mounted again, and file
    system ids do for some kinds.
    """
    url, parts = location.open().url, [fleet_id]
    if url.startswith(FOLDER_URL):
        with suppress(OSError):
            parts.append(str((Path(url.removeprefix(FOLDER_URL)) / FLEET_KEY).stat().st_ino))
    return hashlib.sha256("\n".join([url, location.endpoint, *parts]).encode()).hexdigest()


@cache
def own_version() -> str:
    """Return the version of this program."""
    return version("cutline")


def new_record(chain: Chain, store: str, times: LastReads, compared: tuple[str, Time], oldest: int) -> ReadTimes:
    """Return the record of a check of `chain` with these times; `compared` is as compared_by and compared_at."""
    parts, increments = times.compacted().record()
    return ReadTimes(
        commits=chain.digest,
        last_operation=chain.last.operation,
        store=store,
        version=own_version(),
        rules=RULES,
        compared_by=compared[0],
        compared_at=compared[1],
        oldest_at=Time.of(moment_of(oldest)),
        parts=parts,
        increments=increments,
    )


class RecordedChecks(Struct):
    """The newest checks in the store, read once they are needed; `documents` is the result of document_names."""

    store: ObjectStore
    documents: Mapping[str, Set[str]]
    _found: NewestChecks | None = None
    _has_more: bool = True

    def for_snapshot(self, name: str) -> NewestChecks:
        """Return the newest checks; more of them if the first have no record for the snapshot."""
        if self._found is None:
            self._found = read_checks(self.store, self.documents)
        if self._has_more and not candidates_in(self._found, name):
            self._found, self._has_more = read_checks(self.store, self.documents, count_max=REMOVAL_READ_MAX), False
        return self._found


# An operation's id begins with this time; ids of operations of a wrong clock are in no order.
ID_TIME, CLOCK_MARGIN = "%Y%m%dT%H%M%SZ", timedelta(hours=1)


def commits_to_read_since(checks: NewestChecks, name: str) -> str:
    """Return the id of an operation that began before all operations after the newest record; "" without a record.

    These operations show whether the chain lacks the last commit that the record names, or a later commit.
    """
    for check in candidates_in(checks, name):
        if isinstance(read := check.point.read, ReadTimes):
            begun, _, rest = read.last_operation.partition("-")
            with suppress(ValueError, OverflowError):
                return f"{(datetime.strptime(begun, ID_TIME) - CLOCK_MARGIN).strftime(ID_TIME)}-{rest}"
    return ""


def candidates_in(checks: NewestChecks, name: str) -> list[EndedCheck]:
    """Return the checks of the snapshot that have a record to rest on, newest first."""
    found = [check for check in checks.by_snapshot.get(name, []) if isinstance(check.point.read, ReadTimes)]
    return sorted(found, key=lambda check: check.moment, reverse=True)


def find_earlier(
    chain: Chain, checks: NewestChecks, store: ObjectStore, store_id: str, now: datetime
) -> tuple[EarlierCheck | None, str]:
    """Return the newest check that a check of the chain may rest on, or None and the problem of the newest record."""
    problems: list[str] = []
    for check in candidates_in(checks, chain.name):
        if not isinstance(read := check.point.read, ReadTimes):
            continue
        try:
            times = _check_usable(chain, check, read, checks.by_snapshot[chain.name], now)
            _check_belongs(check, read, store, store_id)
            _check_no_unread_conflicts(read, checks.unread_conflicts, store)
        except UnusableError as error:
            problems.append(f"the record of check {check.operation} can't be used: {error}")
        else:
            return EarlierCheck(check, read, times), ""
    return None, problems[0] if problems else NO_RECORD


def _check_belongs(check: EndedCheck, read: ReadTimes, store: ObjectStore, store_id: str) -> None:
    """Raise UnusableError if the check read another store, or its clock was ahead of the store's."""
    if read.store != store_id:
        raise UnusableError("that check read the store at another address, or the original of this copy of the store")
    stored_at = _stored_at(store, check.operation)
    if stored_at is None or check.moment > stored_at + AHEAD_MAX:
        raise UnusableError("its times are later than the time at which the store received it")


def _check_no_unread_conflicts(read: ReadTimes, operations: Iterable[str], store: ObjectStore) -> None:
    """Raise UnusableError if one of the checks with conflicts, which can't be read, may have ended since the record."""
    compared_at = datetime.fromisoformat(read.compared_at)
    for operation in operations:
        stored_at = _stored_at(store, operation)
        if stored_at is not None and stored_at >= compared_at - AHEAD_MAX:
            raise UnusableError(f"check {operation} has found conflicts since then, and its record can't be read")


def _stored_at(store: ObjectStore, operation: str) -> datetime | None:
    """Return when the store received the outcome of the operation, by the store's clock; None if it has none."""
    listed = store.inventory(f"operations/{operation}")
    return max((entry.created_at for entry in listed if entry.key.rpartition("/")[2] in OUTCOMES), default=None)


def _check_usable(
    chain: Chain, check: EndedCheck, read: ReadTimes, checks: Iterable[EndedCheck], now: datetime
) -> LastReads:
    """Return the times in the record; raise UnusableError unless it describes a beginning of the chain."""
    if read.version != own_version() or read.rules != RULES:
        raise UnusableError(f"version {read.version} of Cutline made it, with rules {read.rules} of checking")
    increment = check.point.increment
    is_in_chain = chain.full.increment <= increment <= chain.last.increment
    if not is_in_chain or chain.up_to(increment).digest != read.commits:
        raise UnusableError("the chain no longer begins with the commits that were checked, or was repaired since")
    compared_at = datetime.fromisoformat(read.compared_at)
    for other in checks:
        # The clock of the machine that found them may be behind.
        if other.point.result == CONFLICTS and other.moment >= compared_at - AHEAD_MAX:
            when = "since" if other.moment >= compared_at else "less than five minutes before, or since"
            raise UnusableError(f"check {other.operation} has found conflicts {when} everything was compared")
    try:
        times = LastReads.of(read)
    except ValueError as error:
        raise UnusableError(str(error)) from error
    if times.increment != increment:
        raise UnusableError(f"it is about increment {times.increment}, but the check was up to {increment}")
    if max(times.newest, milliseconds_of(compared_at)) > milliseconds_of(min(now, check.moment) + AHEAD_MAX):
        raise UnusableError("it contains times in the future")
    if problem := NewPart(chain, increment).problem(Copies.of(chain)):
        raise UnusableError(problem)
    return times
