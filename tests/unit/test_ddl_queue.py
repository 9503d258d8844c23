"""Entries of DDL that several sessions create: none before what it needs, none while its tables are locked."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

from cutline.restore.ddl.ddl import DdlEntry
from cutline.restore.ddl.side_by_side import EntryQueue

JOBS = 4
CPU_SECONDS_MAX = 6


def tables(count: int) -> dict[int, DdlEntry]:
    return {number: DdlEntry(number, "TABLE", "public", f"t{number}", "") for number in range(count)}


def run(queue: EntryQueue, work: Callable[[DdlEntry], None]) -> None:
    failures: list[BaseException] = []

    def take_all() -> None:
        try:
            for entry in queue:
                work(entry)
                queue.end(entry, is_refused=False)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=take_all, daemon=True) for _ in range(JOBS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)


def test_entries_begin_when_what_they_need_is_done_and_their_tables_are_free() -> None:
    dealt = random.Random(7)
    made: list[DdlEntry] = []
    for number in range(100, 300):
        needs = (dealt.randrange(8), dealt.randrange(8), *([dealt.randrange(100, number)] if number % 3 == 2 else []))
        made.append(DdlEntry(number, dealt.choice(["INDEX", "CONSTRAINT"]), "public", f"x{number}", "", needs))
    queue = EntryQueue(made, tables(8), {})
    lock, running, done, together = threading.Lock(), dict[int, DdlEntry](), set[int](), 0

    def work(entry: DdlEntry) -> None:
        nonlocal together
        with lock:
            assert {one for one in entry.dependencies if one >= 100} <= done
            for other in running.values():
                shared = queue.locks[entry.number] & queue.locks[other.number]
                assert not shared or entry.kind == other.kind == "INDEX"
            running[entry.number] = entry
            together = max(together, len(running))
        time.sleep(0.0005)
        with lock:
            del running[entry.number]
            done.add(entry.number)

    run(queue, work)
    assert len(done) == 200
    assert together > 1


def test_a_thousand_foreign_keys_to_one_table_are_chosen_in_no_time() -> None:
    """One at a time can be created, and the other sessions look for theirs meanwhile."""
    count = 1000
    keys = [
        DdlEntry(count + 1 + number, "FK CONSTRAINT", "public", f"t{number} fk", "", (0, number))
        for number in range(1, count + 1)
    ]
    queue, done = EntryQueue(keys, tables(count + 1), {}), list[int]()
    began = time.process_time()

    def work(entry: DdlEntry) -> None:
        done.append(entry.number)
        time.sleep(0.0005)

    run(queue, work)
    assert len(done) == count
    assert time.process_time() - began < CPU_SECONDS_MAX
