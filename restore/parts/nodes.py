"""Restores of some shards: which those are, and what the result is not."""

from __future__ import annotations

from collections.abc import Iterable

from cutline.storage.errors import UsageError


def choose_nodes(nodes: Iterable[str], primaries: Iterable[str], place: str) -> list[str]:
    """Those of `primaries` that are named; all if none is. Raises UsageError naming one that is not among them."""
    wanted, primaries = set(nodes), list(primaries)
    if unknown := sorted(wanted - set(primaries)):
        raise UsageError(
            f"--node {', '.join(unknown)}: {place} has no such primary",
            hint=f"its primaries are: {', '.join(primaries)}",
            details={"nodes": unknown},
        )
    return [one for one in primaries if not wanted or one in wanted]


def warn_of_nodes(nodes: Iterable[str], shards: Iterable[str]) -> list[str]:
    """The warning that only `nodes` of the snapshot's `shards` are restored; none if these are all."""
    chosen = set(nodes)
    others = sorted(set(shards) - chosen)
    if not chosen or not others:
        return []
    return [
        f"not restored: {', '.join(others)}; what spans shards is as of the cut on {', '.join(sorted(chosen))} alone"
    ]
