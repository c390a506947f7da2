"""The model files in some folders: parts of a model together, helpers beside it, nothing twice."""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from app.core.translation import tr_later
from engine import read_file

YOUR_FOLDERS: Final = tr_later("Your folders")
"""Name of the folders that a person has chosen, in place of a program's."""

OPENED: Final = tr_later("Opened")
"""Name of models that were opened and lie in no such folder, in place of a program's."""

Layout = Literal["files", "hub", "ollama", "file"]
"""Arrangement of a place: files in folders, Hugging Face's cache, Ollama's manifests, one file."""


@dataclass(frozen=True, slots=True)
class Place:
    """A folder that may hold models, or one model file.

    Attributes:
        program: name of the program that keeps it, as people know it.
    """

    path: Path
    program: str
    layout: Layout = "files"


def known_places(
    own: Iterable[str | Path] = (),
    home: Path | None = None,
    environment: Mapping[str, str] = os.environ,
) -> list[Place]:
    """Return the folders that exist: a person's own first, then those of other programs.

    Each is named once, also where several programs use it.

    Args:
        own: folders that the person has chosen.
        home: the person's home folder; None asks the system.
    """
    found = [Place(Path(path).expanduser(), YOUR_FOLDERS) for path in own]
    if home is None:
        try:
            home = Path.home()
        except RuntimeError:  # a user without a home
            return _existing(found)
    get = environment.get
    cache = Path(get("XDG_CACHE_HOME") or home / ".cache")
    hub = get("HF_HUB_CACHE") or get("HUGGINGFACE_HUB_CACHE")
    hubs = [Path(hub)] if hub else []
    hubs.append(Path(get("HF_HOME") or cache / "huggingface") / "hub")
    found += [Place(path, "Hugging Face", "hub") for path in hubs]
    lm_studio = (home / ".lmstudio" / "models", cache / "lm-studio" / "models")
    found += [Place(path, "LM Studio") for path in lm_studio]
    ollama = [Path(custom)] if (custom := get("OLLAMA_MODELS")) else []
    ollama += [home / ".ollama" / "models", Path("/usr/share/ollama/.ollama/models")]
    found += [Place(path, "Ollama", "ollama") for path in ollama]
    llama = [Path(custom)] if (custom := get("LLAMA_CACHE")) else []
    llama.append(cache / "llama.cpp")
    found += [Place(path, "llama.cpp") for path in llama]
    jan = Path(get("XDG_CONFIG_HOME") or home / ".config") / "Jan" / "data" / "llamacpp" / "models"
    return _existing([*found, Place(jan, "Jan")])


def opened_models(paths: Iterable[str | Path]) -> list[Place]:
    """Return model files that were opened and are still there."""
    return [Place(Path(path), OPENED, "file") for path in paths if Path(path).is_file()]


def _existing(places: Iterable[Place]) -> list[Place]:
    """Return the places that are folders, each once."""
    found: dict[tuple[int, int], Place] = {}
    for place in places:
        try:
            status = place.path.stat()
            if place.path.is_dir():
                found.setdefault((status.st_dev, status.st_ino), place)
        except OSError:
            continue  # it does not exist, or may not be read
    return list(found.values())


SUFFIX = ".gguf"
MAGIC = b"GGUF"
DEEPEST = 8
"""Number of folders inside each other that are looked into."""

MAX_FILES = 20_000
"""Number of model files after which a folder is left: it holds something else."""

SHARD = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$", re.IGNORECASE)
OLLAMA_MODEL = "application/vnd.ollama.image.model"
OLLAMA_PROJECTOR = "application/vnd.ollama.image.projector"
MAX_MANIFEST = 1 << 20
"""Most bytes of a manifest of Ollama."""

FileIdentity = tuple[int, int]
"""Device and inode of a file."""


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model on the disk.

    Attributes:
        path: file to open; the first part of a model in several.
        name: what its folder or program calls it.
        program: program that keeps it.
        n_bytes: size of all its parts.
        modified: time of the last change, in seconds since the epoch.
        parts: all files of the model that are there.
        missing: file names of parts that are not there.
        projector: file that gives it eyes ("mmproj"); None for none.
        draft: file with heads that predict several tokens ("mtp"); None for none.
        identity: what tells its file from others, as of `file_identity`.
    """

    path: Path
    name: str
    program: str
    n_bytes: int
    modified: float
    parts: tuple[Path, ...] = ()
    missing: tuple[str, ...] = ()
    projector: Path | None = None
    draft: Path | None = None
    identity: FileIdentity | None = None


def scan(
    places: Iterable[Place], is_cancelled: Callable[[], bool] = lambda: False
) -> list[FoundModel]:
    """Return the models in some folders, each file once, in the order of the folders.

    Folders that cannot be read are left out.
    """
    seen: set[FileIdentity] = set()
    found: list[FoundModel] = []
    for place in places:
        for model in _models_at(place, is_cancelled):
            if is_cancelled():
                return found
            if (key := file_identity(model.path)) is not None and key not in seen:
                seen.add(key)
                found.append(replace(model, identity=key))
    return found


def _models_at(place: Place, is_cancelled: Callable[[], bool]) -> Iterator[FoundModel]:
    """Yield the models of a place."""
    if place.layout == "ollama":
        yield from _in_ollama(place)
    elif place.layout == "file":
        folder = place.path.parent
        names = sorted(path.name for path in folder.glob("*") if path.suffix.lower() == SUFFIX)
        found = _models(place, folder, names or [place.path.name])
        yield from (model for model in found if place.path in model.parts)
    else:
        yield from _in_folder(place, is_cancelled)


def file_identity(path: str | Path) -> FileIdentity | None:
    """Return what tells a file from others, by whatever name it goes; None if it is gone."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _in_folder(place: Place, is_cancelled: Callable[[], bool]) -> Iterator[FoundModel]:
    """Yield the models of a folder of files, and of those below it."""
    n_files = 0
    for folder, names in _walk(place.path):
        files = sorted(name for name in names if name.lower().endswith(SUFFIX))
        n_files += len(files)
        if is_cancelled() or n_files > MAX_FILES:
            return
        yield from _models(place, folder, files)


def _walk(top: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield (folder, names of its files) for a folder and those below, without hidden ones."""
    depth = len(top.parts)
    for root, folders, names in os.walk(top):
        folder = Path(root)
        if len(folder.parts) - depth >= DEEPEST:
            folders.clear()
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield folder, names


def _models(place: Place, folder: Path, names: list[str]) -> Iterator[FoundModel]:
    """Yield the models among the files of one folder, with their helpers."""
    projectors = [name for name in names if "mmproj" in name.lower()]
    drafts = [name for name in names if name.lower().startswith("mtp-")]
    helpers = {*projectors, *drafts}
    for parts in _together([name for name in names if name not in helpers]):
        model = _model(place, folder, parts)
        if model is not None:
            yield replace(
                model,
                projector=folder / projectors[0] if projectors else None,
                draft=folder / drafts[0] if drafts else None,
            )


def _together(names: list[str]) -> Iterator[list[str]]:
    """Yield the names of each model's files, in order."""
    shards: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in names:
        match = SHARD.match(name)
        if match is None:
            yield [name]
        else:
            shards[match["stem"], match["count"]].append(name)
    yield from (sorted(parts) for parts in shards.values())


def _model(place: Place, folder: Path, parts: list[str]) -> FoundModel | None:
    """Return the model of these files; None if they are gone."""
    try:
        states = [(folder / part).stat() for part in parts]
    except OSError:
        return None
    match = SHARD.match(parts[0])
    stem = match["stem"] if match else Path(parts[0]).stem
    missing: tuple[str, ...] = ()
    if match is not None:
        count = int(match["count"])
        wanted = (f"{stem}-{n:05}-of-{count:05}{SUFFIX}" for n in range(1, min(count, 999) + 1))
        missing = tuple(name for name in wanted if name not in parts)
    return FoundModel(
        folder / parts[0],
        _hub_name(place, folder, stem) if place.layout == "hub" else stem,
        place.program,
        sum(state.st_size for state in states),
        max(state.st_mtime for state in states),
        tuple(folder / part for part in parts),
        missing,
    )


def _hub_name(place: Place, folder: Path, stem: str) -> str:
    """Return the name of a file in Hugging Face's cache: its repository and itself.

    A repository's folder is called "models--owner--name".
    """
    parts = folder.relative_to(place.path).parts
    repository = parts[0].removeprefix("models--").replace("--", "/", 1) if parts else ""
    return f"{repository}/{stem}" if repository else stem


def _in_ollama(place: Place) -> Iterator[FoundModel]:
    """Yield the models that Ollama's manifests name; their files have no suffix.

    A manifest is "manifests/host/owner/name/tag", JSON with the digests of the model's layers.
    """
    top = place.path / "manifests"
    for folder, tags in _walk(top):
        for tag in sorted(tags):
            layers = _layers(folder / tag)
            path = _blob(place.path, layers.get(OLLAMA_MODEL))
            if path is None:
                continue
            try:
                state = path.stat()
            except OSError:
                continue
            *_, owner, name = ("", *folder.relative_to(top).parts)
            shown = name if owner in ("", "library") else f"{owner}/{name}"
            projector = _blob(place.path, layers.get(OLLAMA_PROJECTOR))
            yield FoundModel(
                path, f"{shown}:{tag}", place.program, state.st_size, state.st_mtime, (path,),
                projector=projector,
            )  # fmt: skip


def _layers(manifest: Path) -> dict[str, str]:
    """Return the digests of a manifest's layers by their type; none if it is no manifest."""
    try:
        document = json.loads(read_file(manifest, MAX_MANIFEST))
        return {str(layer["mediaType"]): str(layer["digest"]) for layer in document["layers"]}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}


def _blob(top: Path, digest: str | None) -> Path | None:
    """Return the file of a digest if it is a model that may be read; else None."""
    if digest is None or re.fullmatch(r"sha256:[0-9a-f]{64}", digest) is None:
        return None
    path = top / "blobs" / digest.replace(":", "-")
    try:
        with path.open("rb") as file:
            return path if file.read(len(MAGIC)) == MAGIC else None
    except OSError:
        return None
