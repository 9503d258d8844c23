"""Pins, the rules by calendar, the quota and the alarm for old restore points on a real fleet."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutline.embedded.fleet import EmbeddedFleet
from cutline.storage.clock import utc_now
from tests.commands.in_process import run_as_text, run_here
from tests.commands.snapshot_runs import names_of_snapshots, runs_on
from tests.stores.documents import check_documents

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LAST_1 = ("prune", "--keep-last", "1")


def test_a_pinned_increment_stays_with_its_chain(
    shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path: Path
) -> None:
    with runs_on(shared_fleet, tmp_path, spark) as runs:
        fleet = runs.fleet

        def ended(code: int, *words: str) -> dict[str, Any]:
            found, document = run_here(fleet, *words)
            assert found == code, document
            return document

        runs.full("old")
        runs.increment("old")
        runs.full("new")
        kept = ended(0, "keep", "old@1", "--until", f"{utc_now().year + 1}-12-31", "--reason", "audit")
        (pin,) = kept["pins"]
        assert (kept["state"], pin["increment"], pin["reason"], pin["problem"]) == ("pinned", 1, "audit", "")
        assert pin["until"] == f"{utc_now().year + 2}-01-01T00:00:00.000Z"

        # The rules alone would delete it.
        plan = ended(0, *LAST_1, "--yes", "--force")
        assert plan["steps"] == []
        points = {one["name"]: one["points"] for one in plan["snapshots"]}["old"]
        assert [(one["increment"], one["kept"], one["needed_by"]) for one in points] == [(0, True, 1), (1, True, None)]
        assert points[1]["why"][0].endswith(": audit")
        drawn = run_as_text(fleet, *LAST_1, "--dry-run")
        assert "needed by increment 1" in drawn
        assert "last 1: it is the newest" in drawn
        assert ended(3, "delete", "old", "--yes")["error"] == "pinned"
        listed = {one["name"]: one["pins"] for one in ended(0, "list")["snapshots"]}
        assert listed == {"old": [pin], "new": []}
        assert "increment 1 of old is pinned by" in run_as_text(fleet, "list")
        garbage = ended(0, "gc", "--dry-run", "--grace", "0s")
        assert garbage["garbage"] == []

        assert runs.check_one("old").result == "valid"
        released = ended(0, "keep", "old@1", "--release")
        assert (released["state"], released["pins"]) == ("released", [])
        assert "released: increment 1 of old was pinned by" in run_as_text(fleet, "show", "old")
        assert [one["state"] for one in ended(0, "show", "old")["pins"]] == ["released"]
        assert ended(3, "keep", "old", "--release")["error"] == "not-pinned"
        found = check_documents(fleet.store.open())
        assert (found["Pin"], found["PinRelease"]) == (1, 1)

        # Both snapshots are of this day, of which the newest restore point is that of the newer one.
        calendar = ended(0, "prune", "--keep-daily", "7", "--keep-yearly", "all", "--dry-run")
        assert [(one["name"], one["fate"]) for one in calendar["snapshots"]] == [("new", "keep"), ("old", "delete")]

        # Neither an old restore point nor the quota deletes anything.
        fleet.path.write_text(fleet.path.read_text() + '\n[retention]\nlast = 2\nmax_age = "1s"\nquota = 1000\n')
        over = ended(3, "prune", "--yes")
        assert (over["steps"], over["quota"]["bytes"]) == ([], 1000)
        assert over["quota"]["exceeded_by"] == over["bytes_left"] - 1000 > 0
        assert "more than the quota" in over["warnings"][-1]
        # On a fast machine, all of the above takes less than max_age.
        time.sleep(1)
        listed_too_old = ended(0, "list")
        assert "[retention] max_age allows 1 s" in listed_too_old["age_problem"]
        assert listed_too_old["age_problem"] in listed_too_old["warnings"]

        done = ended(3, *LAST_1, "--yes")["done"]
        assert [(one["snapshot"], one["state"]) for one in done] == [("old", "done")]
        assert names_of_snapshots(fleet) == ["new"]
