"""The sections of operations: the time of their phases, and what checks compared and skipped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cutline.cli.output.format import count_text, moment_text, size_text
from cutline.cli.report.drawing import Bar, BarPart, DataTable, PartKind, Section
from cutline.cli.report.point_sections import ROWS_MAX, newest_rows, width_text
from cutline.snapshots.activity.checks import EndedCheck, newest_covering
from cutline.snapshots.listing.figures import SnapshotFigures, StoreFigures
from cutline.snapshots.listing.operation_figures import OperationFigures, PhaseFigures
from cutline.snapshots.records.operation_records import CONFLICTS, INCONCLUSIVE, VALID, CheckFigures

BARS_MAX = 40
COMPARED = ("objects", "bytes", "rows", "changes", "partitions", "transactions")
RESULTS = {
    VALID: PartKind.VALID,
    INCONCLUSIVE: PartKind.INCONCLUSIVE,
    CONFLICTS: PartKind.CONFLICTS,
    "": PartKind.UNKNOWN,
}


def operation_sections(figures: StoreFigures) -> list[Section]:
    """The sections, in the order in which they are shown."""
    return [_phases(figures.operations), _checks(figures)]


def _phases(operations: OperationFigures) -> Section:
    phases = operations.phases
    longest = max((one.mean_seconds for one in phases), default=0.0)
    bars = [
        Bar(f"{one.kind}: {one.phase}", width_text(one.mean_seconds), _amount(one.mean_seconds, longest))
        for one in phases[:BARS_MAX]
    ]
    texts = ["The mean time that each phase of an operation took, of those that are done.", _read_text(operations)]
    if operations.untimed:
        texts.append(
            f"Of {count_text(operations.untimed)} operations no phases are recorded: deletions and resumed restores"
            " have none."
        )
    return Section("phases", "Time per phase", tuple(texts), (_phase_table(phases),), bars=tuple(bars))


def _read_text(operations: OperationFigures) -> str:
    read = f"{count_text(operations.read)} operations in the store that have ended were read"
    if operations.are_all:
        return f"{read}; no other one is of these snapshots."
    return f"Only the newest {read}: of checks and the like, of increments, and of all others."


def _amount(value: float, longest: float) -> tuple[BarPart, ...]:
    return (BarPart(value / longest, PartKind.AMOUNT),) if longest > 0 else ()


def _phase_table(phases: Iterable[PhaseFigures]) -> DataTable:
    titles = ("operation", "phase", "operations", "mean", "longest")
    rows = tuple(
        (
            one.kind, one.phase, count_text(one.operations), width_text(one.mean_seconds),
            width_text(one.longest_seconds),
        )
        for one in phases
    )  # fmt: skip
    return DataTable("Time per phase", titles, rows, frozenset({2, 3, 4}))


def _checks(figures: StoreFigures) -> Section:
    checks = figures.operations.checks
    snapshots = sorted((one for one in figures.snapshots if one.points), key=lambda one: one.points[-1].cut_at)
    shown = snapshots[-ROWS_MAX:]
    texts = [
        "A check up to an increment covers all restore points before it, too; its conflicts count for those after it as"
        " well, which need the same objects. The newest check counts that was not inconclusive, if there is one; what"
        " no recorded check covers is unknown.",
        _read_text(figures.operations),
    ]
    if len(shown) < len(snapshots):
        texts.append(f"The picture has the newest {len(shown)} of {count_text(len(snapshots))} snapshots.")
    return Section(
        "checks",
        "What checks compared and skipped",
        tuple(texts),
        (_check_table(checks), _skipped_table(checks)),
        bars=tuple(_coverage(one, checks) for one in reversed(shown)),
    )


def _coverage(snapshot: SnapshotFigures, checks: Iterable[EndedCheck]) -> Bar:
    """The restore points by the result of the newest check that covers each."""
    count = len(snapshot.points)
    own = [one for one in checks if one.point.snapshot == snapshot.name]
    results = [one.point.result if one else "" for one in newest_covering(own, count)]
    parts: list[BarPart] = []
    for result in results:
        kind = RESULTS[result]
        share = 1 / count
        if parts and parts[-1].kind == kind:
            parts[-1] = BarPart(parts[-1].share + share, kind)
        else:
            parts.append(BarPart(share, kind))
    counts = {kind: results.count(result) for result, kind in RESULTS.items()}
    text = ", ".join(f"{count_text(number)} {kind.value}" for kind, number in counts.items() if number)
    return Bar(snapshot.name, text, tuple(parts))


def _check_table(checks: Sequence[EndedCheck]) -> DataTable:
    titles = ("snapshot", "up to", "ended", "result", *COMPARED, "skipped", "conflicts")
    shown, note = newest_rows([_check_cells(one) for one in reversed(checks)], "checks")
    return DataTable("Checks", titles, shown, frozenset(range(4, 12)), note)


def _check_cells(one: EndedCheck) -> tuple[str, ...]:
    """The cells of one check; those of figures are empty if it did not record them."""
    point = one.point
    up_to = f"increment {point.increment}" if point.increment else "full"
    head = (point.snapshot, up_to, moment_text(one.moment), point.result)
    if not isinstance(figures := point.figures, CheckFigures):
        return (*head, *("" for _ in (*COMPARED, "skipped", "conflicts")))
    compared = (_compared_text(name, figures.compared.get(name, 0)) for name in COMPARED)
    return (*head, *compared, count_text(figures.skipped), count_text(figures.conflicts))


def _compared_text(name: str, amount: int) -> str:
    return size_text(amount) if name == "bytes" else count_text(amount)


def _skipped_table(checks: Sequence[EndedCheck]) -> DataTable:
    """What the newest check of each snapshot skipped."""
    newest: dict[str, EndedCheck] = {}
    for one in checks:
        newest.setdefault(one.point.snapshot, one)
    rows: list[tuple[str, ...]] = []
    more = 0
    for one in newest.values():
        if isinstance(figures := one.point.figures, CheckFigures):
            ended = moment_text(one.moment)
            rows += [(one.point.snapshot, ended, skipped.what, skipped.why) for skipped in figures.examples]
            more += figures.skipped - len(figures.examples)
    shown, note = newest_rows(rows[::-1], "parts")
    note = "; ".join(filter(None, (note, f"{count_text(more)} more were skipped" if more else "")))
    titles = ("snapshot", "ended", "what", "why")
    return DataTable("What the newest check of each snapshot skipped", titles, shown, note=note)
