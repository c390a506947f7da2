"""Finds model files; groups split models and helpers, and removes duplicates."""

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

YOUR_FOLDERS: Final = tr_later("Your folders")  # program name for folders that the user added

OPENED: Final = tr_later("Opened")  # program name for opened models outside known folders

Layout = Literal["files", "hub", "ollama", "file"]
"""Layout of a place: folders, Hugging Face's cache, Ollama's manifests, or one file."""


@dataclass(frozen=True, slots=True)
class Place:
    """A folder of models or a single model file, with the name of the program it belongs to."""

    path: Path
    program: str
    layout: Layout = "files"


def known_places(
    own: Iterable[str | Path] = (),
    home: Path | None = None,
    environment: Mapping[str, str] = os.environ,
) -> list[Place]:
    """Return the existing folders, each once: first the user's, then other programs'.

    Args:
        own: folders that the user added.
        home: home folder; None uses the system's home folder.
    """
    found = [Place(Path(path).expanduser(), YOUR_FOLDERS) for path in own]
    if home is None:
        try:
            home = Path.home()
        except RuntimeError:  # no home folder
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
    """Return the opened model files that still exist."""
    return [Place(Path(path), OPENED, "file") for path in paths if Path(path).is_file()]


def _existing(places: Iterable[Place]) -> list[Place]:
    found: dict[tuple[int, int], Place] = {}
    for place in places:
        try:
            status = place.path.stat()
            if place.path.is_dir():
                found.setdefault((status.st_dev, status.st_ino), place)
        except OSError:
            continue  # missing or unreadable
    return list(found.values())


SUFFIX = ".gguf"
MAGIC = b"GGUF"
DEEPEST = 8  # maximum folder depth

MAX_FILES = 20_000  # maximum number of files; a folder with more is not a models folder

SHARD = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$", re.IGNORECASE)
OLLAMA_MODEL = "application/vnd.ollama.image.model"
OLLAMA_PROJECTOR = "application/vnd.ollama.image.projector"
MAX_MANIFEST = 1 << 20  # maximum size of an Ollama manifest in bytes

FileIdentity = tuple[int, int]  # the file's device and inode


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model on disk.

    Attributes:
        path: file to open; the first part if the model is split.
        name: name in the folder or the program.
        n_bytes: total size of the parts.
        modified: time of the last change, in seconds since the epoch.
        parts: all of the model's files that exist.
        missing: names of the parts that are missing.
        projector: vision encoder ("mmproj"), if any.
        draft: MTP heads ("mtp"), if any.
        identity: see `file_identity`.
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
    """Return the models in `places`, in order, each file once.

    Unreadable folders are skipped.
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
    """Return a file's path-independent identity, or None if the file does not exist."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _in_folder(place: Place, is_cancelled: Callable[[], bool]) -> Iterator[FoundModel]:
    n_files = 0
    for folder, names in _walk(place.path):
        files = sorted(name for name in names if name.lower().endswith(SUFFIX))
        n_files += len(files)
        if is_cancelled() or n_files > MAX_FILES:
            return
        yield from _models(place, folder, files)


def _walk(top: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield (folder, file names) for a folder and its subfolders, except hidden ones."""
    depth = len(top.parts)
    for root, folders, names in os.walk(top):
        folder = Path(root)
        if len(folder.parts) - depth >= DEEPEST:
            folders.clear()
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield folder, names


def _models(place: Place, folder: Path, names: list[str]) -> Iterator[FoundModel]:
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
    shards: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in names:
        match = SHARD.match(name)
        if match is None:
            yield [name]
        else:
            shards[match["stem"], match["count"]].append(name)
    yield from (sorted(parts) for parts in shards.values())


def _model(place: Place, folder: Path, parts: list[str]) -> FoundModel | None:
    try:
        states = [(folder / part).stat() for part in parts]
    except OSError:
        return None
    match = SHARD.match(parts[0])
    stem = match["stem"] if match else Path(parts[0]).stem
    missing: tuple[str, ...] = ()
    if match is not None:
        count = int(match["count"])
        expected = (f"{stem}-{n:05}-of-{count:05}{SUFFIX}" for n in range(1, min(count, 999) + 1))
        missing = tuple(name for name in expected if name not in parts)
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
    """Return the repository and name for a file in Hugging Face's cache.

    A repository's folder is "models--owner--name".
    """
    parts = folder.relative_to(place.path).parts
    repository = parts[0].removeprefix("models--").replace("--", "/", 1) if parts else ""
    return f"{repository}/{stem}" if repository else stem


def _in_ollama(place: Place) -> Iterator[FoundModel]:
    """Yield the models that Ollama's manifests list.

    A manifest is "manifests/host/owner/name/tag": JSON with the digests of the model's layers.
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
    """Return a manifest's layer digests by type; none if the manifest is invalid."""
    try:
        document = json.loads(read_file(manifest, MAX_MANIFEST))
        return {str(layer["mediaType"]): str(layer["digest"]) for layer in document["layers"]}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}


def _blob(top: Path, digest: str | None) -> Path | None:
    if digest is None or re.fullmatch(r"sha256:[0-9a-f]{64}", digest) is None:
        return None
    path = top / "blobs" / digest.replace(":", "-")
    try:
        with path.open("rb") as file:
            return path if file.read(len(MAGIC)) == MAGIC else None
    except OSError:
        return None
