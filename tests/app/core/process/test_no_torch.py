"""What the window does with an engine in its own process never imports torch into the window's."""

import subprocess
import sys

SESSION = """
import sys, time
from collections.abc import Callable

from PySide6.QtWidgets import QApplication

from app.main import Shell
from app.core.paths import demo_model
from engine import LoadParams, ProcessHost

app = QApplication([])
shell = Shell(app, ProcessHost)
shell.start()

def wait(is_done: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 100
    while not is_done():
        app.processEvents()
        time.sleep(0.01)
        if time.monotonic() > deadline:
            sys.exit(f"it never {what}")
    if found := {"torch", "triton"} & set(sys.modules):
        sys.exit(f"{found} is there when it has {what}")

shell.models.open(str(demo_model()))
wait(lambda: shell.client.model is not None, "loaded")
shell.chat_presenter.send("Hello")
wait(lambda: not shell.session.is_busy, "answered")
assert shell.session.current.messages[-1].content
assert "markdown_it" in sys.modules, "the answer is not shown"
shell.models.apply(LoadParams(str(demo_model()), ("cpu", "cpu")))
wait(lambda: len(shell.client.model.params.devices) == 2, "changed the split")
shell.window.show_dock(shell.window.links_dock, True)
shell.side_panels._links.measure()
wait(lambda: not shell.side_panels._links._meter.is_busy, "measured")
shell.side_panels.find.click()
wait(shell.side_panels.search.dialog.start.isEnabled, "estimated a search")
shell.window.close()
print("done")
"""


def test_a_whole_session_imports_no_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SESSION], capture_output=True, text=True, timeout=280, check=False
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
