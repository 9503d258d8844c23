"""The last cut of a chain in which an unreachable node took part, for the error of an increment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC

from cutline.fleet.messages import NODES_NAMED_MAX, group_by_value, join_some, list_some
from cutline.fleet.record import Time
from cutline.nodes.connections import NodeUnreachableError
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import Commit
from cutline.snapshots.records.proven_chains import cut_time, increment_label, read_commit
from cutline.storage.errors import SnapshotError
from cutline.storage.store import ObjectStore


@contextmanager
def naming_last_cuts(store: ObjectStore, read_chain: Callable[[], Chain]) -> Iterator[None]:
    """Complete errors about nodes that can't be reached: name the last cut of the chain in which each took part.

    If the chain can't be read, the error stays as it is.
    """
    try:
        yield
    except NodeUnreachableError as error:
        with suppress(SnapshotError):
            _complete(error, store, read_chain())
        raise


def _complete(error: NodeUnreachableError, store: ObjectStore, chain: Chain) -> None:
    named = error.details.get("nodes") or [error.details.get("node")]
    away = [str(node) for node in named] if isinstance(named, list) else []
    last = {node: _last_commit(store, chain, node) for node in away if node in chain.parts}
    if not last:
        return
    texts = group_by_value({node: _text(chain, commit) for node, commit in last.items()})
    added = [f"{list_some(nodes, NODES_NAMED_MAX)}: {text}" for text, nodes in texts.items()]
    error.message = join_some([error.message, *(texts if len(away) == 1 else added)], NODES_NAMED_MAX)
    error.args = (error.message,)
    error.details["last_cuts"] = [
        {"node": node, "increment": commit.increment, "cut_at": _cut_at(commit)} for node, commit in last.items()
    ]


def _text(chain: Chain, commit: Commit) -> str:
    return f"last in the cut of {increment_label(chain.name, commit.increment)} at {_cut_at(commit)}"


def _last_commit(store: ObjectStore, chain: Chain, node: str) -> Commit:
    if node not in chain.absent:
        return chain.last
    return read_commit(store, chain.name, chain.absent[node].since - 1)


def _cut_at(commit: Commit) -> Time:
    return Time.of(cut_time(commit).astimezone(UTC))
