"""`snapshot init`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import typer
from msgspec.structs import replace

from cutline.cli.output.arguments import command_context
from cutline.cli.output.hooks import with_hooks
from cutline.cli.output.results import emit, progress
from cutline.cli.output.retention_rules import retention_text, rules_document
from cutline.cli.output.tables import quantity_is
from cutline.fleet.example import write_example
from cutline.fleet.messages import NODES_NAMED_MAX, group_by_value, list_some
from cutline.fleet.record import to_builtins
from cutline.nodes.problems import actions_of, grants_of, optional_lines
from cutline.snapshots.create.initialise import CopyToRenew, InitReport, initialise
from cutline.spark.settings import check_protection
from cutline.storage.errors import UsageError

SCHEMA, EXAMPLE_SCHEMA = "cutline/init/1", "cutline/init-example/1"
# --json lists all tables.
TABLES_NAMED_MAX = 20
OWN_SLOTS_DROP = (
    "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
    " WHERE slot_name ^@ 'cutline_' AND database = current_database();"
)


def init(
    context: typer.Context,
    *,
    forget_nodes: Annotated[
        bool,
        typer.Option(
            "--forget-nodes",
            help="Count only the current primaries toward the majority, after removing nodes or replacing servers.",
        ),
    ] = False,
    example: Annotated[
        bool,
        typer.Option("--example", help="Only write a commented example fleet.toml to edit. It never replaces a file."),
    ] = False,
) -> None:
    """Check and prepare every node and the store. Safe to repeat."""
    options = command_context(context)
    if example:
        if forget_nodes:
            raise UsageError("--example and --forget-nodes are mutually exclusive", hint="use only one of them")
        write_example(options.fleet_path)
        lines = [f"wrote {options.fleet_path}: fill in your store and your nodes", "next: snapshot init"]
        emit(context, {"schema": EXAMPLE_SCHEMA, "file": options.fleet_path}, lines)
        return
    fleet = options.load_fleet()
    check_protection(fleet.spark_master, fleet.spark_settings)
    with with_hooks(context, fleet, "init"):
        with progress(context) as shown:
            report = initialise(fleet, shown, forgets_nodes=forget_nodes)
        document = {
            "schema": SCHEMA,
            "fleet": report.store.fleet_id,
            "name": report.store.name,
            "store_created": report.store_created,
            "nodes": to_builtins(report.nodes),
            "groups": report.groups,
            "append_only": report.append_only,
            "published": report.published,
            "forgotten": report.forgotten,
            "deleting_refused": report.deleting_refused,
            "encryption_key": report.encryption_key or None,
            "grants": grants_of(report.lacking),
            "actions": actions_of(report.lacking),
            "standbys_left_out": [standby for _, standby in report.too_old],
            "absent": to_builtins(report.absent),
            "retention": rules_document(fleet.retention.or_default) | {"default": not fleet.retention.rules},
            "warnings": [*_warnings(report), *(pattern.text for pattern in report.unmatched)],
            "surroundings": [warning.to_json() for warning in report.warnings],
            "unmatched_patterns": [
                {"rule": one.rule, "pattern": one.pattern, "similar": one.similar} for one in report.unmatched
            ],
            "to_copy": [
                {
                    "snapshot": one.snapshot,
                    "node": one.node,
                    "reason": one.reason,
                    "tables": list(one.tables) or None,
                }
                for one in report.to_copy
            ],
            "renamed": to_builtins(report.renamed),
        }
        lines = lines_of(report, allows_one_copy=fleet.allows_one_copy)
        emit(context, document, [*lines[:-1], retention_text(fleet.retention), lines[-1]])


def lines_of(report: InitReport, *, allows_one_copy: bool = False) -> list[str]:
    """Return the human-readable output.

    `allows_one_copy` is set if the fleet file lets a check pass although it has no second copy to compare.
    """
    lines = [
        f"fleet {report.store.name} ({report.store.fleet_id}): {quantity_is(len(report.nodes), 'nodes')}"
        " ready for snapshots",
        "the store passed its probe" + (", and now belongs to this fleet" if report.store_created else ""),
    ]
    if report.deleting_refused:
        lines.append(
            f"snapshots can be taken, but the store refused to delete the probe's objects: {report.deleting_refused}"
        )
    lines.append(
        f"the store is encrypted with key {report.encryption_key}, except for the names of snapshots and nodes, and the"
        " number, sizes and times of objects; keep a copy of the key elsewhere: without it nothing can be read"
        if report.encryption_key
        else "the store is not encrypted by Cutline: docs/encryption.md"
    )
    lines += _published_lines(report)
    standbys = {node.backup_of for node in report.nodes} | {standby.primary for standby in report.absent}
    if report.too_old:
        names = [standby for _, standby in report.too_old]
        some = list_some(names, NODES_NAMED_MAX)
        lines.append(f"standbys older than PostgreSQL 16 can't decode WAL and are left out: {some}")
    if alone := [node.node for node in report.nodes if node.backup_of is None and node.node not in standbys]:
        what = "a standby that decodes WAL" if report.too_old else "a standby"
        result = (
            "which [check] in the fleet file allows"
            if allows_one_copy
            else "and exits with 4; to allow one copy: docs/check.md#one-copy"
        )
        some = list_some(alone, NODES_NAMED_MAX)
        lines.append(f"without {what}: {some}; check has no second copy to compare, {result}")
    if report.forgotten:
        primaries = report.published
        names = [f"the earlier server of {node}" if node in primaries else node for node in report.forgotten]
        lines += [
            f"no longer counted toward the majority: {', '.join(names)}",
            "their slots remain and retain WAL; if such a server is still running and will not be used again, run in"
            " its database:",
            OWN_SLOTS_DROP,
        ]
    lines += [f"warning: {text}" for text in _warnings(report)]
    lines += _copies_lines(report.to_copy)
    lines += [
        f"{one.listed} is {one.node} in {one.snapshot}: its increments go on with it under that id"
        for one in report.renamed
    ]
    return [*lines, *optional_lines(report.lacking, report.addresses), "next: snapshot create NAME"]


def _warnings(report: InitReport) -> list[str]:
    return [standby.text for standby in report.absent] + [warning.text for warning in report.warnings]


def _copies_lines(to_copy: Iterable[CopyToRenew]) -> list[str]:
    """List the copies that the next increments begin again; nodes of a snapshot with the same reason on one line."""
    nodes: dict[CopyToRenew, list[str]] = {}
    for one in to_copy:
        nodes.setdefault(replace(one, node=""), []).append(one.node)
    return [
        f"the next increment of {one.snapshot} copies"
        f" {list_some(one.tables, TABLES_NAMED_MAX) if one.tables else 'all tables'}"
        f" of {list_some(names, NODES_NAMED_MAX)}: {one.reason}"
        for one, names in nodes.items()
    ]


def _published_lines(report: InitReport) -> list[str]:
    """List the tables of each node; if there are many nodes, the nodes with the same tables on one line."""
    texts: dict[str, str] = {}
    for node, tables in report.groups.items():
        new, append_only = report.published[node], report.append_only[node]
        texts[node] = f"{quantity_is(len(tables), 'tables')} published"
        texts[node] += f", new: {list_some(new, TABLES_NAMED_MAX)}" if new else ""
        if append_only:
            some = list_some(append_only, TABLES_NAMED_MAX)
            texts[node] += f"\nappend-only (only INSERT and TRUNCATE are captured): {some}"
    of_nodes = [(node, text) for node, text in texts.items()]
    if len(texts) > NODES_NAMED_MAX:
        of_nodes = [(list_some(nodes, NODES_NAMED_MAX), text) for text, nodes in group_by_value(texts).items()]
    return [f"{nodes}: {line}" for nodes, text in of_nodes for line in text.split("\n")]
