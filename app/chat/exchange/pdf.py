"""A chat as a PDF: its rendered Markdown in dark letters on white pages, with page numbers."""

from __future__ import annotations

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
from app.chat.exchange.paper import FAINT_INK, INK, TEXT_POINTS, PaperWriter, paper_font
from app.chat.exchange.paper_formulas import PaperFormulas
from app.chat.exchange.paper_pictures import PaperPictures
from app.chat.pictures.sharing import PathOf, nowhere
from app.core.translation import tr
from engine import one_line

MARGIN_MM: Final = 20.0
FOOT_MM: Final = 9.0
"""Height of the page number below the text."""

DPI: Final = 1200
"""Resolution of the PDF; places are rounded to it."""

FOOT_POINTS: Final = 8.0
MM_PER_INCH, USUAL_DPI = 25.4, 96


def pdf_of(chat: Conversation, path_of: PathOf = nowhere) -> bytes:
    """Return a chat as the content of a PDF file; any thread may ask.

    Args:
        path_of: returns where the chat's pictures are.
    """
    loop = QEventLoop()  # gives this thread the timers that a layout wants, though none fires
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
    """Return the pages of a chat, laid out for the writer."""
    document = QTextDocument()
    document.setUndoRedoEnabled(False)
    document.documentLayout().setPaintDevice(writer)
    document.setDocumentMargin(0)
    document.setDefaultFont(paper_font(TEXT_POINTS))
    foot = FOOT_MM / MM_PER_INCH * DPI
    document.setPageSize(QSizeF(writer.width(), writer.height() - foot))
    formulas = PaperFormulas(document)
    pictures = PaperPictures(document, path_of)
    try:
        PaperWriter(document, DPI / USUAL_DPI, formulas, pictures).write(chat)
    finally:
        formulas.close()
        pictures.close()
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
