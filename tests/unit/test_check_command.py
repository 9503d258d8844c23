"""`snapshot check`, `list` and `restore` before they do any work; no node is reachable."""

from __future__ import annotations

import os
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from cutline.cli.output.junit import write_report
from cutline.fleet.config import Fleet, load_fleet
from cutline.snapshots.records.store_identity import IdentityLostError, ensure_identity
from cutline.storage.local import LocalStore
from tests.commands.in_process import run_here
from tests.unit.made_fleets import unreachable_fleet


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return unreachable_fleet(tmp_path)


@pytest.mark.parametrize("words", [["list"], ["check"], ["restore", "daily"], ["show", "daily"]])
def test_a_missing_folder_is_named_and_an_empty_one_is_not_initialised(
    fleet: Fleet, tmp_path: Path, words: list[str]
) -> None:
    code, document = run_here(fleet, *words)
    assert (code, document["error"]) == (3, "store-not-initialised")
    assert f"there is no folder {tmp_path}/store" in document["message"]
    assert "mount" in document["hint"]
    # Where its file system is to be mounted, or a new one.
    (tmp_path / "store").mkdir()
    code, document = run_here(fleet, *words)
    assert (code, document["error"]) == (3, "store-not-initialised")
    assert "it has no fleet.json" in document["message"]
    assert "mount" in document["hint"]
    assert document["hint"].endswith(f"run: snapshot --fleet {fleet.path} init")


@pytest.mark.parametrize("words", [["list"], ["check"], ["show", "daily"]])
def test_a_store_that_has_lost_its_identity_is_not_taken_for_a_new_one(
    fleet: Fleet, tmp_path: Path, words: list[str]
) -> None:
    store = LocalStore(tmp_path / "store")
    ensure_identity(store, fleet)
    store.create("snapshots/daily/snapshot.json", b"{}")
    store.delete("fleet.json")
    code, document = run_here(fleet, *words)
    assert (code, document["error"]) == (3, "identity-lost"), document
    assert "which contains snapshots: daily" in document["message"]
    assert document["hint"].startswith("put fleet.json back from a copy of the store")
    # `init` would give the store another id, and so make its snapshots another fleet's.
    with pytest.raises(IdentityLostError):
        ensure_identity(store, fleet)
    assert not store.exists("fleet.json")


def test_a_junit_file_that_can_not_be_written_ends_a_check_before_its_work(fleet: Fleet, tmp_path: Path) -> None:
    # The store is not initialised, so any work would end with code 3.
    file = tmp_path / "missing" / "report.xml"
    code, document = run_here(fleet, "check", "--junit", str(file))
    assert (code, document["error"]) == (2, "usage")
    assert str(file) in document["message"]


def error_in(file: Path) -> tuple[str, str]:
    """The message and type of the one error in a report, which has nothing else."""
    (suite,) = ElementTree.parse(file).getroot()
    (case,) = suite
    (error,) = case
    counts = [suite.get(name) for name in ("tests", "failures", "errors", "skipped")]
    assert (counts, case.tag, error.tag) == (["1", "0", "1", "0"], "testcase", "error")
    return str(error.get("message")), str(error.get("type"))


def test_the_report_of_an_earlier_check_does_not_survive_one_that_fails(fleet: Fleet, tmp_path: Path) -> None:
    new, old = tmp_path / "new.xml", tmp_path / "old.xml"
    old.write_text("<testsuites/>")
    for file in (new, old):
        code, document = run_here(fleet, "check", "--junit", str(file))
        assert (code, document["error"]) == (3, "store-not-initialised")
        assert error_in(file) == (document["message"], "store-not-initialised")
    old.write_text("<testsuites/>")
    assert run_here(fleet, "check", "--increment", "1", "--junit", str(old))[0] == 2
    assert error_in(old) == ("--increment needs a NAME", "usage")
    ensure_identity(LocalStore(tmp_path / "store"), fleet)
    assert run_here(fleet, "check", "--junit", str(new))[0] == 4
    assert list(ElementTree.parse(new).getroot()) == []


@pytest.mark.parametrize(("words", "message"), [
    (["--newest", "daily"], "--newest and NAME are mutually exclusive"),
    (["daily", "--since-last", "--increment", "1"], "--increment can't be combined with"),
    (["daily", "--since-last", "--metadata-only"], "--metadata-only can't be combined with"),
    (["daily", "--max-seconds", "5", "--rows", "3"], "--rows can't be combined with"),
    (["--restorable"], "--restorable builds the rows of one snapshot"),
    (["daily", "--rows", "5", "--metadata-only"], "--rows and --metadata-only are mutually exclusive"),
    (["daily", "--restorable", "--metadata-only"], "--restorable and --metadata-only are mutually exclusive"),
    (["daily", "--subset", "0/3"], "--subset '0/3' is not a part such as 1/7"),
    (["daily", "--subset", "4/3"], "--subset '4/3' is not a part"),
    (["daily", "--subset", "one"], "--subset 'one' is not a part"),
])  # fmt: skip
def test_options_that_contradict_each_other_are_refused(fleet: Fleet, words: list[str], message: str) -> None:
    code, document = run_here(fleet, "check", *words)
    assert (code, document["error"]) == (2, "usage")
    assert message in document["message"]


def test_the_newest_snapshot_of_an_empty_store_is_none(fleet: Fleet, tmp_path: Path) -> None:
    ensure_identity(LocalStore(tmp_path / "store"), fleet)
    code, document = run_here(fleet, "check", "--newest", "--since-last")
    assert (code, document["result"], document["snapshots"]) == (4, "inconclusive", [])


def test_the_time_within_which_everything_is_reread_is_in_the_fleet_file(fleet: Fleet) -> None:
    assert fleet.reread_seconds == 30 * 86400
    text = fleet.path.read_text()
    fleet.path.write_text(f'{text}[check]\nreread = "36h"\n')
    assert load_fleet(fleet.path).reread_seconds == 36 * 3600
    fleet.path.write_text(f'{text}[check]\nreread = "0"\n')
    code, document = run_here(fleet, "check")
    assert code == 2
    assert "`check.reread` is 0" in document["message"]


def test_a_check_that_is_interrupted_is_reported_as_one_that_did_not_end(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, seen = tmp_path / "report.xml", list[tuple[str, str]]()
    file.write_text("<testsuites/>")
    ensure_identity(LocalStore(tmp_path / "store"), fleet)

    def stop(*_: object) -> None:
        seen.append(error_in(file))
        raise KeyboardInterrupt

    monkeypatch.setattr("cutline.cli.commands.check.check_snapshots", stop)
    assert run_here(fleet, "check", "--junit", str(file))[0] == 130
    assert seen == [("the check did not finish", "unfinished")]
    assert error_in(file) == ("stopped by Ctrl-C", "interrupted")


def test_a_report_is_written_to_nothing_but_a_file(fleet: Fleet, tmp_path: Path) -> None:
    """A pipe would be waited for, and a link that another user has made leads where he wants."""
    os.mkfifo(pipe := tmp_path / "pipe")
    code, refused = run_here(fleet, "check", "--junit", str(pipe))
    assert (code, refused["message"]) == (2, f"{pipe}: it is not a regular file")
    kept, link = tmp_path / "kept", tmp_path / "link"
    kept.write_text("kept")
    link.symlink_to(kept)
    if not os.getuid():
        os.chown(link, 4711, -1, follow_symlinks=False)
        code, refused = run_here(fleet, "check", "--junit", str(link))
        assert (code, refused["message"]) == (2, f"{link}: it is another user's symbolic link")
        assert kept.read_text() == "kept"


def test_a_report_that_can_not_be_written_at_the_end_has_an_exit_code(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    file = tmp_path / "folder" / "check.xml"
    assert write_report(file, "<testsuites/>") == []
    file.unlink()
    (tmp_path / "folder").rmdir()
    assert write_report(file, "<testsuites/>") == [
        f"the report could not be written to {file}: No such file or directory"
    ]
