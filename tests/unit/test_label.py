"""The application_name of sessions: it is read back as it was written, and never longer than PostgreSQL keeps."""

from __future__ import annotations

import os

import pytest

from cutline.fleet.own_process import Label, own_label, read_label

BYTES_KEPT_BY_POSTGRESQL = 63


def test_a_label_is_read_back_as_it_was_written() -> None:
    label = Label("create", "daily", "ops", "db7", 4711)
    assert label.text() == "cutline create daily ops@db7:4711"
    assert read_label(label.text()) == label
    without_subject = Label("init", "", "ops", "db7", 4711)
    assert without_subject.text() == "cutline init ops@db7:4711"
    assert read_label(without_subject.text()) == without_subject


@pytest.mark.parametrize("subject", ["", "n", "n" * 63])
@pytest.mark.parametrize("user", ["o", "o" * 40, "müller the 2nd"])
@pytest.mark.parametrize("host", ["h", "h" * 64, "häuschen"])
@pytest.mark.parametrize("process", [1, 4194304])
def test_a_label_fits_and_always_names_the_process(subject: str, user: str, host: str, process: int) -> None:
    text = Label("create", subject, user, host, process).text()
    assert len(text.encode()) <= BYTES_KEPT_BY_POSTGRESQL
    assert text.isascii()
    found = read_label(text)
    assert found is not None
    assert (found.command, found.process) == ("create", process)
    assert subject.startswith(found.subject.rstrip("~"))
    assert bool(found.subject) == bool(subject)
    assert found.user[0] == user[0]


def test_a_name_of_ordinary_length_is_kept_whole() -> None:
    found = read_label(Label("create", "nightly-orders", "postgres", "coordinator-1", 123456).text())
    assert found == Label("create", "nightly-orders", "postgres", "coordinator-1", 123456)


@pytest.mark.parametrize("text", ["", "cutline", "psql", "cutline create daily", "cutline create daily ops@db7:x"])
def test_the_name_of_another_application_is_not_a_label(text: str) -> None:
    assert read_label(text) is None


def test_our_own_label_has_the_id_of_this_process() -> None:
    found = read_label(own_label("create", "daily"))
    assert found is not None
    assert found.process == os.getpid()
