"""A window whose Python has no torch uses that of an environment, and the bundled model answers."""

import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

WITHOUT = ("torch", "functorch", "triton", "llvmlite", "tokenizers")
"""Beginnings of the names of libraries that only the engine needs."""

SESSION = """
import sys, time
from collections.abc import Callable

from PySide6.QtWidgets import QApplication

from app.setup.page.engine_session import InstallRequest
from app.main import Shell
from app.core.paths import demo_model
from app.core.process.environment import start_host

app = QApplication([])
shell = Shell(app, start_host)
shell.start()

def wait(is_done: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 100
    while not is_done():
        app.processEvents()
        time.sleep(0.01)
        if time.monotonic() > deadline:
            notice = shell.window.banner.notice
            sys.exit(f"it never {what}: {notice}")

wait(lambda: "engine_setup" in shell.__dict__, "was there")
page = shell.engine_setup.page
if sys.argv[1:]:
    wait(lambda: page.is_open, "offered an engine")
    shell.models.open(str(demo_model()))
    page.install(InstallRequest(environment=sys.argv[1]))
else:
    shell.models.open(str(demo_model()))
wait(lambda: shell.client.model is not None, "loaded")
assert not page.is_open
shell.chat_presenter.send("What is tensor parallelism?")
wait(lambda: not shell.session.is_busy, "answered")
assert shell.session.current.messages[-1].content.startswith("Tensor parallelism")
assert "torch" not in sys.modules
shell.window.close()
print("done")
"""


def other_python() -> str:
    """Return the Python that this environment was made with, if that has no torch of its own."""
    found: str = getattr(sys, "_base_executable", sys.executable)
    asked = subprocess.run(
        [found, "-c", "import importlib.util as u; print(u.find_spec('torch') is None)"],
        capture_output=True, text=True, check=True,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )  # fmt: skip
    if sys.prefix == sys.base_prefix or asked.stdout != "True\n":
        pytest.skip("needs a virtual environment whose Python has no torch")
    return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="it needs symbolic links")
def test_an_environment_computes_for_a_window_without_torch(home: Path, tmp_path: Path) -> None:
    """At the first start, once it was chosen, and at the second one."""
    assert importlib.util.find_spec("torch") is not None
    links = tmp_path / "libraries"
    links.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith(WITHOUT) and path.suffix != ".pth":
            (links / path.name).symlink_to(path)
    root = Path(__file__).parents[4]
    env = {**os.environ, "TANDEM_HOME": str(home), "PYTHONPATH": f"{root}{os.pathsep}{links}"}
    for arguments in ([sys.prefix], []):
        done = subprocess.run(
            [other_python(), "-c", SESSION, *arguments], env=env, capture_output=True, text=True,
            timeout=280, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
