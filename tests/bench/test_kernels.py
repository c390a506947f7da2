"""The table of the kernels' speeds: its columns and their contents."""

import pytest
import torch

from tests.bench import kernels


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the matrix small, so that it is soon done, and leave torch's threads alone."""
    monkeypatch.setattr(kernels, "N_ROWS", 64)
    monkeypatch.setattr("engine.runtime.measuring.weight_speed.N_ROWS", 64)
    monkeypatch.setattr("engine.runtime.measuring.weight_speed.N_GEMM_ROWS", 64)
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)


def test_each_type_has_a_line_for_each_number_of_threads(
    capsys: pytest.CaptureFixture[str],
) -> None:
    kernels.main(["Q4_K", "TQ2_0", "--threads", "2", "--rounds", "1", "--megabytes", "1"])
    _, _, headings, *lines = capsys.readouterr().out.splitlines()
    fields = [line.split() for line in lines]
    assert {len(row) for row in fields} == {len(headings.split())}
    assert [(row[0], row[1], row[3]) for row in fields] == [
        (*kind, n_threads)
        for kind in (("Q4_K", "4.62"), ("TQ2_0", "2.50"))
        for n_threads in ("1", "2")
    ]
    for _, bits, _, _, bandwidth, _, rate, *_ in fields:
        assert float(bandwidth) == pytest.approx(float(rate) / 2 * float(bits) / 8, abs=0.3)


def test_a_type_without_planes_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        kernels.main(["F16"])
    assert "no planes for F16" in capsys.readouterr().err
