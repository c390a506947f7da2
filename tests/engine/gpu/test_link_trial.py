"""Trials of links, with kernels that are interpreted: whatever a link does wrong is found."""

import pytest

from engine.gpu import link_exchange
from engine.gpu.link_trial import Effort, try_copies, try_stores
from engine.parallel.ways import Place
from tests.helpers.fake_links import (
    Fading,
    FakeBench,
    Fault,
    Late,
    corrupt,
    lost,
    swapped,
    torn,
)

TINY = Effort(n_rounds=3, n_pairs=4, n_rows=2, n_bulk=40, copied=(64, 4096))
PLACES: tuple[Place, ...] = ("peer", "host")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_exchange, "N_PROGRAMS", 2)
    monkeypatch.setattr(link_exchange, "SIZE", 4)


@pytest.mark.parametrize("place", PLACES)
def test_what_an_honest_link_carries_passes(place: Place) -> None:
    bench = FakeBench()
    for trials in (try_stores(bench, place, TINY), try_copies(bench, place, TINY)):
        assert [trial.verdict for trial in trials] == ["passed", "passed"]


@pytest.mark.parametrize(
    ("fault", "verdict"),
    [(lost, "lost"), (corrupt, "wrong"), (torn, "wrong"), (swapped, "wrong"), (Late(), "lost"),
     (Fading(2), "lost")],
    ids=["lost", "corrupt", "torn", "swapped", "late", "fading"],
)  # fmt: skip
@pytest.mark.parametrize("source", [0, 1])
def test_stores_that_fail_one_way_are_found_in_that_way(
    fault: Fault, verdict: str, source: int
) -> None:
    bench = FakeBench(stores={(source, "peer"): fault})
    found = try_stores(bench, "peer", TINY)
    assert found[source].verdict == verdict, found
    assert found[source].why
    assert found[1 - source].verdict == "passed"
    assert [trial.verdict for trial in try_copies(bench, "peer", TINY)] == ["passed"] * 2
