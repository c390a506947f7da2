"""What is known of repositories, offers and downloads, as texts of the window."""

from __future__ import annotations

from app.core.transfer_progress import TransferProgress, amount_text, moving_text
from app.core.translation import tr
from app.core.units import decimal_size
from app.models.downloads.hub.client import FoundRepo, Repository
from app.models.downloads.jobs import DownloadJob
from app.models.library.texts import LibraryCell, count_text


def result_headers() -> tuple[str, ...]:
    return (
        tr("Repository"), tr("Publisher"), tr("Parameters"), tr("Downloads"), tr("Likes"),
        tr("Updated"),
    )  # fmt: skip


def result_cells(found: FoundRepo) -> list[LibraryCell]:
    """Return the cells of a repository's row, in the order of `result_headers`."""
    publisher, _, name = found.repo.partition("/")
    updated = found.updated
    lock = tr("{name} · gated").format(name=name) if found.is_gated else name
    return [
        LibraryCell(lock, name.casefold(), found.repo),
        LibraryCell(publisher, publisher.casefold()),
        LibraryCell(count_text(found.n_params) if found.n_params else "–", found.n_params),
        LibraryCell(count_text(found.n_downloads), found.n_downloads, tr("In the last 30 days")),
        LibraryCell(count_text(found.n_likes), found.n_likes),
        LibraryCell(
            f"{updated:%Y-%m-%d}" if updated else "–", updated.timestamp() if updated else 0
        ),
    ]


def repository_facts(found: Repository) -> str:
    """Return one line about a repository."""
    parts = [
        tr("{count} parameters").format(count=count_text(found.n_params)) if found.n_params else "",
        tr("licence: {name}").format(name=found.licence) if found.licence else "",
        tr("gated") if found.is_gated else "",
    ]
    return " · ".join(part for part in parts if part)


def state_text(job: DownloadJob, progress: TransferProgress) -> str:
    """Return what a download does: "1.2 of 4.9 GB · 35 MB/s · 2 min left"."""
    if job.state == "failed":
        return f"{job.problem} {job.hint}".strip()
    if job.state == "done":
        return tr("{size} · done").format(size=decimal_size(job.n_bytes))
    amount = amount_text(progress.n_bytes, job.n_bytes)
    if job.state == "waiting":
        return tr("{amount} · waiting for others").format(amount=amount)
    if job.state == "paused":
        return tr("{amount} · paused").format(amount=amount)
    if progress.is_checking:
        return tr("{amount} · comparing with its hash").format(amount=amount)
    return moving_text(progress, job.n_bytes)
