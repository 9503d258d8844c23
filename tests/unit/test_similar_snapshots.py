"""A snapshot that does not exist: the hint names those with similar names, which exist."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cutline.snapshots.records.proven_chains import SnapshotMissingError, read_chain, read_continued_full
from tests.unit.made_commits import memory
from tests.unit.made_deletions import store_two_chains


@pytest.mark.parametrize("read", [read_chain, read_continued_full])
@pytest.mark.parametrize(
    ("name", "hint"), [("odl", "did you mean old?   see: snapshot list"), ("else", "see: snapshot list")]
)
def test_a_mistyped_name_is_answered_with_a_similar_one(read: Callable[..., Any], name: str, hint: str) -> None:
    store = memory()
    store_two_chains(store)
    # What was never committed is no snapshot.
    store.create("snapshots/odlx/base/part", b"")
    with pytest.raises(SnapshotMissingError) as missing:
        read(store, name)
    assert missing.value.hint == hint
