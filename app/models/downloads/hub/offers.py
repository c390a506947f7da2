"""The quantisations that a repository offers, and model addresses."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from app.models.downloads.transfer.source import RemoteFile

SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
QUANT = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q\d\w*|TQ\d_\d|BF16|FP?16|FP?32|MXFP4\w*|NVFP4\w*))(?=$|[-.])",
    re.IGNORECASE,
)
NO_MODEL = ("imatrix",)


@dataclass(frozen=True, slots=True)
class ModelOffer:
    """A model in a repository, in one quantisation.

    Attributes:
        name: file name without suffix and part number.
        quant: quantisation according to the name, or the name itself.
        parts: the model's files, in order.
        helpers: related files, for example the vision encoder.
    """

    name: str
    quant: str
    parts: tuple[RemoteFile, ...]
    helpers: tuple[RemoteFile, ...] = ()

    @property
    def files(self) -> tuple[RemoteFile, ...]:
        """All files to download."""
        return (*self.parts, *self.helpers)

    @property
    def n_bytes(self) -> int:
        return sum(file.n_bytes for file in self.files)


def offers(files: Sequence[RemoteFile]) -> list[ModelOffer]:
    """Return a repository's offers, smallest first, excluding incomplete models."""
    models = defaultdict(list)
    projectors, drafts = [], []
    for file in files:
        folder, _, name = file.name.rpartition("/")
        small = name.lower()
        if not small.endswith(".gguf") or any(word in small for word in NO_MODEL):
            continue
        if "mmproj" in small:
            projectors.append(file)
        elif small.startswith("mtp-"):
            drafts.append(file)
        else:
            match = SHARD.fullmatch(name)
            stem = match["stem"] if match else name[: -len(".gguf")]
            models[folder, stem, int(match["count"]) if match else 1].append(file)
    helpers = (*_best(projectors), *drafts[:1])
    found = []
    for (folder, stem, count), parts in models.items():
        if len(parts) == count:
            parts.sort(key=lambda part: part.name)
            quant = quant_of(stem) or quant_of(folder) or stem
            found.append(ModelOffer(stem, quant, tuple(parts), helpers))
    return sorted(found, key=lambda offer: (offer.n_bytes, offer.name))


def quant_of(name: str) -> str:
    """Return the last quantisation in a name, or ""."""
    found = QUANT.findall(name)
    return found[-1].upper() if found else ""


def find_offer(found: Sequence[ModelOffer], quant: str, path: str) -> ModelOffer | None:
    """Return the offer with this quantisation or path, if any."""
    for offer in found:
        if path and any(part.name == path for part in offer.parts):
            return offer
        if quant and offer.quant.casefold() == quant.casefold():
            return offer
    return None


def _best(projectors: list[RemoteFile]) -> list[RemoteFile]:
    """Return one vision encoder: F16, which runs everywhere, if there is one, else the first."""
    projectors.sort(key=lambda file: (quant_of(file.name[: -len(".gguf")]) != "F16", file.name))
    return projectors[:1]


HUB = "https://huggingface.co"
HUB_HOSTS = {"huggingface.co", "www.huggingface.co", "hf.co"}
PART = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,95}"
REPO = re.compile(rf"({PART}/{PART}?)(?::([\w.-]{{1,40}}))?")
IN_REPO = {"tree", "blob", "resolve", "raw"}
TRUE = {"1", "ON", "YES", "TRUE"}


@dataclass(frozen=True, slots=True)
class Address:
    """A repository, file or link that the user entered.

    Attributes:
        repo: repository as "owner/name"; "" for a link outside the hub.
        quant: requested quantisation; "" for any.
        path: file in the repository; "" for all files.
        revision: branch, tag or commit; "" for the newest.
        url: link outside the hub; "" if it is on the hub.
    """

    repo: str = ""
    quant: str = ""
    path: str = ""
    revision: str = ""
    url: str = ""


def hub_endpoint(environment: Mapping[str, str] = os.environ) -> str:
    """Return the hub's address without a trailing "/", from `HF_ENDPOINT` if it is set."""
    return environment.get("HF_ENDPOINT", "").strip().rstrip("/") or HUB


def is_offline(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether the environment forbids network access to Hugging Face's tools."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(environment.get(name, "").upper() in TRUE for name in names)


def parse_address(text: str, endpoint: str = HUB) -> Address | None:
    """Return the address in a text, or None if the text is a search query."""
    text = text.strip()
    if match := REPO.fullmatch(text):
        return _repo(match[1], match[2] or "")
    host, _, rest = text.partition("/")
    if host in HUB_HOSTS:
        return parse_address(f"{HUB}/{rest}", endpoint)
    try:
        split = urlsplit(text)
        _ = split.port  # raises if invalid
    except ValueError:
        return None
    if split.scheme not in ("http", "https") or not split.hostname:
        return None
    if split.hostname in HUB_HOSTS or split.netloc == urlsplit(endpoint).netloc:
        return _in_hub(unquote(split.path).strip("/"))
    is_file = split.path.lower().endswith(".gguf") and "@" not in split.netloc
    return Address(url=text) if is_file else None


def _in_hub(path: str) -> Address | None:
    """Return the address for a hub path: "owner/name[:quant]", optionally with a file."""
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
    """Return a repository's address, or None if its name looks like a path."""
    if ".." in repo or repo.endswith((".", "/", ".gguf")):
        return None
    return Address(repo, quant)
