"""JUnit reports on checks and drills.

The report on a check contains one suite per snapshot, with one failure per conflict and one skipped case per skipped
item. The report on a drill contains one suite, with a case for the restore, a skipped case for each refused statement,
and a case for each assertion. For a command that did not finish, the report is one case with an error.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

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
from cutline.check.report import CheckReport, SnapshotReport
from cutline.cli.output.tables import printable
from cutline.cli.process.unfinished_reports import UNFINISHED
from cutline.fleet.own_files import replaced_file
from cutline.restore.drill.drill import DrillReport
from cutline.storage.errors import SnapshotError, StoppedError, UsageError

CHECK, DRILL = "snapshot check", "snapshot drill"
NO_ASSERTIONS = "fleet.toml contains no [[drill.assertion]], so nothing was tested"


def junit_of(report: CheckReport) -> str:
    """Return the report on a check as XML."""
    suites = ElementTree.Element("testsuites", name=CHECK, time=f"{report.seconds:.3f}")
    for snapshot in report.snapshots:
        suites.append(_suite(snapshot))
    return _xml_of(suites)


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
    return _xml_of(suites)


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


def junit_of_drill(report: DrillReport) -> str:
    """Return the report on a drill as XML."""
    restored, suites = report.restored, ElementTree.Element("testsuites", name=DRILL, time=f"{report.seconds:.3f}")
    outcomes = [assertion.holds for assertion in report.assertions]
    name = f"{restored.snapshot} at increment {restored.increment}"
    refused = restored.refused
    counts = {"tests": 1 + len(refused) + max(len(outcomes), 1), "failures": outcomes.count(False)}
    counts["skipped"] = len(refused) + outcomes.count(None) + int(not outcomes)
    texts = {what: str(count) for what, count in counts.items()}
    suite = ElementTree.SubElement(suites, "testsuite", {"name": name, **texts})
    ElementTree.SubElement(suite, "testcase", classname=name, name="the restore", time=f"{restored.seconds:.3f}")
    for left in refused:
        case = ElementTree.SubElement(suite, "testcase", classname=left.node, name=left.object)
        ElementTree.SubElement(case, "skipped", message=f"refused: {left.reason}")
    for assertion in report.assertions:
        what = {
            "classname": assertion.assertion.node,
            "name": assertion.assertion.sql,
            "time": f"{assertion.seconds:.3f}",
        }
        case = ElementTree.SubElement(suite, "testcase", what)
        if assertion.holds is None:
            ElementTree.SubElement(case, "skipped", message=assertion.why)
        elif not assertion.holds:
            ElementTree.SubElement(case, "failure", message=assertion.why, type="assertion")
    if not outcomes:
        case = ElementTree.SubElement(suite, "testcase", classname=name, name="assertions")
        ElementTree.SubElement(case, "skipped", message=NO_ASSERTIONS)
    return _xml_of(suites)


def junit_of_error(what: str, message: str, kind: str) -> str:
    """Return the report on a command that did not finish, as XML; `kind` is a stable name for the reason."""
    suites, name = ElementTree.Element("testsuites", name=what), what
    suite = ElementTree.SubElement(suites, "testsuite", name=name, tests="1", failures="0", errors="1", skipped="0")
    case = ElementTree.SubElement(suite, "testcase", classname=name, name=f"the {what.rpartition(' ')[2]} ends")
    ElementTree.SubElement(case, "error", message=message, type=kind)
    return _xml_of(suites)


def _xml_of(suites: ElementTree.Element) -> str:
    ElementTree.indent(suites)
    for element in suites.iter():
        # XML can't represent most control characters.
        element.attrib.update({name: printable(text) for name, text in element.attrib.items()})
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def _suite(one: SnapshotReport) -> ElementTree.Element:
    name = f"{one.name} at increment {one.increment}"
    failed, skipped = len(one.conflicts), len(one.skipped)
    # A snapshot without conflicts is one passed case; if nothing was compared, the case is skipped.
    nothing = not failed and not skipped and not one.is_complete
    suite = ElementTree.Element(
        "testsuite",
        name=name,
        tests=str(max(failed + skipped, 1)),
        failures=str(failed),
        skipped=str(skipped + int(nothing)),
    )
    for conflict in one.conflicts:
        case = ElementTree.SubElement(suite, "testcase", classname=name, name=f"{conflict.kind}: {conflict.detail}")
        ElementTree.SubElement(case, "failure", message=conflict.detail, type=conflict.kind)
    for left in one.skipped:
        case = ElementTree.SubElement(suite, "testcase", classname=name, name=left.what)
        ElementTree.SubElement(case, "skipped", message=left.why)
    if not failed and not skipped:
        what = "what is new compared; the rest rests on records" if one.rests_on else "everything compared"
        case = ElementTree.SubElement(suite, "testcase", classname=name, name=what)
        if nothing:
            ElementTree.SubElement(case, "skipped", message="there was nothing to compare")
    return suite


@contextmanager
def reporting_errors(file: Path | None, what: str = CHECK) -> Iterator[None]:
    """Until the command `what` ends, make the file report that it did not finish; raise UsageError on a failed write.

    Otherwise a CI system could collect the report of an earlier, perhaps successful run. If the command is stopped, the
    file names the signal only later (cli/main.py).
    """
    if file is None:
        yield
        return
    _replace(file, junit_of_error(what, f"the {what.rpartition(' ')[2]} did not finish", UNFINISHED))
    try:
        yield
    except StoppedError:
        raise
    except SnapshotError as error:
        # If the file can no longer be written, it still says that the command did not finish.
        with suppress(UsageError):
            _replace(file, junit_of_error(what, error.message, error.slug))
        raise


def write_report(file: Path | None, text: str) -> list[str]:
    """Write the report to the file, if one is given; return a warning if it can't be written."""
    if file is not None:
        try:
            _replace(file, text)
        except UsageError as error:
            return [f"the report could not be written to {error.message}"]
    return []


def _replace(file: Path, text: str) -> None:
    with replaced_file(file) as write:
        write(text)
