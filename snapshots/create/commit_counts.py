"""The counts in a commit, by which nothing that it lists can go missing unnoticed."""

from __future__ import annotations

from dataclasses import replace

from msgspec import structs

from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import FullSnapshot, Increment
from cutline.snapshots.records.commit_rules import check_fits
from cutline.snapshots.records.commits import commit_key
from cutline.snapshots.records.definition_rules import definition_counts
from cutline.snapshots.records.part_rules import count_listed


def counted_full(commit: FullSnapshot, ignored: int) -> FullSnapshot:
    """The commit with its counts; `ignored` counts the changes that were decoded and not archived."""
    counts = count_listed(set(commit.primaries), commit) | definition_counts(Chain(commit))
    return structs.replace(commit, counts=counts | {"ignored": ignored})


def counted_increment(chain: Chain, commit: Increment, ignored: int) -> Increment:
    """The commit, which continues the chain, with its counts; raise ManifestError if its parts do not fit."""
    last = replace(chain, increments=(*chain.increments, commit))
    counts = count_listed(set(chain.full.primaries), commit) | definition_counts(last)
    commit = structs.replace(commit, counts=counts | {"ignored": ignored})
    # A commit that no command would accept must not be stored.
    check_fits(chain, commit, commit_key(chain.name, commit.increment))
    return commit
