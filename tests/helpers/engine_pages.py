"""Actions of tests on the page of the engine and on its part of the settings."""

from pytestqt.qtbot import QtBot

from app.main import Shell
from app.setup.engine_pack.store import Pack, PackStore
from app.setup.page.engine_view import EngineView
from app.setup.page.page import EnginePage, EnginePanel
from app.window.parts import if_made


def page_of(shell: Shell) -> EnginePage:
    assert if_made(shell, "engine_setup") is not None
    return shell.engine_setup.page


def view_of(qtbot: QtBot, shell: Shell) -> EngineView:
    """Return the page of the engine, once it shows what can be installed."""
    view = page_of(shell).view
    assert view is not None
    qtbot.waitUntil(lambda: bool(view.choices.rows))
    return view


def install(qtbot: QtBot, shell: Shell) -> None:
    """Press Install and wait until the engine runs."""
    view = view_of(qtbot, shell)
    with qtbot.waitSignal(shell.client.ready):
        view.install.click()


def panel_of(qtbot: QtBot, shell: Shell) -> EnginePanel:
    """Return the engine's part of the settings page, which is shown."""
    if shell.settings_page.view is None or not shell.settings_page.view.isVisible():
        shell.settings_page.toggle()
    assert shell.settings_page.view is not None
    panel = shell.settings_page.view.findChild(EnginePanel)
    assert isinstance(panel, EnginePanel)
    qtbot.waitUntil(lambda: bool(panel.text))
    return panel


def current_pack() -> Pack:
    """Return the pack in use; there is one."""
    current = PackStore().current
    assert current is not None
    return current
