"""Two coordinators that know half of the fleet each: who has no majority of its recorded primaries creates nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cutline.fleet.config import Fleet
from cutline.fleet.progress import Silent
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.full import create_full
from cutline.snapshots.create.initialise import initialise
from tests.commands.snapshot_runs import Ready, Runs, configure_fleet, names_of_snapshots
from tests.integration.refusing import NoSpark, refused

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.integration.conftest import FleetFactory


def test_two_coordinators_with_half_of_the_fleet_each_cannot_both_create(
    fleet_factory: FleetFactory, spark: SparkSession, tmp_path: Path
) -> None:
    embedded = fleet_factory(shards=4)
    fleet = configure_fleet(embedded, tmp_path / "fleet.toml", f"file://{tmp_path}/store")
    halves = [replace(fleet, nodes=fleet.nodes[:2]), replace(fleet, nodes=fleet.nodes[2:])]
    runs = Runs(fleet, Ready(spark))
    runs.init()

    # In an empty store, the half that comes first is the fleet, and the other half has no part in it.
    Runs(halves[0], runs.spark).full("first")
    with refused(fleet, "majority-missing") as errors:
        create(halves[1])
    assert errors[0].details["missing"] == ["s1", "s2"]

    # The whole fleet has a majority of that half, and becomes the largest fleet on record.
    runs.full("whole")
    for half, missing in zip(halves, (["s3", "s4"], ["s1", "s2"]), strict=True):
        with refused(fleet, "majority-missing") as errors:
            create(half)
        assert errors[0].details["missing"] == missing
        assert errors[0].details["needed"] == 3
    most = replace(fleet, nodes=fleet.nodes[1:])
    Runs(most, runs.spark).full("most")

    # The operator states that the fleet is smaller now. Then that half can create, and the other half still can't.
    report = initialise(halves[0], Silent(), forgets_nodes=True)
    assert report.forgotten == ["s3", "s4"]
    Runs(halves[0], runs.spark).full("smaller")
    with refused(fleet, "majority-missing"):
        create(halves[1])
    assert names_of_snapshots(fleet) == ["first", "most", "smaller", "whole"]


def create(fleet: Fleet) -> None:
    create_full(fleet, CreateRequest("another"), NoSpark(), Silent())
