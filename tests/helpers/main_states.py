"""Takes a picture of each main state of the window in each look, to be looked at.

    python -m tests.helpers.main_states FOLDER [--looks dark german] [--states chat settings]

Each look runs in a process of its own, since Qt reads the scale of the screen only once.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from PySide6.QtWidgets import QApplication, QWidget

from app.chat.answering import WrittenAnswer
from app.chat.conversation import Conversation
from app.chat.message import AnswerStats, Message
from app.core.engine_client import AnswerStage, RunningAnswer
from app.core.notice import Notice
from app.core.paths import demo_model
from app.core.translation import tr
from app.main import Shell
from app.server.page.server_panel import state_text
from app.setup.updates import update_session as session
from tests.helpers.engine_states import ENGINE_STATES, patches
from tests.helpers.screenshots import new_shell, pause, wait, write_models
from tests.helpers.server_views import server_view


@dataclass(frozen=True, slots=True)
class Look:
    """How the window is shown.

    Attributes:
        size: width and height in pixels before scaling.
        scale: pixels of the screen for each of these.
    """

    theme: str
    language: str = "en"
    size: tuple[int, int] = (1440, 900)
    scale: int = 1


LOOKS = {
    "dark": Look("dark"),
    "light": Look("light"),
    "small": Look("dark", size=(1024, 700)),
    "german": Look("light", "de"),
    "german-small": Look("dark", "de", (1024, 700)),
    "4k": Look("dark", size=(1920, 1080), scale=2),
}

QUESTION = "How do I solve a quadratic equation? Show the formula and some code."
ANSWER = r"""A quadratic equation $ax^2 + bx + c = 0$ has the solutions

$$x_{1,2} = \frac{-b \pm \sqrt{b^2 - 4ac}}{2a}$$

where the *discriminant* \(b^2 - 4ac\) tells how many there are[^1].

| discriminant | solutions | example |
|---|---|---|
| positive | two real ones | \(x^2 - 1 = 0\) |
| zero | one | \(x^2 = 0\) |
| negative | none | \(x^2 + 1 = 0\) |

```python
def solve(a: float, b: float, c: float) -> tuple[complex, complex]:
    root = (b * b - 4 * a * c) ** 0.5
    return (-b + root) / (2 * a), (-b - root) / (2 * a)
```

- [x] the formula
- [ ] a proof

[^1]: Over the complex numbers there are always two, counted with multiplicity.
"""
THOUGHT = "<think>The person wants the formula and code. A table of cases helps.</think>"


def welcome(shell: Shell) -> QWidget:
    """Show the window before a model was opened."""
    return shell.window


def ready(shell: Shell) -> QWidget:
    """Show the demo, loaded, with an empty chat."""
    shell.models.open(str(demo_model()))
    wait(lambda: shell.split.load_state == "loaded")
    return shell.window


def chat(shell: Shell) -> QWidget:
    """Show an answer with all that can be in one, which is the second of two versions."""
    stats = AnswerStats("stop", 212, 48.3, 0.41, 300)
    made = Conversation()
    question = made.add(Message("user", QUESTION))
    made.add(Message("assistant", "Use a calculator.", stats))
    made.add(Message("assistant", THOUGHT + ANSWER, stats, thought_s=2.1), question.id)
    shell.session.take(made)
    pause(1500)
    return shell.window


def running(shell: Shell) -> QWidget:
    """Show the window while several chats are answered, and one of them."""
    long = "What makes one card of several the slowest, and what can be done about it?"
    titles = long, "A poem about copper", "Summary of the report", "Regular expressions"
    for number, title in enumerate(titles):
        made = Conversation()
        made.add(Message("user", title))
        message = made.add(Message("assistant", ""))
        shell.session.take(made)
        answer = RunningAnswer(number)
        shell.session._writer._written[number] = WrittenAnswer(made, message, answer)
        if number < 3:
            answer.n_read, answer.n_prompt = 900 * (number + 1), 2700
            answer.stage = AnswerStage.READING
        if number < 2:
            message.content = "Copper is warm, and bends before it breaks. " * 4
            answer.stage, answer.tokens_per_s = AnswerStage.WRITING, 17.3 + number
    shell.session.open_chat(shell.session.answers[1].chat.id)
    shell.client.rate.emit(35.6, 2)
    shell.session._writer.changed.emit()
    pause(800)
    return shell.window


def running_list(shell: Shell) -> QWidget:
    """Show the list of the answers that run."""
    running(shell)
    shell.window.running.click()
    pause(300)
    return shell.window.running.list


def found(shell: Shell) -> QWidget:
    """Show what the search over all chats finds."""
    chat(shell)
    shell.window.chat_list.search.setText("discriminant")
    pause(1500)
    return shell.window


def models(shell: Shell) -> QWidget:
    """Show the models of this machine."""
    shell.library.toggle()
    pause(3000)
    return shell.window


def download(shell: Shell) -> QWidget:
    """Show the page to find models on, from the button of the start page."""
    shell.window.start_view.download_requested.emit()
    wait(lambda: shell.downloads.view is not None)
    return shell.window


def with_models(shell: Shell) -> QWidget:
    """Show the models of this machine, of which there are some."""
    folder = Path(os.environ["TANDEM_HOME"]) / "models"
    write_models(folder)
    (folder / "half-a-file.gguf").write_bytes(b"GGUF")
    shell.library.toggle()
    pause(4000)
    return shell.window


def split_in_three(shell: Shell) -> None:
    """Load the bundled model, and plan it over three ranks of the CPU."""
    shell.models.open(str(demo_model()))
    wait(lambda: shell.split.load_state == "loaded")
    shell.split.change(shell.split.settings.with_cpu_ranks(3))


def split(shell: Shell) -> QWidget:
    """Show a split by tensor over three ranks, with the details of one."""
    split_in_three(shell)
    shell.split_panel.rows[0].more.click()
    pause(1500)
    return shell.window


def settings(shell: Shell) -> QWidget:
    """Show the settings."""
    shell.settings_page.toggle()
    pause(300)
    return shell.window


def sampling(shell: Shell) -> QWidget:
    """Show the sampling and the system prompt beside a chat."""
    chat(shell)
    shell.window.toggle_sampling()
    pause(800)
    return shell.window


def tensor_map(shell: Shell) -> QWidget:
    """Show where the tensors of a split model lie."""
    split_in_three(shell)
    shell.window.show_dock(shell.window.placement_dock, True)
    pause(1500)
    return shell.window


def links(shell: Shell) -> QWidget:
    """Show the links between devices."""
    shell.window.show_dock(shell.window.links_dock, True)
    pause(800)
    return shell.window


def server(shell: Shell) -> QWidget:
    """Show the page of the server while programs use it."""
    values = {"server_on_network": True, "server_for_pages": True}
    shell.serving.key = "J8fM3xQ0vTn5rYk2bWc7hLz9"
    shell.keep(replace(shell.settings.current, **values))
    shell.window.show_dock(shell.window.server_dock, True)
    shell.window.server.show_running(True)
    pause(300)
    panel = shell.side_panels.server
    panel.show_view(server_view())
    panel.show_state(is_on=True, state=state_text(server_view()), problem="")
    panel.show_address("http://192.168.1.20:11435/v1", needs_key=True)
    pause(800)
    return shell.window


def failure(shell: Shell) -> QWidget:
    """Show an error with a way out."""
    text = "The model needs 9.3 GiB, and CPU 0 has 4.1 GiB free."
    hint = "Close other programs, or choose a smaller quantisation."
    action = tr("Reload")
    shell.window.banner.show_notice(Notice(text, hint, "error", action, lambda: None))
    pause(300)
    return shell.window


def shortcuts(shell: Shell) -> QWidget:
    """Show the list of shortcuts."""
    shell.help.show_shortcuts()
    pause(800)
    assert shell.help.shortcuts is not None
    return shell.help.shortcuts


def about(shell: Shell) -> QWidget:
    """Show versions and licences."""
    shell.help.show_about()
    pause(2500)
    assert shell.help.about is not None
    return shell.help.about


def qt_licence(shell: Shell) -> QWidget:
    """Show what is told of Qt, found by a search."""
    shell.help.show_about()
    dialog = shell.help.about
    assert dialog is not None
    wait(lambda: dialog.list.count() > 10)
    dialog.search.setText("LGPL")
    dialog.list.setCurrentRow(1)
    pause(800)
    return dialog


def release(shell: Shell) -> QWidget:
    """Show the banner of a newer release."""
    shell.updates._show_banner()
    return shell.window


def news(shell: Shell) -> QWidget:
    """Show what is new in a release."""
    shell.updates.show_news()
    assert shell.updates.dialog is not None
    return shell.updates.dialog


def updates(shell: Shell) -> QWidget:
    """Show the settings of releases, without an address to ask."""
    shell.keep(replace(shell.settings.current, checks_releases=True))
    shell.settings_page.toggle()
    assert shell.settings_page.view is not None
    shell.settings_page.view.search.setText("update")
    return shell.window


STATES: dict[str, Callable[[Shell], QWidget]] = {
    "welcome": welcome,
    "ready": ready,
    "chat": chat,
    "running": running,
    "running-list": running_list,
    "found": found,
    "models": models,
    "with-models": with_models,
    "download": download,
    "split": split,
    "settings": settings,
    "sampling": sampling,
    "map": tensor_map,
    "links": links,
    "server": server,
    "failure": failure,
    **ENGINE_STATES,
    "shortcuts": shortcuts,
    "about": about,
    "qt-licence": qt_licence,
    "release": release,
    "news": news,
    "updates": updates,
}

NEWER = {
    "version": "99.1.0",
    "page": "https://example.org/tandem/99.1.0",
    "news": "- Long prompts are read in half the time\n- The monitor shows fans",
}
"""A release that the states of releases know of."""


def take(folder: Path, name: str, states: list[str]) -> None:
    """Take the pictures of one look."""
    look = LOOKS[name]
    app = QApplication([])
    for state in states:
        with new_shell(app, look.theme, language=look.language) as shell:
            shell.window.resize(*look.size)
            wait(lambda shell=shell: shell.start_up.is_ready)  # type: ignore[misc]
            shell.settings.put(replace(shell.settings.current, newest_release=NEWER))
            session.package_version = lambda: "0.1.0"  # a source tree has none
            with patches:
                STATES[state](shell).grab().save(str(folder / f"{name}-{state}.png"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--looks", nargs="+", choices=LOOKS, default=list(LOOKS))
    parser.add_argument("--states", nargs="+", choices=STATES, default=list(STATES))
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.here:
        take(args.folder, args.looks[0], args.states)
        return
    for look in args.looks:
        start = time.monotonic()
        environment = {
            "QT_QPA_PLATFORM": "offscreen", **os.environ, "QT_SCALE_FACTOR": str(LOOKS[look].scale),
        }  # fmt: skip
        command = [sys.executable, "-m", "tests.helpers.main_states", str(args.folder), "--here"]
        subprocess.run(
            [*command, "--looks", look, "--states", *args.states], env=environment, check=True
        )
        seconds = time.monotonic() - start
        sys.stdout.write(f"{look}: {len(args.states)} pictures in {seconds:.0f} s\n")


if __name__ == "__main__":
    main()
