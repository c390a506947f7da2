"""Buttons of shared kinds."""

from pytestqt.qtbot import QtBot

from app.widgets.buttons import ElidedButton


def test_an_elided_button_shows_what_fits_and_tells_the_rest(qtbot: QtBot) -> None:
    button = ElidedButton("Sampling · From the model")
    qtbot.addWidget(button)
    button.resize(button.sizeHint())
    button.show()
    assert (button.text(), button.toolTip()) == ("Sampling · From the model", "")
    wide = button.width()
    button.resize(wide - 40, button.height())
    assert button.text().endswith("…")
    assert button.text() != "Sampling · From the model"
    assert button.toolTip() == button.accessibleName() == "Sampling · From the model"
    assert button.sizeHint().width() == wide, "it asks for the room that it needs"
    assert button.minimumSizeHint().width() < wide - 40
    for text in ("Sampling · From the model", "Sampling · Vom Modell", "illicit", "wAVe ToTo"):
        button.set_full_text(text)  # widths are fractions of pixels
        button.resize(button.sizeHint())
        assert button.text() == text
    button.set_full_text("R&D")
    assert (button.text(), button.accessibleName()) == ("R&&D", "R&D")
