"""A check as a JUnit report: one suite per snapshot, one failure per conflict, one skipped case per skipped item.

A check that did not end is one case with an error.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

from check.report import CheckReport, SnapshotReport
from cli.output.format import printable


def junit_of(report: CheckReport) -> str:
    """The report as XML."""
    suites = ElementTree.Element("testsuites", name="snapshot check", time=f"{report.seconds:.3f}")
    for one in report.snapshots:
        suites.append(_suite(one))
    return _xml_of(suites)


def junit_of_error(message: str, kind: str) -> str:
    """The report of a check that did not end, as XML; `kind` is the stable name of the reason."""
    suites, name = ElementTree.Element("testsuites", name="snapshot check"), "snapshot check"
    suite = ElementTree.SubElement(suites, "testsuite", name=name, tests="1", failures="0", errors="1", skipped="0")
    case = ElementTree.SubElement(suite, "testcase", classname=name, name="the check ends")
    ElementTree.SubElement(case, "error", message=message, type=kind)
    return _xml_of(suites)


def _xml_of(suites: ElementTree.Element) -> str:
    ElementTree.indent(suites)
    for element in suites.iter():
        # XML has no form for most control characters.
        element.attrib.update({name: printable(text) for name, text in element.attrib.items()})
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def _suite(one: SnapshotReport) -> ElementTree.Element:
    name = f"{one.name} at increment {one.increment}"
    failed, skipped = len(one.conflicts), len(one.skipped)
    # A snapshot without conflicts is one passed case, unless nothing was compared.
    nothing = not failed and not skipped and not one.compared.objects
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
        case = ElementTree.SubElement(suite, "testcase", classname=name, name="everything compared")
        if nothing:
            ElementTree.SubElement(case, "skipped", message="nothing was there to compare")
    return suite
