"""What a commit says of definitions and DDL that are not as before its cut."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from fleet.config import Node
from fleet.progress import Progress
from snapshots.carrying import Carried, Work
from snapshots.cutting import MadeCut
from snapshots.manifest import SchemaPart, StoredObject
from snapshots.points import Point
from snapshots.schema import read_roles, schema_prefix, store_schema

T = TypeVar("T")


def schema_part(work: Work, carried: Carried, made: MadeCut, progress: Progress) -> SchemaPart | None:
    """What is not as at the commit before; None if all is."""
    creating = work.creating
    plan = carried.plan
    dumped = [shard for shard, found in plan.fingerprints.items() if found != work.known.fingerprints[shard]]
    objects = [*carried.objects, *_dumped(work, dumped, progress)]
    roles = creating.sessions.ask_primaries(read_roles) if dumped else {}
    states = {
        shard: {name: state for name, state in one.states.items() if work.known.states[shard].get(name) != state}
        for shard, one in plan.shards.items()
    }
    part = SchemaPart(
        groups=_filled(
            {shard: tuple(one.table.group for one in found.changed) for shard, found in plan.shards.items()}
        ),
        gone=_filled({shard: found.gone for shard, found in plan.shards.items()}),
        successions=_filled({shard: found.successions for shard, found in plan.shards.items()}),
        begun=_filled({node.id: _begun(carried, made, node) for node in creating.sessions.nodes}),
        tables=_filled(states),
        objects=tuple(objects),
        roles={shard: roles[shard] for shard in dumped},
        fingerprints={shard: plan.fingerprints[shard] for shard in dumped},
    )
    return None if part == SchemaPart() else part


def _filled(found: Mapping[str, T]) -> dict[str, T]:
    return {name: one for name, one in found.items() if one}


def _begun(carried: Carried, made: MadeCut, node: Node) -> dict[int, int]:
    """From which position the new definitions' changes count on the node."""
    begun: dict[int, int] = {}
    for one in carried.plan.shards[node.shard].changed:
        number = one.table.group.number
        if one.after is None:
            begun[number] = carried.positions[node.id]
        else:
            first = [found.first_changes[number] for found in made.segments[node.id] if number in found.first_changes]
            begun[number] = min(first, default=made.record.cut.nodes[node.shard].position)
    return begun


def _dumped(work: Work, shards: list[str], progress: Progress) -> list[StoredObject]:
    """The DDL of these shards as it is now."""
    creating = work.creating
    if not shards:
        return []
    progress.step("dump DDL", total=len(shards), unit="nodes")

    def dump(shard: str) -> list[StoredObject]:
        prefix = schema_prefix(creating.operation.snapshot, shard, creating.operation.id)
        stored = store_schema(creating.store, creating.fleet.node(shard), prefix, None, creating.sessions.watch)
        progress.advance(1)
        return stored

    with ThreadPoolExecutor(max_workers=len(shards)) as threads:
        found = [stored for objects in threads.map(dump, shards) for stored in objects]
    progress.reached(Point.SCHEMA_STORED)
    return found
