"""A drill as JSON and for people."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET

from cutline.cli.output.junit import NO_ASSERTIONS
from cutline.cli.output.restore_report import borrowed_document, borrowed_lines, refused_lines
from cutline.cli.output.tables import quantity_text, seconds_text, size_text
from cutline.fleet.record import to_builtins
from cutline.restore.drill.assertions import AssertionResult, rows_text
from cutline.restore.drill.drill import DrillReport

SCHEMA = "cutline/drill/1"
SQL_SHOWN_MAX = 100


def drill_document(report: DrillReport) -> dict[str, Any]:
    """The command's JSON."""
    restored = report.restored
    return {
        "schema": SCHEMA,
        "result": report.result,
        "snapshot": restored.snapshot,
        "increment": restored.increment,
        "seconds": round(report.seconds, 3),
        "rows": restored.rows,
        "bytes": restored.bytes,
        "nodes": [{"node": n.node, "rows": n.rows, "seconds": round(n.seconds, 3)} for n in restored.nodes],
        "left_out": restored.left_out,
        "refused": [statement.document() for statement in restored.refused],
        "assertions": [_assertion_document(assertion) for assertion in report.assertions],
        **borrowed_document(restored),
    }


def _assertion_document(one: AssertionResult) -> dict[str, Any]:
    assertion = one.assertion
    return {
        "node": assertion.node,
        "sql": assertion.sql,
        "expected": None if assertion.expected is UNSET else to_builtins(assertion.expected),
        "found": [list(row) for row in one.found],
        "holds": one.holds,
        "why": one.why,
        "seconds": round(one.seconds, 3),
    }


def drill_lines(report: DrillReport) -> list[str]:
    """The output for people; its plan has named the items that are left out."""
    restored = report.restored
    size, rows, seconds = (
        size_text(restored.bytes),
        quantity_text(restored.rows, "rows"),
        seconds_text(restored.seconds),
    )
    lines = [f"{restored.snapshot} at increment {restored.increment} ({size} stored): {rows} restored in {seconds}"]
    lines += [f"{node.node}: {quantity_text(node.rows, 'rows')}" for node in restored.nodes]
    lines += borrowed_lines(restored)
    lines += refused_lines("refused", restored.refused)
    lines += [_assertion_line(assertion) for assertion in report.assertions] or [f"skipped: {NO_ASSERTIONS}"]
    return [*lines, f"{report.result}, {seconds_text(report.seconds)}"]


def _assertion_line(one: AssertionResult) -> str:
    sql = " ".join(one.assertion.sql.split())
    what = f"{one.assertion.node}: {sql[:SQL_SHOWN_MAX]}{'…' * (len(sql) > SQL_SHOWN_MAX)}"
    if one.holds:
        return f"holds: {what}: {rows_text(one.found)}"
    return f"{'skipped' if one.holds is None else 'FAILS'}: {what}: {one.why}"
