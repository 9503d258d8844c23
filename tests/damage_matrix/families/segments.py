"""Sealed damage of segments: changes, transactions, events, markers, metadata.

A segment describes each transaction twice, by its changes and by its event, and each global transaction on every shard.
A change, or a transaction of one shard, that every copy lacks leaves no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import pyarrow as pa

from cutline.fleet.lsn import Lsn
from cutline.wal.cut.markers import marker_from_bytes
from cutline.wal.segments.archive import OpenTransaction
from cutline.wal.segments.segments import (
    COMMIT,
    COMMIT_PREPARED,
    DELETE,
    INSERT,
    MARKER,
    PARTIAL,
    PREPARE,
    ROLLBACK_PREPARED,
    TRUNCATE,
    UPSERT,
)
from tests.damage_matrix.damaged import Damaged, OpenSegment, Row, TableForm
from tests.damage_matrix.families.rows import BOTH, ONLY, PLACES, PRIMARY, STANDBY, Place, by_copies
from tests.damage_matrix.kinds import DAMAGED, PAIRS, POINT, SINGLE, Expected, Hidden, Kind, doubted, found

CHANGES, TRANSACTIONS, METADATA = (
    "segments: changes",
    "segments: transactions and markers",
    "segments: metadata and entries",
)
Edit = Callable[[Damaged, str, OpenSegment], object]
FAILED_BEFORE = "an operation that failed may have written the segment, on a machine with a wrong clock"
DECIDED = "an administrator may commit one part of a transaction, and roll back another"
NO_TRACE = "a change that no copy has leaves no trace, if the end of its transaction does not count it"
NOTHING_SAYS = "every copy has the same changes, and nothing else in the store contains the originals"
READ_BEFORE = "the next increment is the first that reads the tables' files after the cut"
# Added to a number, it gives one that no other change of the transaction has. New rows of updates of keys are odd.
LATER = 1000
# In a millisecond.
MICROSECONDS = 1000
NO_TRANSACTION = "a transaction of one shard that no copy has leaves no trace"


def kinds() -> Iterator[Kind]:
    """Yield the kinds of these families."""
    yield from _changes()
    yield from _invalid_changes()
    yield from _transactions()
    yield from _markers()
    yield from _metadata()
    yield from _restore_point()


def kind(
    name: str,
    place: Place,
    increment: int,
    edit: Edit,
    expected: Expected,
    *,
    family: str = CHANGES,
    cuts_again: bool = False,
    counts: bool = True,
) -> Kind:
    """Return the kind that edits the segments of the place's nodes.

    `cuts_again`: the cuts are made to fit. `counts`: so are the numbers of changes at the ends of transactions.
    """

    def damage(store: Damaged) -> None:
        for node in place.nodes:

            def change(opened: OpenSegment, node: str = node) -> None:
                opened.counts = counts
                edit(store, node, opened)

            store.edit_segment(node, increment, change)
        if cuts_again:
            store.cut_again()
        else:
            store.seal()

    return Kind(f"{name} ({place.name})", family, place.fleet, damage, expected)


def on_change(table: str, increment: int, change: Callable[[OpenSegment, TableForm, Row], object], key: bytes | None,
              op: int | None = None) -> Edit:  # fmt: skip
    """Edit the table's first change with this key (None: any) and op (None: any)."""

    def edit(store: Damaged, node: str, opened: OpenSegment) -> None:
        form = store.table(table, node, increment)
        rows = [row for row in opened.changes if op in (None, row["op"])]
        change(opened, form, form.find(rows, key))

    return edit


def _lose(opened: OpenSegment, _: TableForm, row: Row) -> None:
    opened.changes.remove(row)


def _update(**columns: Any) -> Callable[[OpenSegment, TableForm, Row], object]:
    return lambda _, __, row: row.update(columns)


def _value(column: str, value: bytes) -> Callable[[OpenSegment, TableForm, Row], object]:
    return lambda _, form, row: form.set(row, column, value)


def _repeat(opened: OpenSegment, _: TableForm, row: Row) -> None:
    opened.changes.insert(opened.changes.index(row) + 1, row | {"seq": row["seq"] + LATER})


def _into_twin_a(store: Damaged, node: str, opened: OpenSegment) -> None:
    row = store.table("twin_b", node, 2).find(opened.changes, b"2")
    row["group"] = store.table("twin_a", node, 2).number


def _exchange_order(store: Damaged, node: str, opened: OpenSegment) -> None:
    first, second = store.table("typed", node, 1).of([row for row in opened.changes if row["key"] == b"2"])
    first["row"], second["row"] = second["row"], first["row"]


def _move(opened: OpenSegment, form: TableForm, row: Row) -> None:
    """Make the change part of the transaction before it."""
    at = opened.changes.index(row)
    before = opened.changes[at - 1]
    names = ("lsn", "end_lsn", "xid", "global_id")
    row.update({name: before[name] for name in names} | {"seq": before["seq"] + LATER})


def _truncate(table: str, store: Damaged, node: str, opened: OpenSegment) -> None:
    """Truncate the table twin_a in the transaction that changes this table."""
    row = store.table(table, node, 2).find(opened.changes, None)
    added = row | {"seq": row["seq"] + LATER, "op": TRUNCATE, "partition": -1, "key": b"", "row": b""}
    opened.changes.insert(opened.changes.index(row) + 1, added | {"group": store.table("twin_a", node, 2).number})


def _complete(_: OpenSegment, form: TableForm, row: Row) -> None:
    """Put a value in the place of the mark of a value that the update left out."""
    form.set(row, "a", b"invented")
    row["op"] = UPSERT


def _changes() -> Iterator[Kind]:
    """Changes that are as valid as those that were there."""
    by_name: Mapping[str, tuple[str, int, Edit]] = {
        "an update is lost": ("pairkey", 2, on_change("pairkey", 2, _lose, None)),
        "an insert into a table without a key is lost": ("journal", 1, on_change("journal", 1, _lose, None, INSERT)),
        "an insert into an append-only table is lost": ("log", 1, on_change("log", 1, _lose, None)),
        "a delete is lost": ("account", 1, on_change("account", 1, _lose, b"12")),
        "a delete in a table without a key is lost": ("journal", 1, on_change("journal", 1, _lose, None, DELETE)),
        "a TRUNCATE is lost": ("cleared", 1, on_change("cleared", 1, _lose, None, TRUNCATE)),
        "an update of a new table is lost": ("coming", 2, on_change("coming", 2, _lose, None)),
        "another value": ("byindex", 2, on_change("byindex", 2, _value("v", b"another"), b"3")),
        "a value in the place of a value that the update left out": ("wide", 1, on_change("wide", 1, _complete, b"1")),
        "an update becomes a delete": ("pairkey", 2, on_change("pairkey", 2, _update(op=DELETE, row=b""), None)),
        "a delete becomes an update":
            ("twin_b", 2, on_change("twin_b", 2, _update(op=UPSERT, row=b"4\tagain\n"), b"4", DELETE)),
        "another key": ("twin_b", 2, on_change("twin_b", 2, _value("id", b"9"), b"2")),
        "an update of another table with the same columns": ("twin_b", 2, _into_twin_a),
        "the order of two updates of a row": ("typed", 1, _exchange_order),
        "an insert into a table without a key is repeated":
            ("journal", 1, on_change("journal", 1, _repeat, None, INSERT)),
    }  # fmt: skip
    for name, (table, increment, edit) in by_name.items():
        is_counted = "lost" in name or "repeated" in name
        for place in PLACES:
            hidden = NO_TRACE if is_counted else NOTHING_SAYS
            yield kind(name, place, increment, edit, by_copies(place, table, "changes", hidden=hidden))
        for place in (BOTH, ONLY) if is_counted else ():
            yield kind(f"{name}, but not from the number of its transaction's changes", place, increment, edit,
                       found("rows", node="s1", object=DAMAGED), counts=False)  # fmt: skip
    for place in PLACES:
        compared = by_copies(place, "twin_a", "changes", hidden=READ_BEFORE)
        by_file = compared if place.is_one_of_two else found("history", node="s1", group="public.twin_a")
        yield kind("an additional TRUNCATE", place, 2, partial(_truncate, "pairkey"), by_file)
        yield kind("an additional TRUNCATE in the newest increment", place, 3, partial(_truncate, "account"), compared)
        if not place.is_one_of_two:
            yield kind("an additional TRUNCATE that is not counted", place, 3,
                       partial(_truncate, "account"), found("rows", node="s1", object=DAMAGED),
                       counts=False)  # fmt: skip
    same: Mapping[str, tuple[str, int, Edit, str]] = {
        "an update is repeated":
            ("pairkey", 2, on_change("pairkey", 2, _repeat, None), "an update may write the same row twice"),
        "a change is part of the transaction before it":
            ("byindex", 2, on_change("byindex", 2, _move, None), "both transactions are in the state"),
        "a complete row is marked as incomplete":
            ("pairkey", 2, on_change("pairkey", 2, _update(op=PARTIAL), None), "no value is left out of it"),
        "a gap in the numbers of a transaction's changes":
            ("pairkey", 2, on_change("pairkey", 2, lambda _, __, row: row.update(seq=row["seq"] + LATER), None),
             "changes of tables that are not in the snapshot have numbers, too"),
    }  # fmt: skip
    for name, (table, increment, edit, hidden) in same.items():
        for place in (STANDBY, BOTH, ONLY):
            yield kind(name, place, increment, edit, by_copies(place, table, "changes", hidden=hidden, is_same=True))
    for place in PLACES:
        yield kind("the changes in another order", place, 1, lambda _, __, opened: opened.changes.reverse(),
                   Hidden("each change has a position and a number", is_same=True))  # fmt: skip


def _double(opened: OpenSegment, _: TableForm, row: Row) -> None:
    opened.changes.append(dict(row))


def _other_transaction(store: Damaged, node: str, opened: OpenSegment) -> None:
    """Move a change into another transaction, except for its xid and its end."""
    row = store.table("byindex", node, 2).find(opened.changes, None)
    before = opened.changes[opened.changes.index(row) - 1]
    row.update(lsn=before["lsn"], seq=before["seq"] + LATER)


def _of_ended(store: Damaged, node: str, opened: OpenSegment) -> None:
    """Make a change of the table `grown`, under the definition that ended in increment 1; the columns are the same."""
    row = store.table("twin_b", node, 2).find(opened.changes, b"2")
    row["group"] = store.table("grown", node, 0).number


def _invalid_changes() -> Iterator[Kind]:
    """Changes that contradict the definition of their table, or the event of their transaction."""
    by_name: Mapping[str, tuple[int, Edit]] = {
        "a value that the type refuses": (1, on_change("typed", 1, _value("small", b"x"), b"3")),
        "a text that is not UTF-8": (1, on_change("typed", 1, _value("note", b"\xff"), b"3")),
        "a label that the enum lacks": (1, on_change("typed", 1, _value("mood", b"angry"), b"3")),
        "NULL where it is not allowed": (1, on_change("typed", 1, _value("needed", rb"\N"), b"3")),
        "a field less": (2, on_change("twin_b", 2, _update(row=b"2\n"), b"2")),
        "a field more": (2, on_change("twin_b", 2, _update(row=b"2\tx\ty\n"), b"2")),
        "no newline": (2, on_change("twin_b", 2, _update(row=b"2\tx"), b"2")),
        "a key other than the line's": (2, on_change("twin_b", 2, _update(key=b"9"), b"2")),
        "a group that nothing defines": (2, on_change("twin_b", 2, _update(group=4000), b"2")),
        "the group of a table with other columns":
            (2, lambda store, node, opened: store.table("twin_b", node, 2).find(opened.changes, b"2").update(
                group=store.table("typed", node, 2).number)),
        "a change twice": (2, on_change("pairkey", 2, _double, None)),
        "a change where no transaction ends":
            (2, on_change("pairkey", 2, lambda _, __, row: row.update(lsn=row["lsn"] + 1), None)),
        "a change under a definition that has ended": (2, _of_ended),
        "a change of another transaction than its xid says": (2, _other_transaction),
        "an xid other than the transaction's": (2, on_change("pairkey", 2, _update(xid=3), None)),
        "an end other than the transaction's":
            (2, on_change("pairkey", 2, lambda _, __, row: row.update(end_lsn=row["end_lsn"] + 8), None)),
        "a change of a local transaction has a global id": (2, on_change("pairkey", 2, _update(global_id="x"), None)),
        "the mark of an unchanged value in a complete row": (2, on_change("twin_b", 2, _value("v", rb"\u"), b"2")),
        "the mark of an unchanged value in a key":
            (1, on_change("wide", 1, lambda _, form, row: form.set(row, "id", rb"\u"), b"1")),
        "the mark of an unchanged value in a column of a fixed size":
            (1, on_change("wide", 1, lambda _, form, row: form.set(row, "n", rb"\u"), b"1")),
        "an update of a table without a key":
            (1, on_change("journal", 1, _update(op=UPSERT), None, INSERT)),
        "an insert that is for tables without a key": (2, on_change("twin_b", 2, _update(op=INSERT), b"2")),
        "a delete with a row": (2, on_change("twin_b", 2, _update(row=b"4\tx\n"), b"4", DELETE)),
        "a delete in an append-only table": (1, on_change("log", 1, _update(op=DELETE), None)),
        "a TRUNCATE with a row": (1, on_change("cleared", 1, _update(row=b"1\n"), None, TRUNCATE)),
        "a change without a group": (2, on_change("twin_b", 2, _update(group=-1), b"2")),
        "a change of an unknown kind": (2, on_change("twin_b", 2, _update(op=ord("X")), b"2")),
        "the new row of an update of a key, without the delete of the old row":
            (2, on_change("byindex", 2, lambda _, __, row: row.update(seq=row["seq"] + 1), b"3")),
        "a delete of a row that was never there":
            (2, on_change("twin_b", 2, _update(key=b"400"), b"4", DELETE)),
    }  # fmt: skip
    for name, (increment, edit) in by_name.items():
        for place in (PRIMARY, BOTH, ONLY) if name == "a field less" else (BOTH, ONLY):
            yield kind(name, place, increment, edit, found("rows", "changes", "history", node="s1"))
    for place in (PRIMARY, BOTH, ONLY):
        yield kind("the wrong partition", place, 2, on_change("pairkey", 2, _update(partition=1), None),
                   found("partition", node="s1", object=DAMAGED))  # fmt: skip


def _transaction_of(table: str, key: bytes | None, increment: int = 2) -> Callable[[Damaged, str, OpenSegment], int]:
    """The position of the transaction with the table's first change, of this key."""
    return lambda store, node, opened: int(store.table(table, node, increment).find(opened.changes, key)["lsn"])


def _lose_transaction(store: Damaged, node: str, opened: OpenSegment) -> None:
    lsn = _transaction_of("pairkey", None)(store, node, opened)
    opened.drop(lambda row: row["lsn"] == lsn)


def _event(opened: OpenSegment, op: int, global_id: str | None = None) -> Row:
    return next(row for row in opened.events if row["op"] == op and global_id in (None, row["global_id"]))


def _commit(store: Damaged, node: str, opened: OpenSegment) -> Row:
    lsn = _transaction_of("pairkey", None)(store, node, opened)
    return next(row for row in opened.events if row["lsn"] == lsn)


def _date_newest_commit(store: Damaged, node: str, opened: OpenSegment) -> None:
    """Change the time of the newest COMMIT that the cut of increment 3 includes: the segment may reach beyond it.

    Commits have times in milliseconds, so other COMMITs of the same millisecond would have the time that is lost.
    """
    position = Lsn.parse(store.cut(store.shard_of(node), 3)["position"])
    commits = [row for row in opened.events if row["op"] == COMMIT and row["lsn"] < position]
    newest = max(int(row["seq"]) for row in commits)
    for row in commits:
        if int(row["seq"]) > newest - MICROSECONDS:
            row["seq"] = 1


def _lose_events(*ops: int, global_id: str, changes: bool = False) -> Edit:
    """Lose these events of a global transaction, and its changes, which have the position of its PREPARE."""

    def edit(store: Damaged, node: str, opened: OpenSegment) -> None:
        lsn = _event(opened, PREPARE, global_id)["lsn"]
        opened.drop(lambda row: (row["op"] in ops and row["global_id"] == global_id)
                    or (changes and row["op"] not in (PREPARE, COMMIT_PREPARED) and row["lsn"] == lsn))  # fmt: skip

    return edit


def _commit_again(store: Damaged, node: str, opened: OpenSegment) -> None:
    """Repeat a COMMIT as the record after it."""
    row = _commit(store, node, opened)
    opened.events.append(row | {"lsn": row["end_lsn"], "end_lsn": row["end_lsn"] + 8, "changes": 0})


def _commit_prepared_again(store: Damaged, node: str, opened: OpenSegment) -> None:
    row = _event(opened, COMMIT_PREPARED, "both")
    opened.events.append(row | {"lsn": row["end_lsn"], "end_lsn": row["end_lsn"] + 8})


def _take_xid(store: Damaged, node: str, opened: OpenSegment) -> None:
    """Give a transaction the xid of another one."""
    row = _commit(store, node, opened)
    other = next(one for one in opened.events if one["op"] == COMMIT and one["xid"] != row["xid"])
    for one in [one for one in opened.all if one["xid"] == row["xid"]]:
        one["xid"] = other["xid"]


def _too_large_xid(store: Damaged, node: str, opened: OpenSegment) -> None:
    row = _commit(store, node, opened)
    for one in [one for one in opened.all if one["xid"] == row["xid"]]:
        one["xid"] += 1 << 32


def _overlap(store: Damaged, node: str, opened: OpenSegment) -> None:
    """Let a COMMIT end after the beginning of the next one."""
    commits = sorted((one for one in opened.events if one["op"] == COMMIT), key=lambda one: int(one["lsn"]))
    commits[0]["end_lsn"] = commits[1]["lsn"] + 1


def _records() -> Mapping[str, Edit]:
    """Events whose records contradict each other."""
    return {
        "a transaction ends a second time": _commit_again,
        "a transaction is committed a second time": _commit_prepared_again,
        "a transaction has the xid of another one": _take_xid,
        "a transaction has an xid of more than 32 bits": _too_large_xid,
        "a COMMIT begins before the one before it ends": _overlap,
    }


def _rename(store: Damaged, node: str, opened: OpenSegment) -> None:
    for row in opened.all:
        if row["global_id"] == "both":
            row["global_id"] = "renamed"


def _commit_undone(store: Damaged, node: str, opened: OpenSegment) -> None:
    """Say that a transaction was committed that was rolled back."""
    row = _event(opened, ROLLBACK_PREPARED, "undone")
    prepare = _event(opened, PREPARE, "undone")
    row.update(op=COMMIT_PREPARED, lsn=prepare["end_lsn"], end_lsn=prepare["end_lsn"] + 8)


def _transactions() -> Iterator[Kind]:
    of_family = partial(kind, family=TRANSACTIONS)
    for place in PLACES:
        yield of_family("a transaction of one shard is lost", place, 2, _lose_transaction,
                        _events_by_copies(place, NO_TRANSACTION), cuts_again=True)  # fmt: skip
        yield of_family("a transaction's changes are lost, but not its COMMIT", place, 2, _lose_changes,
                        by_copies(place, "pairkey", "changes", hidden=NO_TRACE))  # fmt: skip
        if not place.is_one_of_two:
            yield of_family("a transaction's changes are lost, but not its COMMIT, which counts them", place, 2,
                            _lose_changes, found("rows", node="s1", object=DAMAGED), counts=False)  # fmt: skip
            for name, of_events in _records().items():
                yield of_family(name, place, 2, of_events, found("rows", node="s1", object=DAMAGED))
        yield of_family("the time of a COMMIT, and the cut's times with it", place, 2,
                        lambda store, node, opened: _commit(store, node, opened).update(seq=1),
                        Hidden("the clock of one node says when a transaction ended", is_same=True),
                        cuts_again=True)  # fmt: skip
        yield of_family("the events in another order", place, 2, lambda _, __, opened: opened.events.reverse(),
                        Hidden("each event has a position", is_same=True))  # fmt: skip
    for place in (PRIMARY, BOTH, ONLY):
        yield of_family("a transaction of one shard is lost, and the commit counts it", place, 2, _lose_transaction,
                        found("cut", node="s1"))  # fmt: skip
        yield of_family("a COMMIT is lost", place, 2,
                        lambda store, node, opened: opened.events.remove(_commit(store, node, opened)),
                        found("rows", node="s1", object=DAMAGED), cuts_again=True)  # fmt: skip
        yield of_family("a COMMIT is elsewhere", place, 2,
                        lambda store, node, opened: _commit(store, node, opened).update(
                            lsn=_commit(store, node, opened)["lsn"] + 1),
                        found("rows", node="s1", object=DAMAGED), cuts_again=True)  # fmt: skip
        yield of_family("a COMMIT is there twice", place, 2,
                        lambda store, node, opened: opened.events.append(dict(_commit(store, node, opened))),
                        found("rows", "cut", "events", node="s1"), cuts_again=True)  # fmt: skip
        yield of_family("the time of the newest COMMIT", place, 3, _date_newest_commit, found("cut", node="s1"))
    yield from _global_transactions()
    yield from _outside_of_ranges()


def _events_by_copies(place: Place, hidden: str, *, is_same: bool = False) -> Expected:
    return found("events", node=place.nodes[0]) if place.is_one_of_two else Hidden(hidden, is_same)


def _lose_changes(store: Damaged, node: str, opened: OpenSegment) -> None:
    lsn = _transaction_of("pairkey", None)(store, node, opened)
    opened.changes[:] = [row for row in opened.changes if row["lsn"] != lsn]


ALL_OF_PAIRS = Place("all copies of both shards", PAIRS, ("s1", "s1-b1", "s2", "s2-b1"))
ALL_OF_SINGLE = Place("the only copies of both shards", SINGLE, ("s1", "s2"))
WHOLE_PLACES = (BOTH, ONLY)


def _global_transactions() -> Iterator[Kind]:
    of_family = partial(kind, family=TRANSACTIONS)
    of_both = partial(_lose_events, global_id="both")
    whole = of_both(PREPARE, COMMIT_PREPARED, changes=True)
    for place in WHOLE_PLACES:
        yield of_family("a PREPARE is lost", place, 2, of_both(PREPARE), found("rows", node="s1"), cuts_again=True)
        yield of_family("a PREPARE and its changes are lost", place, 2, of_both(PREPARE, changes=True),
                        found("rows", "transaction", "cut", node="s1"), cuts_again=True)  # fmt: skip
        yield of_family("a COMMIT PREPARED is lost", place, 2, of_both(COMMIT_PREPARED), found("cut", node="s1"))
        yield of_family("a COMMIT PREPARED is lost, and the cuts call the transaction in doubt", place, 2,
                        of_both(COMMIT_PREPARED),
                        Hidden("the other shard says that the transaction was committed", is_same=True),
                        cuts_again=True)  # fmt: skip
        yield of_family("a ROLLBACK PREPARED is lost, and the cuts call the transaction in doubt", place, 2,
                        _lose_events(ROLLBACK_PREPARED, global_id="undone"),
                        Hidden("no shard says that the transaction was committed", is_same=True),
                        cuts_again=True)  # fmt: skip
        yield of_family("a global transaction has another id on one shard", place, 2, _rename,
                        Hidden("ids of this form don't say which nodes take part", is_same=True),
                        cuts_again=True)  # fmt: skip
        yield of_family("a global transaction is lost on one shard", place, 2, whole,
                        Hidden("ids of this form don't say which nodes take part"), cuts_again=True)  # fmt: skip
        yield of_family("a transaction is committed on one shard that was rolled back on another", place, 2,
                        _commit_undone, doubted("transaction", reason=DECIDED), cuts_again=True)  # fmt: skip
    for place in (ALL_OF_PAIRS, ALL_OF_SINGLE):
        yield of_family("a global transaction is lost on all shards", place, 2, whole,
                        Hidden("a transaction that no node has leaves no trace"), cuts_again=True)  # fmt: skip
        yield of_family("a transaction is committed on all shards that was rolled back", place, 2, _commit_undone,
                        Hidden("every copy of every shard says so"), cuts_again=True)  # fmt: skip
    yield of_family("a global transaction is lost", STANDBY, 2, whole, found("events", node="s1-b1"))
    for name, change in {
        "an event of a two-phase transaction without a global id":
            lambda _, __, opened: _event(opened, PREPARE, "both").update(global_id=None),
        "an event with a group": lambda _, __, opened: _event(opened, COMMIT).update(group=1),
        "an event of an unknown kind": lambda _, __, opened: _event(opened, COMMIT).update(op=ord("Y")),
    }.items():  # fmt: skip
        for place in (PRIMARY, ONLY):
            yield of_family(name, place, 2, change, found("rows", node="s1", object=DAMAGED))


def _outside_of_ranges() -> Iterator[Kind]:
    """Transactions whose positions are not in the WAL that their segment holds."""

    def earlier(store: Damaged, node: str, opened: OpenSegment) -> None:
        after = Lsn.parse(store.segment(node, 2)["after"])
        lsn = _transaction_of("pairkey", None)(store, node, opened)
        for row in opened.all:
            if row["lsn"] == lsn:
                row.update(lsn=int(after) - 16, end_lsn=int(after) - 8)

    for place in WHOLE_PLACES:
        yield kind("a transaction is before the WAL of its segment", place, 2, earlier, found("rows", node="s1"),
                   family=TRANSACTIONS, cuts_again=True)  # fmt: skip

        def in_other_segment(store: Damaged, place: Place = place) -> None:
            moved: list[Row] = []

            def take(node: str, opened: OpenSegment) -> None:
                lsn = _transaction_of("pairkey", None)(store, node, opened)
                moved[:] = [row for row in opened.all if row["lsn"] == lsn]
                opened.drop(lambda row: row in moved)

            def put(opened: OpenSegment) -> None:
                opened.changes += [row for row in moved if row["op"] != COMMIT]
                opened.events += [row for row in moved if row["op"] == COMMIT]

            for node in place.nodes:
                store.edit_segment(node, 2, partial(take, node))
                store.edit_segment(node, 1, put)
            store.cut_again()

        yield Kind(f"a transaction is in an earlier segment ({place.name})", TRANSACTIONS, place.fleet,
                   in_other_segment, found("rows", node="s1"))  # fmt: skip


def _marker(store: Damaged, opened: OpenSegment, of_kind: str, increment: int) -> Row:
    """The marker of the commit's cut."""
    cut = store.commits[increment]["cut"]["id"]
    markers = [(marker_from_bytes(row["row"]), row) for row in opened.events if row["op"] == MARKER]
    return next(row for marker, row in markers if (marker.cut, marker.kind) == (cut, of_kind))


def _replace_in(row: Row, old: str, new: str) -> None:
    assert old.encode() in row["row"]
    row["row"] = row["row"].replace(old.encode(), new.encode())


def marker_edits(increment: int) -> Mapping[str, Edit]:
    """What can happen to a marker of the commit's cut."""

    def on(of_kind: str, change: Callable[[Damaged, OpenSegment, Row], object]) -> Edit:
        return lambda store, _, opened: change(store, opened, _marker(store, opened, of_kind, increment))

    return {
        "the start marker is lost": on("start", lambda _, opened, row: opened.events.remove(row)),
        "the finish marker is lost": on("finish", lambda _, opened, row: opened.events.remove(row)),
        "the start marker is elsewhere": on("start", lambda _, __, row: row.update(lsn=row["lsn"] - 8)),
        "the finish marker is elsewhere": on("finish", lambda _, __, row: row.update(lsn=row["lsn"] - 8)),
        "the marker of another cut": on("start", lambda store, _, row: _replace_in(
            row, store.commits[increment]["cut"]["id"], f"{store.commits[increment]['operation']}.9")),
        "the marker of another chain": on("start", lambda store, _, row: _replace_in(
            row, f'"chain": "{store.commits[0]["chain"]}"', '"chain": "20260101T000000Z-0123456789"')),
        "a finish marker in the place of the start marker":
            on("start", lambda _, __, row: _replace_in(row, '"start"', '"finish"')),
        "a marker that can't be read": on("start", lambda _, __, row: row.update(row=b"{")),
    }  # fmt: skip


def _markers() -> Iterator[Kind]:
    for name, edit in marker_edits(1).items():
        for place in (PRIMARY, STANDBY, BOTH, ONLY):
            yield kind(name, place, 1, edit, found("marker", node=place.nodes[0]), family=TRANSACTIONS)

    def double(store: Damaged, _: str, opened: OpenSegment) -> None:
        opened.events.append(dict(_marker(store, opened, "start", 1)))

    def lose_others(store: Damaged, _: str, opened: OpenSegment) -> None:
        chain = store.commits[0]["chain"]
        opened.drop(lambda row: row["op"] == MARKER and marker_from_bytes(row["row"]).chain != chain)

    for place in (BOTH, ONLY):
        yield kind("a marker is there twice", place, 1, double,
                   Hidden("the second says the same as the first", is_same=True), family=TRANSACTIONS)  # fmt: skip
        yield kind("the markers of another chain are lost", place, 2, lose_others,
                   Hidden("nothing depends on the markers of other chains", is_same=True),
                   family=TRANSACTIONS)  # fmt: skip


def _set(declared: Mapping[str, Any], listed: Mapping[str, Any] | None = None) -> Edit:
    """Other values in the metadata and, unless `listed` has the true ones, in the commit's entry."""

    def edit(store: Damaged, node: str, opened: OpenSegment) -> None:
        opened.declared.update(declared)
        opened.listed.update(listed if listed is not None else {})

    return edit


def _declare(name: str, value: Any) -> Edit:
    """Another value in the metadata alone."""

    def edit(store: Damaged, node: str, opened: OpenSegment) -> None:
        opened.declared[name] = value
        opened.listed[name] = store.segment(node, 2)[name]

    return edit


def _metadata() -> Iterator[Kind]:
    of_family = partial(kind, family=METADATA)
    other_operation = "20260101T000000Z-0123456789"
    in_metadata: Mapping[str, Any] = {
        "node": "s2", "operation": other_operation, "after": Lsn(8), "through": Lsn(8), "changes": 1, "events": 1,
        "partials": 9, "truncates": 9,
    }  # fmt: skip
    for name, value in in_metadata.items():
        for place in (PRIMARY, ONLY):
            yield of_family(f"another value of {name} in the metadata", place, 2, _declare(name, value),
                            found("unreadable", "rows", node="s1", object=DAMAGED))  # fmt: skip
    for place in (BOTH, ONLY):
        yield of_family("another key in the metadata", place, 2, _set({"key": "snapshots/x/wal/s1/1.parquet"}),
                        found("unreadable", "rows", node="s1", object=DAMAGED))  # fmt: skip
        yield of_family("another operation in the metadata and in the commit", place, 2,
                        _set({"operation": other_operation}),
                        doubted("operation", reason=FAILED_BEFORE, is_same=True))  # fmt: skip
        yield of_family("the events begin elsewhere, says the commit", place, 2, _set({}, {"events_at": 4}),
                        found("unreadable", "rows", "commit", "digest", node="s1"))  # fmt: skip
        yield of_family("another digest of the events in the commit", place, 2, _set({}, {"events_digest": "0" * 64}),
                        found("digest", "rows", "commit", node="s1"))  # fmt: skip
        yield of_family("another number in the commit", place, 2, _set({}, {"number": 9}), found("commit"))
        yield of_family("another node in the commit and in the metadata", place, 2, _set({"node": "s2"}),
                        found("commit"))  # fmt: skip
        yield of_family("the segment begins later", place, 2, _later, found("archive"))
        yield of_family("the segment ends earlier", place, 2, _shorter, found("archive"))
        yield of_family("the segment ends within a transaction that it does not contain", place, 2, _open,
                        found("rows", "archive", "commit"))  # fmt: skip
        yield of_family("TRUNCATE is not counted", place, 1, _set({"truncates": 0}), found("rows", node="s1"))
        yield of_family("incomplete rows are not counted", place, 1, _set({"partials": 0}), found("rows", node="s1"))
        yield of_family("the definitions are lost", place, 1, _set({"definitions": (), "first_changes": {}}),
                        Hidden("the commit contains the same definitions", is_same=True))  # fmt: skip
        yield of_family("the seal does not fit", place, 2, _break_seal, found("unreadable", "digest", node="s1"))
        yield of_family("the events are stored with the changes", place, 2, _together,
                        found("rows", node="s1", object=DAMAGED))  # fmt: skip
        yield of_family("a change and an event have exchanged their places", place, 2, _exchanged,
                        found("rows", node="s1", object=DAMAGED))  # fmt: skip
    yield from _entries()


def _later(store: Damaged, node: str, opened: OpenSegment) -> None:
    opened.declared["after"] = Lsn(int(Lsn.parse(store.segment(node, 2)["after"])) + 8)


def _shorter(store: Damaged, node: str, opened: OpenSegment) -> None:
    opened.declared["through"] = Lsn(int(Lsn.parse(store.segment(node, 2)["through"])) - 8)


def _break_seal(store: Damaged, node: str, opened: OpenSegment) -> None:
    opened.seals = False


def _open(store: Damaged, node: str, opened: OpenSegment) -> None:
    opened.declared["open"] = OpenTransaction(Lsn(int(Lsn.parse(store.segment(node, 2)["through"])) + 8), 1, 0)


def _together(store: Damaged, node: str, opened: OpenSegment) -> None:
    opened.layout = lambda changes, events: (pa.concat_tables([changes, events]), events.slice(0, 0))


def _exchanged(store: Damaged, node: str, opened: OpenSegment) -> None:
    """The last change and the first event: as many rows as should be are in each place."""

    def layout(changes: pa.Table, events: pa.Table) -> tuple[pa.Table, pa.Table]:
        last = len(changes) - 1
        return (
            pa.concat_tables([changes.slice(0, last), events.slice(0, 1)]),
            pa.concat_tables([changes.slice(last), events.slice(1)]),
        )

    opened.layout = layout


def _entries() -> Iterator[Kind]:
    """Entries of segments in commits."""

    def change_entries(increment: int, change: Callable[[Damaged, str], object], nodes: tuple[str, ...]) -> (
        Callable[[Damaged], None]
    ):  # fmt: skip
        def damage(store: Damaged) -> None:
            for node in nodes:
                change(store, node)
            store.seal()

        return damage

    def lose(increment: int) -> Callable[[Damaged, str], object]:
        return lambda store, node: store.commits[increment]["segments"][node].pop()

    def double(store: Damaged, node: str) -> None:
        store.commits[2]["segments"][node] *= 2

    def idle(store: Damaged) -> None:
        """Say that no transaction has run since the increment before."""
        for node in store.commits[3]["segments"]:
            if store.commits[3]["segments"][node]:
                store.commits[3]["segments"][node] = []
                store.commits[3].setdefault("idle", {})[node] = store.segment(node, 2)
        store.cut_again()

    def not_last(store: Damaged) -> None:
        for node, last in store.commits[3]["idle"].items():
            assert last["number"] > 1
            store.commits[3]["idle"][node] = store.segment(node, 1)
        store.seal()

    for place in (BOTH, ONLY):
        fleet, nodes = place.fleet, place.nodes
        yield Kind(f"the entry of a segment is lost ({place.name})", METADATA, fleet,
                   change_entries(1, lose(1), nodes), found("archive", "commit"))  # fmt: skip
        yield Kind(f"the entry of the newest segment is lost ({place.name})", METADATA, fleet,
                   change_entries(3, lose(3), nodes), found("archive", "commit"))  # fmt: skip
        yield Kind(f"the entry of a segment is there twice ({place.name})", METADATA, fleet,
                   change_entries(2, double, nodes), found("commit"))  # fmt: skip
        yield Kind(f"a shard that was busy is called idle ({fleet})", METADATA, fleet, idle,
                   Hidden(NO_TRANSACTION))  # fmt: skip
        yield Kind(f"the idle shard's last segment is another ({fleet})", METADATA, fleet, not_last,
                   found("commit"))  # fmt: skip
        yield Kind(f"the contents of two shards' segments are exchanged ({fleet})", METADATA, fleet, _exchange_shards,
                   found("marker", "cut", "rows"))  # fmt: skip


def _exchange_shards(store: Damaged) -> None:
    shards = {store.shard_of(node) for node in store.commits[2]["segments"]}
    for node in [one for one in store.commits[2]["segments"] if store.shard_of(one) == min(shards)]:
        _exchange_contents(store, node, node.replace("s1", "s2"))


def _exchange_contents(store: Damaged, node: str, other: str) -> None:
    first, second = store.open_segment(node, 2), store.open_segment(other, 2)

    def put(contents: OpenSegment) -> Callable[[OpenSegment], object]:
        def change(opened: OpenSegment) -> None:
            opened.changes[:], opened.events[:] = contents.changes, contents.events

        return change

    store.edit_segment(node, 2, put(second))
    store.edit_segment(other, 2, put(first))
    store.seal()


def _restore_point() -> Iterator[Kind]:
    place = Place("of a restore point", POINT, ("s1",))
    for name, edit in marker_edits(0).items():
        yield kind(name, place, 0, edit, found("marker", node="s1"), family=TRANSACTIONS)
