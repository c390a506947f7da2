"""A hub on this machine, with the answers of Hugging Face that its library reads."""

import hashlib
import json
from collections.abc import Mapping
from urllib.parse import parse_qs

from tests.helpers.hostile_server import Asked, HostileServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"
Reply = tuple[int, dict[str, str], bytes]


def add_repository(
    server: HostileServer,
    repo: str,
    files: Mapping[str, bytes],
    *,
    downloads: int = 1000,
    gated: str | bool = False,
    licence: str = "apache-2.0",
    n_params: int = 135_000_000,
    token: str = "",
) -> None:
    """Add a repository to a server that `start_hub` has made a hub.

    Args:
        gated: "auto" or "manual" where it is gated.
        token: token without which its files are refused; "" for none.
    """
    summary = {
        "id": repo, "modelId": repo, "author": repo.partition("/")[0], "sha": COMMIT,
        "lastModified": "2026-10-01T12:00:00.000Z", "downloads": downloads, "likes": 7,
        "gated": gated, "private": False, "tags": ["gguf", f"license:{licence}"],
        "gguf": {"total": n_params, "architecture": "llama", "context_length": 2048},
    }  # fmt: skip
    siblings = [
        {
            "rfilename": name, "size": len(data), "blobId": "0" * 40,
            "lfs": {
                "sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130,
            },
        }
        for name, data in files.items()
    ]  # fmt: skip
    known = server.__dict__.setdefault("repositories", {})
    known[repo] = summary
    details = summary | {"siblings": siblings, "cardData": {"license": licence}}
    for path in (f"/api/models/{repo}", f"/api/models/{repo}/revision/{COMMIT}"):
        server.replies[path] = lambda _: _json(details)
    for name, data in files.items():
        path = f"/{repo}/resolve/{COMMIT}/{name}"
        server.files[path] = data
        if token:
            server.replies[path] = lambda asked, path=path: _guarded(server, asked, path, token)


def start_hub(server: HostileServer) -> None:
    """Let a server answer searches."""

    def search(asked: Asked) -> Reply:
        words = parse_qs(asked.query).get("search", [""])[0].casefold()
        found = server.__dict__.get("repositories", {}).values()
        return _json([one for one in found if words in str(one["id"]).casefold()])

    server.replies["/api/models"] = search


def _guarded(server: HostileServer, asked: Asked, path: str, token: str) -> Reply:
    """Return the bytes of a file for those who have the token."""
    if asked.token != f"Bearer {token}":
        return 401, {"X-Error-Code": "GatedRepo"}, b""
    data = server.files[path]
    start, end = asked.start or 0, (asked.end or len(data))
    part = data[start:end]
    shown = f"bytes {start}-{start + len(part) - 1}/{len(data)}"
    return 206, {"Content-Range": shown}, part


def _json(value: object) -> Reply:
    return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()
