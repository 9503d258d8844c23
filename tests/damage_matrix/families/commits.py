"""Sealed damage of commits: cuts, times, sequences, definitions, databases, entries of objects.

A commit is compared with the archived events, with the DDL, with its own counts, and with the commits around it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timedelta
from functools import partial

from cutline.fleet.lsn import Lsn
from cutline.fleet.record import Time, from_json
from cutline.snapshots.records.documents import seal
from cutline.wal.cut.cut_values import NodeCut
from cutline.wal.cut.safe_time import safe_time_of_nodes
from cutline.wal.segments.segments import COMMIT, PREPARE
from tests.damage_matrix.damaged import Damaged, Document, Rows
from tests.damage_matrix.families.raw import commit_of
from tests.damage_matrix.kinds import (
    CHAINS,
    PAIRS,
    POINT,
    SINGLE,
    Expected,
    FleetName,
    Hidden,
    Kind,
    doubted,
    found,
)
from tests.damage_matrix.world import OWNER, READER

CUT, TIMES, SEQUENCES, DEFINITIONS, CHANGES, DATABASES, OBJECTS, FIELDS = (
    f"commits: {name}"
    for name in (
        "cuts", "times", "sequences", "definitions", "changes of definitions", "databases and nodes",
        "entries of objects", "other fields",
    )
)  # fmt: skip
Change = Callable[[Damaged], object]
SHARDS = ("s1", "s2")
OTHER_OPERATION = "20260101T000000Z-0123456789"
DESCRIBES = "the value describes, and nothing depends on it"
CLOCK = "somebody may have set the clock of a node during the create"
MAY_BE_SET = "an application may set a sequence to any value, and insert any key"
DIFFER = "shards may differ, and a change reaches one after the other"
RECORDED_ONCE = "nothing else in the store contains the original value"
LOGGED_BETWEEN = "somebody may have made it logged, and unlogged again, while the create listed what it leaves out"
NEXT_CREATE = "only the next create uses the value, and compares it with the servers"


def kinds() -> Iterator[Kind]:
    """Yield the kinds of these families."""
    yield from _cuts()
    yield from _times()
    yield from _sequences()
    yield from _definitions()
    yield from _changes_of_definitions()
    yield from _databases()
    yield from _objects()
    yield from _fields()


def kind(
    family: str, fleet: FleetName, name: str, change: Change, expected: Expected, *, recounts: bool = True
) -> Kind:
    """Return the kind that changes the chain's documents and seals them."""

    def damage(store: Damaged) -> None:
        before = copy.deepcopy((store.commits, store.lists))
        change(store)
        assert before != (store.commits, store.lists), f"{name}: nothing is changed"
        store.seal(recounts=recounts)

    return Kind(name, family, fleet, damage, expected)


def _of(increment: int, change: Callable[[Document], object]) -> Change:
    return lambda store: change(store.commits[increment])


def _in_cut(increment: int, change: Callable[[Document], object], shard: str = "s1") -> Change:
    return lambda store: change(store.cut(shard, increment))


def _moved(position: str, by: int) -> str:
    return str(Lsn(int(Lsn.parse(position)) + by))


def _add(name: str, by: int) -> Callable[[Document], object]:
    return lambda part: part.update({name: _moved(part[name], by)})


def _prepared(store: Damaged, global_id: str) -> Document:
    """The transaction of two phases as an entry of `undecided`."""
    row = next(row for row in store.open_segment("s1", 2).events
               if row["op"] == PREPARE and row["global_id"] == global_id)  # fmt: skip
    return {"global_id": global_id, "lsn": str(Lsn(row["lsn"])), "end_lsn": str(Lsn(row["end_lsn"]))}


def _beyond_next_transaction(store: Damaged) -> None:
    row = next(row for row in store.open_segment("s1", 2).events if row["op"] == COMMIT)
    store.cut("s1", 1).update(position=str(Lsn(row["end_lsn"])))


def _cuts() -> Iterator[Kind]:
    in_doubt: Mapping[str, Callable[[Document], object]] = {
        "is included": lambda one: one.update(is_included=not one["is_included"]),
        "is prepared": lambda one: one.update(is_prepared=not one["is_prepared"]),
        "has another xid": lambda one: one.update(xid=one["xid"] + 1),
        "has another gid": lambda one: one.update(gid="other"),
        "has another global id": lambda one: one.update(global_id="other"),
        "is elsewhere": lambda one: one.update(lsn=_moved(one["lsn"], 8)),
    }
    of_node: Mapping[str, tuple[int, Change]] = {
        "the position is a byte later": (3, _in_cut(3, _add("position", 1))),
        "the position is after the next transaction": (1, _beyond_next_transaction),
        "a transaction is no longer undecided": (3, _in_cut(3, lambda cut: cut.update(undecided=[]))),
        "an undecided transaction has another id":
            (3, _in_cut(3, lambda cut: cut["undecided"][0].update(global_id="other"))),
        "a transaction that was committed is undecided":
            (2, lambda store: store.cut("s1", 2)["undecided"].append(_prepared(store, "both"))),
        "a transaction is no longer rolled back": (2, _in_cut(2, lambda cut: cut.update(rolled_back=[]))),
        "a transaction that was committed is rolled back":
            (2, lambda store: store.cut("s1", 2)["rolled_back"].append(_prepared(store, "both")["lsn"])),
        "no transaction is in doubt": (3, _in_cut(3, lambda cut: cut.update(in_doubt=[]))),
        "a transaction more in doubt": (3, _in_cut(3, lambda cut: cut["in_doubt"].append(
            cut["in_doubt"][0] | {"lsn": _moved(cut["in_doubt"][0]["lsn"], 8)}))),
        "the number of its transactions": (2, _in_cut(2, lambda cut: cut.update(
            local_transactions=cut["local_transactions"] + 1))),
        **{f"a transaction in doubt {name}":
            (3, _in_cut(3, lambda cut, change=change: change(cut["in_doubt"][0])))
           for name, change in in_doubt.items()},
    }  # fmt: skip
    totals: Mapping[str, Change] = {
        f"the number of {what}": _of(2, lambda commit, name=name: commit["cut"].update({name: commit["cut"][name] + 1}))
        for name, what in (("global_transactions", "global transactions"), ("in_flight", "transactions in flight"),
                           ("included_early", "transactions that are included early"))
    }  # fmt: skip
    markers: Mapping[str, Change] = {
        "the start is earlier": _in_cut(1, _add("start", -8)),
        "the finish is later": _in_cut(1, _add("finish", 8)),
    }
    for fleet in CHAINS:
        for name, (_, change) in of_node.items():
            yield kind(CUT, fleet, name, change, found("cut", node="s1"))
        for name, change in totals.items():
            yield kind(CUT, fleet, name, change, found("cut"))
        for name, change in markers.items():
            yield kind(CUT, fleet, name, change, found("marker", node="s1"))
        yield kind(CUT, fleet, "the cut has another id", _of(2, lambda commit: commit["cut"].update(id="other.1")),
                   found("marker"))  # fmt: skip
    refused: Mapping[str, Change] = {
        "the position is before the start": _in_cut(2, _add("position", -8)),
        "the position is before the previous cut":
            _in_cut(2, lambda cut: cut.update(position="0/10", start="0/10", finish="0/20")),
        "the finish is before the start": _in_cut(2, lambda cut: cut.update(finish=_moved(cut["start"], -8))),
        "an undecided transaction is there twice": _in_cut(3, lambda cut: cut["undecided"].append(cut["undecided"][0])),
        "a node is lost": _of(2, lambda commit: commit["cut"]["nodes"].pop()),
        "a node is there twice": _of(2, lambda commit: commit["cut"]["nodes"].append(commit["cut"]["nodes"][0])),
        "more attempts than causes": _of(2, lambda commit: commit["cut"].update(attempts=2)),
        "more transactions included early than in flight":
            _of(2, lambda commit: commit["cut"].update(included_early=9)),
    }  # fmt: skip
    for name, change in refused.items():
        yield kind(CUT, SINGLE, name, change, found("commit"))
    yield kind(CUT, SINGLE, "an attempt more, with its cause",
               _of(2, lambda commit: commit["cut"].update(attempts=2, causes=["made up"])),
               # The id of a cut ends with the number of the attempt.
               found("cut", "commit"))  # fmt: skip
    for name in ("position", "start", "finish"):
        yield kind(CUT, POINT, f"the {name} is a byte later", _in_cut(0, _add(name, 1)),
                   found("cut", "marker", "commit", "archive"))  # fmt: skip


def _later(text: str, seconds: float) -> str:
    return str(Time.of(datetime.fromisoformat(text) + timedelta(seconds=seconds)))


def _fit_safe_time(commit: Document) -> None:
    nodes = [from_json(json.dumps(node), NodeCut) for node in commit["cut"]["nodes"]]
    commit["cut"]["safe_at"] = str(safe_time_of_nodes(nodes))


def _made_at(seconds: float) -> Change:
    return _of(2, lambda commit: commit["cut"].update(made_at=_later(commit["cut"]["made_at"], seconds)))


def _times() -> Iterator[Kind]:
    hour = 3600.0

    def of_node(name: str, seconds: float) -> Change:
        def change(store: Damaged) -> None:
            part = store.cut("s1", 2)
            part[name] = _later(part[name], seconds)
            _fit_safe_time(store.commits[2])

        return change

    created: Callable[[float], Change] = lambda seconds: _of(  # noqa: E731  # as _made_at
        2, lambda commit: commit.update(created_at=_later(commit["created_at"], seconds))
    )
    yield kind(TIMES, SINGLE, "a cut is made before the cut before it", _made_at(-hour), found("cut", "commit", "time"))
    yield kind(TIMES, SINGLE, "a cut is made after the cut after it", _made_at(hour), found("cut", "commit", "time"))
    yield kind(TIMES, SINGLE, "a cut is made a millisecond later", _made_at(0.001),
               Hidden(RECORDED_ONCE, is_same=True))  # fmt: skip
    yield kind(TIMES, SINGLE, "a marker is written an hour after its cut", of_node("marked_at", hour),
               doubted("time", reason=CLOCK, is_same=True))  # fmt: skip
    yield kind(TIMES, SINGLE, "a node's newest commit is a second earlier", of_node("last_commit_at", -1.0),
               found("cut", node="s1"))  # fmt: skip
    yield kind(TIMES, SINGLE, "the safe time is not the earliest of the nodes'",
               _of(2, lambda commit: commit["cut"].update(safe_at=_later(commit["cut"]["safe_at"], 1.0))),
               found("commit"))  # fmt: skip
    yield kind(TIMES, SINGLE, "a commit is begun a day after its cut", created(24 * hour),
               found("commit", "time", "operation"))  # fmt: skip
    yield kind(TIMES, SINGLE, "a commit is begun a day before its operation", created(-24 * hour),
               found("commit", "time", "operation"))  # fmt: skip
    yield kind(TIMES, SINGLE, "a commit is begun a millisecond later than its operation", created(0.001),
               found("commit", "time", "operation"))  # fmt: skip
    yield kind(TIMES, SINGLE, "a commit takes longer", _of(2, lambda commit: commit.update(seconds=99.0)),
               Hidden(DESCRIBES, is_same=True))  # fmt: skip
    yield kind(TIMES, SINGLE, "a cut takes longer", _of(2, lambda commit: commit["cut"].update(seconds=9.0)),
               Hidden(DESCRIBES, is_same=True))  # fmt: skip
    yield kind(TIMES, SINGLE, "the clocks differ more", _of(2, lambda commit: commit["cut"].update(skew_seconds=9.0)),
               Hidden(DESCRIBES, is_same=True))  # fmt: skip


def _sequence(name: str, change: Callable[[Document], object], shard: str = "s1") -> Change:
    def of_last(store: Damaged) -> None:
        change(next(one for one in store.last["sequences"][shard] if one["name"] == name))

    return of_last


def _of_sequences(change: Callable[[list[Document]], object]) -> Change:
    return lambda store: change(store.last["sequences"]["s1"])


def _exchange_values(sequences: list[Document]) -> None:
    first, second = (next(one for one in sequences if one["name"] == name) for name in ("counter", "ring"))
    first["last_value"], second["last_value"] = second["last_value"], first["last_value"]


def _sequences() -> Iterator[Kind]:
    behind: Mapping[str, tuple[FleetName, Change]] = {
        "an identity column's sequence is before its rows":
            (SINGLE, _sequence("ticket_id_seq", lambda one: one.update(last_value=2))),
        "a serial column's sequence is before its rows":
            (PAIRS, _sequence("transfer_id_seq", lambda one: one.update(last_value=2))),
        "the last value of an identity column is handed out again":
            (SINGLE, _sequence("ticket_id_seq", lambda one: one.update(is_called=False))),
        "a sequence is behind the commit before": (SINGLE, _sequence("counter", lambda one: one.update(last_value=1))),
        "the values of two sequences are exchanged": (SINGLE, _of_sequences(_exchange_values)),
    }  # fmt: skip
    for name, (fleet, change) in behind.items():
        yield kind(SEQUENCES, fleet, name, change, doubted("sequence", reason=MAY_BE_SET))
    hidden: Mapping[str, Change] = {
        "a sequence is ahead": _sequence("counter", lambda one: one.update(last_value=1000)),
        "the last value of a sequence is handed out again":
            _sequence("counter", lambda one: one.update(is_called=False)),
        "a cycling sequence is elsewhere": _sequence("ring", lambda one: one.update(last_value=9)),
    }  # fmt: skip
    for name, change in hidden.items():
        yield kind(SEQUENCES, SINGLE, name, change, Hidden(MAY_BE_SET))
    of_kind = ("sequence", "definition", "commit")
    wrong: Mapping[str, Change] = {
        "a sequence is after its MAXVALUE": _sequence("ring", lambda one: one.update(last_value=11)),
        "a sequence is before its MINVALUE": _sequence("counter", lambda one: one.update(last_value=0)),
        "a sequence has another increment": _sequence("counter", lambda one: one.update(increment=5)),
        "a sequence does not cycle": _sequence("ring", lambda one: one.update(cycles=False)),
        "a sequence is there twice": _of_sequences(lambda some: some.append(dict(some[0], last_value=999))),
        "a sequence is lost": _of_sequences(lambda some: some.pop(0)),
        "a sequence has another name": _sequence("counter", lambda one: one.update(name="other")),
        "a sequence is in another schema": _sequence("counter", lambda one: one.update(schema="other")),
        "a sequence more": _of_sequences(lambda some: some.append(dict(some[0], name="more"))),
        "a table is called a sequence": _of_sequences(lambda some: some.append(dict(some[0], name="account"))),
    }
    for name, change in wrong.items():
        yield kind(SEQUENCES, SINGLE, name, change, found(*of_kind, node="s1" if "twice" not in name else ""))
    yield kind(SEQUENCES, SINGLE, "a shard is lost", _of(3, lambda commit: commit["sequences"].pop("s2")),
               found("commit"))  # fmt: skip


def _group(table: str, change: Callable[[Document], object], shards: tuple[str, ...] = SHARDS) -> Change:
    """Change the newest definition of the table on these shards."""

    def of_newest(store: Damaged) -> None:
        for shard in shards:
            change(store.group(table, shard))

    return of_newest


def _column(name: str, change: Callable[[Document], object]) -> Callable[[Document], object]:
    return lambda group: change(next(one for one in group["columns"] if one["name"] == name))


def _exchange(field: str, first: str, second: str) -> Callable[[Document], object]:
    """Exchange a field of two columns."""

    def change(group: Document) -> None:
        one, other = (next(column for column in group["columns"] if column["name"] == name) for name in (first, second))
        one[field], other[field] = other[field], one[field]

    return change


def _state(table: str, change: Callable[[Document], object]) -> Change:
    """Change the newest state of the table on both shards."""

    def of_newest(store: Damaged) -> None:
        for shard in SHARDS:
            listed = [
                one
                for commit in store.commits
                for tables in (commit.get("tables", {}), (commit.get("schema_changes") or {}).get("tables", {}))
                for one in tables.get(shard, ())
                if one["table"] == f"public.{table}"
            ]
            change(listed[-1])

    return of_newest


def _exchange_tables(field: str, first: str = "twin_a", second: str = "twin_b") -> Change:
    def change(store: Damaged) -> None:
        for shard in SHARDS:
            one, other = store.group(first, shard), store.group(second, shard)
            one[field], other[field] = other[field], one[field]

    return change


def _exchange_names(store: Damaged) -> None:
    """Exchange the names of two tables with the same columns, also in their states."""
    _exchange_tables("table")(store)
    for shard in SHARDS:
        states = {one["table"]: one for one in store.commits[0]["tables"][shard]}
        one, other = states["public.twin_a"], states["public.twin_b"]
        one["table"], other["table"] = other["table"], one["table"]


def _without(number: int, rows: Rows) -> None:
    rows[:] = [row for row in rows if row["group"] != number]


def _lose_table(store: Damaged) -> None:
    """Lose a table with its rows, its state and its changes."""
    commit = store.commits[0]
    for shard in SHARDS:
        group = store.group("typed", shard)
        commit["groups"][shard].remove(group)
        commit["tables"][shard] = [one for one in commit["tables"][shard] if one["table"] != "public.typed"]
        number = group["number"]
        store.edit_base(shard, partial(_without, number))
        store.edit_segment(shard, 1, lambda opened, number=number: _without(number, opened.changes))


def _definitions() -> Iterator[Kind]:
    described: Mapping[str, Change] = {
        "the names of two columns of one type are exchanged":
            _group("transfer", _exchange("name", "from_account", "to_account")),
        "the names of two columns are exchanged on one shard":
            _group("transfer", _exchange("name", "from_account", "to_account"), ("s1",)),
        "a column has another name": _group("typed", _column("note", lambda one: one.update(name="other"))),
        "a column has another type": _group("typed", _column("note", lambda one: one.update(type="bytea"))),
        "a column has the oid of another type": _group("typed", _column("big", lambda one: one.update(type_oid=701))),
        "a column has another limit": _group("typed", _column("label", lambda one: one.update(type_modifier=104))),
        "two columns have exchanged their places":
            _group("transfer", _exchange("position", "from_account", "to_account")),
        "two columns have exchanged their numbers":
            _group("transfer", _exchange("number", "from_account", "to_account")),
        "a table has another name": _group("twin_a", lambda group: group.update(table="other")),
        "a table is in another schema": _group("twin_a", lambda group: group.update(schema="other")),
        "a table's key is not its primary key": _group("twin_a", lambda group: group.update(identity="index")),
        "a table's key is its primary key": _group("byindex", lambda group: group.update(identity="default")),
        "a table is append-only": _group("journal", lambda group: group.update(identity="append_only")),
        "an append-only table is not": _group("log", lambda group: group.update(identity="full")),
    }  # fmt: skip
    described |= {
        "a column has a number that no column has": _group("typed", _column("note", lambda one: one.update(number=99))),
        "a table has had fewer columns than it has": _state("typed", lambda state: state.update(attributes=1)),
    }
    # A table that has another name has no state any more.
    refused = {"a table has another name", "a table is in another schema"}
    for fleet in CHAINS:
        for name, change in described.items():
            yield kind(DEFINITIONS, fleet, name, change,
                       found("commit") if name in refused else found("definition", "commit", "left-out"))  # fmt: skip
    by_rows: Mapping[str, tuple[Change, tuple[str, ...]]] = {
        "a key has a column more": (_group("transfer", lambda group: group.update(key_width=2)),
                                    ("rows", "definition")),
        "the columns of a key are exchanged":
            (_group("pairkey", lambda group: group["columns"].insert(0, group["columns"].pop(1))), ("rows",)),
        "a column less": (_group("twin_a", lambda group: group["columns"].pop()), ("rows", "definition")),
        "a column more": (_group("twin_a", lambda group: group["columns"].append(
            group["columns"][-1] | {"name": "more", "position": 2, "number": 3})), ("rows", "definition")),
        "the numbers of tables with other columns are exchanged":
            (_exchange_tables("number", "twin_a", "pairkey"), ("rows",)),
        "a table has more partitions": (_group("typed", lambda group: group.update(partitions=2)), ("partition",)),
    }  # fmt: skip
    for name, (change, kinds_found) in by_rows.items():
        yield kind(DEFINITIONS, SINGLE, name, change, found(*kinds_found))
    yield kind(DEFINITIONS, SINGLE, "a table is lost with its rows", _lose_table, found("definition", node="s1"))
    # The oids of the tables are not exchanged.
    yield kind(DEFINITIONS, SINGLE, "the names of two tables with the same columns are exchanged", _exchange_names,
               found("definition"))  # fmt: skip
    yield kind(DEFINITIONS, SINGLE, "the numbers of two tables with the same columns are exchanged",
               _exchange_tables("number"), Hidden("both tables have the same columns, and rows that fit"))  # fmt: skip
    contradictory: Mapping[str, Change] = {
        "a table is there twice": _of(0, lambda commit: commit["groups"]["s1"].append(commit["groups"]["s1"][0])),
        "two tables have one number":
            _of(0, lambda commit: commit["groups"]["s1"][1].update(number=commit["groups"]["s1"][0]["number"])),
        "a table has no key, but its identity has": _group("twin_a", lambda group: group.update(key_width=0)),
        "three partitions": _group("twin_a", lambda group: group.update(partitions=3)),
        "two columns have one name": _group("twin_a", lambda group: group["columns"][1].update(name="id")),
        "two columns have one place": _group("twin_a", lambda group: group["columns"][1].update(position=0)),
        "a shard has no tables": _of(0, lambda commit: commit["groups"].update(s1=[])),
        "the value of older rows is a line": _group("grown", _column("level", lambda one: one.update(missing="3\n9"))),
    }  # fmt: skip
    for name, change in contradictory.items():
        yield kind(DEFINITIONS, SINGLE, name, change, found("commit"))
    older: Mapping[str, tuple[str, tuple[str, ...], Expected]] = {
        "another value of older rows": ("4", SHARDS, doubted("older-value", reason=(
            "the default may have been another when the column was added"))),
        "another value of older rows on one shard": ("4", ("s1",), doubted("older-value", reason=DIFFER)),
        "a value of older rows that the type refuses": ("x", SHARDS, found("definition", "rows", "commit")),
        "NULL as the value of older rows where it is not allowed":
            (r"\N", SHARDS, found("definition", "rows", "commit")),
    }  # fmt: skip
    for name, (value, shards, expected) in older.items():
        change = _group("grown", _column("level", lambda one, value=value: one.update(missing=value)), shards)
        yield kind(DEFINITIONS, SINGLE, name, change, expected)


def _changes_of(store: Damaged, increment: int = 1) -> Document:
    changes: Document = store.commits[increment]["schema_changes"]
    return changes


def _begun(table: str, change: Callable[[Damaged, str], str]) -> Change:
    """Change the position from which the rows of the newest definition count."""

    def of_nodes(store: Damaged) -> None:
        for node, positions in _changes_of(store)["begun"].items():
            positions[str(store.group(table, store.shard_of(node))["number"])] = change(store, node)

    return of_nodes


def _after_first_change(table: str, increment: int) -> Callable[[Damaged, str], str]:
    def position(store: Damaged, node: str) -> str:
        row = store.table(table, node).find(store.open_segment(node, increment).changes)
        return str(Lsn(row["lsn"] + 1))

    return position


def _other_predecessor(store: Damaged) -> None:
    """Let a table continue the rows of another that was copied again."""
    for shard, successions in _changes_of(store)["successions"].items():
        for number in successions:
            successions[number] = store.group("again", shard, 0)["number"]


def _gone(table: str, *, is_gone: bool) -> Change:
    def change(store: Damaged) -> None:
        for shard, gone in _changes_of(store)["gone"].items():
            number = store.group(table, shard, 0)["number"]
            gone.append(number) if is_gone else gone.remove(number)

    return change


def _states(name: str, value: object) -> Change:
    return _of(0, lambda commit: commit["tables"]["s1"][0].update({name: value}))


def _roles(change: Callable[[list[str]], object]) -> Change:
    return lambda store: [change(roles) for roles in _changes_of(store, 2)["roles"].values()]


def _changes_of_definitions() -> Iterator[Kind]:
    yield kind(CHANGES, SINGLE, "a table does not continue its rows",
               lambda store: _changes_of(store).update(successions={}),
               found("commit", "definition", "history", "row-count"))  # fmt: skip
    yield kind(CHANGES, SINGLE, "a table continues the rows of another", _other_predecessor, found("commit"))
    yield kind(CHANGES, SINGLE, "a table continues, and the commit does not count it",
               lambda store: _changes_of(store)["successions"].pop("s1"), found("commit"), recounts=False)  # fmt: skip
    yield kind(CHANGES, SINGLE, "a continued table begins after its first change",
               _begun("grown", _after_first_change("grown", 1)), found("commit", "rows", "history"))  # fmt: skip
    yield kind(CHANGES, SINGLE, "a table that was copied again begins after a change",
               _begun("again", _after_first_change("again", 2)), found("commit", "rows", "history"))  # fmt: skip
    yield kind(CHANGES, SINGLE, "a new table begins earlier", _begun("coming", lambda _, __: "0/10"),
               Hidden("there is no change of the table before its copy", is_same=True))  # fmt: skip
    yield kind(CHANGES, SINGLE, "a node has no beginnings", lambda store: _changes_of(store)["begun"].pop("s1"),
               found("commit"))  # fmt: skip
    yield kind(CHANGES, SINGLE, "a table that exists is gone", _gone("twin_a", is_gone=True), found("definition"))
    yield kind(CHANGES, SINGLE, "a table that was dropped is not gone", _gone("leaving", is_gone=False),
               found("definition"))  # fmt: skip
    for name, field, value in (
        ("file", "file", 4),
        ("publication", "publication", "4.4"),
        ("number of attributes", "attributes", 99),
    ):  # fmt: skip
        yield kind(
            CHANGES,
            SINGLE,
            f"another {name} in the state of a table",
            _states(field, value),
            Hidden(NEXT_CREATE, is_same=True),
        )
    yield kind(CHANGES, SINGLE, "another oid in the state of a table", _states("oid", 4), found("definition"))
    yield kind(CHANGES, SINGLE, "another stamp of a column in the state of a table", _states("columns", "1.4"),
               found("definition"))  # fmt: skip
    yield kind(CHANGES, SINGLE, "another fingerprint",
               _of(2, lambda commit: commit["schema_changes"]["fingerprints"].update(s1="0" * 32)),
               Hidden(NEXT_CREATE, is_same=True))  # fmt: skip
    yield kind(CHANGES, SINGLE, "a role that the DDL names is lost", _roles(lambda roles: roles.remove(OWNER)),
               found("definition", "commit", "roles"))  # fmt: skip
    yield kind(CHANGES, SINGLE, "a role that has privileges in the DDL is lost",
               _roles(lambda roles: roles.remove(READER)), found("roles"))  # fmt: skip
    yield kind(CHANGES, SINGLE, "a role more", _roles(lambda roles: roles.append("nobody")),
               found("definition", "commit", "roles"))  # fmt: skip
    yield kind(CHANGES, SINGLE, "a shard has no DDL", lambda store: _changes_of(store, 2).update(objects=[
        one for one in _changes_of(store, 2)["objects"] if one["node"] != "s1"]), found("commit"))  # fmt: skip


def _nodes(change: Callable[[Document], object], shard: str = "s1") -> Change:
    """Change the identities of the shard's primary and standby."""
    return lambda store: [change(one) for one in store.commits[0]["baseline"]
                          if shard in (one["node"], one["backup_of"])]  # fmt: skip


def _database(change: Callable[[Document], object], shard: str = "s1") -> Change:
    return lambda store: change(store.last["databases"][shard])


def _property(change: Callable[[Document], object]) -> Change:
    return _database(lambda facts: change(facts["properties"]))


def _databases() -> Iterator[Kind]:
    by_ddl: Mapping[str, Change] = {
        "another encoding": _nodes(lambda one: one.update(encoding="LATIN1")),
        "another collation": _nodes(lambda one: one.update(collate="POSIX", ctype="POSIX")),
        "another name of the database": _nodes(lambda one: one.update(database="other")),
        "another oid of the database": _nodes(lambda one: one.update(database_oid=4)),
        "another version of the server": _nodes(lambda one: one.update(server_version=150001)),
        "an extension that the DDL does not create":
            _database(lambda facts: facts.setdefault("extensions", {}).update(hstore="1.8")),
        "a collation that the DDL does not create": _database(lambda facts: facts.setdefault("collations", []).append(
            {"schema": "public", "name": "nothing", "provider": "c", "locales": ["C"], "is_own": True})),
        "a collation of the server that no server has":
            _database(lambda facts: facts.setdefault("collations", []).append(
                {"schema": "public", "name": "nothing", "provider": "c", "locales": ["C"]})),
        "a column is compressed that does not exist":
            _database(lambda facts: facts.update(lz4_columns=["public.account.nothing"])),
        "an owner that is no role": _property(lambda one: one.update(owner="nobody")),
        "a setting that no server has":
            _property(lambda one: one.setdefault("settings", []).append({"name": "nothing_of_the_kind", "value": "1"})),
        "a privilege of nobody": _property(lambda one: one["privileges"][0].update(grantee="nobody")),
    }  # fmt: skip
    for name, change in by_ddl.items():
        yield kind(DATABASES, SINGLE, name, change, found("definition", "commit", "roles"))
    alterable: Mapping[str, Change] = {
        "another owner": _property(lambda one: one.update(owner=READER)),
        "another comment of the database": _property(lambda one: one.update(comment="other")),
        "another setting": _property(lambda one: one["settings"][0].update(value="9MB")),
        "a setting is lost": _property(lambda one: one.pop("settings")),
        "another limit on connections": _property(lambda one: one.update(connection_limit=7)),
        "a template": _property(lambda one: one.update(is_template=True)),
        "the privileges are lost": _property(lambda one: one.pop("privileges")),
    }
    for name, change in alterable.items():
        yield kind(DATABASES, SINGLE, name, change, found("definition"))
    yield kind(DATABASES, SINGLE, "another server", _nodes(lambda one: one.update(system_identifier="1")),
               found("primaries"))  # fmt: skip
    yield kind(DATABASES, SINGLE, "another timeline", _nodes(lambda one: one.update(timeline=9)),
               Hidden(NEXT_CREATE, is_same=True))  # fmt: skip
    yield kind(DATABASES, SINGLE, "another size of the database", _database(lambda facts: facts.update(size_bytes=1)),
               Hidden(DESCRIBES, is_same=True))  # fmt: skip
    contradictory: Mapping[str, Change] = {
        "a standby has another encoding":
            _of(0, lambda commit: commit["baseline"][-1].update(encoding="LATIN1")),
        "a standby is of another primary": _of(0, lambda commit: commit["baseline"][-1].update(backup_of="s1")),
        "a standby is a primary":
            _of(0, lambda commit: commit["baseline"][-1].update(backup_of=None, in_recovery=False)),
        "a node is lost": _of(0, lambda commit: commit["baseline"].pop()),
        "a node is there twice": _of(0, lambda commit: commit["baseline"].append(commit["baseline"][0])),
        "an unknown encoding": _nodes(lambda one: one.update(encoding="EBCDIC")),
    }  # fmt: skip
    for name, change in contradictory.items():
        yield kind(DATABASES, PAIRS, name, change, found("commit"))


def _entry(of_kind: str, change: Callable[[Document], object], increment: int = 0) -> Change:
    return lambda store: change(store.entry(of_kind, "s1", increment))


def _lose_entry(of_kind: str, increment: int) -> Change:
    """Lose the entries of s1's objects of a kind, or the list of them."""

    def change(store: Damaged) -> None:
        commit = store.commits[increment]
        for part in (commit, commit.get("schema_changes") or {}):
            for name in ("objects", "lists"):
                if name in part:
                    part[name] = [one for one in part[name] if (one["kind"], one["node"]) != (of_kind, "s1")]

    return change


def _stale_ddl(shards: tuple[str, ...]) -> Change:
    """Put the contents of the DDL of increment 1 into that of increment 2."""

    def change(store: Damaged) -> None:
        for shard in shards:
            body = store.read(store.entry("archive", shard, 1)["key"])
            store.put_object(store.entry("archive", shard, 2), body)

    return change


def _exchange_bases(store: Damaged) -> None:
    """Exchange the rows of two shards, in every copy."""
    for node in [one["node"] for one in store.commits[0]["baseline"] if store.shard_of(one["node"]) == "s1"]:
        first, second = store.entry("base", node, 0), store.entry("base", node.replace("s1", "s2"), 0)
        rows = store.rows_of(first), store.rows_of(second)
        store.put_base(first, rows[1])
        store.put_base(second, rows[0])


def _in_entry_of_list(change: Callable[[Document], object]) -> Change:
    return lambda store: change(store.list_of("base", "s1"))


def _in_list(change: Callable[[Document], object]) -> Change:
    return lambda store: change(store.lists[store.list_of("base", "s1")["key"]])


def _objects() -> Iterator[Kind]:
    damaged: Mapping[str, tuple[Change, tuple[str, ...]]] = {
        "another size": (_entry("base", lambda one: one.update(size=one["size"] + 1)), ("size",)),
        "another digest": (_entry("base", lambda one: one.update(digest="0" * 64)), ("digest",)),
        "a row more": (_entry("base", lambda one: one["rows"].update(
            {next(iter(one["rows"])): next(iter(one["rows"].values())) + 1})), ("rows",)),
    }  # fmt: skip
    for name, (change, kinds_found) in damaged.items():
        for fleet in CHAINS:
            yield kind(OBJECTS, fleet, f"an entry of a base copy has {name}", change, found(*kinds_found, node="s1"))
    contradictory: Mapping[str, Change] = {
        "another node": _entry("base", lambda one: one.update(node="s2")),
        "an unknown node": _entry("base", lambda one: one.update(node="s9")),
        "another kind": _entry("base", lambda one: one.update(kind="large_objects")),
        "an unknown kind": _entry("base", lambda one: one.update(kind="other")),
        "another key": _entry("base", lambda one: one.update(key=one["key"].replace("/s1/", "/s2/"))),
        "rows of an unknown table": _entry("base", lambda one: one["rows"].update({"4000": 1})),
        "a copy": lambda store: store.commits[0]["objects"].append(store.entry("base", "s1", 0)),
    }
    for name, change in contradictory.items():
        yield kind(OBJECTS, PAIRS, f"an entry of a base copy has {name}", change, found("commit"))
    of_list: Mapping[str, Callable[[Document], object]] = {
        "another size": lambda entry: entry.update(size=entry["size"] + 1),
        "another digest": lambda entry: entry.update(digest="0" * 64),
        "an object more": lambda entry: entry.update(objects=entry["objects"] + 1),
        "a byte more": lambda entry: entry.update(bytes=entry["bytes"] + 1),
        "another node": lambda entry: entry.update(node="s2"),
    }
    for name, change_entry in of_list.items():
        of_kind = {"another size": "size", "another digest": "digest"}.get(name, "commit")
        yield kind(OBJECTS, SINGLE, f"an entry of a list has {name}", _in_entry_of_list(change_entry), found(of_kind))
    of_document: Mapping[str, Callable[[Document], object]] = {
        "is of another snapshot": lambda document: document.update(snapshot="other"),
        "is of another operation": lambda document: document.update(operation=OTHER_OPERATION),
        "has an object twice": lambda document: document["objects"].append(document["objects"][0]),
    }
    for name, change_list in of_document.items():
        yield kind(OBJECTS, SINGLE, f"a list {name}", _in_list(change_list), found("commit"))
    lost: Mapping[str, tuple[str, int, tuple[str, ...]]] = {
        # Some rows are needed by updates that left values out.
        "the base copy is lost": ("base", 0, ("history", "row-count")),
        "the base copy of an increment is lost": ("base", 1, ("commit",)),
        "the large objects are lost": ("large_objects", 0, ("left-out", "commit")),
        "the globals are lost": ("globals", 0, ("roles", "commit", "definition")),
        "the DDL is lost": ("archive", 0, ("commit", "definition")),
        "the DDL of an increment is lost": ("archive", 2, ("commit",)),
    }
    for name, (of_kind, increment, kinds_found) in lost.items():
        for fleet in CHAINS:
            yield kind(OBJECTS, fleet, name, _lose_entry(of_kind, increment), found(*kinds_found))
    for name, shards in (("the DDL is the one before", SHARDS), ("the DDL of one shard is the one before", ("s1",))):
        for fleet in CHAINS:
            yield kind(OBJECTS, fleet, name, _stale_ddl(shards), found("definition", "commit"))
    for fleet in CHAINS:
        yield kind(OBJECTS, fleet, "the rows of two shards are exchanged", _exchange_bases,
                   Hidden("all tables of both shards have the same columns, and rows that fit"))  # fmt: skip


def _count_more(name: str, commit: Document) -> None:
    commit["counts"][name] += 1


def _fields() -> Iterator[Kind]:
    refused: Mapping[str, Change] = {
        "another snapshot": _of(2, lambda commit: commit.update(snapshot="other")),
        "another increment": _of(2, lambda commit: commit.update(increment=7)),
        "another chain": _of(2, lambda commit: commit.update(chain=OTHER_OPERATION)),
        "a field more": _of(2, lambda commit: commit.update(more=1)),
        "a field less": _of(2, lambda commit: commit.pop("comment")),
        "a value of another type": _of(2, lambda commit: commit.update(comment=7)),
        "a newer format": _of(2, lambda commit: commit.update(schema="cutline/increment/3")),
        "a negative count": _of(2, lambda commit: commit["counts"].update(ignored=-1)),
        "rows in a restore point": _of(0, lambda commit: commit.update(only_cut=True)),
        "an unknown shard": _of(2, lambda commit: commit["segments"].update(s9=[])),
    }
    for name, change in refused.items():
        for fleet in CHAINS:
            yield kind(FIELDS, fleet, name, change, found("commit"))
    for name in ("rows", "changes", "transactions", "objects", "bytes", "groups", "continued"):
        yield kind(FIELDS, SINGLE, f"another count of {name}", _of(1, partial(_count_more, name)), found("commit"),
                   recounts=False)  # fmt: skip
    yield kind(FIELDS, SINGLE, "another count of ignored changes",
               _of(2, lambda commit: commit["counts"].update(ignored=7)), Hidden(DESCRIBES, is_same=True))  # fmt: skip
    yield kind(FIELDS, SINGLE, "another operation", _of(2, lambda commit: commit.update(operation=OTHER_OPERATION)),
               found("commit", "operation"))  # fmt: skip
    yield kind(FIELDS, SINGLE, "another fleet", _of(0, lambda commit: commit.update(fleet="0badf00d")), found("fleet"))
    yield kind(FIELDS, SINGLE, "another comment", _of(2, lambda commit: commit.update(comment="other")),
               Hidden(DESCRIBES, is_same=True))  # fmt: skip
    yield kind(FIELDS, SINGLE, "a fleet that was left read-only", _of(3, lambda commit: commit.update(terminal=True)),
               Hidden(DESCRIBES, is_same=True))  # fmt: skip
    yield kind(FIELDS, SINGLE, "another form of global ids", _of(0, lambda commit: commit.update(global_id="xa")),
               Hidden("only the next create derives global ids", is_same=True))  # fmt: skip
    by_groups: Mapping[str, Change] = {
        "rules that don't include a table": _of(0, lambda commit: commit["rules"].update(include=["public.account"])),
        "rules that exclude a table": _of(0, lambda commit: commit["rules"].update(exclude=["public.account"])),
        "rules by which no table is append-only": _of(0, lambda commit: commit["rules"].update(append_only=[])),
        "a table is left out that is there": _of(3, lambda commit: commit["left_out"].append(
            {"node": "s1", "kind": "excluded_table", "name": "public.account", "why": "", "count": 1})),
        "an append-only table is not named": _of(3, lambda commit: commit.update(left_out=[
            one for one in commit["left_out"] if one["kind"] != "append_only_table"])),
        "the large objects of the full snapshot are not named": _of(3, lambda commit: commit.update(left_out=[
            one for one in commit["left_out"] if one["kind"] != "large_objects_of_full"])),
    }  # fmt: skip
    for name, change in by_groups.items():
        yield kind(FIELDS, SINGLE, name, change, found("commit", "definition", "rules", "left-out"))

    def without_unlogged(store: Damaged) -> None:
        for commit in store.commits:
            commit["left_out"] = [one for one in commit["left_out"] if one["kind"] != "unlogged_table"]

    yield kind(FIELDS, SINGLE, "an unlogged table is not named", without_unlogged,
               doubted("left-out", reason=LOGGED_BETWEEN, is_same=True))  # fmt: skip
    yield from _links()


def _links() -> Iterator[Kind]:
    """Links between commits, which nothing recomputes."""

    def unlinked(increment: int, change: Callable[[Document], object]) -> Callable[[Damaged], None]:
        return lambda store: store.change_document(commit_of(store, increment), change)

    by_name: Mapping[str, Callable[[Document], object]] = {
        "another previous commit": lambda commit: commit["previous"].update(digest="0" * 64),
        "another previous operation": lambda commit: commit["previous"].update(operation=OTHER_OPERATION),
        "a history of another full snapshot": lambda commit: commit["history"].update(full="0" * 64),
        "another digest in the history": lambda commit: commit["history"]["recent"][0].update(digest="0" * 64),
        "another count in the history":
            lambda commit: commit["history"]["recent"][0].update(changes=commit["history"]["recent"][0]["changes"] + 1),
        "an increment less in the history": lambda commit: commit["history"]["recent"].pop(0),
        "no change of definitions in the history": lambda commit: commit["history"].update(redefinitions={}),
    }  # fmt: skip
    for name, change in by_name.items():
        yield Kind(name, FIELDS, SINGLE, unlinked(3, change), found("commit"))
    yield Kind("a commit in the middle is another, and the next does not name it", FIELDS, SINGLE,
               unlinked(1, lambda commit: commit.update(comment="other")), found("commit"))  # fmt: skip

    def void(store: Damaged) -> None:
        store.damage(commit_of(store, 3), lambda _: seal(
            {"schema": "cutline/void/1", "snapshot": store.name, "increment": 3, "voids": store.last["operation"]}
        ))  # fmt: skip

    yield Kind("the newest commit is voided", FIELDS, SINGLE, void, found("missing", "commit"))
