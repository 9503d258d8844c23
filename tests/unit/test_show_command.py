"""`snapshot show`: the text of a chain."""

from __future__ import annotations

from msgspec import structs

from cutline.cli.commands.show import lines_of
from cutline.snapshots.listing.listing import Entry
from cutline.snapshots.records.chain import Chain
from tests.unit.made_commits import full_commit, increment_commit

COMMENT = "before the move"


def texts_of(chain: Chain) -> list[str]:
    return [line for line in lines_of(Entry(chain.name, chain), chain) if isinstance(line, str)]


def test_the_comments_of_all_commits_are_shown() -> None:
    one, two = increment_commit(1), increment_commit(2)
    full = structs.replace(full_commit(), comment="the first")
    bare = texts_of(Chain(full, (structs.replace(one, comment=""), structs.replace(two, comment=""))))
    assert bare[0].endswith(" — the first")
    lines = texts_of(Chain(full, (structs.replace(one, comment=""), structs.replace(two, comment=COMMENT))))
    assert [line for line in lines if line not in bare] == [f"increment 2 — {COMMENT}"]
    (long,) = (line for line in texts_of(Chain(full, (structs.replace(one, comment="x" * 10_000),))) if "xx" in line)
    assert len(long) < 1000
