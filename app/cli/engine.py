"""The subcommand `engine`, which shows, installs and removes engine packs (PyTorch)."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from pathlib import Path

from app.cli.arguments import add_json
from app.cli.output import note, note_progress, table, write, write_json
from app.core.units import decimal_size
from app.setup.engine_pack.activation import activate, has_own_engine
from app.setup.engine_pack.existing import use_environment
from app.setup.engine_pack.fetching import (
    InstallProgress,
    InstallStage,
    LackingWheels,
    MissingAddresses,
    UvMissing,
)
from app.setup.engine_pack.installation import Installation, Installed
from app.setup.engine_pack.lock import Lock, read_lock
from app.setup.engine_pack.store import (
    Pack,
    PackOffer,
    PackStore,
    find_offers,
    find_update,
    title_of,
)
from engine import EngineError

DOING = {
    InstallStage.FETCHING: "Fetching",
    InstallStage.CHECKING: "Checking",
    InstallStage.UNPACKING: "Unpacking",
    InstallStage.TRYING: "Trying the new engine",
}
HEADERS = ("BACKEND", "FOR", "PYTORCH", "DOWNLOAD", "DISK", "")
RIGHT = frozenset({3, 4})
EVERY_S = 0.1
HINTS: dict[type[EngineError], str] = {
    LackingWheels: "`tandem engine wheels` lists the wheels.",
    MissingAddresses: "Use --wheels to specify a folder that contains them.",
    UvMissing: "Reinstall Tandem, or run: pip install uv",
}
"""Hints that name commands, used instead of the hints that the window shows."""


def add_engine(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    status = actions.add_parser("status", help="show the current engine and the available ones")
    add_json(status)
    install = actions.add_parser(
        "install", help="install or update it; resumes an interrupted download"
    )
    add_choice(install)
    install.add_argument(
        "--wheels", type=Path, metavar="FOLDER",
        help="read the wheels from a folder instead of the network",
    )  # fmt: skip
    wheels = actions.add_parser("wheels", help="list the wheels that --wheels FOLDER must contain")
    add_choice(wheels)
    use = actions.add_parser("use", help="use an existing Python environment with torch")
    use.add_argument(
        "python", type=Path, metavar="PYTHON", help="the environment's folder or Python binary"
    )
    actions.add_parser("rollback", help="return to the previous engine")
    actions.add_parser("remove", help="delete everything that this command has installed")


def add_choice(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--backend", metavar="NAME", help="a name from `tandem engine status` (default: the best)"
    )
    what.add_argument(
        "--lock", type=Path, metavar="FILE", help="a lock file to use instead of Tandem's"
    )


def run_engine(args: argparse.Namespace) -> None:
    action = args.action or "status"
    if action == "status":
        _show(is_json=getattr(args, "json", False))
    elif action == "wheels":
        for wheel in _chosen_lock(args).wheels:
            write(wheel.file.url or wheel.file.name)
    elif action == "install":
        _check_needed()
        _install(_chosen_lock(args), args.wheels)
    elif action == "use":
        _check_needed()
        note_progress("Testing the environment")
        _report(use_environment(args.python))
    elif action == "rollback":
        pack = PackStore().roll_back()
        write(f"{_pack_text(pack)} is back in use.")
    else:
        PackStore().remove()
        write("The engine was removed.")


def _check_needed() -> None:
    if has_own_engine():
        raise EngineError(
            "PyTorch is installed alongside Tandem, so engine packs are not used.",
            "Manage it with pip.",
        )


def _chosen_lock(args: argparse.Namespace) -> Lock:
    if args.lock is not None:
        return read_lock(args.lock)
    offers = find_offers()
    backend = args.backend or _kept_backend(offers)
    chosen = next((offer for offer in offers if backend in (None, offer.backend)), None)
    if chosen is None:
        raise EngineError(
            "There is no engine “{backend}” for this system and Python version."
            if backend
            else "There is no engine for this system and Python version.",
            "Choose one of {names}."
            if offers
            else "Use an existing environment: tandem engine use",
            backend=backend or "",
            names=", ".join(offer.backend for offer in offers),
        )
    return chosen.lock


def _kept_backend(offers: tuple[PackOffer, ...]) -> str | None:
    pack = PackStore().current
    names = [offer.backend for offer in offers]
    return pack.backend if pack is not None and pack.backend in names else None


def _install(lock: Lock, wheels: Path | None) -> None:
    store = PackStore()
    pack = store.current
    if pack is not None and pack.digest == lock.digest and pack.is_usable:
        write(f"{_pack_text(pack)} is already installed.")
        return
    installation = Installation(lock, store, wheels, ProgressLine())
    try:
        installed = installation.run()
    except EngineError as error:
        error.hint = HINTS.get(type(error), error.hint)
        raise
    except KeyboardInterrupt:
        note_progress()
        note("Stopped. The partial download was kept; `tandem engine install` resumes it.")
        raise
    finally:
        note_progress()
    _report(installed)


def _report(installed: Installed) -> None:
    note_progress()
    activate()
    write(f"{_pack_text(installed.pack)} works and is now in use.")
    if installed.gpu_problem:
        note(installed.gpu_problem)


def _show(*, is_json: bool) -> None:
    store = PackStore()
    offers = find_offers()
    update = find_update(store.current, offers)
    is_own = has_own_engine()
    if is_json:
        write_json(
            {
                "own": is_own,
                "folder": str(store.folder),
                "current": _document(store.current),
                "previous": _document(store.previous),
                "update": update is not None,
                "offers": [
                    {
                        "backend": offer.backend, "version": offer.lock.version,
                        "download_bytes": offer.lock.n_bytes,
                        "unpacked_bytes": offer.lock.unpacked_bytes,
                        "recommended": offer.is_recommended,
                    }
                    for offer in offers
                ],
            }
        )  # fmt: skip
        return
    write(_state(store, is_own=is_own))
    if store.previous is not None:
        write(f"Previous: {_pack_text(store.previous)}.")
    if update is not None:
        write(f"PyTorch {update.lock.version} is available: tandem engine install")
    if offers and not is_own:
        write()
        write(table(HEADERS, map(_row, offers), RIGHT))
        write("\nInstall the recommended engine, or another: tandem engine install --backend NAME")


def _state(store: PackStore, *, is_own: bool) -> str:
    pack = store.current
    if is_own:
        return "PyTorch is installed alongside Tandem; no engine pack is needed."
    if pack is None:
        return "No engine is installed: tandem engine install"
    if not pack.is_usable:
        return (
            f"{_pack_text(pack)} cannot be used: it is for Python {pack.python}, or its folder is "
            "missing. Run: tandem engine install"
        )
    place = pack.source or str(store.folder / pack.name)
    size = f", {decimal_size(pack.n_bytes)}" if pack.n_bytes else ""
    return f"{_pack_text(pack)} is in use: {place}{size}"


def _document(pack: Pack | None) -> dict[str, object] | None:
    return None if pack is None else {**asdict(pack), "usable": pack.is_usable}


def _pack_text(pack: Pack) -> str:
    return f"PyTorch {pack.version} ({title_of(pack.backend)})"


def _row(offer: PackOffer) -> tuple[str, ...]:
    lock = offer.lock
    note = "recommended" if offer.is_recommended else ""
    sizes = decimal_size(lock.n_bytes), decimal_size(lock.unpacked_bytes)
    return (offer.backend, offer.title, lock.version, *sizes, note)


class ProgressLine:
    """Progress line for an installation."""

    def __init__(self) -> None:
        self._shown = 0.0
        self._stage: InstallStage | None = None
        self._first: tuple[float, int] = (0.0, 0)

    def __call__(self, progress: InstallProgress) -> None:
        now = time.monotonic()
        if progress.stage is not self._stage:
            self._stage, self._first = progress.stage, (now, progress.n_done)
        elif now - self._shown < EVERY_S:
            return
        self._shown = now
        note_progress(self._text(progress, now))

    def _text(self, progress: InstallProgress, now: float) -> str:
        text = DOING[progress.stage]
        if not progress.n_bytes:
            return text
        share = min(progress.n_done / progress.n_bytes, 1.0)
        text += f" {share:4.0%}"
        if progress.stage is InstallStage.FETCHING:
            seconds, n_bytes = now - self._first[0], progress.n_done - self._first[1]
            speed = f"  {n_bytes / seconds / 1e6:.1f} MB/s" if seconds > 1 else ""
            of = f"{decimal_size(progress.n_done)} of {decimal_size(progress.n_bytes)}"
            text += f"  {of}{speed}"
        return f"{text}  {progress.name}"
