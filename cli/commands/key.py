"""`snapshot key`: the encryption keys that open the store."""

from __future__ import annotations

import os
import secrets
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from cutline.cli.output.arguments import command_context
from cutline.cli.output.hooks import with_hooks
from cutline.cli.output.results import answer, emit
from cutline.fleet.config import Fleet
from cutline.storage.encryption.fleet_encryption import FleetEncryption
from cutline.storage.encryption.key_source import KEY_BYTES, EncryptionKeyError, KeySource, key_text
from cutline.storage.errors import RefusedError, UsageError
from cutline.storage.folders import sync_folder

SCHEMA = "cutline/key-command/1"
NewFile = Annotated[Path, typer.Argument(metavar="FILE", help="The file to create.")]
KeyId = Annotated[str, typer.Argument(metavar="KEY", help="The key's name, as `snapshot key list` shows it.")]

key_app = typer.Typer(
    help="Create, list, add and remove encryption keys. To rotate: key new, key add, change fleet.toml, key remove."
)


class KeyFileExistsError(RefusedError):
    """The file for a new key already exists."""


@key_app.command()
def new(context: typer.Context, file: NewFile) -> None:
    """Write a new random encryption key to FILE, which only its owner can read. No server is contacted."""
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        hint = "name a different file; if this file is a store's key, keep it"
        raise KeyFileExistsError(f"file {file} already exists", hint=hint) from None
    except OSError as error:
        raise EncryptionKeyError(
            f"file {file} can't be created: {error.strerror}", hint="name a different file"
        ) from None
    try:
        with os.fdopen(descriptor, "w") as opened:
            opened.write(key_text(secrets.token_bytes(KEY_BYTES)) + "\n")
            opened.flush()
            # If the key is lost, nobody can read the objects that it encrypts.
            os.fsync(descriptor)
        sync_folder(file.absolute().parent)
    except BaseException as error:
        file.unlink()
        if not isinstance(error, OSError):
            raise
        hint = "free up space there, or name a different file"
        raise EncryptionKeyError(f"file {file} can't be written: {error.strerror}", hint=hint) from None
    lines = [
        f"wrote a new key to {file}",
        f'for a new store: key_file = "{file.absolute()}" in [encryption] of fleet.toml, then snapshot init',
        f"for a store that already has a key: snapshot key add --key-file {shlex.quote(str(file.absolute()))}",
        "keep a copy elsewhere, not in the store: without the key nothing in the store can be read",
    ]
    emit(context, {"schema": SCHEMA, "file": str(file.absolute())}, lines)


@key_app.command("list")
def list_keys(context: typer.Context) -> None:
    """List the keys that open the store."""
    fleet, encryption = _encrypted_fleet(context)
    from cutline.storage.encryption.key_documents import find_data_key, stored_keys

    raw, key = fleet.store.open_raw(), encryption.read_key()
    data_key = find_data_key(raw, key).data_key
    keys = [
        {
            "key": stored_key.document.key if stored_key.document else None,
            "object": stored_key.place,
            "created_at": stored_key.document.created_at if stored_key.document else None,
            "configured": bool(stored_key.document and key.unwrap(stored_key.document)),
            "genuine": bool(stored_key.document and stored_key.document.is_genuine(data_key)),
        }
        for stored_key in stored_keys(raw)
    ]
    lines = [
        f"{one['key']}  {one['created_at']}" + (f"  the key of {fleet.path}" if one["configured"] else "")
        if one["genuine"]
        else f"warning: {one['object']} is not genuine: it was not created with a key of this store; delete"
        " that object from the store"
        for one in keys
    ]
    answer(context, {"schema": SCHEMA, "keys": keys}, lines)


@key_app.command()
def add(
    context: typer.Context,
    *,
    key_file: Annotated[Path | None, typer.Option(metavar="FILE", help="The file that contains the new key.")] = None,
    key_variable: Annotated[
        str | None, typer.Option(metavar="NAME", help="The environment variable that contains the new key.")
    ] = None,
    key_command: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The command that prints the new key, quoted as for a shell.")
    ] = None,
) -> None:
    """Add another key that opens the store. No object is rewritten. Safe to repeat."""
    try:
        command = tuple(shlex.split(key_command or ""))
    except ValueError as error:
        raise UsageError(f"--key-command is not a valid command line: {error}") from None
    if sum(bool(one) for one in (key_file, key_variable, command)) != 1:
        raise UsageError("name the new key with exactly one of --key-file, --key-variable and --key-command")
    fleet, encryption = _encrypted_fleet(context)
    from cutline.storage.encryption.key_documents import add_key

    source = KeySource(key_file, key_variable or None, command or None)
    ours, added = encryption.read_key(), FleetEncryption(source, fleet.name).read_key()
    with with_hooks(context, fleet, "key-add"):
        document = add_key(fleet.store.open_raw(), ours, added)
        lines = [f"key {document.key} of {source} now opens the store"]
        if document.key != ours.id:
            lines.append(f"to rotate: name it in [encryption] of every fleet.toml, then: snapshot key remove {ours.id}")
        emit(context, {"schema": SCHEMA, "key": document.key}, lines)


@key_app.command()
def remove(context: typer.Context, key: KeyId) -> None:
    """Remove a key, so that it no longer opens the store. The key that fleet.toml names can't be removed."""
    fleet, encryption = _encrypted_fleet(context)
    from cutline.storage.encryption.key_documents import remove_key

    with with_hooks(context, fleet, "key-remove"):
        places = remove_key(fleet.store.open_raw(), encryption.read_key(), key)
        document: dict[str, Any] = {"schema": SCHEMA, "key": key, "removed": places}
        emit(context, document, [f"key {key} no longer opens the store, except with a copy of {', '.join(places)}"])


def _encrypted_fleet(context: typer.Context) -> tuple[Fleet, FleetEncryption]:
    fleet = command_context(context).load_fleet()
    if fleet.encryption is None:
        raise EncryptionKeyError(
            f"{fleet.path} has no [encryption]", hint="name the fleet's encryption key there: docs/encryption.md"
        )
    return fleet, fleet.encryption
