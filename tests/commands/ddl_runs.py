"""A shard's DDL as a restore has it, from a database: dumped, read, and written for the same server."""

from __future__ import annotations

from pathlib import Path

import psycopg
from msgspec.structs import replace

from cutline.fleet.config import Node
from cutline.nodes.watch import Watch
from cutline.restore.ddl.ddl import Ddl, DdlEntry
from cutline.restore.ddl.entries import read_archive
from cutline.restore.rows.load import create_ledger
from cutline.snapshots.ddl.ddl_archive import DdlArchive
from cutline.snapshots.ddl.dump import dump_archive

NOTHING = Ddl("", (), (), ())


def dumped_ddl(node: Node, folder: Path, watch: Watch) -> Ddl:
    """The DDL of the node's database."""
    return read_archive(DdlArchive.of(dump_archive(node, None, watch))).for_target(node, folder)


def ddl_of(pre_data: str = "", post_data: str = "", *, kind: str = "TABLE") -> Ddl:
    """DDL of an entry with these statements in each section, if there are any."""
    sections = [
        (DdlEntry(number, kind, "public", f"made{number}", text),) if text else ()
        for number, text in enumerate((pre_data, post_data), start=1)
    ]
    return replace(NOTHING, pre_data=sections[0], post_data=sections[1])


def make_ledger(node: Node) -> str:
    """Make a ledger in the node's database, and return its name."""
    with psycopg.connect(node.dsn) as connection:
        return create_ledger(connection)
