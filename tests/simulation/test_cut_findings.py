"""A check finds nothing in cuts as a create makes them, on random interleavings of two-phase transactions.

Gids are used again after a rollback and after a commit, transactions have several branches on a node, coordinators
commit in one phase, and some transactions stay in doubt for ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest
from msgspec import structs

from cutline.check.cut_findings import differences, lost_prepares, shared_parts
from cutline.wal.cut import resolve as rule
from cutline.wal.cut.cut_events import NodeWindow, fleet_events
from cutline.wal.cut.cut_values import Cut
from tests.run.soak import SEED
from tests.simulation.runs import run_fleets
from tests.unit.made_commits import full_commit

HISTORIES = 200


def test_random_cuts_have_no_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[str] = Counter()
    resolve = rule.resolve

    def resolve_and_check(windows: Mapping[str, NodeWindow]) -> Cut:
        cut = resolve(windows)
        stored = structs.replace(
            full_commit().cut,
            nodes=cut.nodes,
            global_transactions=cut.global_transactions,
            included_early=cut.included_early,
            in_flight=cut.in_flight,
        )
        events = fleet_events(windows)
        shared = shared_parts(events, stored, tuple(windows))
        assert shared.torn == ()
        assert [lost_prepares(window, window.finish) for window in windows.values()] == [[]] * len(windows)
        assert list(differences(stored, rule.resolve_events(windows, events), windows)) == []
        seen.update(cuts=1, pairs=shared.pairs, waiting=shared.waiting)
        return cut

    monkeypatch.setattr(rule, "resolve", resolve_and_check)
    tally = run_fleets(SEED, HISTORIES)
    assert tally["histories"] == HISTORIES
    assert min(tally["reused_gids"], tally["tagged"], tally["with two branches on a node"], tally["early"]) > 0
    assert min(seen["cuts"], seen["pairs"], seen["waiting"]) > 0
