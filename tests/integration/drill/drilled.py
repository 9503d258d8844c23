"""The chain that drills restore, what is asserted of it, and what a drill has running and leaves."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAME = "weekly"
# A view of an owner of tables must not run as a superuser, and what a CHECK does must not outlive a drill.
TABLES = """
CREATE FUNCTION rude(int) RETURNS boolean LANGUAGE plpgsql AS $$
  BEGIN
    IF current_user ^@ 'cutline_drill_' THEN
      EXECUTE format('ALTER DATABASE %I IS_TEMPLATE true', current_database());
    END IF;
    RETURN true;
  END $$;
CREATE TABLE item (id int PRIMARY KEY CHECK (rude(id)), price numeric(10, 2), sold boolean, note text);
INSERT INTO item VALUES (1, 1.50, true, 'a'), (2, 20, false, NULL);
CREATE VIEW who AS SELECT current_setting('is_superuser') AS is_super
"""
CHANGES = "UPDATE item SET price = 2.50 WHERE id = 1"
HOLDING = """
[[drill.assertion]]
node = "s1"
sql = "SELECT count(*) FROM item;"
expected = 2

[[drill.assertion]]
node = "s1"
sql = "SELECT price, sold, note FROM item ORDER BY id LIMIT 1"
expected = [[2.5, true, "a"]]

[[drill.assertion]]
node = "s2"
sql = "SELECT id FROM item ORDER BY id"
expected = [1, 2]

[[drill.assertion]]
node = "s2"
sql = "SELECT 1 FROM item WHERE price < 0"

[[drill.assertion]]
node = "s2"
sql = "SELECT is_super FROM who"
expected = "off"
"""
FAILING = """
[[drill.assertion]]
node = "s1"
sql = "SELECT price FROM item WHERE id = 1"
expected = 1.5

[[drill.assertion]]
node = "s1"
sql = "SELECT note FROM item WHERE id = 2"
expected = "NULL"

[[drill.assertion]]
node = "s1"
sql = "SELECT nothing FROM item"
expected = 1

[[drill.assertion]]
node = "s1"
sql = "SELECT lo_create(0)"
expected = 1

[[drill.assertion]]
node = "s1"
sql = "SELECT 1; SELECT 1"
expected = 1
"""


@dataclass(frozen=True, slots=True)
class Drilled:
    """A chain in a store, the text of a fleet.toml whose nodes answer nobody, and every shard's rows at the cut."""

    text: str
    rows: list[int]
    spark: SparkSession
    connections: list[str]


@contextmanager
def listening() -> Iterator[tuple[int, list[str]]]:
    """A port, and who has connected to it."""
    found: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            while True:
                try:
                    connection, address = server.accept()
                except OSError:
                    return
                found.append(str(address))
                connection.close()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield server.getsockname()[1], found
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def write_fleet(drilled: Drilled, folder: Path, assertions: str) -> Path:
    path = folder / "fleet.toml"
    path.write_text(drilled.text + assertions)
    return path


def processes_of(folder: Path) -> list[str]:
    """The servers that a command with this folder for temporary files has started."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (process / "comm").read_text() == "postgres\n" and bytes(folder) in (process / "environ").read_bytes():
                found.append(process.name)
    return found


def servers_below(folder: Path) -> list[Path]:
    """The servers' data in the sessions of commands with this folder for temporary files."""
    return sorted(folder.glob("*/cutline-drill-*/fleet/demo.json"))
