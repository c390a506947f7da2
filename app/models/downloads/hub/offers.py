"""The files of a repository as what can be downloaded: one offer for each quantisation."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from app.models.downloads.transfer.remote_file import RemoteFile

SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
QUANT = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q\d\w*|TQ\d_\d|BF16|FP?16|FP?32|MXFP4\w*|NVFP4\w*))(?=$|[-.])",
    re.IGNORECASE,
)
NO_MODEL = ("imatrix",)


@dataclass(frozen=True, slots=True)
class ModelOffer:
    """A model of a repository in one quantisation.

    Attributes:
        name: name of its file, without suffix and number of its part.
        quant: quantisation as its name says; the name where it says none.
        parts: its files, in order.
        helpers: files that belong to it, such as one that gives it eyes.
    """

    name: str
    quant: str
    parts: tuple[RemoteFile, ...]
    helpers: tuple[RemoteFile, ...] = ()

    @property
    def files(self) -> tuple[RemoteFile, ...]:
        """All that a download fetches."""
        return (*self.parts, *self.helpers)

    @property
    def n_bytes(self) -> int:
        return sum(file.n_bytes for file in self.files)


def offers(files: Sequence[RemoteFile]) -> list[ModelOffer]:
    """Return the offers of a repository, the smallest first; models with missing parts are none."""
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
    """Return the quantisation that a name ends in; "" if it names none."""
    found = QUANT.findall(name)
    return found[-1].upper() if found else ""


def wanted(found: Sequence[ModelOffer], quant: str, path: str) -> ModelOffer | None:
    """Return the offer that an address names; None if it names none, or one that is not there."""
    for offer in found:
        if path and any(part.name == path for part in offer.parts):
            return offer
        if quant and offer.quant.casefold() == quant.casefold():
            return offer
    return None


def _best(projectors: list[RemoteFile]) -> list[RemoteFile]:
    """Return one of several files with eyes: in F16, which all can compute with, else the first."""
    projectors.sort(key=lambda file: (quant_of(file.name[: -len(".gguf")]) != "F16", file.name))
    return projectors[:1]
