"""The dashboard, the alert rules and the code name the same metrics, in PromQL that Prometheus reads."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cutline.snapshots.listing.metrics import FLEET
from cutline.snapshots.listing.metrics_endpoint import render
from tests.programs.lacking import skip_without
from tests.unit.metric_values import METRICS, values_of

DOCS = Path(__file__).parents[2] / "docs"
FOLDER = DOCS / "monitoring"
RULES, RULES_TEST = FOLDER / "alerts.yml", FOLDER / "alerts_test.yml"
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "dashboard.json").read_text(encoding="utf-8"))
ALERTS: list[dict[str, Any]] = [
    rule for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"] for rule in group["rules"]
]
BY_NAME = {one.name: one for one in METRICS}
NAME = re.compile(r"cutline_\w+")
SELECTOR = re.compile(r"(cutline_\w+)\{([^}]*)\}")
# A join of many series with one per group, on these labels: the operand before or after it that has the one.
MANY_TO_ONE = re.compile(r"on \(([\w, ]+)\) group_left(?: \(\))?\s+(.+)")
ONE_TO_MANY = re.compile(r"(.+?)\s+-\s+on \(([\w, ]+)\) group_right")


def queries() -> Iterator[str]:
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]


def expressions() -> list[str]:
    return [*queries(), *(rule["expr"] for rule in ALERTS)]


@pytest.fixture
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        skip_without("promtool", "Debian's package prometheus has it")
    return found


def run(*words: str | Path, text: str | None = None) -> str:
    done = subprocess.run(words, capture_output=True, text=True, input=text, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_dashboard_shows_every_metric_and_no_other() -> None:
    assert {name for query in queries() for name in NAME.findall(query)} == BY_NAME.keys()


@pytest.mark.parametrize("expression", expressions())
def test_expressions_have_metrics_and_labels_that_exist(expression: str) -> None:
    assert set(NAME.findall(expression)) <= BY_NAME.keys()
    for name, matchers in SELECTOR.findall(expression):
        assert set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers)) <= {FLEET, *BY_NAME[name].labels}


def test_labels_in_texts_are_those_of_the_metrics() -> None:
    for rule in ALERTS:
        labels = {label for name in NAME.findall(rule["expr"]) for label in BY_NAME[name].labels}
        used = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
        assert used <= {FLEET, "instance", *labels}, rule["alert"]


def test_a_join_has_one_series_per_group_also_if_two_watches_serve_the_metrics() -> None:
    """Prometheus ends the evaluation of a rule whose one side has two series: the alert would never fire."""
    joins = [(labels, one) for text in expressions() for labels, one in MANY_TO_ONE.findall(text)]
    joins += [(labels, one) for text in expressions() for one, labels in ONE_TO_MANY.findall(text)]
    assert len(joins) == sum(text.count("group_") for text in expressions())
    for labels, one in joins:
        assert f"max by ({labels}) (" in one, one


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_every_metric_is_read_back_as_it_was_written() -> None:
    samples = [one.of(number, *("x" for _ in one.labels)) for number, one in enumerate(METRICS)]
    found = values_of(render("shop", samples))
    assert {name: list(values.values()) for name, values in found.items()} == {
        one.name: [float(number)] for number, one in enumerate(METRICS)
    }


def test_promtool_finds_nothing_to_say_about_the_metrics(promtool: str) -> None:
    samples = [one.of(1, *("x" for _ in one.labels)) for one in METRICS]
    assert run(promtool, "check", "metrics", text=render("shop", samples).decode()) == ""


def test_promtool_reads_the_rules_and_the_queries(promtool: str, tmp_path: Path) -> None:
    run(promtool, "check", "rules", RULES)
    rules = [{"record": f"a:b{number}", "expr": one} for number, one in enumerate(queries())]
    (tmp_path / "queries.yml").write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": rules}]}))
    run(promtool, "check", "rules", tmp_path / "queries.yml")


def test_the_alerts_fire_when_they_should_and_only_then(promtool: str) -> None:
    run(promtool, "test", "rules", RULES_TEST)


def test_every_alert_is_tested() -> None:
    assert {rule["alert"] for rule in ALERTS} == set(re.findall(r"Cutline\w+", RULES_TEST.read_text(encoding="utf-8")))
