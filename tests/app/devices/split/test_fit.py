"""The search for what fits runs on a thread; remedies are one press away."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace

import pytest
from pytestqt.qtbot import QtBot

from app.devices.split.planning import FitAnswer, FitFinder, FitQuestion, suggestion
from app.devices.split.settings import default_settings
from app.devices.split.views.split_footer import short_text
from app.widgets.theme import theme
from engine import Choice, Evaluation, LoadParams, Remedy
from tests.app.conftest import MakePanel
from tests.helpers.fake_planner import (
    CPU,
    GIB,
    GPUS,
    INFO,
    FakePlanner,
    RefusingPlanner,
    fake_machine,
)
from tests.helpers.split_panels import WiredPanel, settle, texts, used

QUESTION = FitQuestion(
    LoadParams(INFO.path, ("cuda:0",)), (("cuda:0", 24 * GIB, 1.0),), INFO.n_ctx_train, 8
)


def test_what_does_not_fit_is_said_in_the_danger_colour(panel: WiredPanel) -> None:
    """The sentence says where and by how much, from the live memory figures."""
    assert not panel.problem.isVisible()
    panel.session.set_snapshots([used("cuda:0", 21)])
    settle()
    assert "GPU 0: 5.0 GiB needed, 3.0 GiB available, 2.0 GiB short." in texts(panel)
    assert panel.problem.palette().windowText().color().name() == theme().danger
    assert panel.rows[0].use.property("role") == "shortage"
    assert panel.footer.load.isEnabled()


def test_an_error_of_the_planner_is_a_sentence_and_stops_loading(make_panel: MakePanel) -> None:
    """Message and hint are shown; without a plan nothing can be loaded."""
    panel = make_panel(GPUS, RefusingPlanner)
    assert panel.problem.text() == "This model cannot be split by tensor. Choose layers."
    assert not panel.footer.load.isEnabled()
    panel.session.set_model(None)
    panel.session.set_state("empty")
    settle()
    assert not panel.problem.isVisible()


def test_the_longest_context_is_marked(panel: WiredPanel, qtbot: QtBot) -> None:
    """Besides 3.75 GiB of weights and CUDA's overhead, 1 GiB is left on GPU 0."""
    panel.session.set_snapshots([used("cuda:0", 24 - 5.25)])
    qtbot.waitUntil(lambda: "tokens fit" in panel.options.context_note.accessibleName())
    assert panel.options.context_slider.mark == pytest.approx(0.6, abs=0.1)
    panel.options.context.setValue(8192)
    settle()
    assert panel.options.context_note.property("role") == "shortage"
    assert "short." in panel.problem.text()


def test_a_remedy_is_applied_with_one_press_and_can_be_undone(
    panel: WiredPanel, qtbot: QtBot
) -> None:
    panel.session.set_snapshots([used("cuda:0", 24 - 5.25)])
    panel.options.context.setValue(4096)
    wanted = panel.session.load_params()
    qtbot.waitUntil(lambda: panel.remedies.isVisible() and panel.remedies.isEnabled())
    buttons = {button.text(): button for button in panel.remedies.buttons}
    assert "q8_0 KV cache" in buttons
    assert buttons["q8_0 KV cache"].toolTip()
    with qtbot.waitSignal(panel.session.settings_changed):
        buttons["q8_0 KV cache"].click()
    settle()
    after = panel.session.load_params()
    assert after.kv_type == "q8_0"
    assert after.split == pytest.approx(wanted.split)
    assert not panel.problem.isVisible()
    assert not panel.remedies.isVisible()
    panel.session.undo()
    assert panel.session.load_params() == wanted


def test_remedies_of_other_settings_cannot_be_pressed(panel: WiredPanel, qtbot: QtBot) -> None:
    """They are disabled until new ones are found."""
    panel.session.set_snapshots([used("cuda:0", 21)])
    qtbot.waitUntil(lambda: panel.remedies.isVisible() and panel.remedies.isEnabled())
    panel.options.context.setValue(3000)
    settle()
    assert panel.remedies.isVisible()
    assert not panel.remedies.isEnabled()
    qtbot.waitUntil(panel.remedies.isEnabled)


@pytest.mark.parametrize(
    ("remedy", "text"),
    [
        (Remedy("split", "Split it.", LoadParams("m")), "Shares that fit"),
        (Remedy("devices", "Use cuda:2 as well.", LoadParams("m")), "Use GPU 2 as well"),
        (Remedy("parallel", "…", LoadParams("m", parallel=2)), "2 parallel requests"),
        (Remedy("kv_type", "…", LoadParams("m", kv_type="q8_0")), "q8_0 KV cache"),
        (Remedy("context", "…", LoadParams("m", n_ctx=16384)), "Context of 16\u202f384 tokens"),
        (Remedy("experts", "…", LoadParams("m", n_cpu_moe=12)), "Experts of 12 blocks on the CPU"),
        (Remedy("blocks", "…", LoadParams("m", n_cpu_blocks=3)), "3 blocks on the CPU"),
        (Remedy("kv_on_host", "…", LoadParams("m")), "KV cache in host memory"),
    ],
)
def test_a_remedy_is_told_in_a_few_words(remedy: Remedy, text: str) -> None:
    assert short_text(remedy) == text


class WaitingPlanner(FakePlanner):
    """Planner that waits before it answers."""

    may_answer = threading.Event()
    n_open = 0

    def __init__(self, path: str) -> None:
        super().__init__(path)
        type(self).n_open += 1

    def close(self) -> None:
        type(self).n_open -= 1

    def evaluate(
        self, params: LoadParams, free_bytes: Mapping[str, int] | None = None
    ) -> Evaluation:
        assert self.may_answer.wait(5)
        return super().evaluate(params, free_bytes)


def test_only_the_last_question_is_answered(qtbot: QtBot) -> None:
    """The search under way gives up without being waited for, and closes its file."""
    finder = FitFinder(WaitingPlanner)
    found: list[FitAnswer] = []
    finder.found.connect(found.append)
    WaitingPlanner.may_answer.clear()
    finder.ask(QUESTION)
    qtbot.waitUntil(lambda: WaitingPlanner.n_open == 1)
    last = FitQuestion(LoadParams(INFO.path, ("cuda:0",), n_ctx=99), QUESTION.rooms, 8192, 8)
    finder.ask(last)
    WaitingPlanner.may_answer.set()
    qtbot.waitUntil(lambda: bool(found))
    assert [answer.question for answer in found] == [last]
    assert found[0].n_ctx == 8192
    assert WaitingPlanner.n_open == 0
    finder.ask(last)
    qtbot.wait(200)
    assert len(found) == 1
    finder.stop()


def test_stopping_waits_for_the_thread(qtbot: QtBot) -> None:
    finder = FitFinder(WaitingPlanner)
    found: list[FitAnswer] = []
    finder.found.connect(found.append)
    WaitingPlanner.may_answer.clear()
    finder.ask(QUESTION)
    qtbot.waitUntil(lambda: WaitingPlanner.n_open == 1)
    WaitingPlanner.may_answer.set()
    finder.stop()
    assert WaitingPlanner.n_open == 0
    qtbot.wait(50)
    assert found == []


def test_a_split_that_cannot_be_made_fits_nowhere(qtbot: QtBot) -> None:
    """The search finds nothing, which is no error."""
    finder = FitFinder(RefusingPlanner)
    with qtbot.waitSignal(finder.found) as found:
        finder.ask(QUESTION)
    assert found.args == [FitAnswer(QUESTION, None, ())]
    finder.stop()


def test_a_context_that_nobody_chose_is_the_longest_that_fits_comfortably() -> None:
    """The planner's model takes 10 GiB and 1 MiB a token; a quarter of what is free stays free."""

    def context(free: int, chosen: int | None = None) -> int | None:
        settings = replace(default_settings([CPU]), n_ctx=chosen)
        choice = suggestion(
            INFO,
            settings,
            {"cpu": free * GIB},
            FakePlanner(INFO.path),
            lambda: fake_machine([CPU]).forecaster,
        )
        assert choice is not None
        return choice.params.n_ctx

    assert context(64) == INFO.n_ctx_train
    assert context(20) == 5 * 1024
    assert context(16) is None, "2048 is what one takes in any case"
    assert context(64, chosen=4096) == 4096


def test_a_suggested_context_is_not_carried_to_another_model(make_panel: MakePanel) -> None:
    """One that a person chose is."""
    session = make_panel().session
    session.suggest(Choice(LoadParams(INFO.path, ("cuda:1",), n_ctx=8192), "Because."))
    assert session.settings.n_ctx == 8192
    session._plans.open = lambda info: None  # type: ignore[method-assign]
    session.set_model(replace(INFO, path="/m/other.gguf"))
    assert session.settings.n_ctx is None
    session.change(replace(session.settings, n_ctx=4096))
    session.suggest(Choice(LoadParams(INFO.path, ("cuda:1",)), "Because."))
    session.set_model(replace(INFO, path="/m/third.gguf"))
    assert session.settings.n_ctx == 4096
