"""JUnit reports on checks and drills.

The report on a check contains one suite per snapshot, with one failure per conflict, one skipped case per skipped item
and, if the check is complete, one passed case per shard. The report on a drill contains one suite, with a case for the
restore, a skipped case for each refused statement, and a case for each assertion. For a command that did not finish,
the report is one case with an error.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from cutline.check.report import CheckReport, SnapshotReport
from cutline.cli.output.exact_point import exact_text
from cutline.cli.output.tables import printable
from cutline.cli.process.unfinished_reports import UNFINISHED
from cutline.fleet.own_files import replaced_file
from cutline.storage.errors import SnapshotError, StoppedError, UsageError

if TYPE_CHECKING:
    from cutline.restore.drill.drill import DrillReport

CHECK, DRILL = "snapshot check", "snapshot drill"
NO_ASSERTIONS = "fleet.toml contains no [[drill.assertion]], so nothing was tested"


def junit_of(report: CheckReport) -> str:
    """Return the report on a check as XML."""
    suites = ElementTree.Element("testsuites", name=CHECK, time=f"{report.seconds:.3f}")
    for snapshot in report.snapshots:
        suites.append(_suite(snapshot))
    return xml_of(suites)


def junit_of_drill(report: DrillReport) -> str:
    """Return the report on a drill as XML."""
    restored, suites = report.restored, ElementTree.Element("testsuites", name=DRILL, time=f"{report.seconds:.3f}")
    outcomes = [assertion.holds for assertion in report.assertions]
    point = exact_text(restored.exact.moment) if restored.exact else f"increment {restored.increment}"
    name = f"{restored.snapshot} at {point}"
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
    return xml_of(suites)


def junit_of_error(what: str, message: str, kind: str) -> str:
    """Return the report on a command that did not finish, as XML; `kind` is a stable name for the reason."""
    suites, name = ElementTree.Element("testsuites", name=what), what
    suite = ElementTree.SubElement(suites, "testsuite", name=name, tests="1", failures="0", errors="1", skipped="0")
    case = ElementTree.SubElement(suite, "testcase", classname=name, name=f"the {what.rpartition(' ')[2]} ends")
    ElementTree.SubElement(case, "error", message=message, type=kind)
    return xml_of(suites)


def xml_of(suites: ElementTree.Element) -> str:
    """Return the report as XML."""
    ElementTree.indent(suites)
    for element in suites.iter():
        # XML can't represent most control characters.
        element.attrib.update({name: printable(text) for name, text in element.attrib.items()})
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def _suite(one: SnapshotReport) -> ElementTree.Element:
    name = f"{one.name} at increment {one.increment}"
    suite = ElementTree.Element("testsuite", name=name)

    def add(case: str, outcome: str = "", **attributes: str) -> None:
        added = ElementTree.SubElement(suite, "testcase", classname=name, name=case)
        if outcome:
            ElementTree.SubElement(added, outcome, attributes)

    for conflict in one.conflicts:
        add(f"{conflict.kind}: {conflict.detail}", "failure", message=conflict.detail, type=conflict.kind)
    for left in one.skipped_by_cause:
        add(left.what, "skipped", message=left.why)
    if not one.conflicts and not one.skipped:
        what = "what is new compared; the rest rests on records" if one.rests_on else "everything compared"
        if one.is_complete:
            add(what)
        else:
            add(what, "skipped", message="there was nothing to compare")
    for shard in _passed_shards(one):
        add(shard)
    counts = {"tests": len(suite), "failures": len(one.conflicts), "skipped": len(suite.findall("testcase/skipped"))}
    suite.attrib.update({what: str(count) for what, count in counts.items()})
    return suite


def _passed_shards(one: SnapshotReport) -> Iterator[str]:
    """Yield what was found of each shard, if the check is complete: otherwise parts of a shard may not have been read.

    If there is only one copy, that is less than equal copies, and the suite has a skipped case that says so.
    """
    records = ", with records of earlier checks" if one.rests_on else ""
    for shard, copies in sorted(one.shards.items()) if one.is_complete else ():
        found = (
            f"its {copies} copies are equal" if copies > 1 else "its only copy has the objects and rows of the commits"
        )
        yield f"shard {shard}: {found}{records}"


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
