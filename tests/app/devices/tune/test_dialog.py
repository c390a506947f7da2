"""The dialog of the search: its estimate, live results, the winner."""

from __future__ import annotations

from dataclasses import replace

import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.devices.tune.results import duration_text, point_of, trial_text
from app.devices.tune.views.tune_dialog import TuneDialog
from app.widgets.theme import apply_theme, theme
from engine import GOALS, EngineError
from engine.planning.search.results import reason_for_best
from tests.helpers.fake_tuning import DEVICES, ESTIMATE, REGION, TRIALS, result, trial


@pytest.fixture
def dialog(qapp: QApplication, qtbot: QtBot) -> TuneDialog:
    apply_theme(qapp, "dark")
    made = TuneDialog()
    qtbot.addWidget(made)
    made.open_for(DEVICES)
    return made


def run(dialog: TuneDialog, n: int = len(TRIALS)) -> None:
    """Show a search with `n` finished trials."""
    dialog.show_estimate(ESTIMATE)
    dialog.begin(ESTIMATE)
    best = None
    for number, one in enumerate(TRIALS[:n]):
        if one.sample and (best is None or one.decode_ts > best.decode_ts):
            best = one
        dialog.add_trial(one, number + 1, ESTIMATE.n_trials, best)


def rows(dialog: TuneDialog) -> list[list[str]]:
    model = dialog.table.model()
    return [
        [model.index(row, column).data() for column in range(model.columnCount())]
        for row in range(model.rowCount())
    ]


def test_what_it_costs_is_said_before_anything_happens(qtbot: QtBot) -> None:
    dialog = TuneDialog()
    qtbot.addWidget(dialog)
    with qtbot.waitSignal(dialog.estimate_requested) as asked:
        dialog.open_for(DEVICES)
    assert asked.args == ["chat", None]
    assert not dialog.start.isEnabled(), "nobody knows yet what would be done"
    dialog.show_estimate(ESTIMATE)
    assert dialog.what.text() == (
        "Tries 4 combinations of devices and modes, in about 12 runs of 1.5 s each. "
        "This takes 18 s in total, 22 s at most."
    )
    assert dialog.budget.value() == 22
    assert dialog.start.isEnabled()


def test_another_budget_asks_for_another_estimate(dialog: TuneDialog, qtbot: QtBot) -> None:
    dialog.show_estimate(ESTIMATE)
    with qtbot.waitSignal(dialog.estimate_requested) as asked:
        dialog.budget.setValue(60)
    assert asked.args == ["chat", 60.0]
    with qtbot.waitSignal(dialog.estimate_requested) as asked:
        dialog.goal.setCurrentIndex(1)
    assert asked.args == ["prompts", None]


def test_start_hands_on_goal_and_budget(dialog: TuneDialog, qtbot: QtBot) -> None:
    dialog.show_estimate(ESTIMATE)
    dialog.choose("prompts", 90)
    with qtbot.waitSignal(dialog.start_requested) as started:
        qtbot.mouseClick(dialog.start, Qt.MouseButton.LeftButton)
    assert started.args == ["prompts", 90.0]


def test_results_are_drawn_and_listed_as_they_come(dialog: TuneDialog) -> None:
    run(dialog, 3)
    assert [row[0] for row in rows(dialog)] == [
        "Tensor: GPU 0 50.0 %, GPU 1 50.0 %",
        "Tensor: GPU 0 80.0 %, GPU 1 20.0 %",
        "Best · Tensor: GPU 0 62.0 %, GPU 1 38.0 %",
    ]
    assert rows(dialog)[2][1:3] == ["618.0", "61.8"]
    assert dialog.progress.value() == 3
    assert dialog.outcome.text().startswith("3 of about 12 · best so far: Tensor: GPU 0 62.0 %")
    assert len(dialog.plot._marks()) == 3
    x, _ = dialog.plot._lines()[0].getData()
    assert list(x) == pytest.approx([50, 62, 80]), "a line in the order of shares"


def test_a_repeated_trial_stays_one(dialog: TuneDialog) -> None:
    run(dialog, 2)
    dialog.add_trial(trial(0.5, 44.0), 3, 12, None)
    assert [row[2] for row in rows(dialog)] == ["44.0", "30.0"]


def test_the_winner_is_explained_and_can_be_applied(dialog: TuneDialog, qtbot: QtBot) -> None:
    run(dialog)
    assert not dialog.apply.isEnabled()
    dialog.finish(result())
    assert dialog.outcome.text() == (
        "Best split: “Tensor: GPU 0 62.0 %, GPU 1 38.0 %”. It is 12 % faster than one device."
    )
    with qtbot.waitSignal(dialog.apply_requested) as applied:
        dialog.apply.click()
    assert applied.args == [TRIALS[2].params]
    assert not dialog.isVisible()


def test_what_does_not_fit_is_shaded_and_marked(dialog: TuneDialog) -> None:
    run(dialog)
    dialog.finish(result())
    (shade,) = dialog.plot._shades()
    assert shade.getRegion() == pytest.approx((90, 100))
    assert "does not fit" in dialog.plot.legend.text()
    assert rows(dialog)[-1][1:] == ["–", "–", "cannot run", ""]
    model = dialog.table.model()
    why = model.index(model.rowCount() - 1, 0).data(Qt.ItemDataRole.ToolTipRole)
    assert "8.00 GiB are needed" in why


def test_modes_have_their_own_marks(dialog: TuneDialog) -> None:
    run(dialog)
    symbols = [mark.opts["symbol"] for mark in dialog.plot._marks()]
    assert symbols == ["o", "o", "o", "s", "d", "x"]
    for word in ("Tensor", "Layers", "One device"):
        assert word in dialog.plot.legend.text()


def test_it_can_be_stopped_at_any_time(dialog: TuneDialog, qtbot: QtBot) -> None:
    """The button, Escape and closing stop it; the best so far can be applied."""
    run(dialog, 2)
    assert not dialog.start.isVisible()
    with qtbot.waitSignal(dialog.cancel_requested):
        qtbot.mouseClick(dialog.cancel, Qt.MouseButton.LeftButton)
    assert not dialog.cancel.isEnabled(), "once is enough"
    dialog.finish(result(TRIALS[:2], 0))
    assert dialog.apply.isEnabled()
    run(dialog, 1)
    with qtbot.waitSignal(dialog.cancel_requested):
        qtbot.keyClick(dialog, Qt.Key.Key_Escape)
    assert dialog.isVisible(), "the first Escape only stops"
    with qtbot.waitSignal(dialog.cancel_requested):
        dialog.close()


def test_an_error_is_a_banner_in_the_dialog(dialog: TuneDialog) -> None:
    dialog.fail(EngineError("No split of this model fits.", "Choose a smaller context."))
    assert dialog.banner.isVisible()
    assert dialog.banner.accessibleName() == "No split of this model fits."
    assert dialog.banner.accessibleDescription() == "Choose a smaller context."
    assert dialog.state == "ready"
    assert not dialog.start.isEnabled()


def test_nothing_that_ran_leaves_nothing_to_apply(dialog: TuneDialog) -> None:
    run(dialog)
    why = reason_for_best(TRIALS[5:], GOALS["chat"])
    dialog.finish(replace(result(TRIALS[5:], None), reason=why))
    assert not dialog.apply.isEnabled()
    assert dialog.outcome.text() == why


def test_opening_it_again_shows_the_search_that_runs(dialog: TuneDialog, qtbot: QtBot) -> None:
    run(dialog, 2)
    with qtbot.assertNotEmitted(dialog.estimate_requested):
        dialog.open_for(("cpu",))
    assert len(rows(dialog)) == 2


def test_every_control_has_a_name(dialog: TuneDialog) -> None:
    for widget in (dialog.goal, dialog.budget, dialog.table, dialog.plot, dialog.progress):
        assert widget.accessibleName()
    assert dialog.apply.accessibleName() == "Use the best split"


def test_it_follows_the_theme(dialog: TuneDialog, qapp: QApplication) -> None:
    run(dialog)
    apply_theme(qapp, "light")
    (line,) = dialog.plot._lines()
    assert line.opts["pen"].color().name() == theme().device_colour(0)
    apply_theme(qapp, "dark")


def test_virtual_ranks_of_one_device_stand_at_the_first_ones_share() -> None:
    one = trial(0.3, 20.0, devices=("cpu", "cpu"))
    assert point_of(one, GOALS["chat"], ("cpu", "cpu")).share == pytest.approx(0.3)
    assert trial_text(one) == "Tensor: CPU 0 30.0 %, CPU 1 70.0 %"
    other = trial(1.0, 20.0, devices=("cuda:1",))
    assert point_of(other, GOALS["chat"], DEVICES).share == 0.0, "nothing is on the first device"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "1 s"), (45, "45 s"), (99, "99 s"), (120, "2 min"), (150, "2 min 30 s")],
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_regions_are_shaded_before_a_search_too(dialog: TuneDialog) -> None:
    dialog.show_estimate(ESTIMATE, [REGION])
    assert len(dialog.plot._shades()) == 1


def test_what_is_compared_is_marked_and_a_faster_run_is_explained(
    dialog: TuneDialog, qtbot: QtBot
) -> None:
    """A run that looked faster, but was not measured in turns with the others, is not the best."""
    finals = tuple(replace(TRIALS[at], is_final=True) for at in (0, 1))
    found = replace(result((*finals, *TRIALS[2:]), best=0), others=(("cuda:1", 45.0),))
    run(dialog)
    dialog.finish(found)
    assert [row[-1] for row in rows(dialog)] == ["alternately"] * 2 + ["once"] * 3 + [""]
    text = dialog.outcome.text()
    assert "Only splits measured in turn at the end are compared" in text
    assert "Other programs were using GPU 1 (45 %) when the search began" in text
    assert not result().note, "all were measured alike, and nobody else was at work"
