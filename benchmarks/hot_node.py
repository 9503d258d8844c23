"""Measure how long it takes to drain a busy node: the server's stream alone, each step, and the whole drain.

The fleet is one server without standbys, and its transactions are small, with ten changes each. A drain advances its
slot at the end, so each repeat uses a separate slot, and all repeats read the same WAL.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import psycopg
import pyarrow as pa

from cutline.columns.bytes_column import from_arrow
from cutline.embedded.fleet import start_fleet, stop_fleet
from cutline.fleet.config import GroupRules, Node
from cutline.fleet.lsn import Lsn
from cutline.nodes.connections import connect
from cutline.nodes.groups import number_groups, read_tables
from cutline.nodes.publications import ensure_publications, publication_names
from cutline.storage.location import StoreLocation
from cutline.wal.decoding.decoder import Decoder
from cutline.wal.drain.drain import SEGMENT_BYTES_MAX, drain
from cutline.wal.drain.drain_task import DrainTask
from cutline.wal.drain.peek import peek, peek_query
from cutline.wal.drain.slots import create_exported_slot
from cutline.wal.segments.archive import Definition, SegmentRange
from cutline.wal.segments.segments import SEGMENT_SCHEMA, create_segment

CHANGES, TEXT_BYTES, REPEATS = 1_000_000, 12, 3
# Changes per transaction.
TOGETHER = 10
MESSAGES_MAX = 1 << 30
FLEET, SLOT = "benchmark", "cutline_hot"
SETTINGS = {"fsync": "off", "max_wal_size": "8GB", "max_replication_slots": "40", "autovacuum": "off"}
# Text that compresses to half its size.
ROWS = """
INSERT INTO public.account SELECT n, 0, left((SELECT string_agg(md5(n::text || i), '')
  FROM generate_series(0, {text_bytes} / 32) i), {text_bytes}) FROM generate_series(0, 10009) n
"""
WORK = """
DO $$ BEGIN FOR n IN 1..{transactions} LOOP
  UPDATE public.account SET balance = balance + 1 WHERE id BETWEEN n % 1000 * 10 AND n % 1000 * 10 + 9; COMMIT;
END LOOP; END $$
"""


def main() -> None:
    """Measure and print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--changes", type=int, default=CHANGES, help="number of changes, rounded down to tens")
    parser.add_argument("--bytes", type=int, default=TEXT_BYTES, help="bytes of text in each row")
    given = parser.parse_args()
    changes, text_bytes = given.changes // TOGETHER * TOGETHER, given.bytes
    with tempfile.TemporaryDirectory(prefix="cutline-hot-") as folder:
        fleet = start_fleet(Path(folder) / "fleet", shards=1, backups=0, settings=SETTINGS, schema=False)
        try:
            node = Node("s1", fleet.nodes[0].dsn("postgres"))
            seconds = measure(prepare(node, Path(folder), changes, text_bytes), changes)
        finally:
            stop_fleet(fleet.directory, delete=True)
    sys.stdout.write(json.dumps({"changes": changes, "text_bytes": text_bytes} | seconds, indent=1) + "\n")


def prepare(node: Node, folder: Path, changes: int, text_bytes: int) -> list[DrainTask]:
    """Create the table and the slots, and run the changes; return a task for each slot."""
    with connect(node) as connection:
        connection.execute("CREATE TABLE public.account (id int PRIMARY KEY, balance bigint, name text)")
        connection.execute(ROWS.format(text_bytes=text_bytes).encode())
        tables = number_groups({"s": read_tables(connection, GroupRules())}, 100)["s"]
        ensure_publications(connection, FLEET, tables)
        bases = {}
        for slot in (f"{SLOT}_{repeat}" for repeat in range(REPEATS)):
            exported = create_exported_slot(node, node, slot, 60)
            exported.connection.close()
            bases[slot] = exported.position
        connection.execute(WORK.format(transactions=changes // TOGETHER).encode())
        # The commit flushes the message; a drain up to a position that is not flushed yet can't advance the slot.
        end = "SELECT pg_logical_emit_message(false, 'end', 'x')::text, pg_current_xact_id()"
        finish, _ = connection.execute(end).fetchone() or ("", None)
    definitions, store = tuple(Definition(0, table.group) for table in tables), StoreLocation(f"file://{folder}/store")
    return [
        DrainTask(
            node=node,
            slot=slot,
            publications=publication_names(FLEET),
            snapshot="hot",
            archive=slot,
            operation="op",
            definitions=definitions,
            global_id_form="exact",
            base=base,
            last=None,
            finish=Lsn.parse(finish),
            store=store,
        )
        for slot, base in bases.items()
    ]


def measure(tasks: list[DrainTask], changes: int) -> dict[str, Any]:
    """Return how many seconds each step took: the median, and the figure of each repeat."""
    kept: dict[str, Any] = {}

    def server(task: DrainTask) -> None:
        query = peek_query(task.slot, task.publications, task.finish, MESSAGES_MAX)
        with psycopg.connect(task.node.dsn) as connection:
            connection.execute(f"SELECT count(*) FROM ({query}) AS messages".encode())

    def read(task: DrainTask) -> None:
        kept["batches"] = list(peek(task.node, task.slot, task.publications, task.finish, MESSAGES_MAX))

    def decode(task: DrainTask) -> None:
        decoder = Decoder(task.node.id, task.definitions, task.global_id_form)
        kept["decoded"] = [decoder.feed(from_arrow(batch)) for batch in kept["batches"]]

    def store(task: DrainTask) -> None:
        for number, tables in enumerate(_in_segments(kept["decoded"]), start=1):
            wal_range = SegmentRange(task.node.id, "op", Lsn(number), Lsn(number + 1), None)
            create_segment(task.store.open(), f"alone/{task.slot}", number, wal_range, tables, continued=None)

    def together(task: DrainTask) -> None:
        kept.clear()
        report = drain(task)
        if report.problem or sum(segment.segment.changes for segment in report.segments) != changes:
            raise RuntimeError(f"the drain reported {report.problem}")

    steps: dict[str, Callable[[DrainTask], None]] = {
        "server": server,
        "server and reading": read,
        "decoding": decode,
        "storing": store,
        "drain": together,
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for task in tasks:
        for name, step in steps.items():
            began = time.monotonic()
            step(task)
            seconds[name].append(round(time.monotonic() - began, 2))
    return {name: {"median": median(taken_seconds), "each": taken_seconds} for name, taken_seconds in seconds.items()}


def _in_segments(decoded: list[Any]) -> Iterator[tuple[pa.Table, pa.Table]]:
    """Yield the changes and events in segments of the size that a drain stores."""
    empty = pa.Table.from_batches([], SEGMENT_SCHEMA)
    held: list[Any] = []
    for tables in decoded:
        held.append(tables)
        if sum(each.changes.nbytes + each.events.nbytes for each in held) > SEGMENT_BYTES_MAX:
            yield _joined(empty, held)
            held = []
    if held:
        yield _joined(empty, held)


def _joined(empty: pa.Table, held: list[Any]) -> tuple[pa.Table, pa.Table]:
    return (
        pa.concat_tables([empty, *(segment.changes for segment in held)]),
        pa.concat_tables([empty, *(segment.events for segment in held)]),
    )


if __name__ == "__main__":
    main()
