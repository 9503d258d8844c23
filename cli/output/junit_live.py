"""JUnit reports on checks of running databases."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator, Sequence

from cutline.check.live.report import (
    APPEND_ONLY,
    CUT_ROWS,
    INDEX,
    STANDBY_ROWS,
    UNREADABLE,
    LiveReport,
    LiveRow,
    row_lines,
)
from cutline.cli.output.junit import CHECK, xml_of
from cutline.cli.output.tables import printable


def junit_of_live(report: LiveReport) -> str:
    """Return the report on a check of running databases as XML: one suite.

    It has a failure for each conflict, an error for each node that could not be reached, a skipped case for each part
    that was not compared, and a passed case for each comparison of a shard in which nothing was found. Failures and
    skipped cases contain the rows that were named. The names of the cases differ.
    """
    suites = ElementTree.Element("testsuites", name=CHECK, time=f"{report.seconds:.3f}")
    suite = ElementTree.SubElement(suites, "testsuite", name="running databases")
    taken = Counter[str]()

    def add(name: str, outcome: str = "", text: str = "", **attributes: str) -> None:
        taken[name] += 1
        title = name if taken[name] == 1 else f"{name} ({taken[name]})"
        case = ElementTree.SubElement(suite, "testcase", classname="running databases", name=title)
        if outcome:
            ElementTree.SubElement(case, outcome, attributes).text = printable(text, keep="\n\t") or None

    for one in report.conflicts:
        title = " ".join(filter(None, (f"{one.kind}: {one.nodes}", one.group, one.index)))
        add(title, "failure", _rows_text(one.rows), message=one.detail, type=one.kind)
    for node, why in report.unreachable.items():
        add(f"node {node}", "error", message=why, type="node-unreachable")
    unproven = {f"{rows.group} on {rows.node}": rows.rows for rows in report.unproven}
    for left in report.skipped:
        add(left.what, "skipped", _rows_text(unproven.get(left.what, ())), message=left.why)
    for passed in _passed_comparisons(report):
        add(passed)
    if not len(suite):
        add("comparison", "skipped", message="there was nothing to compare")
    counts = {"tests": len(suite)} | {
        name: len(suite.findall(f"testcase/{outcome}"))
        for name, outcome in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped"))
    }
    suite.attrib.update({name: str(count) for name, count in counts.items()})
    return xml_of(suites)


def _passed_comparisons(report: LiveReport) -> Iterator[str]:
    """Yield a name for each comparison of a shard in which nothing was found, and no node was lost."""
    kinds: dict[str, set[str]] = {shard.shard: set() for shard in report.shards}
    for one in report.conflicts:
        kinds[report.primary_of(one.node)].add(one.kind)
    for shard in report.shards:
        found = kinds[shard.shard]
        if not report.unreachable.keys().isdisjoint((shard.shard, *shard.standbys)):
            # The comparisons with the node that was lost are not complete.
            continue
        if shard.compared.tables and not found & {STANDBY_ROWS, UNREADABLE}:
            yield f"shard {shard.shard}: rows compared with {', '.join(shard.standbys)}"
        if shard.cut and shard.cut.tables and not found & {CUT_ROWS, APPEND_ONLY, UNREADABLE}:
            yield f"shard {shard.shard}: rows compared with {report.snapshot} at increment {report.increment}"
        if shard.compared.indexes and INDEX not in found:
            yield f"shard {shard.shard}: indexes checked"


def _rows_text(rows: Sequence[LiveRow]) -> str:
    return "\n".join(line for row in rows for line in row_lines(row))
