"""Name templates: the names that they make, the names that they recognise, and the texts that are not templates."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest

import cutline.snapshots.listing.name_templates as module
from cutline.fleet.config import load_fleet
from cutline.snapshots.listing.name_templates import new_name, newest_name, next_number, read_template, used_names
from cutline.snapshots.operations.operation import begin, new_operation
from cutline.snapshots.records.documents import seal
from cutline.snapshots.records.proven_chains import SnapshotMissingError, commit_key
from cutline.storage.errors import UsageError
from cutline.storage.memory import InMemoryStore
from tests.unit.made_commits import commit, memory, named

NOON = datetime(2026, 11, 20, 14, 33, 7, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("nightly-{date}", "nightly-2026-11-20"),
        ("{date}_{time}", "2026-11-20_143307"),
        ("v{n}", "v7"),
        ("{n}.{date}.{n}", "7.2026-11-20.7"),
    ],
)
def test_a_template_makes_a_name(text: str, name: str) -> None:
    assert read_template(text).render(NOON, 7) == name


def test_times_are_utc() -> None:
    tokyo = datetime(2026, 11, 21, 1, 0, 5, tzinfo=timezone(timedelta(hours=9)))
    assert read_template("{date}-{time}").render(tokyo, 0) == "2026-11-20-160005"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nightly-{day}", "unknown field {day}"),
        ("nightly-{}", "unknown field {}"),
        ("nightly-{0}", "unknown field {0}"),
        ("nightly-{Date}", "unknown field {Date}"),
        ("nightly-{n:03}", "unknown field {n:03}"),
        ("nightly-{n!r}", "unknown field {n!r}"),
        ("nightly-{date.year}", "unknown field {date.year}"),
        ("nightly-{date", "stray brace"),
        ("nightly-date}", "stray brace"),
        ("nightly-{{date}}", "stray brace"),
        ("nightly {date}", "produces 'nightly 20"),
        ("-{date}", "is not a valid snapshot name"),
        ("x" * 60 + "{date}", "is not a valid snapshot name"),
    ],
)
def test_an_invalid_template_is_refused_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        read_template(text)


def test_a_template_recognises_its_own_names() -> None:
    template = read_template("nightly.{date}-{n}")
    assert template.values_in("nightly.2026-11-20-12") == ("2026-11-20", "", 12)
    for other in (
        "nightly.2026-11-20", "nightly.2026-11-20-", "nightly.2026-11-20-012", "nightly.2026-11-20-x",
        "nightlyx2026-11-20-1", "nightly.2026-11-20-1-2", "Nightly.2026-11-20-1", "nightly.2026-11-20-\u0661",
    ):  # fmt: skip
        assert template.values_in(other) is None, other
    assert read_template("{n}-{n}").values_in("3-3") == ("", "", 3)
    assert read_template("{n}-{n}").values_in("3-4") is None


def test_the_next_number_is_one_that_the_template_never_used() -> None:
    template = read_template("v{n}")
    assert next_number(template, []) == 1
    assert next_number(template, ["v2", "v10", "v9", "w99", "v7x"]) == 11


def test_deleted_names_and_names_in_open_operations_count_as_used() -> None:
    store = InMemoryStore("memory://names")
    store.create("snapshots/v1/snapshot.json", b"{}")
    store.create("snapshots/v2/base/a/x/part-0.parquet", b"")
    store.create("deleted/v3.json", b"{}")
    begin(store, new_operation("create", "v4", 0, ("a",)))
    store.create(f"operations/{new_operation('create', '', 0, ()).id}/intent.json", b"{}")
    assert used_names(store) == {"v1", "v2", "v3", "v4"}
    assert next_number(read_template("v{n}"), used_names(store)) == 5


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """A fleet with a store in memory: three committed snapshots, and one without a commit."""
    file = tmp_path / "fleet.toml"
    file.write_text('name = "x"\nstore = "memory://x"\n[[node]]\nid = "a"\ndsn = "host=/nowhere"\n')
    store = memory()
    store.create("fleet.json", json.dumps({"schema": "cutline/fleet/1", "fleet": "ab", "name": "x"}).encode())
    for name in ("nightly-2026-11-09", "nightly-2026-11-10", "nightly-2026-10-31"):
        store.create(commit_key(name, 0), seal(named(commit(0), name)))
    store.create("snapshots/nightly-2026-11-11/base/a/x/part-0.parquet", b"")
    monkeypatch.setattr(module, "_store", lambda _: store)
    return load_fleet(file)


def test_the_newest_committed_name_of_a_template_is_found(fleet) -> None:  # type: ignore[no-untyped-def]
    assert newest_name(fleet, "nightly-{date}") == "nightly-2026-11-10"
    with pytest.raises(SnapshotMissingError, match=re.escape("hourly-{date}")):
        newest_name(fleet, "hourly-{date}")


def test_a_plain_name_is_used_as_it_is_without_asking_the_store(fleet, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(module, "_store", None)
    assert new_name(fleet, "weekly") == newest_name(fleet, "weekly") == "weekly"
    with pytest.raises(UsageError, match="'a b' is not a valid snapshot name"):
        new_name(fleet, "a b")
    # `keep` names an increment in this way.
    with pytest.raises(UsageError) as raised:
        new_name(fleet, "weekly@12")
    assert raised.value.hint.endswith("restore, drill, check and show take --increment 12")


def test_a_new_name_has_the_current_time(fleet) -> None:  # type: ignore[no-untyped-def]
    before = datetime.now(UTC)
    name = new_name(fleet, "{date}-{time}")
    made = datetime.strptime(name, "%Y-%m-%d-%H%M%S").replace(tzinfo=UTC)
    assert before.replace(microsecond=0) <= made <= datetime.now(UTC)
    assert new_name(fleet, "nightly-2026-11-{n}") == "nightly-2026-11-12"
