"""The placement map: its cells, their texts, and pinning by hand."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from PySide6.QtCore import QItemSelectionModel, QPoint, QPointF, Qt
from PySide6.QtGui import QColor, QDropEvent, QWheelEvent
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.devices.map.grid import Grid, Overrides, grid_of, parts_text, ranks_text, with_pins
from app.devices.map.views.panel import PinTarget, PlacementPanel
from app.devices.map.views.placement_table import Look, PlacementTable
from app.widgets.theme import apply_theme, theme
from engine import LoadParams, PlacementMap, Planner
from tests.helpers.drags import drag_enter
from tests.helpers.hollow import hollow_moe
from tests.helpers.tiny_gguf import tiny_gguf

TARGETS = (
    PinTarget("#0", "CPU 0", 0),
    PinTarget("#1", "CPU 1", 1),
    PinTarget("cuda:0", "GPU 0", 2),
)
LOOK = Look((0, 1, 2), ("CPU 0", "CPU 1", "GPU 0"))


def placed(path: Path, overrides: Overrides = (), **changes: object) -> PlacementMap:
    values: dict[str, object] = {"devices": ("cpu", "cpu"), "split": (3.0, 1.0)} | changes
    params = LoadParams(str(path), overrides=overrides, **values)  # type: ignore[arg-type]
    return Planner(path).placement(params)


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("moe") / "m.gguf"
    return hollow_moe(path, n_layer=6, n_embd=512, n_head=16, n_vocab=512)


@pytest.fixture
def panel(qapp: QApplication, qtbot: QtBot, moe: Path) -> PlacementPanel:
    apply_theme(qapp, "dark")
    made = PlacementPanel()
    qtbot.addWidget(made)
    made.resize(424, 700)
    made.show()
    show(made, moe)
    return made


def show(panel: PlacementPanel, path: Path, overrides: Overrides = ()) -> None:
    found = placed(path, overrides)
    n = len(found.devices)
    panel.show_map(found, overrides, Look(LOOK.colours[:n], LOOK.labels[:n]), TARGETS)


def at(panel: PlacementPanel, row: str, column: str) -> tuple[int, int]:
    grid = panel.view.table.grid
    return grid.rows.index(row), grid.columns.index(column)


def select(panel: PlacementPanel, *places: tuple[str, str]) -> None:
    model = panel.view.selectionModel()
    model.clear()
    for row, column in places:
        index = panel.view.table.index(*at(panel, row, column))
        model.setCurrentIndex(index, QItemSelectionModel.SelectionFlag.Select)


# rows and columns


def names(grid: Grid, row: str) -> list[list[str]]:
    """Return the tensors of each cell of a row, from the left."""
    number = grid.rows.index(row)
    cells = [grid.cells[place] for place in sorted(grid.cells) if place[0] == number]
    return [[tensor.stem for tensor in cell.tensors] for cell in cells]


def test_a_dense_model_has_its_matrices_in_order(tmp_path: Path) -> None:
    """Attention is left of the FFN, whatever the file's order; norms share the last column."""
    grid = grid_of(placed(tiny_gguf(tmp_path / "m.gguf", n_layer=3)), ())
    assert grid.rows == ("emb", "0", "1", "2", "head")
    assert grid.columns == (
        "attn q", "attn k", "attn v", "attn output", "ffn gate", "ffn up", "ffn down",
        "norms, rest",
    )  # fmt: skip
    assert names(grid, "1")[0] == ["attn_q.weight"]
    assert sorted(names(grid, "1")[-1]) == ["attn_norm.weight", "ffn_norm.weight"]
    assert names(grid, "emb") == [["token_embd.weight"]]
    assert names(grid, "head") == [["output.weight"], ["output_norm.weight"]]
    head, norm = (grid.cells[4, column] for column in (0, 7))
    assert (head.span, norm.span) == (7, 1)


def test_every_tensor_stands_in_one_cell(moe: Path) -> None:
    found = placed(moe)
    shown = [t.name for cell in grid_of(found, ()).cells.values() for t in cell.tensors]
    assert sorted(shown) == sorted(tensor.name for tensor in found.tensors)


def test_biases_stand_with_their_matrices(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", arch="qwen2", qkv_bias=True)
    assert names(grid_of(placed(path), ()), "0")[0] == ["attn_q.weight", "attn_q.bias"]


def test_what_moves_with_a_cell_is_said(moe: Path) -> None:
    grid = grid_of(placed(moe), ())
    parts = grid.cells[3, grid.columns.index("ffn up exps")].parts
    assert parts == {(2, "experts")}
    assert parts_text(parts) == "experts of block 2"
    assert parts_text([(n, "experts") for n in range(4)]) == "experts of 4 blocks"
    assert parts_text([(None, "output")]) == "output head"
    assert grid.cells[3, grid.columns.index("norms, rest")].parts == frozenset()


# what is shown


def test_a_cell_is_painted_in_the_parts_of_its_ranks(panel: PlacementPanel, qtbot: QtBot) -> None:
    """A cell is three quarters in one colour, the rest in another; a pinned cell has the third."""
    show(panel, moe_of(panel), with_pins((), [(1, "experts")], "cuda:0"))
    QApplication.processEvents()
    image = panel.view.viewport().grab().toImage()

    def colours(row: str, column: str) -> list[str]:
        index = panel.view.table.index(*at(panel, row, column))
        area = panel.view.visualRect(index)
        y = area.center().y()
        return [image.pixelColor(x, y).name() for x in range(area.left() + 2, area.right() - 2)]

    first, second, third = (QColor(theme().device_colour(i)).name() for i in range(3))
    queries = colours("3", "attn q")
    assert set(queries) == {first, second}
    assert queries.count(first) / len(queries) == pytest.approx(0.75, abs=0.1)
    assert queries == sorted(queries, key=[first, second].index), "in rank order"
    assert set(colours("1", "ffn up exps")) == {third}


def moe_of(panel: PlacementPanel) -> Path:
    """Return the model file of the fixture."""
    return panel.property("moe") or pytest.fail("no model")


@pytest.fixture(autouse=True)
def _remember(request: pytest.FixtureRequest) -> None:
    if "panel" in request.fixturenames:
        panel = request.getfixturevalue("panel")
        panel.setProperty("moe", request.getfixturevalue("moe"))


def test_a_cell_says_everything_about_its_tensor(panel: PlacementPanel) -> None:
    """The focused cell's text stands below the map, and a screen reader gets it as well."""
    select(panel, ("2", "attn k"))
    lines = panel.detail.text().splitlines()
    assert lines[0].startswith("blk.2.attn_k.weight · Q4_K · ")
    assert " × 512 · " in lines[0]
    assert lines[1].startswith("CPU 0 ")
    assert "CPU 1 " in lines[1]
    index = panel.view.currentIndex()
    spoken = panel.view.table.data(index, Qt.ItemDataRole.AccessibleTextRole)
    assert spoken.startswith("Block 2, attn k: CPU 0 ")
    assert panel.view.table.data(index, Qt.ItemDataRole.ToolTipRole) == "\n".join(lines)


def test_bytes_of_devices_add_up_to_the_tensor(moe: Path) -> None:
    grid = grid_of(placed(moe), ())
    cell = grid.cells[1, grid.columns.index("ffn gate exps")]
    assert sum(cell.ranks) == cell.tensors[0].n_bytes
    assert ranks_text(cell, ("A", "B")).count("%") == 2


def test_names_of_a_file_are_no_html(panel: PlacementPanel) -> None:
    assert panel.detail.textFormat() is Qt.TextFormat.PlainText


def test_the_selection_stays_while_the_split_changes(panel: PlacementPanel, moe: Path) -> None:
    select(panel, ("2", "attn k"))
    panel.show_map(placed(moe, split=(1.0, 9.0)), (), Look((0, 1), ("A", "B")), TARGETS)
    assert panel.view.selected_parts == {(2, "attention")}
    assert panel.detail.text().splitlines()[1].startswith("B ")


def test_without_a_model_there_is_a_sentence(panel: PlacementPanel) -> None:
    panel.clear()
    assert not panel.view.isVisible()
    assert "Open a model" in panel.hint.text()


# zoom


def test_zoom_by_wheel_and_keys_keeps_what_is_pointed_at(
    panel: PlacementPanel, tmp_path: Path
) -> None:
    show(panel, hollow_moe(tmp_path / "large.gguf"))
    QApplication.processEvents()
    view, wanted = panel.view, at(panel, "40", "ffn gate exps")
    before = view.rowHeight(0), view.columnWidth(0)
    point = view.visualRect(view.table.index(*wanted)).center()
    event = QWheelEvent(
        QPointF(point), QPointF(view.viewport().mapToGlobal(point)), QPoint(), QPoint(0, 120),
        Qt.MouseButton.NoButton, Qt.KeyboardModifier.ControlModifier,
        Qt.ScrollPhase.NoScrollPhase, False,
    )  # fmt: skip
    for _ in range(4):
        QApplication.sendEvent(view.viewport(), event)
    assert view.columnWidth(0) > 2 * before[1]
    assert view.indexAt(point) == view.table.index(*wanted)
    QTest.keyClicks(view, "-")
    assert view.zoom == 3
    QTest.keyClicks(view, "0")
    assert (view.rowHeight(0), view.columnWidth(0)) == pytest.approx(before, abs=1)  # scroll bars


def test_a_large_model_fits_and_scrolls(panel: PlacementPanel, tmp_path: Path) -> None:
    """80 blocks are no wider than the panel, and the arrow keys reach the last row."""
    show(panel, hollow_moe(tmp_path / "large.gguf"))
    QApplication.processEvents()
    view = panel.view
    assert view.horizontalHeader().length() <= view.viewport().width()
    view.setCurrentIndex(view.table.index(0, 0))
    view.setFocus()
    QTest.keyClick(view, Qt.Key.Key_End, Qt.KeyboardModifier.ControlModifier)
    for _ in range(82):
        QTest.keyClick(view, Qt.Key.Key_Down)
    assert view.currentIndex().row() == 81
    assert view.visualRect(view.currentIndex()).bottom() <= view.viewport().height()


def test_painting_a_large_model_takes_less_than_a_stall(
    panel: PlacementPanel, tmp_path: Path
) -> None:
    """It counts the processor's time to show and paint a map, not other programs."""
    found = placed(hollow_moe(tmp_path / "large.gguf"))
    seconds = []
    for _ in range(5):
        start = time.thread_time()
        panel.show_map(found, (), Look((0, 1), ("A", "B")), TARGETS)
        panel.view.viewport().grab()
        seconds.append(time.thread_time() - start)
    assert min(seconds) < 0.1


# pinning


def test_a_number_pins_the_selection_and_delete_unpins_it(
    panel: PlacementPanel, qtbot: QtBot
) -> None:
    select(panel, ("1", "ffn up exps"), ("2", "ffn up exps"))
    with qtbot.waitSignal(panel.pin_requested) as pinned:
        QTest.keyClicks(panel.view, "3")
    assert pinned.args == ["cuda:0", {(1, "experts"), (2, "experts")}]
    with qtbot.waitSignal(panel.unpin_requested) as unpinned:
        QTest.keyClick(panel.view, Qt.Key.Key_Delete)
    assert unpinned.args == [{(1, "experts"), (2, "experts")}]


def test_a_chip_pins_the_selection(panel: PlacementPanel, qtbot: QtBot) -> None:
    select(panel, ("head", "attn q"))
    chip = panel.chips.chips[1]
    assert chip.accessibleName() == "Pin the selection to CPU 1"
    with qtbot.waitSignal(panel.pin_requested) as pinned:
        chip.click()
    assert pinned.args == ["#1", {(None, "output")}]


def test_nothing_is_pinned_without_a_selection(panel: PlacementPanel, qtbot: QtBot) -> None:
    with qtbot.assertNotEmitted(panel.pin_requested):
        panel.chips.chips[0].click()
        select(panel, ("1", "norms, rest"))
        panel.chips.chips[0].click()
    assert not panel.unpin.isEnabled()


def test_cells_dropped_on_a_chip_are_pinned(panel: PlacementPanel, qtbot: QtBot) -> None:
    """The chip reads the parts that the table gives to a drag."""
    table: PlacementTable = panel.view.table
    cells = [table.index(*at(panel, "3", name)) for name in ("attn q", "ffn down exps")]
    assert table.flags(cells[0]) & Qt.ItemFlag.ItemIsDragEnabled
    data = table.mimeData(cells)
    chip = panel.chips.chips[2]
    enter = drag_enter(5, 5, data)
    chip.dragEnterEvent(enter)
    assert enter.isAccepted()
    assert chip.isDown()
    drop = QDropEvent(
        QPointF(5, 5), Qt.DropAction.CopyAction, data, Qt.MouseButton.LeftButton,
        Qt.KeyboardModifier.NoModifier,
    )  # fmt: skip
    with qtbot.waitSignal(panel.pin_requested) as pinned:
        chip.dropEvent(drop)
    assert pinned.args == ["cuda:0", {(3, "attention"), (3, "experts")}]
    assert not chip.isDown()


def test_what_cannot_be_moved_cannot_be_dragged(panel: PlacementPanel) -> None:
    table = panel.view.table
    index = table.index(*at(panel, "3", "norms, rest"))
    assert not table.flags(index) & Qt.ItemFlag.ItemIsDragEnabled


def test_the_menu_offers_to_unpin_only_what_is_pinned(panel: PlacementPanel, moe: Path) -> None:
    select(panel, ("1", "ffn up exps"))
    actions = {action.text(): action.isEnabled() for action in panel.view.make_menu().actions()}
    assert actions["Pin to GPU 0"]
    assert not actions["Unpin"]
    show(panel, moe, with_pins((), [(1, "experts")], "cuda:0"))
    actions = {action.text(): action.isEnabled() for action in panel.view.make_menu().actions()}
    assert actions["Unpin"]
    assert panel.detail.text().endswith("pinned")
