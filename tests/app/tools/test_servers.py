"""Servers as JSON, in their file, and as a line of text; names of tools for models."""

import json
import os
import re
import stat
import sys
from dataclasses import replace
from pathlib import Path

import keyring.errors
import pytest

from app.core.system_keyring import SecretStore
from app.tools.results import server_prefixes, tool_names
from app.tools.server_store import (
    ToolServer,
    ToolServerStore,
    join_command,
    servers_in,
    servers_json,
    split_command,
)
from engine import EngineError
from tests.helpers.odd_files import make_odd_file, odd_files

FILES = ToolServer(
    "Files", ("npx", "-y", "server-files", "/home/me"), {"DEBUG": "1"}, "/tmp", hidden=("write",)
)
FAR = ToolServer("far", url="https://x.example/mcp", headers={"Authorization": ""}, is_on=False)


def store_in(folder: Path) -> ToolServerStore:
    return ToolServerStore(folder / "tool-servers.json", SecretStore(folder / "tool-secrets.json"))


def test_json_of_servers_is_read_back() -> None:
    assert servers_in(json.dumps(servers_json([FILES, FAR]))) == (FILES, FAR)


@pytest.mark.parametrize(
    ("text", "server"),
    [
        ('{"mcpServers": {"a": {"command": "b", "args": ["c"]}}}', ToolServer("a", ("b", "c"))),
        ('{"servers": {"a": {"type": "stdio", "command": "b"}}}', ToolServer("a", ("b",))),
        ('{"a": {"command": "b", "env": {"N": 1}}}', ToolServer("a", ("b",), {"N": "1"})),
        ('{"name": "a", "command": "b"}', ToolServer("a", ("b",))),
        ('{"a": {"serverUrl": "http://b:1/c"}}', ToolServer("a", url="http://b:1/c")),
        ('{"a": {"command": "b", "disabled": true}}', ToolServer("a", ("b",), is_on=False)),
    ],
)
def test_forms_of_other_programs_are_read(text: str, server: ToolServer) -> None:
    assert servers_in(text) == (server,)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("npx server", "This is not valid JSON: Expecting value: line 1 column 1 (char 0)."),
        ("[" * 100_000, "This is not valid JSON: "),
        ("[]", "This text contains no server."),
        ("{}", "This text contains no server."),
        ('{"mcpServers": {"a": 1}}', "a is not a server."),
        ('{"a": {}}', "a needs a command or an address."),
        ('{"a": {"command": "b", "args": "c"}}', "“args” in a is not a list of strings."),
        ('{"a": {"command": "b", "env": [1]}}', "“env” in a is not an object with string values."),
        ('{"a": {"url": "ftp://b"}}', "ftp://b is not a valid http:// or"),
        ('{"a": {"url": "http://[b"}}', "http://[b is not a valid http:// or"),
        ('{"": {"command": "b"}}', "A server needs a name of at most 64 characters."),
        ('{"a": {"command": "b\\u0000"}}', "a has no usable command."),
        ('{"a": {"url": "http://b", "headers": {"X": "1\\n2"}}}', "The header X contains "),
    ],
)  # fmt: skip
def test_what_is_no_server_is_a_sentence(text: str, sentence: str) -> None:
    with pytest.raises(EngineError) as caught:
        servers_in(text)
    assert caught.value.message.startswith(sentence)


def test_servers_are_kept_and_their_secrets_are_not_in_the_file(
    ring: dict[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "config"
    store = store_in(folder)
    assert store.load() == ()
    typed = ToolServer("far", url=FAR.url, headers={"Authorization": "Bearer s3"}, is_on=False)
    assert store.keep_secrets(typed) == "keyring"
    store.save([FILES, typed])
    assert "s3" not in "".join(path.read_text() for path in folder.iterdir())
    again = store_in(folder)
    assert again.load() == (FILES, FAR)
    assert again.headers_of(FAR) == {"Authorization": "Bearer s3"}
    assert again.headers_of(FILES) == {}
    near = replace(FAR, name="near")  # edited without typing the value again
    again.keep_secrets(near, FAR)
    assert again.headers_of(FAR) == {}
    assert again.headers_of(near) == {"Authorization": "Bearer s3"}
    again.forget("near")
    assert again.headers_of(near) == {}
    assert not ring
    if sys.platform != "win32":
        assert stat.S_IMODE((folder / "tool-servers.json").stat().st_mode) == 0o600


def test_without_a_keyring_secrets_are_in_a_private_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: str) -> None:
        raise keyring.errors.NoKeyringError("none here")

    for name in ("get_password", "set_password", "delete_password"):
        monkeypatch.setattr(f"keyring.{name}", fail)
    typed = ToolServer("far", url=FAR.url, headers={"X": "s3"})
    assert store_in(tmp_path).keep_secrets(typed) == "file"
    kept = replace(typed, headers={"X": ""})
    assert store_in(tmp_path).headers_of(kept) == {"X": "s3"}


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[]", b'{"mcpServers": {"a": {}}}'])
def test_a_damaged_file_is_set_aside(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "tool-servers.json"
    file.write_bytes(content)
    assert store_in(tmp_path).load() == ()
    assert not file.exists()
    assert file.with_name("tool-servers.json.broken").read_bytes() == content


@odd_files
def test_what_is_no_file_is_set_aside(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "tool-servers.json"
    make_odd_file(file, kind)
    assert store_in(tmp_path).load() == ()
    assert os.path.lexists(file.with_name("tool-servers.json.broken"))


@pytest.mark.parametrize(
    ("text", "words", "is_windows"),
    [
        ("npx -y 'a b' c\\ d", ("npx", "-y", "a b", "c d"), False),
        ('"C:\\Program Files\\x.exe" a\\b', ("C:\\Program Files\\x.exe", "a\\b"), True),
        ("", (), False),
    ],
)
def test_a_line_is_a_program_and_its_arguments(
    text: str, words: tuple[str, ...], is_windows: bool
) -> None:
    assert split_command(text, is_windows=is_windows) == words
    assert split_command(join_command(words, is_windows=is_windows), is_windows=is_windows) == words


def test_a_quote_without_an_end_is_a_sentence() -> None:
    with pytest.raises(EngineError, match="A quote in the command is not closed"):
        split_command("npx 'a")


def test_names_for_models_are_unique_and_allowed() -> None:
    servers = ["a b", "a_b", "A B", "__", "", "é" * 40, "x" * 100, "x" * 101, "a__b"]
    prefixes = server_prefixes(servers)
    assert len({prefix.lower() for prefix in prefixes.values()}) == len(servers)
    assert not [prefix for prefix in prefixes.values() if "__" in prefix or prefix.endswith("_")]
    tools = ["read", "read ", "read.", "y" * 100, "y" * 101, "__", ""]
    names = [name for prefix in prefixes.values() for name in tool_names(prefix, tools)]
    assert len({name.lower() for name in names}) == len(names)
    assert all(re.fullmatch("[A-Za-z0-9_-]{1,64}", name) for name in names)
    assert tool_names("Files", ["read_file"]) == ["Files__read_file"]
    assert {name.partition("__")[0] for name in names} == set(prefixes.values())
