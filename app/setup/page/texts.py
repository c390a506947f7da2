"""Texts of the window about engines and installations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from app.core.transfer_progress import TransferProgress, amount_text, moving_text
from app.core.translation import tr, tr_later, tr_n
from app.core.units import decimal_size, size_text
from app.setup.page.views.choice_list import ShownEngine
from engine import DeviceInfo

if TYPE_CHECKING:
    from app.setup.engine_pack.activation import Origin
    from app.setup.engine_pack.backends import PackOffer
    from app.setup.engine_pack.progress import InstallStage
    from app.setup.engine_pack.store import Pack
    from app.setup.page.session import EngineFacts

USES = {
    "cpu": tr_later("Computes on the processor. GPUs are not used."),
    "cuda13": tr_later("For NVIDIA GPUs with driver 580 or newer, and the processor."),
    "cuda12": tr_later("For NVIDIA GPUs with an older driver, and the processor."),
    "rocm": tr_later("For AMD GPUs, and the processor."),
}
"""Devices that each kind of PyTorch computes on."""


def missing_intro(former: Pack | None) -> str:
    """Return what the page says while there is no engine.

    Args:
        former: one that was installed and cannot be used any more.
    """
    if former is not None:
        text = tr("{engine} cannot be used any more: it is for another Python, or was deleted.")
        return f"{text.format(engine=pack_title(former))} {tr('Install it again, or another one.')}"
    return tr(
        "An engine computes what models answer: PyTorch, which Tandem keeps in a folder of its own."
        " Nothing is asked of the network before you press Install."
    )


def change_intro(pack: Pack) -> str:
    """Return what the page says while an engine is in use."""
    text = tr("In use: {engine}. It stays until another one has answered.")
    return text.format(engine=pack_title(pack))


def found_text(devices: Sequence[DeviceInfo]) -> str:
    """Return the devices of this machine in one line."""
    if not devices:
        return tr("Looking for devices …")
    named = [_device_text(device) for device in devices]
    return tr("Found: {devices}").format(devices=" · ".join(named))


def _device_text(device: DeviceInfo) -> str:
    if device.kind == "cpu":
        cores = tr_n("{n} core", "{n} cores", device.n_cores)
        return f"{device.name} ({cores}, {size_text(device.total_bytes)})"
    return f"{device.name} ({size_text(device.total_bytes)})" if device.total_bytes else device.name


def without_commands(device: DeviceInfo, origin: Origin) -> DeviceInfo:
    """Return a device as a window shows it whose engine is a pack: nobody needs pip there."""
    if origin == "own" or device.usable or device.remedy.partition(" ")[0] != "pip":
        return device
    if origin == "none":
        return replace(device, reason=tr("It needs an engine, which is not there yet."), remedy="")
    return replace(device, remedy=tr("Choose another engine in the settings."))


def shown_engines(facts: EngineFacts) -> list[ShownEngine]:
    """Return the rows of the page: what can be installed, and what would suit but is not there."""
    from app.setup.engine_pack.backends import title_of as backend_title

    shown = [shown_offer(offer, facts.current) for offer in facts.offers]
    for backend in facts.suitable:
        if facts.offer(backend) is None:
            problem = tr(
                "This version of Tandem has none to install. A Python environment with such a"
                " PyTorch can be used."
            )
            shown.append(ShownEngine(backend, backend_title(backend), "", problem))
    return shown


def shown_offer(offer: PackOffer, current: Pack | None) -> ShownEngine:
    """Return an offer as a row of the page."""
    lock = offer.lock
    sizes = tr("Download {download}, {disk} on the disk · PyTorch {version}").format(
        version=lock.version,
        download=decimal_size(lock.n_bytes),
        disk=decimal_size(lock.unpacked_bytes),
    )
    if current is not None and current.digest == lock.digest:
        sizes = tr("{facts} · in use").format(facts=sizes)
    lines = (tr(USES[offer.backend]) if offer.backend in USES else "", sizes)
    details = "\n".join(line for line in lines if line)
    return ShownEngine(offer.backend, offer.title, details, "", offer.is_recommended)


def room_text(folder: str, free_bytes: int, needed_bytes: int) -> str:
    """Return how much room there is for an engine, and whether that is enough."""
    free = decimal_size(free_bytes)
    if free_bytes < needed_bytes:
        text = tr("Needs {needed} in {folder}, where {free} are free.")
        return text.format(needed=decimal_size(needed_bytes), folder=folder, free=free)
    return tr("{free} are free in {folder}.").format(free=free, folder=folder)


def pack_title(pack: Pack) -> str:
    """Return the name of an engine: "PyTorch 2.15.0, NVIDIA GPUs (CUDA 13)"."""
    return f"PyTorch {pack.version}, {title_of(pack)}"


def environment_title() -> str:
    """Return the name of an existing environment as the engine."""
    return tr("existing Python environment")


def title_of(pack: Pack) -> str:
    """Return what kind of engine a pack is."""
    from app.setup.engine_pack.backends import title_of as backend_title

    return environment_title() if pack.is_environment else backend_title(pack.backend)


def stage_text(stage: InstallStage | None, progress: TransferProgress, total_bytes: int) -> str:
    """Return what an installation does: "Fetching: 1.2 GB of 3.0 GB · 35.0 MB/s · 51 s left"."""
    name = stage.name if stage is not None else ""
    if name == "FETCHING":
        return tr("Fetching: {amount}").format(amount=moving_text(progress, total_bytes))
    amount = amount_text(progress.n_bytes, total_bytes)
    if name == "CHECKING":
        return tr("Checking the hash: {amount}").format(amount=amount)
    if name == "UNPACKING":
        return tr("Unpacking: {amount}").format(amount=amount)
    if name == "TRYING":
        return tr("Trying it: the bundled model answers with it …")
    return tr("Beginning …")
