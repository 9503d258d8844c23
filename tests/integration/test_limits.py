"""Limits on rates: what a command reads, stores and loads takes at least as long as the limit says.

The lower bounds follow from the bytes and the rate; how much longer a command takes depends on the machine.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Fleet
from cutline.storage.rate import CREDIT_SECONDS
from tests.commands.snapshot_runs import run_command, sorted_copies
from tests.integration.own_database import own_database, restore_target
from tests.integration.refusing import execute

DATABASE, NAME = "limited", "daily"
MB = 1_000_000
RATE = 2 * MB
# Not compressible, and as long as printed.
ROWS, WIDTH = 4000, 2000
FILL = (
    "CREATE TABLE item (id bigint PRIMARY KEY, noise text)",
    "INSERT INTO item SELECT n, (SELECT string_agg(md5(n::text || '.' || m), '') FROM generate_series(1, 63) m)"
    f" FROM generate_series(1, {ROWS}) n",
)
CHANGE = "UPDATE item SET noise = reverse(noise)"


@pytest.fixture
def fleet(shared_fleet: EmbeddedFleet, tmp_path: Path) -> Iterator[Fleet]:
    """A database of its own with 8 MB of rows, and its initialised store."""
    with own_database(shared_fleet, tmp_path, DATABASE) as fleet:
        execute(fleet.nodes[0].dsn, *FILL)
        code, document = run_command(fleet, "init")
        assert code == 0, document
        yield fleet


def printed_bytes(fleet: Fleet) -> int:
    """Return how many bytes COPY prints of the table."""
    with psycopg.connect(fleet.nodes[0].dsn) as connection:
        (size,) = connection.execute("SELECT sum(length(id::text) + length(noise) + 2) FROM item").fetchone() or (0,)
    return int(size)


def limit(fleet: Fleet, **limits: str) -> None:
    text = re.sub(r"(?s)\n\[limits\].*?\n\n", "\n", fleet.path.read_text())
    table = "".join(f'{name} = "{value}"\n' for name, value in limits.items())
    fleet.path.write_text(text.replace("[[node]]", f"[limits]\n{table}\n[[node]]", 1) if limits else text)


def timed(fleet: Fleet, *words: str) -> tuple[float, dict[str, Any]]:
    began = time.monotonic()
    code, document = run_command(fleet, *words)
    assert code == 0, document
    return time.monotonic() - began, document


def test_a_chain_is_read_and_restored_at_the_limits(fleet: Fleet) -> None:
    size = printed_bytes(fleet)
    assert size > 4 * RATE - MB
    limit(fleet, read="2MB/s")
    _, full = timed(fleet, "create", NAME)
    assert full["seconds"] >= size / RATE - CREDIT_SECONDS
    execute(fleet.nodes[0].dsn, CHANGE)
    _, increment = timed(fleet, "create", NAME, "--incremental")
    assert increment["seconds"] >= size / RATE - CREDIT_SECONDS
    # Reading the store is not limited, and the limit on restoring is the target's.
    (node,), (back,) = fleet.nodes, restore_target(fleet).nodes
    target = fleet.path.with_name("target.toml")
    limit(fleet, restore="2MB/s")
    target.write_text(fleet.path.read_text().replace(node.dsn, back.dsn))
    limit(fleet)
    _, restored = timed(fleet, "restore", NAME, "--to", str(target))
    assert restored["seconds"] >= size / RATE - CREDIT_SECONDS
    assert sorted_copies(back.dsn) == sorted_copies(node.dsn)


def test_storing_keeps_to_the_limit(fleet: Fleet) -> None:
    limit(fleet, store="1MB/s")
    seconds, document = timed(fleet, "create", NAME)
    assert document["bytes"] > 2 * MB
    assert seconds >= document["bytes"] / MB - CREDIT_SECONDS


def test_a_copy_keeps_to_the_limit_of_the_second_store(fleet: Fleet, tmp_path: Path) -> None:
    _, full = timed(fleet, "create", NAME)
    limit(fleet, store="1MB/s")
    other = tmp_path / "second.toml"
    other.write_text(re.sub('(?m)^store = "file:.*"$', f'store = "file://{tmp_path}/other"', fleet.path.read_text()))
    for place, unlimited in ((f"file://{tmp_path}/second", False), (str(other), True)):
        if unlimited:
            # The limit of the second store's own fleet file counts.
            limit(fleet)
        seconds, copied = timed(fleet, "copy", NAME, "--to", place)
        assert copied["bytes"] >= full["bytes"] > 2 * MB
        assert seconds >= copied["bytes"] / MB - CREDIT_SECONDS, place
