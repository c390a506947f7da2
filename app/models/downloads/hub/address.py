"""What people paste: a repository, one of its quantisations or files, or a link to a file."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

HUB = "https://huggingface.co"
HUB_HOSTS = {"huggingface.co", "www.huggingface.co", "hf.co"}
PART = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}"
REPO = re.compile(rf"({PART}/{PART}?)(?::([\w.-]{{1,40}}))?")
IN_REPO = {"tree", "blob", "resolve", "raw"}
TRUE = {"1", "ON", "YES", "TRUE"}


@dataclass(frozen=True, slots=True)
class Address:
    """A place of models.

    Attributes:
        repo: repository as "owner/name"; "" for a link that leads to no hub.
        quant: quantisation that is wanted; "" for any.
        path: file in the repository; "" for all.
        revision: branch, tag or commit; "" for the newest.
        url: link to a file elsewhere; "" for none.
    """

    repo: str = ""
    quant: str = ""
    path: str = ""
    revision: str = ""
    url: str = ""


def hub_endpoint(environment: Mapping[str, str] = os.environ) -> str:
    """Return the address of the hub, which `HF_ENDPOINT` may change, without a "/" at its end."""
    return environment.get("HF_ENDPOINT", "").strip().rstrip("/") or HUB


def is_offline(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether a person has forbidden the hub's programs to use the network."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(environment.get(name, "").upper() in TRUE for name in names)


def parse_address(text: str, endpoint: str = HUB) -> Address | None:
    """Return the place that a text names; None if it is words to search for."""
    text = text.strip()
    if match := REPO.fullmatch(text):
        return _repo(match[1], match[2] or "")
    host, _, rest = text.partition("/")
    if host in HUB_HOSTS:
        return parse_address(f"{HUB}/{rest}", endpoint)
    try:
        split = urlsplit(text)
        _ = split.port  # raises on rubbish
    except ValueError:
        return None
    if split.scheme not in ("http", "https") or not split.hostname:
        return None
    if split.hostname in HUB_HOSTS or split.netloc == urlsplit(endpoint).netloc:
        return _in_hub(unquote(split.path).strip("/"))
    is_file = split.path.lower().endswith(".gguf") and "@" not in split.netloc
    return Address(url=text) if is_file else None


def _in_hub(path: str) -> Address | None:
    """Return the place of a path of the hub: "owner/name[:quant]" and perhaps a file in it."""
    parts = path.split("/")
    match = REPO.fullmatch("/".join(parts[:2]))
    if match is None:
        return None
    found = _repo(match[1], match[2] or "")
    if found is None or len(parts) < 4 or parts[2] not in IN_REPO:
        return found
    file = "/".join(parts[4:])
    return Address(found.repo, found.quant, file if file.endswith(".gguf") else "", parts[3])


def _repo(repo: str, quant: str) -> Address | None:
    """Return a repository if its name is none of a file or of a folder elsewhere."""
    if ".." in repo or repo.endswith((".", "/", ".gguf")):
        return None
    return Address(repo, quant)
