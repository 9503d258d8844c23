"""When cuts were made, and the newest one that was made not after a moment."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from msgspec import UnsetType

from cutline.fleet.record import Time
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import Commit, CommitSummary
from cutline.snapshots.records.commits import SnapshotMissingError


def cut_time(commit: Commit | CommitSummary) -> datetime:
    """When the commit's cut was made; if that is not recorded, when the commit was put, which is later."""
    made_at = commit.cut_at if isinstance(commit, CommitSummary) else commit.cut.made_at
    if isinstance(made_at, str):
        return datetime.fromisoformat(made_at)
    return datetime.fromisoformat(commit.created_at) + timedelta(seconds=commit.seconds)


def safe_time(commit: Commit | CommitSummary) -> Time | None:
    """The safe time of the commit's cut; None if it is not recorded."""
    safe_at = commit.safe_at if isinstance(commit, CommitSummary) else commit.cut.safe_at
    return None if isinstance(safe_at, UnsetType) else safe_at


def chain_at(chain: Chain, moment: datetime) -> Chain:
    """The chain up to the newest cut that was made not after `moment`; raise SnapshotMissingError if there is none."""
    numbers = [commit.increment for commit in chain.commits if cut_time(commit) <= moment]
    if not numbers:
        raise SnapshotMissingError(
            f"snapshot {chain.name} has no cut that was made by {_shown(moment)}",
            hint=f"its first one was made at {_shown(cut_time(chain.full))}; for other snapshots: snapshot list",
            details={"snapshot": chain.name},
        )
    return replace(chain, increments=chain.increments[: numbers[-1]])


def next_cut_time(whole: Chain, chain: Chain) -> datetime | None:
    """When the first cut of the whole chain after `chain`, which begins it, was made; None if there is none."""
    later = whole.commits[len(chain.commits) :]
    return cut_time(later[0]) if later else None


def _shown(moment: datetime) -> str:
    return Time.of(moment.astimezone(UTC))
