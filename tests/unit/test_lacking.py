"""What a run says about tests that were skipped because of programs that the machine lacks."""

from __future__ import annotations

import pytest

from tests.programs.lacking import lacking, lacking_line, skip_without


def test_skipped_tests_are_counted_by_the_program_that_they_lack() -> None:
    reasons = [lacking("promtool", "it is in Debian's package"), "Skipped: lacks haproxy: no apt-get", "the long form"]
    reasons += [lacking("haproxy", "no apt-get")]
    assert lacking_line(reasons) == "skipped because this machine lacks a program: haproxy 2, promtool 1"
    assert lacking_line(["Skipped: the long form", "it lacks nothing: really"]) == ""


def test_a_skip_names_the_program() -> None:
    with pytest.raises(pytest.skip.Exception) as skipped:
        skip_without("openssl", "it makes the certificates")
    assert lacking_line([str(skipped.value)]).endswith("openssl 1")
