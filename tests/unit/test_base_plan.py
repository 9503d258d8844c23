from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cutline.fleet.config import Node
from cutline.nodes.groups import Column, Group, Table
from cutline.snapshots.base_copy.copy_ranges import PAGE_BYTES, CopyDestination, copy_query
from cutline.snapshots.base_copy.copy_tables import TASK_PAGES, TableSource, plan_copy, plan_ranges
from cutline.storage.location import StoreLocation

RAW = "TO STDOUT (ENCODING 'SQL_ASCII')"
SIZES = st.lists(st.integers(0, 5 * TASK_PAGES) | st.sampled_from([TASK_PAGES, TASK_PAGES + 1]), max_size=12)


def table(number: int, pages: int) -> Table:
    group = Group(number, "public", f"t{number}", "default", 1, (Column("id", "integer", 23, -1, 0),))
    return Table(number, group, 0, pages * PAGE_BYTES, readable=True, key_is_immediate=True)


@given(SIZES)
def test_every_page_of_every_table_is_in_exactly_one_range(sizes: list[int]) -> None:
    tables = [table(number, pages) for number, pages in enumerate(sizes, start=1)]
    ranges = [part for task in plan_ranges(tables) for part in task.ranges]
    assert {part.group.number for part in ranges} == {one.group.number for one in tables}
    for one in tables:
        mine = sorted((part for part in ranges if part.group == one.group), key=lambda part: part.low)
        assert [part.low for part in mine] == [0, *(part.high for part in mine[:-1])]
        # Pages that are added after the size was read belong to the last range.
        assert mine[-1].high is None
        assert all(part.high > part.low for part in mine[:-1])


@given(SIZES)
def test_the_size_of_a_task_is_bounded(sizes: list[int]) -> None:
    tables = [table(number, pages) for number, pages in enumerate(sizes, start=1)]
    pages = {one.group.number: one.size_bytes // PAGE_BYTES for one in tables}
    for task in plan_ranges(tables):
        ends = [(part, pages[part.group.number] if part.high is None else part.high) for part in task.ranges]
        assert sum(end - part.low for part, end in ends) == task.size // PAGE_BYTES <= TASK_PAGES * 3 // 2


def test_nodes_take_turns_and_tasks_are_numbered() -> None:
    destination = CopyDestination("daily", "op", StoreLocation("file:///store"))
    sources = [
        TableSource(Node(name, f"dbname={name}"), f"exported-{name}", [table(1, pages)])
        for name, pages in (("a", 3 * TASK_PAGES), ("b", TASK_PAGES * 2))
    ]
    tasks = plan_copy(sources, destination, 1000)
    assert [task.node.id for task in tasks] == ["a", "b", "a", "b", "a"]
    assert [task.number for task in tasks] == [0, 1, 2, 3, 4]
    assert all(task.destination == destination for task in tasks)
    assert destination.prefix("a") == "snapshots/daily/base/a/op"
    assert {task.exported for task in tasks} == {"exported-a", "exported-b"}
    assert plan_copy([], destination, 1000) == []


def test_a_range_is_a_condition_on_ctid() -> None:
    ((whole,),) = (task.ranges for task in plan_ranges([table(1, 10)]))
    # Which needs no planner.
    assert copy_query(whole) == 'COPY "public"."t1" ("id") ' + RAW
    first, second = (part for task in plan_ranges([table(1, TASK_PAGES * 2)]) for part in task.ranges)
    assert copy_query(first).endswith(f"WHERE ctid < '({TASK_PAGES},0)'::tid) {RAW}")
    assert copy_query(second).endswith(f"WHERE ctid >= '({TASK_PAGES},0)'::tid) {RAW}")


def test_a_table_that_no_query_may_read_is_copied_whole_however_large_it_is() -> None:
    tables = [table(number, pages) for number, pages in enumerate((3 * TASK_PAGES, 5 * TASK_PAGES, 1, 1), start=1)]
    planned = plan_ranges(tables, undivided={2})
    assert [(one.ranges[0].group.number, one.ranges[0].low) for one in planned] == [
        (2, 0), *((1, low * TASK_PAGES) for low in range(3)), (3, 0),
    ]  # fmt: skip
    assert planned[0].size == 5 * TASK_PAGES * PAGE_BYTES
    assert copy_query(planned[0].ranges[0]).startswith('COPY "public"."t2" (')


def test_a_copy_of_much_has_about_as_many_tasks_as_wanted_and_no_smaller_ones() -> None:
    destination = CopyDestination("daily", "op", StoreLocation("file:///store"))
    # A terabyte on each of ten nodes: 16 million pages of 8 KiB and more would be 160,000 tasks of TASK_PAGES.
    sources = [TableSource(Node(f"n{one}", f"dbname=n{one}"), "", [table(1, 2**27)]) for one in range(10)]
    tasks = plan_copy(sources, destination, 1000)
    assert 1000 <= len(tasks) <= 1010
    assert sum(task.size for task in tasks) == 10 * 2**40
    little = [TableSource(Node("n", "dbname=n"), "", [table(1, 4 * TASK_PAGES)])]
    assert len(plan_copy(little, destination, 1000)) == 4
