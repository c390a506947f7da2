"""Files that macOS opens with the program."""

import subprocess
import sys

FILES = """
import sys
from PySide6.QtCore import QEvent, QUrl
from PySide6.QtGui import QFileOpenEvent
from app.core.process.single_window import Application

app = Application(sys.argv[:1])
app.opened.connect(lambda request: print(ascii(request.model), request.demo, request.quit))
for url in (QUrl.fromLocalFile("/models/ü model.gguf"), QUrl("https://example.com/model.gguf")):
    app.sendEvent(app, QFileOpenEvent(url))
app.sendEvent(app, QEvent(QEvent.Type.User))
"""


def test_a_file_that_macos_opens_is_asked_for() -> None:
    done = subprocess.run([sys.executable, "-c", FILES], capture_output=True, text=True, check=True)
    assert done.stdout == "'/models/\\xfc model.gguf' False False\n"
