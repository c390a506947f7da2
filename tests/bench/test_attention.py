"""The table of attention's speeds: a line for each case, with the ratio to another checkout."""

import re

import pytest

from tests.bench import attention

TOKEN = attention.Case(4, 2, 32, "q8_0", 1, 300, 2)


@pytest.mark.slow
def test_each_case_has_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(attention, "READ_BYTES", 1 << 20)
    options = ["--shapes", "4/2x32", "--depths", "0,300", "--threads", "2", "--rounds", "1"]
    attention.main([*options, "--types", "q8_0"])
    lines = capsys.readouterr().out.splitlines()
    pattern = re.compile(
        r"4/2 x  32 q8_0 +(\d+) behind +(\d+), 2 threads: +([\d.]+) (GB/s|GFLOP/s).* \([\d.]+\)"
    )
    found = [match for match in map(pattern.fullmatch, lines) if match]
    prompt = "512", "GFLOP/s"
    assert [(match[1], match[4]) for match in found] == 2 * [("1", "GB/s")] + 2 * [prompt]
    assert [match[2] for match in found] == ["0", "300", "0", "300"]
    assert all(float(match[3]) > 0 for match in found[1:])


def test_the_ratio_is_the_median_of_the_rounds() -> None:
    rates = [[3e9, 1e9], [4e9, 4e9], [2e9, 1e9]]
    assert attention.report(TOKEN, rates, 6e9) == (
        "4/2 x  32 q8_0   1 behind   300, 2 threads:    3.0 GB/s, sum 6.0 (0.50); "
        "ratio 2.00 (1.00 to 3.00)"
    )


def test_operations_are_those_of_visible_positions() -> None:
    prompt = TOKEN._replace(n_tokens=3, depth=10)
    assert prompt.n_operations == 4 * 32 * 4 * (11 + 12 + 13)
