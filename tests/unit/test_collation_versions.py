"""Which node of a shard is told what about the version of its collation."""

from __future__ import annotations

from cutline.fleet.config import Node
from cutline.nodes.collation_versions import CollationVersions, difference_text

PRIMARY, STANDBY = Node("s1", "dbname=shop"), Node("s1-b1", "dbname=shop", backup_of="s1")


def texts(primary: str, standby: str, recorded: str = "2.36") -> tuple[bool, bool]:
    """Whether the primary and its standby are named, whose libraries have these versions."""
    found = {PRIMARY: primary, STANDBY: standby}
    versions = {node.id: CollationVersions("shop", recorded, actual) for node, actual in found.items()}
    return bool(difference_text(PRIMARY, versions)), bool(difference_text(STANDBY, versions))


def test_a_primary_is_compared_with_its_database_and_a_standby_with_its_primary() -> None:
    assert texts("2.36", "2.36") == (False, False)
    assert texts("2.41", "2.41") == (True, False)
    assert texts("2.36", "2.41") == (False, True)
    # Of both: once the primary's indexes are made again, the standby's library does not fit them.
    assert texts("2.41", "2.36") == (True, True)


def test_a_collation_without_versions_is_not_named() -> None:
    assert difference_text(PRIMARY, {}) == difference_text(STANDBY, {}) == ""
    found = {"s1-b1": CollationVersions("shop", "2.36", "2.41")}
    # Its primary is not asked.
    assert difference_text(STANDBY, found) == ""
