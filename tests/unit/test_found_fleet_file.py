"""A fleet file that nobody has named: only one's own is read, as it names programs and gets variables."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cutline.cli.output.arguments import CommandContext
from cutline.storage.errors import UsageError
from tests.other_user import OTHER_UID, needs_root

TEXT = 'name = "shop"\nstore = "memory://x"\n[[node]]\nid = "s1"\ndsn = "host=h"\n'


@needs_root
def test_another_users_file_in_the_working_directory_is_refused_until_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SNAPSHOT_FLEET", raising=False)
    file = tmp_path / "fleet.toml"
    file.write_text(TEXT)
    assert CommandContext().load_fleet().name == "shop"
    os.chown(file, OTHER_UID, OTHER_UID)
    with pytest.raises(UsageError, match="belongs to another user") as raised:
        CommandContext().load_fleet()
    assert raised.value.hint == "if you trust it, name it explicitly: --fleet fleet.toml"
    assert CommandContext(file, given_fleet=str(file)).load_fleet().name == "shop"
    with monkeypatch.context() as named:
        named.setenv("SNAPSHOT_FLEET", str(file))
        assert CommandContext().load_fleet().name == "shop"
    # An ordinary user reads their own and root's.
    monkeypatch.setattr(os, "geteuid", lambda: OTHER_UID)
    assert CommandContext().load_fleet().name == "shop"
    os.chown(file, 0, 0)
    assert CommandContext().load_fleet().name == "shop"
    os.chown(file, OTHER_UID + 1, OTHER_UID + 1)
    with pytest.raises(UsageError, match="belongs to another user"):
        CommandContext().load_fleet()
