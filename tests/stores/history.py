"""Rebuild the fields in which an increment's commit describes the commits before it (docs/store-format.md)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

Document = dict[str, Any]
SUMMARIZED_MAX, COMMENT_MAX = 64, 1000


def relink(document: Document, before: Sequence[Document]) -> None:
    """Make an increment refer to the current digests of the commits `before` it, the full snapshot first.

    A commit without `history` gets only `previous`; if an earlier document is damaged, `history` does not change.
    """
    last = before[-1]
    document["previous"] = {"operation": last.get("operation", ""), "digest": last["digest"]}
    if "history" not in document:
        return
    with suppress(KeyError, TypeError):
        document["history"] = history_of(before)


def history_of(before: Sequence[Document]) -> Document:
    """Return the value of `history` in the increment after these commits."""
    full, *increments = before
    found: Document = {"full": full["digest"]}
    if redefinitions := {str(one["increment"]): one["digest"] for one in increments if one.get("schema_changes")}:
        found["redefinitions"] = redefinitions
    first = max(len(increments) // SUMMARIZED_MAX * SUMMARIZED_MAX, 1)
    if recent := [_summary(one) for one in increments[first - 1 :]]:
        found["recent"] = recent
    return found


def _summary(commit: Document) -> Document:
    comment = commit["comment"]
    found = {name: commit[name] for name in ("increment", "operation", "digest", "created_at", "seconds")}
    found |= {name: commit["counts"][name] for name in ("changes", "transactions", "bytes")}
    found["cut"] = commit["cut"]["id"]
    times = {"cut_at": "made_at", "safe_at": "safe_at"}
    found |= {name: commit["cut"][of] for name, of in times.items() if of in commit["cut"]}
    if comment:
        found["comment"] = comment if len(comment) <= COMMENT_MAX else comment[: COMMENT_MAX - 1] + "…"
    return found | ({"terminal": True} if commit.get("terminal") else {})
