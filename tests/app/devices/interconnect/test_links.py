"""The Links panel: links as the driver reports them and as measured, in a graph and a table."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from PySide6.QtCore import Qt
from PySide6.QtGui import QColor
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.devices.interconnect.interconnect import (
    Edge,
    InterconnectPicture,
    Node,
    links_picture,
    measure_links,
    proven_routes,
    read_links,
)
from app.devices.interconnect.interconnect_presenter import InterconnectPresenter
from app.devices.interconnect.views.interconnect_panel import InterconnectPanel
from app.widgets.theme import apply_theme, theme
from engine import (
    DeviceInfo,
    EngineError,
    Link,
    LinkFacts,
    LinkRecord,
    Links,
    LinkSpeed,
    MachineFile,
    Pcie,
    Prediction,
    Rig,
    Topology,
    Wires,
    WireSpeed,
    known_links,
    parse_rig,
)
from engine.hardware.devices.topology import Routes
from engine.planning.speed.facts import Path, RankTime
from engine.planning.speed.link_records import TrialRecord

GIB = 1 << 30
CPU = DeviceInfo("cpu", "cpu", "Ryzen", 32 * GIB, 30 * GIB, n_cores=8)


def rows(panel: InterconnectPanel) -> list[list[str]]:
    model = panel.table.model()
    return [
        [model.index(row, column).data() or "" for column in range(model.columnCount())]
        for row in range(model.rowCount())
    ]


@pytest.fixture
def panel(qapp: QApplication, qtbot: QtBot) -> InterconnectPanel:
    apply_theme(qapp, "dark")
    made = InterconnectPanel()
    qtbot.addWidget(made)
    made.resize(424, 560)
    return made


# what is known


def test_a_rig_of_three_cards_has_every_pair() -> None:
    picture = read_links((), parse_rig("2x3090,1x3060"))
    assert [node.device for node in picture.nodes] == ["cuda:0", "cuda:1", "cuda:2", "cpu"]
    pairs = {(edge.a, edge.b): edge for edge in picture.edges}
    assert len(pairs) == 3 + 3 + 1
    assert pairs["cuda:0", "cuda:1"].kind == "host"
    assert "No direct access" in pairs["cuda:0", "cuda:1"].detail
    assert pairs["cpu", "cpu"].a == pairs["cpu", "cpu"].b == "cpu"


def test_nvlink_is_named_with_number_and_version() -> None:
    edges = read_links((), parse_rig("2xA100")).edges
    assert edges[0].kind == "nvlink"
    assert edges[0].route == "12 × NVLink 3"


def test_a_slot_that_is_slower_than_it_could_be_is_marked() -> None:
    gpu = DeviceInfo("cuda:0", "cuda", "RTX 3090", 24 * GIB, 23 * GIB)
    topology = Topology({"cuda:0": Pcie(1, 16, 4, 16)}, ())
    (node, _) = links_picture([gpu, CPU], topology, Links({}), {}).nodes
    assert (node.slot, node.slot_at_most) == ("1.0 x16", "4.0 x16")
    full = Topology({"cuda:0": Pcie(4, 16, 4, 16)}, ())
    assert links_picture([gpu, CPU], full, Links({}), {}).nodes[0].slot_at_most == ""


def test_measured_links_are_told_from_expected_ones() -> None:
    facts = LinkFacts(2e-5, 1e9)
    picture = links_picture(
        [CPU], Topology({}, ()), Links({("cpu", "cpu"): facts}), {("cpu", "cpu"): facts}
    )
    assert picture.edges[0].is_measured
    assert picture.edges[0].facts == facts


def test_measuring_stops_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stops before the next device or pair; finished measurements are kept."""
    done: list[str] = []
    monkeypatch.setattr("engine.measure_facts", lambda d, kinds, file: done.append(d.id))
    monkeypatch.setattr("engine.measure_link", lambda a, b: pytest.fail("stopped"))
    said: list[str] = []
    measure_links([CPU], said.append, lambda: bool(done))
    assert done == ["cpu"]
    assert said == ["Measuring cpu …"]


def test_what_cannot_be_measured_is_said_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise EngineError("cpu has too little free memory to measure its speed.")

    monkeypatch.setattr("engine.measure_facts", refuse)
    monkeypatch.setattr("engine.measure_link", refuse)
    said: list[str] = []
    measure_links([CPU], said.append)
    assert sum("too little free memory" in text for text in said) == 2


def proven(lost: bool) -> LinkRecord:
    trials = {
        (means, place): TrialRecord("passed", "", {1 << 14: seconds, 1 << 24: 100 * seconds})
        for means in ("stores", "copies")
        for place, seconds in (("peer", 1e-5), ("host", 3e-5))
    }
    if lost:
        trials["stores", "peer"] = TrialRecord("lost", "nothing was written")
    return LinkRecord("2026-03-01", trials)  # type: ignore[arg-type]


@pytest.fixture
def pair() -> tuple[DeviceInfo, ...]:
    return tuple(
        DeviceInfo(f"cuda:{n}", "cuda", "RTX 3090", 24 * GIB, 23 * GIB, pci_bus=f"0:{n}")
        for n in range(2)
    )


@pytest.mark.parametrize("lost", [False, True])
def test_what_was_proven_of_a_link_is_told(
    lost: bool, pair: tuple[DeviceInfo, ...], panel: InterconnectPanel
) -> None:
    """The panel names the routes in use, the date of their test, and problems."""
    file, topology = MachineFile(), Topology({}, (Link("cuda:0", "cuda:1", "p2p"),))
    file.keep_proof(pair[0], pair[1], proven(lost))
    file.keep_proof(pair[1], pair[0], proven(lost=False))
    ways = proven_routes(pair, topology, file)
    measured = {(way.source, way.goal): way.speed for way in ways if way.speed}
    links = known_links(pair, topology, file)
    (edge,) = links_picture(pair, topology, links, measured, ways).edges
    assert edge.is_measured
    assert edge.facts.latency_s == (3e-5 if lost else 1e-5)
    assert edge.detail.endswith("Transfers go directly; tested on 2026-03-01.")
    assert ("Small transfers go by the host, large ones directly;" in edge.detail) == lost
    assert (edge.kind, len(edge.problems)) == ("p2p", int(lost))
    panel.show_picture(InterconnectPicture((), (edge,)), ["cuda:0", "cuda:1"], ["GPU 0", "GPU 1"])
    assert panel.problems.isHidden() != lost
    if lost:
        assert panel.problems.text().startswith("Kernel writes from cuda:0 to cuda:1 do not")
        assert "do not arrive" in panel.table.model().index(0, 1).data(Qt.ItemDataRole.ToolTipRole)


def test_a_link_that_nothing_goes_through_directly_is_not_drawn_as_one(
    pair: tuple[DeviceInfo, ...],
) -> None:
    """A failed test outweighs the driver's word, and the driver's veto a passed test."""
    file = MachineFile()
    for problem in ("", "the driver's settings forbid it"):
        link = Link("cuda:0", "cuda:1", "host" if problem else "p2p", peer_problem=problem)
        topology = Topology({}, (link,))
        trials = dict(proven(lost=False).trials)
        if not problem:
            trials |= dict.fromkeys((("stores", "peer"), ("copies", "peer")), TrialRecord("wrong"))  # type: ignore[arg-type]
        for a, b in (pair, pair[::-1]):
            file.keep_proof(a, b, LinkRecord("2026-03-01", trials))
        ways = proven_routes(pair, topology, file)
        assert {(way.small, way.large) for way in ways} == {("by the host", "by the host")}
        (edge,) = links_picture(pair, topology, Links({}), {}, ways).edges
        assert (edge.kind, edge.route) == ("host", "by the host's memory")
        assert len(edge.problems) == (0 if problem else 4)


def test_gpus_are_tried_together_and_what_is_found_is_said(
    pair: tuple[DeviceInfo, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels come first, then routes, and then all-reduces, which use both."""
    tried, measured, said = [], [], []
    broken = {"cuda:1": "a test program ended"}

    def prove(devices: Sequence[str]) -> Routes:
        tried.append(tuple(devices))
        return Routes(notes=("cuda:0 is slow.",))

    def measure(a: str, b: str) -> LinkSpeed:
        measured.append((a, b))
        return LinkSpeed(a, b, {8192: 1e-6}, 1e9)

    monkeypatch.setattr("engine.measure_facts", lambda *_: None)
    monkeypatch.setattr("engine.prove_cards", lambda devices: broken)
    monkeypatch.setattr("engine.prove_links", prove)
    monkeypatch.setattr("engine.measure_link", measure)
    measure_links([*pair, CPU], said.append)
    assert tried == [("cuda:0", "cuda:1")]
    assert measured == [
        ("cuda:0", "cuda:1"), ("cuda:0", "cpu"), ("cuda:1", "cpu"), ("cpu", "cpu")
    ]  # fmt: skip
    assert said[3:7] == [
        "Testing kernels on cuda:0, cuda:1 …",
        "cuda:1 uses PyTorch instead of Tandem's kernels: a test program ended.",
        "Testing routes between cuda:0, cuda:1 …",
        "cuda:0 is slow.",
    ]
    tried.clear()
    measure_links([pair[0], CPU], said.append)
    assert tried == [], "one GPU has no links"


# what is shown

PICTURE = InterconnectPicture(
    (Node("cuda:0", "1.0 x16", "4.0 x16"), Node("cuda:1", "4.0 x16"), Node("cpu")),
    (
        Edge("cuda:0", "cuda:1", "nvlink", "4 × NVLink 3", LinkFacts(6e-6, 9e10), is_measured=True),
        Edge("cuda:0", "cpu", "host", "the GPU's slot", LinkFacts(13e-6, 2.6e9), is_measured=False),
    ),
)


def test_the_table_says_all_that_is_drawn(panel: InterconnectPanel) -> None:
    """Screen readers need it, and everybody does with many devices."""
    panel.show_picture(PICTURE, ["cuda:0", "cuda:1", "cpu"], ["GPU 0", "GPU 1", "CPU"])
    assert rows(panel) == [
        ["GPU 0", "1.0 x16 of 4.0 x16", "", ""],
        ["GPU 1", "PCIe 4.0 x16", "", ""],
        ["GPU 0 – GPU 1", "4 × NVLink 3", "6 µs", "90 GB/s"],
        ["GPU 0 – CPU", "PCIe slot", "~ 13 µs", "~ 2.6 GB/s"],
    ]
    assert "GPU 0 is below full slot speed" in panel.status.text()
    assert panel.table.accessibleName() == "Links"


def test_lines_and_devices_are_drawn(panel: InterconnectPanel, qapp: QApplication) -> None:
    """Lines have the colour of their kind, boxes that of their device, in both themes."""
    panel.show_picture(PICTURE, ["cuda:0", "cuda:1", "cpu"], ["GPU 0", "GPU 1", "CPU"])
    panel.show()
    for name in ("dark", "light"):
        apply_theme(qapp, name)
        image = panel.graph.grab().toImage()
        found = {
            image.pixelColor(x, y).name()
            for x in range(image.width())
            for y in range(image.height())
        }
        wanted = (theme().ok, theme().device_colour(0), theme().device_colour(2), theme().warn)
        for colour in wanted:
            assert QColor(colour).name() in found, (name, colour)
    apply_theme(qapp, "dark")


def test_the_cost_of_exchanges_is_told(panel: InterconnectPanel) -> None:
    ranks = tuple(RankTime(n, "cpu", 1, 0, 0, 0, 0, 0, 0) for n in range(2))
    panel.set_token(Prediction(1, 0.0162, ranks, Path(link_s=0.0021)))
    assert panel.cost.text() == (
        "Communication takes 13 % of the time per token: 2.10 of 16.2 ms (predicted)."
    )
    panel.set_token(None)
    assert panel.cost.text() == "A single rank needs no communication."


def test_simulated_devices_cannot_be_measured(panel: InterconnectPanel) -> None:
    panel.show_picture(PICTURE, ["cuda:0", "cuda:1", "cpu"], ["a", "b", "c"], is_simulated=True)
    assert not panel.measure.isEnabled()


# measuring


class Meter:
    """Fake measurement that waits until it may go on."""

    def __init__(self) -> None:
        self.go_on, self.was_stopped = threading.Event(), False
        self.error: EngineError | None = None
        self.threads: set[str] = set()

    def read(
        self, devices: Sequence[DeviceInfo], rig: Rig | None, wires: object
    ) -> InterconnectPicture:
        self.threads.add(threading.current_thread().name)
        return PICTURE

    def measure(
        self, devices: Sequence[DeviceInfo], say: Callable[[str], None],
        is_stopped: Callable[[], bool],
    ) -> None:  # fmt: skip
        say("Measuring cuda:0 …")
        while not self.go_on.wait(0.01):
            if is_stopped():
                self.was_stopped = True
                return
        if self.error is not None:
            raise self.error


DEVICES = tuple(
    DeviceInfo(name, "cuda" if name != "cpu" else "cpu", name, GIB, GIB)
    for name in ("cuda:0", "cuda:1", "cpu")
)


def test_links_are_read_on_a_thread_when_the_page_shows(
    panel: InterconnectPanel, qtbot: QtBot
) -> None:
    meter = Meter()
    presenter = InterconnectPresenter(panel, panel, read=meter.read, measure=meter.measure)
    presenter.set_devices(DEVICES)
    assert not meter.threads, "nobody looks yet"
    panel.show()
    qtbot.waitUntil(lambda: len(rows(panel)) == 4)
    assert rows(panel)[3][0] == "GPU 0 – CPU"
    assert meter.threads == {"tandem-links"}
    presenter.close()


def test_measuring_can_be_watched_and_stopped(panel: InterconnectPanel, qtbot: QtBot) -> None:
    meter = Meter()
    presenter = InterconnectPresenter(panel, panel, read=meter.read, measure=meter.measure)
    presenter.set_devices(DEVICES)
    qtbot.mouseClick(panel.measure, Qt.MouseButton.LeftButton)
    qtbot.waitUntil(lambda: panel.status.text() == "Measuring cuda:0 …")
    assert panel.measure.text() == "Stop"
    with qtbot.waitSignal(presenter.measured):
        qtbot.mouseClick(panel.measure, Qt.MouseButton.LeftButton)
    assert meter.was_stopped
    assert panel.measure.text() == "Measure"
    presenter.close()


def test_a_failure_is_a_sentence_on_the_page(panel: InterconnectPanel, qtbot: QtBot) -> None:
    meter = Meter()
    meter.error = EngineError("The disk is full.", "Free some space.")
    meter.go_on.set()
    presenter = InterconnectPresenter(panel, panel, read=meter.read, measure=meter.measure)
    presenter.set_devices(DEVICES)
    panel.measure.click()
    qtbot.waitUntil(lambda: panel.status.text() == "The disk is full. Free some space.")
    assert panel.measure.text() == "Measure"
    presenter.close()


def test_closing_ends_a_measurement(panel: InterconnectPanel, qtbot: QtBot) -> None:
    """The fixture that looks for threads does the rest."""
    meter = Meter()
    presenter = InterconnectPresenter(panel, panel, read=meter.read, measure=meter.measure)
    presenter.set_devices(DEVICES)
    panel.measure.click()
    presenter.close()
    assert meter.was_stopped


def test_machines_have_one_line_between_them_with_the_measured_link() -> None:
    far = [replace(CPU, id="1/cpu"), replace(CPU, id="2/cpu")]
    wires = Wires(measured=[WireSpeed(0, 1, 1e-3, 2e-3, 1e8, 2e-3)])
    edges = {(edge.a, edge.b): edge for edge in read_links([CPU, *far], None, wires).edges}
    assert set(edges) == {("cpu", "1/cpu"), ("cpu", "2/cpu"), ("1/cpu", "2/cpu"), ("cpu", "cpu")}
    assert edges["cpu", "1/cpu"].is_measured
    assert edges["cpu", "1/cpu"].facts.latency_s == 2e-3
    assert edges["cpu", "1/cpu"].kind == "network"
    assert not edges["cpu", "2/cpu"].is_measured
