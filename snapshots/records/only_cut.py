"""Restore points (`create --only-cut`): commits with a cut and no rows."""

from __future__ import annotations

from snapshots.records.chain import Chain
from storage.errors import RefusedError


class OnlyCutError(RefusedError):
    """The snapshot is a restore point, which has no rows."""


def check_has_rows(chain: Chain, hint: str) -> None:
    """Raise OnlyCutError with this hint if the snapshot is a restore point."""
    if chain.full.only_cut:
        raise OnlyCutError(
            f"snapshot {chain.name} is a restore point (--only-cut): it has a cut and no rows",
            hint=hint,
            details={"snapshot": chain.name},
        )
