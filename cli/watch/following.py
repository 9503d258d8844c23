"""The chain that a watch follows: which snapshot gets increments, and when a full snapshot begins a new chain.

The newest snapshot replaces older snapshots; the watch ends their chains if they have not ended. A snapshot that can't
be read is skipped and reported: it must not prevent others from being taken.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import datetime, timedelta

from msgspec import Struct, field
from msgspec.structs import replace

from cutline.cli.watch.fleet_source import FleetSource
from cutline.cli.watch.notices import Notices
from cutline.cli.watch.schedule import (
    FINAL_FAILURES,
    FINAL_SECONDS,
    OF_CHAIN,
    OF_SNAPSHOT,
    FullPauses,
    Task,
    TaskKind,
)
from cutline.fleet.progress import Silent
from cutline.nodes.clocks import AGREE_SECONDS_MAX
from cutline.nodes.sessions import open_sessions
from cutline.snapshots.listing.name_templates import read_template
from cutline.snapshots.records.commit import FullSnapshot
from cutline.snapshots.records.documents import NEWER_HINT, ManifestError, StoreEncryptedError
from cutline.snapshots.records.end_marks import has_end
from cutline.snapshots.records.proven_chains import (
    SnapshotMissingError,
    cut_time,
    read_full,
    read_newest_part,
    snapshot_names,
)
from cutline.snapshots.records.store_identity import FLEET_KEY
from cutline.snapshots.records.tombstones import SnapshotDeletedError, is_only_full
from cutline.snapshots.removal.chain_end import supersede
from cutline.storage.clock import machine_now, utc_now
from cutline.storage.errors import ChainEnd, SnapshotError
from cutline.storage.store import ObjectStore

# How many of the newest snapshots are read: among the watch's own, and among others. The watch's own older chains
# were ended when they were replaced.
READ_MAX, OTHERS_MAX = 5, 20


class WatchedChain(Struct, frozen=True):
    """The newest snapshot, the times of its first and last cuts, and why it gets no increments ("" if it does).

    `replaced` are older snapshots whose chains have not ended.
    """

    name: str
    began_at: datetime
    last_at: datetime
    ended: str = ""
    replaced: tuple[str, ...] = ()

    @property
    def goes_on(self) -> bool:
        """Whether the chain gets increments."""
        return not self.ended


def matching_names(store: ObjectStore, template: str) -> tuple[str, ...]:
    """Return the names of snapshots that match the template, in the template's order; raises the store's errors."""
    parsed = read_template(template)
    matching = {name: values for name in snapshot_names(store) if (values := parsed.values_in(name))}
    return tuple(sorted(matching, key=lambda one: matching[one]))


def find_chain(
    store: ObjectStore, names: Sequence[str], log: Callable[..., None], now: Callable[[], datetime] = utc_now
) -> WatchedChain | None:
    """Find the chain of the newest of these snapshots that has rows; None if no snapshot has rows.

    The newest snapshot is the one whose first cut is the latest: the time in a name may be in the future. A snapshot
    with a cut after `now()` was made with a wrong clock and counts as the oldest; `now` is called only if this
    machine's clock suggests that there is one. Raises StoreEncryptedError, and the store's errors.
    """
    fulls = [full for name in names[-READ_MAX:] if (full := _read_full(store, name, log)) and not full.only_cut]
    if not fulls:
        return None
    *older, newest = _oldest_first(fulls, now)
    replaced = tuple(snapshot.snapshot for snapshot in older if not _why_ended(store, snapshot))
    ended = _why_ended(store, newest)
    try:
        last_at = cut_time(read_newest_part(store, newest.snapshot).last)
    except StoreEncryptedError:
        raise
    except ManifestError as error:
        # No increment can be added to this chain.
        last_at, ended = cut_time(newest), ended or error.message
    return WatchedChain(newest.snapshot, cut_time(newest), last_at, ended, replaced)


def _oldest_first(fulls: Iterable[FullSnapshot], now: Callable[[], datetime]) -> list[FullSnapshot]:
    """Order snapshots by their first cuts, those with a cut in the future before all others.

    Otherwise no increment could follow, because clocks show a time before the last cut, and each new full snapshot
    would count as older.
    """
    ordered, margin = sorted(fulls, key=cut_time), timedelta(seconds=AGREE_SECONDS_MAX)
    if len(ordered) == 1 or cut_time(ordered[-1]) <= machine_now() + margin:
        return ordered
    latest = now() + margin
    return sorted(ordered, key=lambda full: cut_time(full) <= latest)


def find_others(store: ObjectStore, names: Sequence[str], log: Callable[..., None]) -> tuple[str, ...]:
    """Find snapshots other than the watch's `names` whose chains have not ended: nodes retain WAL for them.

    Only the last OTHERS_MAX by name are read. Raises the errors of `find_chain`.
    """
    others = sorted(set(snapshot_names(store)).difference(names))[-OTHERS_MAX:]
    fulls = [full for name in others if (full := _read_full(store, name, log)) and not full.only_cut]
    return tuple(full.snapshot for full in fulls if not _why_ended(store, full))


def _read_full(store: ObjectStore, name: str, log: Callable[..., None]) -> FullSnapshot | None:
    try:
        return read_full(store, name)
    except StoreEncryptedError:
        raise
    except (SnapshotMissingError, SnapshotDeletedError):
        return None
    except ManifestError as error:
        log(f"snapshot {name} is skipped: {error.message}", hint=error.hint)
        return None


def _why_ended(store: ObjectStore, full: FullSnapshot) -> str:
    try:
        if has_end(store, full.snapshot, full.chain):
            return "its chain has ended"
        return "its increments were pruned" if is_only_full(store, full.snapshot) else ""
    except StoreEncryptedError:
        raise
    except ManifestError as error:
        # A mark exists but can't be read.
        return error.message


LOOK_SECONDS = 30.0
DAY_SECONDS = 86400.0


class RepeatedFailure(Struct):
    """How many times in a row a task has failed with an error because of which the watch may give something up.

    That is the chain, or an interrupted full snapshot. `since_seconds` is the time.monotonic of the first of these
    failures.
    """

    since_seconds: float
    failures: int = 0

    @property
    def is_final(self) -> bool:
        """Whether the task has failed so often and for so long that the watch gives it up."""
        return self.failures >= FINAL_FAILURES and time.monotonic() - self.since_seconds >= FINAL_SECONDS


class Following(Struct):
    """The chain of the newest snapshot (None if there is no snapshot), and how it affects the watch's `tasks`.

    Decides when full snapshots and the ends of replaced chains are due, and when increments are next due.
    """

    source: FleetSource
    log: Callable[..., None]
    tasks: dict[TaskKind, Task]
    notices: Notices
    chain: WatchedChain | None = None
    doubts: dict[TaskKind, RepeatedFailure] = field(default_factory=dict)
    # Whether the chain was given up although its fault may still be removed.
    _is_given_up: bool = False
    _pauses: FullPauses = field(default_factory=FullPauses)
    # The ended chain that the due full snapshot will replace; "" if there was no chain, None if a chain continues.
    _asked_for: str | None = None
    _names: tuple[str, ...] = ()
    _others: tuple[str, ...] = ()
    _looked_at: float = 0.0

    @property
    def goes_on(self) -> bool:
        """Whether there is a chain that gets increments."""
        return self.chain is not None and self.chain.goes_on

    def find(self) -> None:
        """Find the chain; raises the store's errors."""
        store = self.source.open_store()
        self._names = matching_names(store, self.source.rules.name)
        self._follow(find_chain(store, self._names, self.log, self._time_of_primaries))
        self._note_others(store)

    def _time_of_primaries(self) -> datetime:
        """Return the time according to the primaries or, if they can't be reached, as this process knows it.

        A failed increment may have set this process's time to that of a cut in the future.
        """
        with suppress(SnapshotError), open_sessions(self.source.fleet, self.source.fleet.primaries):
            # From here on, this process uses the primaries' time.
            pass
        return utc_now()

    def _note_others(self, store: ObjectStore) -> None:
        """Log the other snapshots for which nodes retain WAL, if they are not the same as before."""
        others = find_others(store, self._names, self.log)
        if others and others != self._others:
            self.log(
                f"nodes also retain WAL for snapshots that get no increments from this watch: {', '.join(others)}",
                hint=f"to end the chain of one that needs no more increments, and keep its restore points:"
                f" snapshot end {others[0]}; or, if nobody needs these either: snapshot delete {others[0]}",
            )
        self._others = others

    def plan(self) -> None:
        """Plan the tasks that the current chain needs."""
        if self.chain is None or self.chain.ended:
            self._ask_for_full("" if self.chain is None else f"snapshot {self.chain.name}: {self.chain.ended}")
        else:
            self._asked_for = None
            self._done_at(TaskKind.FULL, self.chain.began_at)
            self._done_at(TaskKind.INCREMENT, self.chain.last_at)
        self._plan_replacing()

    def possible(self, left_out: Iterable[TaskKind]) -> dict[TaskKind, Task]:
        """Return the tasks that are possible in the current state of the chain, except those `left_out`."""
        without = set(left_out)
        if not self.goes_on:
            without |= {*OF_CHAIN, *(() if self.chain else OF_SNAPSHOT)}
        return {kind: task for kind, task in self.tasks.items() if kind not in without}

    def _follow(self, chain: WatchedChain | None) -> None:
        """Follow the chain, and forget the failures counted so far.

        They concern another chain, or another watch may have had the turn since.
        """
        self.chain, self._is_given_up = chain, False
        self.doubts.clear()

    def rules_changed(self) -> None:
        """Try a chain again that was given up: the old file may have been the fault.

        Makes a full snapshot due, without a pause, if the new rules ask for it and no chain continues.
        """
        self.doubts.clear()
        if self._is_given_up and self.chain is not None:
            self.log(f"increments of {self.chain.name} are tried again, because fleet.toml has changed")
            self._follow(replace(self.chain, ended=""))
            self.plan()
        if not self.goes_on and self.source.rules.full > 0:
            self._pauses, self._asked_for = FullPauses(), None
            self._ask_for_full("")

    def follow_newest(self) -> bool:
        """Continue the newest snapshot, and plan the ends of the chains that it replaces.

        Returns whether the newest snapshot has changed.
        """
        store = self.source.open_store()
        names = matching_names(store, self.source.rules.name)
        if names == self._names:
            return False
        before, chain = self.chain, find_chain(store, names, self.log, self._time_of_primaries)
        self._names = names
        self._follow(chain)
        # With other names in fleet.toml, the chain until now is among them.
        self._note_others(store)
        if chain is None:
            if before is not None:
                self._ask_for_full(f"no snapshot {self.source.rules.name} with rows is left")
            return False
        is_other = before is None or chain.name != before.name
        if chain.ended:
            self._ask_for_full(f"snapshot {chain.name}: {chain.ended}")
        elif is_other:
            self._asked_for = None
            self.log(f"increments now continue snapshot {chain.name}")
            self._done_at(TaskKind.INCREMENT, chain.last_at)
        self._plan_replacing()
        return is_other

    def look_for_chain(self) -> None:
        """While there is no chain to continue, check from time to time whether somebody has started one."""
        if self.goes_on or time.monotonic() < self._looked_at + LOOK_SECONDS:
            return
        self._looked_at = time.monotonic()
        # If the store can't be read now, look again next time.
        with suppress(SnapshotError):
            if self.follow_newest() and self.chain is not None and self.chain.goes_on:
                self._done_at(TaskKind.FULL, self.chain.began_at)

    def end(self, reason: str) -> None:
        """Record that the chain can't continue; if the rules allow it, a full snapshot will begin the next chain."""
        assert self.chain is not None  # one of its increments has failed
        self.chain = replace(self.chain, ended=reason)
        self._ask_for_full(f"snapshot {self.chain.name} can't continue: {reason}")

    def is_over(self, kind: TaskKind, end: ChainEnd) -> bool:
        """Whether the failure of a task ends the chain.

        If the fault can be repaired, the task is first retried for an hour, or without limit if no full snapshot would
        follow.
        """
        if kind not in OF_CHAIN:
            return False
        if end is not ChainEnd.PERHAPS:
            self.doubts.pop(kind, None)
            return end is ChainEnd.FOR_GOOD
        self._is_given_up = self._repeated(kind).is_final and self.source.rules.full > 0
        return self._is_given_up

    def full_failed(self, *, is_refused: bool) -> None:
        """Count how often in a row an interrupted full snapshot was refused; any other failure ends the count."""
        if is_refused:
            self._repeated(TaskKind.FULL)
        else:
            self.doubts.pop(TaskKind.FULL, None)

    @property
    def gives_up_full(self) -> bool:
        """Whether an interrupted full snapshot has been refused so often and for so long that it is given up."""
        refusals = self.doubts.get(TaskKind.FULL)
        return refusals is not None and refusals.is_final

    def _repeated(self, kind: TaskKind) -> RepeatedFailure:
        """Count another failure of the task."""
        repeated = self.doubts.setdefault(kind, RepeatedFailure(time.monotonic()))
        repeated.failures += 1
        return repeated

    def end_replaced(self) -> None:
        """End the chains that the newest snapshot has replaced; otherwise their slots retain WAL that nobody reads.

        Tries every chain, then raises the first error.
        """
        assert self.chain is not None  # else nothing has been replaced
        problems: dict[str, SnapshotError] = {}
        for name in self.chain.replaced:
            try:
                left = supersede(self.source.fleet, name, self.chain.name, Silent())
            except SnapshotDeletedError:
                continue
            except ManifestError as error:
                problems[name] = _with_way_out(error, name)
            except SnapshotError as error:
                problems[name] = error
            else:
                rest = f"; its slot may remain on {', '.join(left)}: the next create will drop it" if left else ""
                self.log(f"snapshot {name} will get no more increments: {self.chain.name} has taken its place{rest}")
        self.chain = replace(self.chain, replaced=tuple(problems))
        self._plan_replacing(is_done=True)
        for problem in problems.values():
            raise problem

    def _plan_replacing(self, *, is_done: bool = False) -> None:
        """Plan the end of replaced chains, if there are any.

        If `is_done`, the caller has just ended them, and will report it.
        """
        seconds = DAY_SECONDS if self.chain is not None and self.chain.goes_on and self.chain.replaced else 0.0
        # A failed task keeps its pauses, even if there are now more chains to replace.
        before = self.tasks.get(TaskKind.REPLACE)
        if not seconds and not is_done and before is not None and before.failing_since is not None:
            self.notices.is_not_needed(before, self.chain.name if self.chain else None)
        kept = before if seconds and before is not None else Task(TaskKind.REPLACE, seconds)
        self.tasks[TaskKind.REPLACE] = replace(kept, interval_seconds=seconds)

    def _ask_for_full(self, reason: str) -> None:
        """Make a full snapshot due: at once, or later if several chains ended young, or never if the rules say so."""
        name = self.chain.name if self.chain else ""
        if self.source.rules.full <= 0:
            why = reason or "there is no snapshot"
            self.log(f"{why}; [watch] full is never; to take a full snapshot: {self._create_command}")
        elif name != self._asked_for:
            now = utc_now()
            age_seconds = (now - self.chain.began_at).total_seconds() if self.chain else None
            seconds = self._pauses.next_seconds(name, age_seconds)
            self.tasks[TaskKind.FULL] = self.tasks[TaskKind.FULL].put_off(now, seconds)
            self._asked_for = name
            if reason:
                self.log(f"{reason}; a full snapshot follows" + (f" in {seconds:.0f} s" if seconds else ""))

    @property
    def _create_command(self) -> str:
        """The command that takes a full snapshot with a name that the watch follows."""
        return f"snapshot create '{self.source.rules.name}'"

    def _done_at(self, kind: TaskKind, moment: datetime) -> None:
        self.tasks[kind] = self.tasks[kind].last_done(moment)


def _with_way_out(error: ManifestError, name: str) -> ManifestError:
    """Add to the error about a replaced chain's damaged commit the command that deletes the chain.

    Nodes retain WAL for the chain until it is deleted.
    """
    is_of_it = str(error.details.get("object", "")).startswith(f"snapshots/{name}/")
    if is_of_it and NEWER_HINT not in error.hint and not isinstance(error, StoreEncryptedError):
        error.hint += f"\nor delete it with all its restore points: snapshot delete {name} --force"
    return error


def chain_end_of(error: BaseException) -> ChainEnd:
    """Return whether the error ends the chain.

    A damaged commit may end it, unless the commit is put back; a damaged fleet.json never ends it.
    """
    if isinstance(error, ManifestError) and error.details.get("object") == FLEET_KEY:
        return ChainEnd.NO
    if isinstance(error, ManifestError) and not isinstance(error, StoreEncryptedError):
        return max(error.ends_chain, ChainEnd.PERHAPS, key=list(ChainEnd).index)
    return error.ends_chain if isinstance(error, SnapshotError) else ChainEnd.NO
