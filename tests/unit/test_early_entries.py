"""Which entries may begin before all rows are loaded, when they do, and which tasks a table waits for."""

from __future__ import annotations

from msgspec.structs import replace

from cutline.fleet.config import Node
from cutline.nodes.groups import Group
from cutline.restore.ddl.ddl import Ddl, DdlEntry
from cutline.restore.ddl.side_by_side import EntryQueue, find_early
from cutline.restore.rows.expected_tasks import expect_tasks
from cutline.restore.rows.load import BaseLoadTask, Feed, ImageLoadTask, LoadTarget
from cutline.snapshots.fold.sources import BaseSource, Source
from cutline.storage.location import StoreLocation

STORE = StoreLocation("memory://unused")


def entry(number: int, kind: str, *needs: int) -> DdlEntry:
    return DdlEntry(number, kind, "public", f"x{number}", "", needs)


BEFORE = (
    entry(1, "TABLE"),
    entry(2, "TABLE"),
    entry(3, "TABLE", 2),
    entry(4, "FUNCTION"),
    entry(5, "DOMAIN", 4),
    entry(6, "TABLE", 5),
    entry(7, "EXTENSION"),
    entry(8, "TABLE", 7),
)
POSSIBLE = (
    entry(10, "INDEX", 1),
    entry(11, "CONSTRAINT", 1),
    # A key from an index.
    entry(12, "CONSTRAINT", 1, 10),
    # Its table inherits from another.
    entry(13, "CONSTRAINT", 3),
    entry(14, "INDEX", 8, 7),
)
IMPOSSIBLE = (
    # They call a function, by themselves or by a domain.
    entry(20, "INDEX", 1, 4),
    entry(21, "INDEX", 6),
    # Another table inherits from its table.
    entry(22, "CONSTRAINT", 2),
    entry(23, "FK CONSTRAINT", 1, 13),
    # It locks two tables.
    entry(24, "INDEX", 1, 3),
    # Nothing is known of what it needs.
    entry(25, "INDEX", 1, 99),
)
# It may not run beside others, and nor may what needs it.
ALONE = (entry(30, "INDEX", 1), entry(31, "CONSTRAINT", 1, 30))


def test_keys_and_indexes_of_one_table_without_functions_may_begin_early() -> None:
    side_by_side = frozenset(one.number for one in (*POSSIBLE, *IMPOSSIBLE, ALONE[1]))
    ddl = replace(Ddl("", BEFORE, (*ALONE, *IMPOSSIBLE, *POSSIBLE), ()), side_by_side=side_by_side)
    assert find_early(ddl) == {10: 1, 11: 1, 12: 1, 13: 3, 14: 8}


def test_held_entries_begin_once_released_those_of_the_largest_tables_first() -> None:
    tables = {number: entry(number, "TABLE") for number in range(4)}
    indexes = [entry(10 + number, "INDEX", number) for number in range(4)]
    sizes = {("public", f"x{number}"): number for number in range(4)}
    queue = EntryQueue(indexes, tables, sizes, held=True)
    assert queue.take_ready() is None
    queue.release([11, 12])
    queue.release([12, 99])
    first = queue.take_ready()
    assert first == indexes[2]
    # By now the first table is the largest.
    queue.release_all(sizes | {("public", "x0"): 9})
    assert [one.number for one in (queue.take_ready(), queue.take_ready(), queue.take_ready()) if one] == [10, 13, 11]
    assert len(queue) == 4
    queue.end(indexes[2], is_refused=True)
    assert (len(queue), queue.refused, queue.take_ready()) == (3, [indexes[2]], None)


def target_of(node: str, *groups: int) -> LoadTarget:
    return LoadTarget(
        Node(node, "dbname=a"),
        {number: Group(number, "public", f"t{number}", "default", 1, ()) for number in groups},
        "l",
    )


def base_task(key: str, target: tuple[int, LoadTarget], *groups: int) -> BaseLoadTask:
    number, database = target
    source = Source(key, database.node.id, number, 1, "")
    feed = Feed({number: database.select(groups)})
    return BaseLoadTask(BaseSource(source, dict.fromkeys(groups, 1)), feed, None, STORE)


def test_a_table_is_complete_when_all_tasks_with_its_rows_are_in_its_ledger() -> None:
    first, second = target_of("s1", 1, 2, 3, 4, 5), target_of("s2", 1)
    # Rows of group 4 go to its root, and group 5 has none.
    first = replace(first, roots={4: "public.root"})
    tasks = [
        base_task("a", (0, first), 1, 2),
        base_task("b", (0, first), 2, 3, 4),
        base_task("c", (1, second), 1),
        ImageLoadTask("images-0-0", b"", 0, Feed({0: first.select([1])})),
    ]
    # Some rows of group 3 are loaded by other tasks.
    expected = expect_tasks(tasks, {0: first, 1: second}, {0: {3}})
    assert expected[0].note_done([]) == [5]
    assert expected[0].note_done(["a", "of an earlier process"]) == []
    assert expected[0].note_done(["a", "b"]) == [2]
    assert expected[0].note_done(["a", "b", "images-0-0"]) == [1]
    assert expected[0].note_done(["a", "b", "images-0-0"]) == []
    assert expected[1].note_done(["c"]) == [1]
