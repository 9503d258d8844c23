"""The findings and the result of a check of running databases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from msgspec import Struct, field
from msgspec.structs import asdict

from cutline.check.report import EXIT_CODES, Skipped
from cutline.fleet.record import to_builtins
from cutline.nodes.baseline import NodeIdentity
from cutline.nodes.groups import Group
from cutline.snapshots.records.operation_records import CONFLICTS, INCONCLUSIVE, ONE_COPY, VALID, CheckResult
from cutline.storage.errors import UnreachableError

SCHEMA = "cutline/check-live/1"
# The kinds of conflicts. STANDBY_ROWS: a standby has other rows than its primary. UNREADABLE: a server can't read pages
# of a table. CUT_ROWS: rows that have not been written since the cut differ from the snapshot. APPEND_ONLY: rows of an
# append-only table have gone. INDEX: an index does not fit its table.
STANDBY_ROWS, UNREADABLE, CUT_ROWS, APPEND_ONLY, INDEX = (
    "standby-rows",
    "unreadable",
    "cut-rows",
    "append-only",
    "index",
)


class LiveCopy(Struct, frozen=True):
    """A row in a copy: its `line`, which ends with … if it is longer; None if the copy lacks the row.

    `of` is a node, or the snapshot that the row was compared with. `note` says how often the line occurs if a table has
    no key, or, without a line, why the row can't be shown.
    """

    of: str
    line: str | None
    note: str = ""

    @property
    def text(self) -> str:
        """The copy's state for people to read."""
        if self.line is None:
            return self.note or "no such row"
        return f"{self.line}  ({self.note})" if self.note else self.line


class LiveRow(Struct, frozen=True):
    """A row that copies have differently. `place` is its ctid, if known; `key` is "" in a table without a key."""

    key: str
    place: str
    copies: tuple[LiveCopy, ...]


class LiveConflict(Struct, frozen=True):
    """Something that is wrong in a running database, or in the snapshot that it was compared with.

    `pages` are the first of the pages of `group` that are affected. `index` is the index's name, quoted for SQL.
    """

    kind: str
    detail: str
    node: str
    other_node: str | None = None
    group: str | None = None
    index: str | None = None
    pages: tuple[int, ...] = ()
    rows: tuple[LiveRow, ...] = ()

    @property
    def nodes(self) -> str:
        """The names of the nodes that are affected."""
        return " and ".join(node for node in (self.node, self.other_node) if node)

    def to_json(self) -> dict[str, Any]:
        """Return the conflict for the JSON document."""
        document: dict[str, Any] = to_builtins(self)
        return document


class LiveVersion(Struct, frozen=True):
    """A row version of a database: its place (ctid), its xmin, and its line in the database's encoding.

    `file` is the table's file (filenode) that contains the place; None if it is not known.
    """

    place: str
    xmin: int
    file: int | None
    line: bytes


class RowRepair(Struct, frozen=True):
    """Rows with one key (without a key: equal lines) that the database of `node` and the cut have differently.

    The cut has `left` rows that the database lacks, all with the line `stored`; None if there are none, or if the line
    is not known, for the reason `why`. The database has `more` rows that the cut lacks; those whose place is known are
    in `versions`. `fixed` are the names of the columns that are GENERATED ALWAYS AS IDENTITY. `unproven` is the reason
    why it is not known whether these rows were written since the cut; "" if it is known.
    """

    node: str
    group: Group
    left: int
    more: int
    stored: bytes | None
    versions: tuple[LiveVersion, ...] = ()
    why: str = ""
    fixed: frozenset[str] = frozenset()
    unproven: str = ""


class UnprovenRows(Struct, frozen=True):
    """`differing` rows of a table that differ from the cut, which proves nothing, for the reason `why`.

    `rows` are some of them, if rows were requested.
    """

    node: str
    group: str
    differing: int
    why: str
    rows: tuple[LiveRow, ...] = ()


class LiveCompared(Struct):
    """The amounts that were compared between a primary and its standbys; a row that was read again counts again.

    Of `tables`, `partial_tables` were compared except for pages that a node could not read; `rows` leaves these out.
    """

    tables: int = 0
    partial_tables: int = 0
    rows: int = 0
    bytes: int = 0
    indexes: int = 0


class CutCompared(Struct):
    """How the rows of a primary compare with those at the cut.

    `equal` rows are the same, `written` rows differ because they were written since, and the `differing` rows differ
    although nobody has written them. `unproven` rows differ, and it is not known whether they were written since.
    """

    tables: int = 0
    equal: int = 0
    written: int = 0
    differing: int = 0
    unproven: int = 0

    def add(self, other: CutCompared) -> None:
        """Add the amounts of another table."""
        for name, amount in asdict(other).items():
            setattr(self, name, getattr(self, name) + amount)


class ShardReport(Struct):
    """The report on a primary, its `standbys`, and the comparison with the cut, if there was one.

    The standbys in `away` could not be reached when the check began.
    """

    shard: str
    standbys: tuple[str, ...]
    away: tuple[str, ...] = ()
    compared: LiveCompared = field(default_factory=LiveCompared)
    cut: CutCompared | None = None


class LiveReport(Struct):
    """The report on all shards. `snapshot` and `increment` name the cut that the databases were compared with.

    `repairs` are the rows for a repair script. `encodings` and `identities` are keyed by node, and `quoted` has the
    tables' names, quoted for SQL, by the names of groups. `unproven` are rows that differ from the cut, although it is
    not known whether they were written since. `unreachable` has the reason, by node, why a node could not be reached,
    at the beginning or later.
    """

    snapshot: str | None = None
    increment: int | None = None
    shards: list[ShardReport] = field(default_factory=list)
    conflicts: list[LiveConflict] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    unproven: list[UnprovenRows] = field(default_factory=list)
    unreachable: dict[str, str] = field(default_factory=dict)
    repairs: list[RowRepair] = field(default_factory=list)
    encodings: dict[str, str] = field(default_factory=dict)
    identities: dict[str, NodeIdentity] = field(default_factory=dict)
    quoted: dict[str, str] = field(default_factory=dict)
    allows_one_copy: bool = False
    seconds: float = 0.0

    @property
    def result(self) -> CheckResult:
        """The result: without conflicts, valid only if something was compared and nothing was skipped."""
        if self.conflicts:
            return CONFLICTS
        if self.unreachable or not any(
            shard.compared.tables or shard.compared.indexes or (shard.cut and shard.cut.tables) for shard in self.shards
        ):
            return INCONCLUSIVE
        if not self.skipped:
            return VALID
        return ONE_COPY if self.allows_one_copy and all(part.is_one_copy for part in self.skipped) else INCONCLUSIVE

    @property
    def exit_code(self) -> int:
        """0 if everything is equal, 1 on conflicts, 6 if a node could not be reached, 4 if something was skipped."""
        if self.unreachable and not self.conflicts:
            return UnreachableError.exit_code
        return EXIT_CODES[self.result]

    @property
    def volumes(self) -> dict[str, int]:
        """The amounts compared, summed over all shards."""
        return dict(sum((Counter(asdict(shard.compared)) for shard in self.shards), Counter[str]()))

    def of(self, shard: str) -> ShardReport:
        """Return the report on a shard."""
        return next(one for one in self.shards if one.shard == shard)

    def primary_of(self, node: str) -> str:
        """Return the primary of the node's shard."""
        return next(one.shard for one in self.shards if node in (one.shard, *one.standbys))

    def skip(self, what: str, why: str, *, is_one_copy: bool = False) -> None:
        """Add a part that was not compared, once."""
        if (part := Skipped(what, why, is_one_copy)) not in self.skipped:
            self.skipped.append(part)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            "schema": SCHEMA,
            "result": self.result,
            "snapshot": self.snapshot,
            "increment": self.increment,
            "seconds": round(self.seconds, 3),
            "shards": to_builtins(self.shards),
            "conflicts": [conflict.to_json() for conflict in self.conflicts],
            "skipped": [asdict(part) for part in self.skipped],
            "unproven": to_builtins(self.unproven),
            "unreachable": [{"node": node, "why": why} for node, why in self.unreachable.items()],
        }


def row_lines(row: LiveRow) -> Iterator[str]:
    """Describe a row in each of its copies."""
    where = f" at {row.place}" if row.place else ""
    yield f"row {row.key}{where}:" if row.key else f"a row without a key{where}:"
    for copy in row.copies:
        yield f"  {copy.of}: {copy.text}"


SHOWN_PAGES_MAX = 20


def pages_text(pages: Iterable[int], count: int) -> str:
    """Name the first of `count` pages: `page 7`, `pages 1, 2, 3 and 9 more`."""
    shown = list(pages)[:SHOWN_PAGES_MAX]
    more = f" and {count - len(shown):,} more" if count > len(shown) else ""
    return f"page{'s' if count != 1 else ''} {', '.join(map(str, shown))}{more}"


def row_claims(changed: int, missing: int, extra: int) -> dict[str, int]:
    """Return how many rows have other contents, are missing, and should not be there, in the form of `amounts_text`."""
    return {
        "row has other contents|rows have other contents": changed,
        "row is missing|rows are missing": missing,
        "row should not be there|rows should not be there": extra,
    }


def amounts_text(amounts: Mapping[str, int]) -> str:
    """Join the amounts that are not 0: `3 rows differ, 1 row is missing`; the keys are `singular|plural` claims."""
    parts = []
    for claim, amount in amounts.items():
        singular, _, plural = claim.partition("|")
        if amount:
            parts.append(f"{amount:,} {singular if amount == 1 else plural}")
    return ", ".join(parts)
