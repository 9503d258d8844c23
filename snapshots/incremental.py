"""The work of an increment: a cut, the WAL up to it archived, the commit.

The archive and the copies of tables that can't be carried on are all that is written before the commit. An attempt
that dies leaves segments that the next one begins with, and a slot that stands where the archive ends or before.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from fleet.left_out import read_left_out
from fleet.progress import Progress
from snapshots.carrying import Work
from snapshots.chain import Chain
from snapshots.continuable import rules_since
from snapshots.counted import check_counted, counted_states, since_of, with_warnings
from snapshots.counting import counts_of
from snapshots.create import Creating
from snapshots.cutting import Before
from snapshots.exclusive import check_exclusive
from snapshots.jobs import SparkSource
from snapshots.large_objects import with_stored
from snapshots.manifest import Commit, Previous
from snapshots.operations import commit_operation
from snapshots.points import Point
from snapshots.prepared import await_prepared
from snapshots.schema_changes import Catalogs, known_of
from snapshots.taking import take_cut
from snapshots.terminal import check_final, end_writes


def take_increment(
    creating: Creating,
    chain: Chain,
    seen: Mapping[str, Catalogs],
    spark: SparkSource,
    progress: Progress,
    began: float,
) -> Commit:
    """Take the increment and commit it.

    `seen` are the primaries' catalogs as the checks read them; `began` is when the command did (time.monotonic).
    """
    progress.reached(Point.INTENT_STORED)
    sessions, store, operation = creating.sessions, creating.store, creating.operation
    request = creating.request
    work = _work(creating, chain, seen)

    def close() -> Mapping[str, int]:
        await_prepared(sessions, request.wait_seconds, progress, "the end of all writes")
        # Nobody is kept from writing while a JVM starts, or for one that does not.
        progress.step("start Spark")
        spark.session()
        return end_writes(creating.lock, store, operation, chain.part.fleet_id, request.wait_seconds, progress)

    taken = take_cut(work, spark, progress, close if request.terminal else None)
    progress.step("commit")
    untold = check_counted(sessions, counted_states(taken.tables, work.known), since_of(chain))
    left_out = (
        with_stored(read_left_out(sessions.primaries, rules_since(chain, creating.fleet), taken.groups), chain.full)
        + chain.too_old
    )
    check_final(taken.plan, taken.made, taken.ends, sessions, store)
    commit = Commit(
        snapshot=chain.name,
        increment=operation.increment,
        operation=operation.id,
        chain=chain.full.operation,
        created_at=operation.began_at,
        seconds=time.monotonic() - began,
        cut=taken.made.record,
        segments=taken.made.segments,
        sequences=taken.sequences,
        counts=counts_of(sessions.nodes, taken.made, taken.schema.objects if taken.schema else ()),
        comment=request.comment,
        schema=taken.schema,
        terminal=request.terminal,
        left_out=with_warnings(left_out, chain, untold, taken.copied),
        previous=Previous(chain.last.operation, chain.last.digest),
    )
    check_exclusive(creating.lock, store, operation)
    commit_operation(store, operation, commit)
    progress.reached(Point.COMMITTED)
    return commit


def _work(creating: Creating, chain: Chain, seen: Mapping[str, Catalogs]) -> Work:
    cuts = chain.last.cut.cut.nodes
    return Work(
        creating,
        chain.part.fleet_id,
        rules_since(chain, creating.fleet),
        chain.full.operation,
        known_of(chain),
        seen,
        chain.part.base,
        {node.id: chain.segments(node.id) for node in creating.sessions.nodes},
        {node: Before(cut.position, cut.undecided) for node, cut in cuts.items()},
    )
