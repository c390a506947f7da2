"""Formulas on screen: images, baselines, sources, and the cost of hostile ones."""

import time
from dataclasses import replace

import pytest
from PySide6.QtGui import QImage, QTextCursor
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.chat import formulas
from app.chat.conversation import Conversation
from app.chat.export import exported
from app.chat.formula_program import draw
from app.chat.formulas import OBJECT, FormulaCache, FormulaLook, formula_cache
from app.chat.message import Message
from app.chat.views.formula_view import FormulaView
from app.chat.views.message_body import MessageBody
from app.chat.views.prose_view import MONOSPACE, ProseView, TextBlock
from app.main import Shell
from app.widgets.theme import apply_theme, theme
from tests.helpers.fake_host import Script
from tests.helpers.shell_driver import MODEL, MakeShell, ask, shown
from tests.helpers.tiers import swept

FORMULAS = [
    r"\frac{a}{b}", r"\sum_{n=1}^\infty \frac{1}{n^2}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
    r"\begin{aligned}a&=b\\c&=d\end{aligned}", r"\begin{cases}x & x>0\\ 0 & \text{else}\end{cases}",
    r"\sqrt[3]{x}", r"\binom{n}{k}", r"\mathbb{R}^n", r"\boxed{42}", r"\cancel{x}", r"\lim_{x\to0}",
]  # fmt: skip
HOSTILE = [
    r"\frac{1}{" * 30 + "x" + "}" * 30, "x^{" * 40 + "x" + "}" * 40, "x+" * 1900,
    r"\hspace{100000em}x", r"\rule{1cm}{10000000cm}", r"\frac{a", "<b>&x", "\\" * 3000, "{" * 3000,
]  # fmt: skip


@pytest.fixture
def body(qtbot: QtBot, qapp: QApplication) -> MessageBody:
    apply_theme(qapp, "dark")
    made = MessageBody()
    qtbot.addWidget(made)
    made.resize(600, 400)
    made.show()
    return made


def n_pictures(body: MessageBody) -> int:
    """Return the number of formulas shown as images."""
    n = 0
    for view in body._views:
        if isinstance(view, TextBlock):
            n += view.document().toPlainText().count(OBJECT)
        elif isinstance(view, FormulaView):
            n += not view._label.pixmap().isNull()
    return n


@pytest.mark.filterwarnings("ignore:path is deprecated")  # ziamath under Python 3.11
@pytest.mark.parametrize("latex", FORMULAS)
def test_common_formulas_are_drawn(latex: str) -> None:
    drawn = draw(latex, 16.0, "#ff0000", is_display=True)
    assert str(drawn["svg"]).startswith("<svg")
    assert 0 < float(str(drawn["depth"])) < float(str(drawn["height"])) < 120


def test_formulas_become_pictures_and_their_text_stays(qtbot: QtBot, body: MessageBody) -> None:
    text = "# A $x$\n\nb \\(y^2\\) c **$z$**\n\n$$\nw\n$$\n\n| $t$ |\n|---|\n| $5 and $6 |"
    body.set_text(text)
    before = body.pieces_shown()
    assert before == ["A $x$\nb \\(y^2\\) c $z$", "$$\nw\n$$", before[2]]
    qtbot.waitUntil(lambda: n_pictures(body) == 5)
    assert body.pieces_shown() == before


def test_a_copied_text_has_the_sources(qtbot: QtBot, qapp: QApplication, body: MessageBody) -> None:
    body.set_text("a $x$ and \\(y\\) or $x$.\n\n- $z$ end")
    qtbot.waitUntil(lambda: n_pictures(body) == 4)
    (view,) = body._views
    assert isinstance(view, ProseView)
    view.selectAll()
    view.copy()
    assert qapp.clipboard().text() == "a $x$ and \\(y\\) or $x$.\n• $z$ end"
    cursor = view.textCursor()
    cursor.setPosition(3)
    cursor.setPosition(9, QTextCursor.MoveMode.KeepAnchor)
    view.setTextCursor(cursor)
    view.copy()
    assert qapp.clipboard().text() == " and \\(y\\)"


def test_an_answer_that_grows_while_formulas_are_drawn_ends_like_one_at_once(
    qtbot: QtBot, body: MessageBody
) -> None:
    """Images replace longer sources, before and after marks of text that is not final."""
    text = "".join(
        f"Line {n} has $x_{{{n}}}$\n\n- item \\(y_{n}\\)\n\n**bold $z$\n\n" for n in range(6)
    )
    for start in range(0, len(text), 5):
        body.append(text[start : start + 5])
        body.flush()
        qtbot.wait(3)
    qtbot.waitUntil(lambda: n_pictures(body) == 18)
    whole = MessageBody()
    qtbot.addWidget(whole)
    whole.set_text(text)
    assert body.pieces_shown() == whole.pieces_shown()
    qtbot.waitUntil(lambda: n_pictures(whole) == 18)


def ink(image: QImage, x: int, width: int) -> tuple[int, int]:
    """Return the first and last row with ink in some columns."""
    rows = [
        y
        for y in range(image.height())
        if any(image.pixelColor(column, y).lightness() > 110 for column in range(x, x + width))
    ]
    return rows[0], rows[-1]


@pytest.mark.parametrize("size", ["", "# "])
def test_a_formula_stands_on_the_baseline(qtbot: QtBot, body: MessageBody, size: str) -> None:
    """Letters without descender end where those of the text do, and lines do not get higher."""
    body.set_text(f"{size}EEEE $E$ $\\frac{{g}}{{g}}$ $x$")
    view = body._views[0]
    assert isinstance(view, ProseView)
    qtbot.waitUntil(lambda: n_pictures(body) == 3)
    cursor = QTextCursor(view.document())
    cursor.setPosition(5)
    left = view.cursorRect(cursor)
    cursor.setPosition(6)
    right = view.cursorRect(cursor)
    image = body.grab().toImage()
    formula = ink(image, left.left() + 1, right.left() - left.left() - 2)
    text = ink(image, 0, left.left() - 3)
    assert abs(formula[1] - text[1]) <= 1
    assert abs(formula[0] - text[0]) <= 2


def test_small_formulas_do_not_spread_the_lines(qtbot: QtBot, body: MessageBody) -> None:
    body.set_text("plain words, and more of them")
    height = body._views[0].height()
    body.set_text("plain $x$ and $E$ of them")
    qtbot.waitUntil(lambda: n_pictures(body) == 2)
    assert body._views[0].height() <= height + 1


@pytest.mark.parametrize("ratio", [1.0, 2.0])
def test_a_picture_has_as_many_dots_as_the_screen(qtbot: QtBot, ratio: float) -> None:
    kept = FormulaCache()
    look = FormulaLook("E=mc^2", is_display=False, pixels=16.0, colour="#ff0000", ratio=ratio)
    with qtbot.waitSignal(kept.ready):
        assert kept.want(look)
    picture = kept.find(look)
    kept.close()
    assert picture is not None
    assert picture.image.width() == pytest.approx(picture.width * ratio)
    assert picture.width == pytest.approx(56, abs=12)
    colours = {picture.image.pixelColor(x, y).red() for x in range(20) for y in range(16)}
    assert 255 in colours


def test_a_formula_is_drawn_once_for_each_look(qtbot: QtBot, body: MessageBody) -> None:
    body.set_text("$q$ $q$ $q$")
    qtbot.waitUntil(lambda: n_pictures(body) == 3)
    other = MessageBody()
    qtbot.addWidget(other)
    other.set_text("$q$")
    assert n_pictures(other) == 1


def test_another_theme_draws_in_its_colour(
    qtbot: QtBot, qapp: QApplication, body: MessageBody
) -> None:
    for name in ("dark", "light"):
        apply_theme(qapp, name)
        body.set_text("$M$")
        qtbot.waitUntil(lambda: n_pictures(body) == 1)
        look = FormulaLook("M", False, 14 * 1.14, theme().text, body.devicePixelRatioF())
        assert formula_cache().find(look) is not None


@pytest.mark.parametrize("latex", swept(HOSTILE, (HOSTILE[0], *HOSTILE[3:])))
def test_a_hostile_formula_is_shown_as_its_source_in_time(
    qtbot: QtBot, body: MessageBody, latex: str
) -> None:
    body.set_text(f"before \\({latex}\\) after $ok$\n\n\\[{latex}\\]\n\nend")
    start = time.monotonic()
    qtbot.waitUntil(lambda: n_pictures(body) >= 1, timeout=15_000)
    qtbot.waitUntil(lambda: not formula_cache()._waiting, timeout=15_000)
    assert time.monotonic() - start < 20
    assert latex in "\n".join(body.pieces_shown())
    assert all(view.width() <= body.width() for view in body._views)


def test_what_cannot_be_drawn_is_code(qtbot: QtBot, body: MessageBody) -> None:
    body.set_text(r"see \(\frac{a\) and $ok$")
    qtbot.waitUntil(lambda: n_pictures(body) == 1)
    (view,) = body._views
    assert isinstance(view, ProseView)
    cursor = QTextCursor(view.document())
    cursor.setPosition(8)
    assert cursor.charFormat().fontFamilies() == MONOSPACE


def test_without_the_child_formulas_are_their_source(
    qtbot: QtBot, body: MessageBody, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formulas, "COMMAND", ("/no/such/program",))
    body.set_text("a $j_1$ b")
    qtbot.waitUntil(lambda: not formula_cache()._waiting)
    qtbot.wait(50)
    assert body.pieces_shown() == ["a $j_1$ b"]
    assert n_pictures(body) == 0


def test_a_wide_formula_scrolls_in_its_place(qtbot: QtBot, body: MessageBody) -> None:
    body.set_text("$$\n" + " + ".join("x" for n in range(60)) + "\n$$")
    (view,) = body._views
    assert isinstance(view, FormulaView)
    qtbot.waitUntil(lambda: n_pictures(body) == 1)
    qtbot.waitUntil(lambda: view.horizontalScrollBar().maximum() > 100)
    assert view.width() <= body.width()
    assert view.height() >= view._label.sizeHint().height() + 4, "the scroll bar covers nothing"


def test_no_child_is_started_without_a_formula(body: MessageBody) -> None:
    body.set_text("No formula for $5 or 6$, `$x$`.")
    assert formula_cache()._thread is None


@pytest.mark.parametrize("suffix", [".html", ".md"])
def test_an_export_has_the_sources(suffix: str) -> None:
    chat = Conversation(title="Maths")
    chat.add(Message("user", "What?"))
    chat.add(
        Message(
            "assistant", "It is \\(a_1*b*c\\) and\n\n\\[\nx < y\n\\]\n\nor $5. See[^1].\n\n[^1]: n"
        )
    )
    text = exported(chat, suffix)
    assert "\\(a_1*b*c\\)" in text
    assert "\\[\nx < y\n\\]" in text.replace("&lt;", "<")
    assert "$5" in text


def test_an_answer_in_the_window_shows_its_formulas_in_every_theme_and_after_a_restart(
    qtbot: QtBot, qapp: QApplication, make_shell: MakeShell, script: Script
) -> None:
    script.answer = "It is $e^x$, for $5 or $6.\n\n$$\n\\frac{a}{b}\n$$\n"
    shell = make_shell(model=MODEL)
    ask(qtbot, shell, "What?")

    def body_of(shell: Shell) -> MessageBody:
        answer = shell.window.chat_view.last_answer()
        assert answer is not None
        return answer.body

    qtbot.waitUntil(lambda: n_pictures(body_of(shell)) == 2)
    for name in ("light", "dark"):
        shell.keep(replace(shell.settings.current, theme=name))
        assert theme().name == name
        qtbot.waitUntil(lambda: n_pictures(body_of(shell)) == 2)
    answer = shell.window.chat_view.last_answer()
    assert answer is not None
    answer.copy()
    assert qapp.clipboard().text() == script.answer
    shell.window.close()
    again = make_shell()
    qtbot.waitUntil(lambda: n_pictures(body_of(again)) == 2)
    assert shown(again)[1] == "It is $e^x$, for $5 or $6.\n$$\n\\frac{a}{b}\n$$"


def test_pictures_that_come_at_once_are_not_missed(
    qtbot: QtBot, body: MessageBody, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is rendered before `want` returns, as by a child that is faster than the view."""
    kept, real = formula_cache(), FormulaCache.want

    def at_once(pictures: FormulaCache, look: FormulaLook) -> bool:
        is_coming = real(pictures, look)
        while is_coming and look not in kept._kept:
            time.sleep(0.001)
        time.sleep(0.01)
        return is_coming

    monkeypatch.setattr(FormulaCache, "want", at_once)
    body.set_text("a $k_1$ and $k_2$\n\n\\[k_3\\]\n\nb $k_4$")
    qtbot.waitUntil(lambda: n_pictures(body) == 4)
