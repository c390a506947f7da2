"""Export of chats: PDF rendering, and writing files and folders in any format."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from PySide6.QtCore import (
    QBuffer,
    QByteArray,
    QEventLoop,
    QIODevice,
    QLocale,
    QMarginsF,
    QRectF,
    QSizeF,
    Qt,
)
from PySide6.QtGui import (
    QAbstractTextDocumentLayout,
    QColor,
    QPageLayout,
    QPageSize,
    QPainter,
    QPalette,
    QPdfWriter,
    QTextDocument,
)

from app.chat.conversation import Conversation
from app.chat.exchange.paper import (
    FAINT_INK,
    INK,
    TEXT_POINTS,
    PaperFormulas,
    PaperImages,
    PaperWriter,
    paper_font,
)
from app.chat.export import PDF, exported, file_name
from app.chat.images.album import PathOf, nowhere, write_beside, write_for_others
from app.chat.images.files import ImageFolder
from app.chat.store import why_unreadable
from app.core.translation import tr, tr_later
from engine import one_line

MARGIN_MM: Final = 20.0
FOOT_MM: Final = 9.0
"""Height of the space for the page number below the text."""

DPI: Final = 1200
"""Resolution of the PDF; positions are rounded to it."""

FOOT_POINTS: Final = 8.0
MM_PER_INCH, USUAL_DPI = 25.4, 96


def pdf_of(chat: Conversation, path_of: PathOf = nowhere) -> bytes:
    """Return a chat as PDF data. Thread-safe.

    Args:
        path_of: returns the paths of the chat's images.
    """
    loop = QEventLoop()  # enables timers on this thread, which layouts need although none fires
    data = QByteArray()
    buffer = QBuffer(data)
    buffer.open(QIODevice.OpenModeFlag.WriteOnly)
    writer = QPdfWriter(buffer)
    writer.setTitle(one_line(chat.shown_title))
    writer.setCreator("Tandem")
    writer.setResolution(DPI)
    metric = QLocale.system().measurementSystem() == QLocale.MeasurementSystem.MetricSystem
    size = QPageSize(QPageSize.PageSizeId.A4 if metric else QPageSize.PageSizeId.Letter)
    margins = QMarginsF(MARGIN_MM, MARGIN_MM, MARGIN_MM, MARGIN_MM)
    unit = QPageLayout.Unit.Millimeter
    writer.setPageLayout(QPageLayout(size, QPageLayout.Orientation.Portrait, margins, unit))
    _paint(writer, _document(chat, writer, path_of))
    buffer.close()
    del loop
    return bytes(data.data())


def _document(chat: Conversation, writer: QPdfWriter, path_of: PathOf) -> QTextDocument:
    document = QTextDocument()
    document.setUndoRedoEnabled(False)
    document.documentLayout().setPaintDevice(writer)
    document.setDocumentMargin(0)
    document.setDefaultFont(paper_font(TEXT_POINTS))
    foot = FOOT_MM / MM_PER_INCH * DPI
    document.setPageSize(QSizeF(writer.width(), writer.height() - foot))
    formulas = PaperFormulas(document)
    images = PaperImages(document, path_of)
    try:
        PaperWriter(document, DPI / USUAL_DPI, formulas, images).write(chat)
    finally:
        formulas.close()
        images.close()
    return document


def _paint(writer: QPdfWriter, document: QTextDocument) -> None:
    page, n_pages = document.pageSize(), document.pageCount()
    context = QAbstractTextDocumentLayout.PaintContext()
    context.palette.setColor(QPalette.ColorRole.Text, QColor(INK))
    painter = QPainter(writer)
    for number in range(n_pages):
        if number:
            writer.newPage()
        painter.save()
        painter.translate(0, -number * page.height())
        context.clip = QRectF(0, number * page.height(), page.width(), page.height())
        painter.setClipRect(context.clip)
        document.documentLayout().draw(painter, context)
        painter.restore()
        _paint_foot(painter, writer, number + 1, n_pages)
    painter.end()


def _paint_foot(painter: QPainter, writer: QPdfWriter, number: int, n_pages: int) -> None:
    painter.setFont(paper_font(FOOT_POINTS))
    painter.setPen(QColor(FAINT_INK))
    text = tr("Page {n} of {total}").format(n=number, total=n_pages)
    box = QRectF(0, 0, writer.width(), writer.height())
    painter.drawText(box, Qt.AlignmentFlag.AlignHCenter | Qt.AlignmentFlag.AlignBottom, text)


BESIDE: Final = tr_later("{name} images")
"""Name of the image folder for a Markdown file."""


@dataclass(frozen=True, slots=True)
class Written:
    """Files written by an export, and the error that stopped it early, or ""."""

    paths: tuple[Path, ...]
    failure: str = ""


def write_chat_as(chat: Conversation, path: Path, images: ImageFolder) -> None:
    """Write a chat atomically, in the format given by the file's suffix (raises OSError).

    Images in a Markdown file go into a folder next to it; other formats embed images.
    """
    suffix, path_of, beside = path.suffix.lower(), partial(images.path, chat), ""
    if suffix == PDF:
        data = pdf_of(chat, path_of)
    else:
        if suffix == ".md" and any(message.pictures for message in chat.messages):
            beside = tr(BESIDE).format(name=path.stem)
            write_beside(chat, path_of, path.with_name(beside))
        data = exported(chat, suffix, path_of, beside).encode(errors="replace")
    write_for_others(path, data)


def write_all(
    chats: Iterable[Conversation | str],
    read: Callable[[str], Conversation],
    images: ImageFolder,
    folder: Path,
    suffix: str,
) -> Written:
    """Write chats to new files, named after the chats' titles.

    Args:
        chats: chats, or ids of chats for `read`.
        suffix: one of `FORMATS`.
    """
    paths: list[Path] = []
    for one in chats:
        try:
            chat = one if isinstance(one, Conversation) else read(one)
            path = free_path(folder, file_name(chat), suffix)
            write_chat_as(chat, path, images)
        except (OSError, ValueError, RecursionError) as error:
            name = one if isinstance(one, str) else one.shown_title
            why = why_unreadable(error)
            return Written(
                tuple(paths), tr("“{title}” cannot be written: {why}.").format(title=name, why=why)
            )
        paths.append(path)
    return Written(tuple(paths))


def free_path(folder: Path, name: str, suffix: str) -> Path:
    """Return an unused path for a file."""
    path, number = folder / f"{name}{suffix}", 2
    while path.exists():
        path, number = folder / f"{name} ({number}){suffix}", number + 1
    return path
