"""The source of an encryption key: a file, an environment variable, or a command such as a KMS client."""

from __future__ import annotations

import base64
import binascii
import os
import re
import shlex
import stat
import subprocess
from pathlib import Path

from msgspec import Struct

from cutline.storage.errors import UnreachableError, UsageError, remember_secret

KEY_BYTES = 32
COMMAND_SECONDS_MAX = 60.0
KEY_TEXT_BYTES_MAX = 4096
ERROR_CHARACTERS_MAX = 300
SECRETIVE = re.compile(r"[A-Za-z0-9+/_=-]{32,}")


class EncryptionKeyError(UsageError):
    """The encryption key is missing, malformed, or readable by others."""


class KeyCommandError(UnreachableError):
    """The command that prints the encryption key failed."""


class KeySource(Struct, frozen=True):
    """The source of an encryption key: exactly one of the three is set. Only `read` accesses it."""

    file: Path | None = None
    variable: str | None = None
    command: tuple[str, ...] | None = None

    def __str__(self) -> str:
        """Return the name of the source for messages."""
        if self.file:
            return f"file {self.file}"
        return f"variable {self.variable}" if self.variable else f"command {(self.command or ('',))[0]}"

    def read(self) -> bytes:
        """Return the key; raise EncryptionKeyError or KeyCommandError. Messages never show the bytes that were read."""
        if self.file:
            text = _read_file(self.file)
        elif self.variable:
            text = os.environ.get(self.variable, "")
            if not text:
                raise EncryptionKeyError(
                    f"the encryption key's variable {self.variable} is empty or not set",
                    hint="set it, or name the right variable",
                )
        else:
            text = _run(self.command or ())
        remember_secret(text.strip())
        return parse_key(text, str(self))


def parse_key(text: str, source: str) -> bytes:
    """Return the key in `text`, 32 bytes as base64 or hexadecimal digits; raise EncryptionKeyError."""
    text = "".join(text.split())
    for decode in (bytes.fromhex, lambda value: base64.b64decode(value, validate=True)):
        try:
            key = decode(text)
        except (binascii.Error, ValueError):
            continue
        if len(key) == KEY_BYTES:
            return key
    raise EncryptionKeyError(
        f"the encryption key from {source} is not {KEY_BYTES} bytes in base64 or hexadecimal",
        hint="use the right key; to generate a key for a new store: snapshot key new FILE",
    )


def key_text(key: bytes) -> str:
    """Return the key in the form that `parse_key` reads."""
    return base64.b64encode(key).decode()


def _read_file(path: Path) -> str:
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            # libpq's rule for private keys: only the user may access the user's own file; root's file may also be
            # readable by its group.
            allowed = stat.S_IRWXU | (stat.S_IRGRP if status.st_uid == 0 else 0)
            if status.st_uid not in (0, os.geteuid()):
                raise EncryptionKeyError(
                    f"the encryption key's file {path} belongs to another user",
                    hint=f"run: chown {os.geteuid()} {shlex.quote(str(path))}",
                )
            if stat.S_ISREG(status.st_mode) and stat.S_IMODE(status.st_mode) & ~allowed:
                raise EncryptionKeyError(
                    f"the encryption key's file {path} is open to other users",
                    hint=f"run: chmod 600 {shlex.quote(str(path))}",
                )
            return file.read(KEY_TEXT_BYTES_MAX).decode("ascii", "replace")
    except OSError as error:
        raise EncryptionKeyError(
            f"the encryption key's file {path} can't be read: {error.strerror}",
            hint="name the right file, or restore the key from its escrow: docs/encryption.md",
        ) from None


def _run(command: tuple[str, ...]) -> str:
    name = command[0]
    try:
        run = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=COMMAND_SECONDS_MAX, check=False
        )
    except OSError as error:
        raise EncryptionKeyError(
            f"the encryption key's command {name} can't be run: {error.strerror}",
            hint="correct key_command of [encryption] in fleet.toml",
        ) from None
    except subprocess.TimeoutExpired:
        raise KeyCommandError(
            f"the encryption key's command {name} did not finish within {COMMAND_SECONDS_MAX:.0f} s",
            hint="run it by hand; it must print the key without asking for input",
        ) from None
    if run.returncode:
        # A command that traces itself prints the key to stderr, too.
        reason = SECRETIVE.sub("***", run.stderr.decode(errors="replace").strip())[-ERROR_CHARACTERS_MAX:]
        raise KeyCommandError(
            f"the encryption key's command {name} exited with code {run.returncode}"
            + (f": {reason}" if reason else ""),
            hint="run it by hand; it must print the key",
        )
    return run.stdout[:KEY_TEXT_BYTES_MAX].decode("ascii", "replace")
