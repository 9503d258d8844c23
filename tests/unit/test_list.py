"""`list` at a terminal: empty cells where there is nothing to say, and the WAL that nodes retain."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from msgspec import structs
from msgspec.structs import replace

from cutline.cli.commands.list import lines_of
from cutline.cli.output.tables import FittingTable
from cutline.fleet.config import Fleet
from cutline.snapshots.listing.listing import Listing, list_store
from cutline.snapshots.records.chain import Chain
from cutline.wal.drain.lags import Retained
from tests.unit.made_chains import FLEET
from tests.unit.made_fleets import new_fleet, store_chain

NOW = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
GIB = 1 << 30


@pytest.fixture
def fleet() -> Fleet:
    made = new_fleet(FLEET)
    store_chain(made, "daily", "2026-11-20T00:00:00Z", "2026-11-20T01:00:00Z")
    return made


def retaining(listing: Listing, *sizes: int) -> Listing:
    """The listing with this much WAL on the nodes s0, s1, …, each with a limit of 16 GiB."""
    retained = tuple(Retained(f"s{number}", "slot", size, 16 * GIB) for number, size in enumerate(sizes))
    (entry,) = listing.entries
    return replace(listing, entries=(replace(entry, retained=retained),))


def test_a_full_snapshot_without_changes_has_no_number_and_an_empty_increment_has_0(fleet: Fleet) -> None:
    listing = list_store(fleet)
    (entry,) = listing.entries
    assert entry.chain is not None
    nothing = {"changes": 0, "transactions": 0}
    full = structs.replace(entry.chain.full, counts={**entry.chain.full.counts, **nothing})
    summaries = tuple(structs.replace(one, **nothing, bytes=0) for one in entry.summaries)
    idle = replace(entry, chain=Chain(full), summaries=summaries)
    table = lines_of(replace(listing, entries=(idle,)), NOW)[0]
    assert isinstance(table, FittingTable)
    wanted = [table.titles.index(title) for title in ("increment", "changes", "transactions", "sizes")]
    assert [[row[column] for column in wanted] for row in table.rows] == [["1", "0", "0", ""], ["full", "", "", ""]]


def test_the_sizes_of_increments_that_a_merge_replaced_are_not_shown(fleet: Fleet) -> None:
    listing = list_store(fleet)
    (entry,) = listing.entries
    (one,) = entry.summaries
    summaries = tuple(structs.replace(one, increment=number, bytes=1000 * number) for number in (1, 2, 3))
    merged = replace(entry, summaries=summaries, first=2, base_bytes=77)
    table = lines_of(replace(listing, entries=(merged,)), NOW)[0]
    assert isinstance(table, FittingTable)
    wanted = [table.titles.index(title) for title in ("increment", "size")]
    assert [[row[column] for column in wanted] for row in table.rows] == [["3", "2.9 KiB"], ["2 (base)", "77 B"]]
    # The only increment since.
    assert len(str(table.rows[0][table.titles.index("sizes")])) == 1


def test_a_line_names_the_node_that_retains_much_wal(fleet: Fleet) -> None:
    listing = list_store(fleet)
    assert retaining(listing).notes == []
    assert retaining(listing, 2 * GIB).notes == []
    text = "node s1 keeps 3.0 GiB of WAL for snapshot daily, of at most 16.0 GiB"
    much = retaining(listing, GIB, 3 * GIB)
    assert much.notes == [text]
    assert text in lines_of(much, NOW)
    # More than half of the limit is a warning.
    assert retaining(listing, 9 * GIB).notes == []
