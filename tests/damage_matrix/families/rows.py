"""Sealed damage of rows in base copies: values, fields, keys, rows, tables.

Of two copies, one that differs is found by the comparison. If both have the same change, or there is one copy, only
what a row contradicts by itself shows it: the form of its line, its key, its partition, its types, and the constraints
in the DDL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from tests.damage_matrix.damaged import Damaged, Row, Rows, TableForm
from tests.damage_matrix.kinds import (
    DAMAGED,
    PAIRS,
    SINGLE,
    Drilled,
    Expected,
    FleetName,
    Hidden,
    Kind,
    Restorable,
    found,
)

VALUES, TYPES, CONSTRAINTS, LINES, WHOLE = (
    "rows: other values",
    "rows: values that types refuse",
    "rows: values that constraints refuse",
    "rows: lines, keys and partitions",
    "rows: lost and additional",
)
Edit = Callable[[TableForm, Rows], object]
ALL_COPIES = "every copy has the same value, and nothing else in the store contains the original"
# Why a check of everything does not find what --restorable finds.
OF_EXPRESSION = (
    "an expression has to be evaluated over the fields of all rows; a check looks only at the form of each value"
)
TOGETHER = (
    "rows that are far apart have to be compared, so that the values of all rows are shuffled; a check shuffles no base"
    " rows, and its tasks see one object at a time"
)
OF_FUNCTION = "only a server has the functions and operators that the constraint calls"
BOUNDS = "the bound is in the DDL alone, and a check reads no values but those of some types"
NOT_OF_STATE = (
    "an increment has replaced the row, so neither of the two belongs to the state; `check --restorable --increment N`"
    " with an earlier increment finds it"
)
ALL_ROWS = "every copy has the same rows, and nothing else in the store contains the originals"


@dataclass(frozen=True, slots=True)
class Place:
    """The copies that get the same change: their name in the names of kinds, and their nodes."""

    name: str
    fleet: FleetName
    nodes: tuple[str, ...]

    @property
    def is_one_of_two(self) -> bool:
        """Whether another copy of the shard stays as it was."""
        return self.fleet == PAIRS and len(self.nodes) == 1


PRIMARY = Place("the primary's copy", PAIRS, ("s1",))
STANDBY = Place("the standby's copy", PAIRS, ("s1-b1",))
BOTH = Place("both copies", PAIRS, ("s1", "s1-b1"))
ONLY = Place("the only copy", SINGLE, ("s1",))
PLACES = (PRIMARY, STANDBY, BOTH, ONLY)

# For each column of table `typed`: a value that its type accepts, and one that it refuses.
TYPED: Mapping[str, tuple[bytes, bytes]] = {
    "flag": (b"f", b"yes"),
    "small": (b"8", b"40000"),
    "big": (b"71", b"9223372036854775808"),
    "amount": (b"2.50", b"12x"),
    "ratio": (b"0.75", b"1.5.2"),
    "code": (b"abd", b"abcd"),
    "label": (b"other", b"longer than 8"),
    "note": (b"another note", b"not UTF-8: \xff"),
    "day": (b"2026-01-03", b"2026-13-45"),
    "at": (b"2026-01-02 03:04:06", b"2026-01-02 25:00:00"),
    "at_tz": (b"2026-01-02 03:04:06+00", b"someday"),
    "tag": (b"00000000-0000-0000-0000-000000000002", b"00000000-0000-0000-0000-00000000000g"),
    "mood": (b"happy", b"angry"),
    "info": (b'{"a": 2}', b'{"a": '),
    "raw": (rb"\\x0103", rb"\\x010"),
    "list": (b"{1,3}", b"{1,3"),
    "net": (b"10.0.0.2", b"10.0.0.300"),
    "span": (b"2 days", b"2 fortnits"),
    "comp": (b"(2,one)", b"(2"),
}
# Other values of tables that are stored in other ways.
ELSEWHERE: Mapping[str, tuple[str, bytes, bytes]] = {
    "with a composite key": ("pairkey", rb"1" + b"\t" + rb"tab\there 1", b"v"),
    "without a key": ("journal", b"", b"what"),
    "that is append-only": ("log", b"", b"what"),
    "with a unique index as its key": ("byindex", b"1", b"v"),
    "that is a partition": ("parted_low", b"1", b"v"),
}


def kinds() -> Iterator[Kind]:
    """Yield the kinds of these families."""
    yield from _values()
    yield from _refused_values()
    yield from _lines()
    yield from _whole_rows()
    yield from _later_copies()


def kind(family: str, name: str, place: Place, table: str, edit: Edit, expected: Expected, increment: int = 0) -> Kind:
    """Return the kind that edits the rows of the place's copies."""

    def damage(store: Damaged) -> None:
        for node in place.nodes:
            store.edit_base(node, partial(edit, store.table(table, node, increment)), increment, table)
        store.seal()

    return Kind(f"{name} ({place.name})", family, place.fleet, damage, expected)


def by_copies(place: Place, table: str, *kinds_found: str, hidden: str, is_same: bool = False) -> Expected:
    """A change of one of two copies is found by comparing them; other changes are hidden, for this reason."""
    if place.is_one_of_two:
        return found(*kinds_found, node=place.nodes[0], group=f"public.{table}")
    return Hidden(hidden, is_same)


def set_value(column: str, value: bytes, key: bytes = b"1") -> Edit:
    return lambda form, rows: form.set(form.find(rows, key), column, value)


def _values() -> Iterator[Kind]:
    for column, (value, _) in TYPED.items():
        for place in PLACES:
            # Each type is compared in the same way, so that one of the copies is enough for most.
            if place in (STANDBY, BOTH) and column not in ("small", "mood", "info"):
                continue
            expected = by_copies(place, "typed", "row-hash", hidden=ALL_COPIES)
            yield kind(VALUES, f"a value of column {column}", place, "typed", set_value(column, value), expected)
    for name, (table, key, column) in ELSEWHERE.items():
        edit = _append(column.decode(), key)
        for place in (PRIMARY, ONLY):
            yield kind(VALUES, f"a value of a table {name}", place, table, edit,
                       by_copies(place, table, "row-hash", hidden=ALL_COPIES))  # fmt: skip
    for place in PLACES:
        yield kind(VALUES, "a value becomes NULL", place, "typed", set_value("note", rb"\N"),
                   by_copies(place, "typed", "row-hash", hidden=ALL_COPIES))  # fmt: skip
        yield kind(VALUES, "the values of two rows are exchanged", place, "twin_b", _exchange_values,
                   by_copies(place, "twin_b", "row-hash", hidden=ALL_COPIES))  # fmt: skip
        yield kind(VALUES, "a TOASTed value that later updates leave out", place, "wide", set_value("a", b"short"),
                   by_copies(place, "wide", "row-hash", hidden=ALL_COPIES))  # fmt: skip
        yield kind(VALUES, "the key of a row", place, "twin_a", set_value("id", b"99", b"3"),
                   by_copies(place, "twin_a", "row-hash", hidden=ALL_COPIES))  # fmt: skip
    replaced = "the newest state does not contain the value; a check of the increment that does compares it"
    for place in PLACES:
        edit = set_value("balance", b"77", b"1")
        yield kind(VALUES, "a value that a later update replaces", place, "account", edit,
                   Hidden(replaced, is_same=True))  # fmt: skip
        earlier = kind(VALUES, "a value that a later update replaces, checked at increment 0", place, "account", edit,
                       by_copies(place, "account", "row-hash", hidden=ALL_COPIES))  # fmt: skip
        yield Kind(earlier.name, VALUES, place.fleet, earlier.damage, earlier.expected, increment=0)


def _append(column: str, key: bytes) -> Edit:
    def edit(form: TableForm, rows: Rows) -> None:
        row = form.find(rows, key or None)
        form.set(row, column, form.value(row, column) + b"1")

    return edit


def _exchange_values(form: TableForm, rows: Rows) -> None:
    first, second = form.find(rows, b"1"), form.find(rows, b"3")
    value = form.value(first, "v")
    form.set(first, "v", form.value(second, "v"))
    form.set(second, "v", value)


def _refused_values() -> Iterator[Kind]:
    for column, (_, value) in TYPED.items():
        for place in (BOTH, ONLY):
            yield kind(TYPES, f"a value that the type of column {column} refuses", place, "typed",
                       set_value(column, value), found("rows", node="s1", object=DAMAGED))  # fmt: skip
    others: Mapping[str, tuple[str, bytes]] = {
        "a field more than the composite type of a column has": ("comp", b"(2,one,)"),
        "a field less than the composite type of a column has": ("comp", b"(2)"),
        "a field of a composite value that its type refuses": ("comp", b"(x,one)"),
        "a value that the type of a domain refuses": ("dom", b"x"),
        "an array of arrays that have different lengths": ("list", b"{{1},{2,3}}"),
        "a number too large for the elements of an array": ("list", b"{3000000000}"),
        "a year after the last one": ("at_tz", b"299999-01-01 00:00:00+00"),
        "a number too large for its float": ("ratio", b"1e+400"),
    }
    for name, (column, value) in others.items():
        for place in (BOTH, ONLY):
            yield kind(TYPES, name, place, "typed", set_value(column, value),
                       found("rows", node="s1", object=DAMAGED))  # fmt: skip
    yield kind(TYPES, "a value that the type of column small refuses", PRIMARY, "typed", set_value("small", b"x"),
               found("rows", node="s1", object=DAMAGED))  # fmt: skip
    yield kind(TYPES, "a value that the type of column small refuses", STANDBY, "typed", set_value("small", b"x"),
               found("rows", node="s1-b1", object=DAMAGED))  # fmt: skip
    constraints: Mapping[str, tuple[str, Edit]] = {
        "NULL where it is not allowed": ("typed", set_value("needed", rb"\N")),
        "NULL in a key": ("twin_a", set_value("id", rb"\N", b"3")),
        "more digits than numeric(6,2) has": ("typed", set_value("amount", b"123456.00")),
    }
    for name, (table, edit) in constraints.items():
        for place in (BOTH, ONLY):
            yield kind(CONSTRAINTS, name, place, table, edit,
                       found("rows", "constraint", node="s1", group=f"public.{table}"))  # fmt: skip
    built: Mapping[str, tuple[str, Edit, str, str]] = {
        "a value that a domain refuses": ("typed", set_value("dom", b"-5"), "typed", OF_EXPRESSION),
        "a value that a CHECK constraint refuses": (
            "account", set_value("balance", b"-1", b"5"), "account", OF_EXPRESSION,
        ),
        "a value twice in a unique column": ("account", set_value("owner", b"owner 6", b"5"), "account", TOGETHER),
        "a reference to a row that does not exist": (
            "transfer", set_value("to_account", b"999", b"2"), "transfer", TOGETHER,
        ),
        "the referenced row is lost": (
            "account", lambda form, rows: rows.remove(form.find(rows, b"6")), "transfer", TOGETHER,
        ),
        "a row in the wrong partition of its table": (
            "parted_low", set_value("id", b"15", b"2"), "parted_low", BOUNDS,
        ),
    }  # fmt: skip
    for name, (table, edit, named, reason) in built.items():
        for place in (BOTH, ONLY):
            yield kind(CONSTRAINTS, name, place, table, edit, Restorable(reason, "s1", f"public.{named}"))
    for place in (BOTH, ONLY):
        yield kind(CONSTRAINTS, "a value that a pattern in a CHECK constraint refuses", place, "typed",
                   set_value("code", b"1bc"), Drilled(OF_FUNCTION))  # fmt: skip


def _set(**columns: object) -> Callable[[Row], object]:
    return lambda row: row.update(columns)


def _line(change: Callable[[bytes], bytes]) -> Callable[[Row], object]:
    return lambda row: row.update(row=change(row["row"]))


# What is done to the row with key 3 of table `twin_a`, whose line is "3\ta3\n".
OF_LINE: Mapping[str, Callable[[Row], object]] = {
    "a field less": _line(lambda line: b"3\n"),
    "a field more": _line(lambda line: b"3\ta3\tmore\n"),
    "no field": _set(row=b"\n"),
    "no line": _set(row=b""),
    "no newline": _line(lambda line: line[:-1]),
    "two newlines": _line(lambda line: line + b"\n"),
    "two lines": _line(lambda line: line + b"33\ta33\n"),
    "a carriage return": _line(lambda line: b"3\ta\r3\n"),
    "a NUL": _line(lambda line: b"3\ta\x003\n"),
    "an escape that COPY does not print": _line(lambda line: b"3\ta\\q3\n"),
    "an octal escape": _line(lambda line: b"3\ta\\063\n"),
    "a backslash at the end": _line(lambda line: b"3\ta3\\\n"),
    "the mark of an unchanged value": _line(lambda line: b"3\t\\u\n"),
    "the mark of the end of a COPY": _set(row=b"\\.\n", key=b"\\."),
    "a key other than the line's": _set(key=b"4000"),
    "an empty key": _set(key=b""),
    "a line other than the key's": _line(lambda line: b"4000\ta3\n"),
    "the whole line as the key": _set(key=b"3\ta3"),
}


def _lines() -> Iterator[Kind]:
    for name, change in OF_LINE.items():
        # A copy that contradicts itself is damage, whether or not there is another that does not.
        for place in (PRIMARY, BOTH, ONLY) if name == "a field less" else (BOTH, ONLY):
            yield kind(LINES, name, place, "twin_a", _change_row(change),
                       found("rows", node="s1", object=DAMAGED))  # fmt: skip
    others: Mapping[str, tuple[str, Edit, str]] = {
        "the wrong partition": ("twin_a", _change_row(_set(partition=1)), "partition"),
        "a negative partition": ("twin_a", _change_row(_set(partition=-1)), "partition"),
        "a group that no commit defines": ("twin_a", _change_row(_set(group=4000)), "commit"),
        "a key in a table without a key": ("journal", lambda form, rows: form.find(rows).update(key=b"1"), "rows"),
        "the group of another table": ("typed", _into_twin_a, "rows"),
    }
    for name, (table, edit, of_kind) in others.items():
        for place in (BOTH, ONLY):
            # A commit that lists rows of an unknown group is refused before anything is read.
            expected = found("commit") if of_kind == "commit" else found(of_kind, node="s1", object=DAMAGED)
            yield kind(LINES, name, place, table, edit, expected)
    for place in PLACES:
        yield kind(LINES, "the rows in another order", place, "twin_a", lambda form, rows: rows.reverse(),
                   Hidden("a table is a set of rows", is_same=True))  # fmt: skip


def _change_row(change: Callable[[Row], object], key: bytes = b"3") -> Edit:
    return lambda form, rows: change(form.find(rows, key))


def _into_twin_a(form: TableForm, rows: Rows) -> None:
    # The first table of two columns: its rows have another number of fields.
    form.find(rows).update(group=min(row["group"] for row in rows if row["row"].count(b"\t") == 1))


def _whole_rows() -> Iterator[Kind]:
    lost: Mapping[str, tuple[str, Edit]] = {
        "a row is lost": ("twin_a", lambda form, rows: rows.remove(form.find(rows, b"3"))),
        "a row of a table without a key is lost": ("journal", lambda form, rows: rows.remove(form.find(rows))),
        "a row of an append-only table is lost": ("log", lambda form, rows: rows.remove(form.find(rows))),
        "all rows of a table are lost": ("typed", _without_table),
        "an additional row": ("twin_a", _additional),
        "a row of a table without a key is doubled": ("journal", _double),
    }
    for name, (table, edit) in lost.items():
        for place in PLACES:
            yield kind(WHOLE, name, place, table, edit, by_copies(place, table, "row-count", hidden=ALL_ROWS))
    for place in (PRIMARY, BOTH, ONLY):
        yield kind(WHOLE, "a row is doubled", place, "twin_a", _double, found("duplicate", node="s1", object=DAMAGED))
        yield kind(WHOLE, "two rows with the same key and different values", place, "twin_a", _same_key,
                   found("duplicate", node="s1", object=DAMAGED))  # fmt: skip
    for place in (BOTH, ONLY):
        yield kind(WHOLE, "the base row of a value that an update left out is lost", place, "wide",
                   lambda form, rows: rows.remove(form.find(rows, b"2")),
                   found("history", node="s1", group="public.wide"))  # fmt: skip
        # Only a row that is there can be deleted.
        yield kind(WHOLE, "the base row of a row that is deleted later is lost", place, "account",
                   lambda form, rows: rows.remove(form.find(rows, b"12")),
                   found("history", node="s1", group="public.account"))  # fmt: skip
    yield from (_in_two_objects(place) for place in (PRIMARY, BOTH, ONLY))
    yield Kind("a row that an increment replaces is in two objects", WHOLE, SINGLE, _twice(ONLY, "twin_b", b"2"),
               Hidden(NOT_OF_STATE, is_same=True))  # fmt: skip


def _without_table(form: TableForm, rows: Rows) -> None:
    rows[:] = [row for row in rows if row["group"] != form.number]


def _additional(form: TableForm, rows: Rows) -> None:
    row = dict(form.find(rows))
    form.fill(row, [b"9", b"added"])
    rows.append(row)


def _double(form: TableForm, rows: Rows) -> None:
    rows.append(dict(form.find(rows, b"3" if form.key_width else None)))


def _same_key(form: TableForm, rows: Rows) -> None:
    row = dict(form.find(rows, b"3"))
    form.fill(row, [b"3", b"another"])
    rows.append(row)


def _twice(place: Place, table: str, key: bytes) -> Callable[[Damaged], None]:
    """Return what adds an object to the base copy that has a row which another object has, too."""

    def damage(store: Damaged) -> None:
        for node in place.nodes:
            form, entry = store.table(table, node, 0), store.entry("base", node, 0)
            row = form.find(store.rows_of(entry), key)
            further = dict(entry, key=entry["key"].replace("part-", "part-9"))
            _listing(store, node).append(further)
            store.put_base(further, [row])
        store.seal()

    return damage


def _in_two_objects(place: Place) -> Kind:
    expected: Expected = found("duplicate", "row-count", node="s1", group="public.twin_a")
    if not place.is_one_of_two:
        expected = Restorable(TOGETHER, "s1", "public.twin_a")
    damage = _twice(place, "twin_a", b"3")
    return Kind(f"a row is in two objects ({place.name})", WHOLE, place.fleet, damage, expected)


def _listing(store: Damaged, node: str) -> list[dict[str, object]]:
    """The list that contains the entries of the node's base copy."""
    for entry in store.object_lists(0):
        if (entry["kind"], entry["node"]) == ("base", node):
            found_list: list[dict[str, object]] = store.lists[entry["key"]]["objects"]
            return found_list
    own: list[dict[str, object]] = store.commits[0]["objects"]
    return own


def _later_copies() -> Iterator[Kind]:
    """Tables that an increment copied again, or that are new in it."""
    for place in (PRIMARY, BOTH, ONLY):
        yield kind(VALUES, "a value of a table that an increment copied again", place, "again",
                   set_value("v", b"30", b"3"),
                   by_copies(place, "again", "row-hash", hidden=ALL_COPIES), 1)  # fmt: skip
        # The commit counts the rows of new copies, so that it contradicts its own list of objects.
        for table, what in (("coming", "is new in an increment"), ("again", "an increment copied again")):
            yield kind(WHOLE, f"a row of a table that {what} is lost", place, table,
                       lambda form, rows: rows.remove(form.find(rows, b"3")), found("commit"), 1)  # fmt: skip
