"""DDL statements that a target refuses, and what they mean for a restore.

Refusals found in the rehearsal end a restore before any row is loaded. Others appear only once the rows are loaded: an
index whose function fails on a value, or a constraint that rows violate under a different collation. Everything else is
still restored. The operator then decides: repair the cause and resume, publish without the refused statements, or undo.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from cutline.fleet.messages import CHECK_NAMED, join_some, list_some, name_nodes
from cutline.nodes.encodings import raw_text
from cutline.restore.ddl.ddl import DATABASE, MATERIALIZED_VIEW, Ddl, DdlEntry, Refusal, show_name
from cutline.restore.ddl.running import EARLIER
from cutline.restore.ddl.statements import RESTRICTED_VERSION, NeededPath
from cutline.restore.plan.checked_ddl import read_all_ddl
from cutline.restore.plan.database_plan import plan_database
from cutline.restore.plan.plan import LockedTargets, RestorePlan
from cutline.restore.plan.report import NeededSearchPath, RefusedStatement, access_to, describe_refusals
from cutline.restore.plan.roles import name_bytes
from cutline.restore.run.build import FinishedDatabase
from cutline.restore.run.rehearsal import remedy_of
from cutline.restore.run.run import RestoreRun
from cutline.restore.targets.obstacles import Obstacles
from cutline.restore.targets.target import Target, TargetUnfitError
from cutline.storage.errors import SnapshotError

# The limit per database, because the record is stored in a comment on the database.
REFUSED_KEPT_MAX = 100
NAMED_MAX = 5
# What fails for an object of each kind.
MAINTAINED = {
    "INDEX": ("ANALYZE", "REINDEX"),
    "CONSTRAINT": ("ANALYZE", "REINDEX"),
    "STATISTICS": ("ANALYZE",),
    MATERIALIZED_VIEW: ("REFRESH",),
}
# So many objects with the same cause, and so many causes, are named in warnings; JSON and --verbose list them all.
OBJECTS_NAMED_MAX, CAUSES_NAMED_MAX = 3, 5


# What to do if rows are the cause, by the first characters of the SQLSTATE: the statements ran in the empty database.
KEYS, OF_SHARDS = ("23505", "23P01"), "rows of several shards may have the same key: remove all but one of them"
EQUAL_KEYS = (
    "two rows have the same key: unless a collation or a function of the target compares them in another way, the"
    f" snapshot or the index on the source is damaged; to find out: {CHECK_NAMED} --restorable"
)
OWNERS = (
    "indexes and constraints call functions as their table's owner, who may lack a privilege that it has on the source"
    " from a superuser's grant or as a superuser: a missing USAGE on a schema also hides what is in it"
)
ROW_CAUSES: Mapping[str, str] = {
    "23503": "a row references a row that is missing on the source, too, or left out of this restore, unless the"
    f" snapshot is damaged; to find out: {CHECK_NAMED} --restorable",
    "23": "a row violates a constraint that it does not violate on the source, or it is damaged:"
    f" {CHECK_NAMED} --restorable",
    "22": "a function or an operator fails on a value: its version or a locale may differ from the source's",
    # With rows, an index calls functions as its table's owner.
    "42501": OWNERS,
    "42883": OWNERS,
    "42P01": OWNERS,
}


class DdlRefusedError(SnapshotError):
    """All rows are restored but DDL statements were refused; the operator decides whether to publish the databases."""

    exit_code = 10

    def __init__(self, message: str, refused: Iterable[RefusedStatement], hint: Sequence[str] = ()) -> None:
        self.refused = tuple(refused)
        super().__init__(message, hint=hint, details={"refused": [statement.document() for statement in self.refused]})


def needed_path(node: str, entry: DdlEntry, needed: tuple[NeededPath, ...]) -> NeededSearchPath:
    """Describe an object whose functions use names without a schema."""
    return NeededSearchPath(
        node,
        entry.label,
        MAINTAINED[entry.kind],
        tuple(show_name(path.function) for path in needed),
        tuple(show_name(path.statement) for path in needed),
    )


def path_warnings(found: Iterable[NeededSearchPath]) -> list[str]:
    """Return a warning for each cause: the functions that set no search_path, some objects, what fails, the remedy."""
    causes: dict[tuple[tuple[str, ...], tuple[str, ...]], list[NeededSearchPath]] = {}
    for one in found:
        causes.setdefault((one.functions, one.statements), []).append(one)
    most_first = sorted(causes.items(), key=lambda cause: -len(cause[1]))
    lines = [
        _path_warning(functions, statements, objects)
        for (functions, statements), objects in most_first[:CAUSES_NAMED_MAX]
    ]
    if others := most_first[CAUSES_NAMED_MAX:]:
        count = sum(len(objects) for _, objects in others)
        lines.append(
            f"{count} more objects use other functions that do not set search_path ({len(others)} causes): --json and"
            " --verbose list them"
        )
    return lines


def _path_warning(functions: tuple[str, ...], statements: tuple[str, ...], objects: Sequence[NeededSearchPath]) -> str:
    nodes, who, of_which, where = list(dict.fromkeys(one.node for one in objects)), objects[0].object, "it", ""
    if len(objects) > 1:
        named = [one.object if len(nodes) == 1 else f"{one.object} on {one.node}" for one in objects]
        hidden = "; --json and --verbose list all" if len(objects) > OBJECTS_NAMED_MAX else ""
        who, of_which = f"{len(objects)} objects ({list_some(named, OBJECTS_NAMED_MAX)}{hidden})", "them"
        where = " on each of these nodes" if len(nodes) > 1 else ""
    use = "use" if len(objects) > 1 else "uses"
    named_functions = f" ({', '.join(functions)})" if functions else ""
    *earlier, last = dict.fromkeys(command for one in objects for command in one.work)
    work = f"{', '.join(earlier)} and {last}" if earlier else last
    remedy = " ".join(statements) or "ALTER FUNCTION … SET search_path = …;"
    return (
        f"{name_nodes(nodes)}: {who} {use} functions that do not set search_path{named_functions}; on PostgreSQL 17 and"
        f" newer, {work} of {of_which} will fail until you run{where}: {remedy}"
    )


def report_refused(run: RestoreRun, finished: Mapping[Target, FinishedDatabase]) -> None:
    """Add the refusals to the report; raise DdlRefusedError unless the request allows them."""
    for target in run.plan.targets:
        if (done := finished.get(target)) and not done.is_earlier:
            run.report.refused += describe_refusals(target, done.refusals)
            if run.connections[target.shard].info.server_version >= RESTRICTED_VERSION:
                run.report.needed_paths += [
                    needed_path(target.node.id, entry, needed)
                    for entry, needed in done.helped
                    if entry.kind in MAINTAINED
                ]
        elif record := run.records.get(target.shard):
            # Report statements that an earlier process left out because they were refused.
            run.report.refused += _describe_earlier(run, target, record.refused)
            if len(record.refused) == REFUSED_KEPT_MAX:
                run.report.warnings.append(
                    f"node {target.node.id}: the server may have refused more objects than the {REFUSED_KEPT_MAX} that"
                    " are named: compare the definitions"
                )
    run.report.warnings += path_warnings(run.report.needed_paths)
    # List counted statements last, because there may be many for extension objects.
    named = sorted(run.report.refused, key=lambda statement: bool(statement.counted))
    causes = [statement.text() for statement in named if not statement.needs]
    if not causes or run.allows_refused:
        return
    hints: list[str] = []
    for target, done in finished.items():
        states = [refusal.sqlstate for refusal in done.refusals if not refusal.needs]
        hints += [_cause_of(state, run.plan) for state in states]
        if target.shard in run.unrehearsed:
            hints += map(remedy_of, states)
    raise DdlRefusedError(
        f"all rows are loaded, but statements were refused: {join_some(causes, NAMED_MAX)}",
        run.report.refused,
        hint=list(dict.fromkeys(filter(None, hints))),
    )


def _cause_of(sqlstate: str, plan: RestorePlan) -> str:
    """Return what to do about rows that cause this error; "" if they don't cause it."""
    if sqlstate in KEYS:
        return OF_SHARDS if plan.topology else EQUAL_KEYS
    return next((text for begin, text in ROW_CAUSES.items() if sqlstate.startswith(begin)), "")


def _describe_earlier(run: RestoreRun, target: Target, labels: Sequence[str]) -> list[RefusedStatement]:
    """Describe the statements refused in an earlier process, with their text if the snapshot still contains it."""
    if not labels:
        return []
    databases = {target.shard: plan_database(run.plan, target, run.connections[target.shard])}
    locked = LockedTargets(run.plan, run.connections, run.folder, Obstacles())
    ddl = read_all_ddl(locked, [target], databases).ddl.get(target.shard)
    sections = {**ddl.sections, DATABASE: _entries_of_database(run, target, ddl)} if ddl else {}
    refusals = {
        entry.label: Refusal(entry, name, EARLIER, "") for name, entries in sections.items() for entry in entries
    }
    refusals |= {refusal.label: refusal for refusal in (ddl.lost if ddl else ())}
    known = {
        statement.object: statement
        for statement in describe_refusals(target, [refusals[label] for label in labels if label in refusals])
    }
    lacking = RefusedStatement(target.node.id, target.database, "", reason=EARLIER, access=access_to(target))
    return [known.get(label) or replace(lacking, object=label) for label in labels]


def _entries_of_database(run: RestoreRun, target: Target, ddl: Ddl) -> tuple[DdlEntry, ...]:
    """Return the entries for the database's own properties, with statements encoded as the database stores them."""
    pieces = ddl.database.pieces(ddl.database.name) if ddl.database else []
    texts = ["\n".join(piece.statements) for piece in pieces]
    connection, encoding = run.connections[target.shard], run.plan.chain.baseline[target.source].encoding
    with suppress(TargetUnfitError):
        texts = list(map(raw_text, name_bytes(connection, texts, encoding)))
    return tuple(DdlEntry(0, piece.kind, "", piece.name, text) for piece, text in zip(pieces, texts, strict=True))
