"""Retained WAL is bounded: the slot of a chain that nobody continues is given up, and its node says so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from fleet.config import load_fleet
from fleet.embedded import EmbeddedFleet
from fleet.progress import Silent
from fleet.sessions import Sessions, open_sessions
from snapshots.retained import give_up_chains
from wal.slots import create_exported_slot, drop_slot, slot_state

SLOT = "cutline_of_an_older_chain"
FOREIGN = "somebody_elses"


@dataclass(slots=True)
class Notes(Silent):
    texts: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        self.texts.append(text)


@pytest.fixture
def sessions(shared_fleet: EmbeddedFleet) -> Iterator[Sessions]:
    fleet = load_fleet(shared_fleet.fleet_toml)
    node = fleet.primaries[0]
    try:
        for name in (SLOT, FOREIGN):
            create_exported_slot(node, node, name, 30).connection.close()
        with open_sessions(fleet, [node]) as opened:
            opened.primaries[node.id].execute(
                "SELECT pg_logical_emit_message(false, 'filler', repeat('x', 100000), true)"
            )
            yield opened
    finally:
        for name in (SLOT, FOREIGN):
            assert drop_slot(node, name)


def slots_of(sessions: Sessions) -> set[str]:
    (connection,) = sessions.primaries.values()
    return {name for name in (SLOT, FOREIGN) if slot_state(connection, name)}


def test_a_chain_that_keeps_more_than_the_limit_is_given_up_and_named(sessions: Sessions) -> None:
    notes = Notes()
    assert give_up_chains(sessions, None, 50_000, notes) == [SLOT]
    assert slots_of(sessions) == {FOREIGN}
    (text,) = notes.texts
    assert SLOT in text
    assert "s1" in text


def test_the_chain_that_is_continued_is_kept_whatever_it_holds(sessions: Sessions) -> None:
    assert give_up_chains(sessions, SLOT, 1, Notes()) == []
    assert slots_of(sessions) == {SLOT, FOREIGN}


def test_a_chain_below_the_limit_is_kept(sessions: Sessions) -> None:
    notes = Notes()
    assert give_up_chains(sessions, None, 16 << 30, notes) == []
    assert slots_of(sessions) == {SLOT, FOREIGN}
    assert notes.texts == []
