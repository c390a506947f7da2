"""Predictions for published speeds: how many are near, and that no ratio drifts."""

from collections import Counter

import pytest

from tests.bench.published import ROWS, is_near, lines, pace_of, predicted, speed_of
from tests.bench.published_rows import ALONE, GEMMA_31B, GEMMA_A4B, Row

DRIFT = 0.02
"""Largest relative change of a row's ratio; a larger one has to be written into the row."""

MIN_NEAR = {"alone": 0.6, "generation": 0.9, "prompt": 0.5, "gain": 1.0}
"""Smallest share of a category's rows that must be within 25 %."""

IDS = [f"{row.name} on {row.case.rig}, {row.case.mode}" for row in ROWS]


def test_every_row_is_in_the_table() -> None:
    table = list(lines())
    assert len(table) == 2 + len(ROWS)
    assert all(line.count("|") == 7 for line in table)


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_a_row_is_as_near_as_it_says(row: Row) -> None:
    """Rows that are not within 25 % have a reason, others have none."""
    ratio = speed_of(row) / row.published
    assert ratio == pytest.approx(row.ratio, rel=DRIFT)
    assert is_near(ratio) == (not row.why)


def test_most_rows_of_each_kind_are_within_a_quarter() -> None:
    near = Counter(row.category for row in ROWS if not row.why)
    of = Counter(row.category for row in ROWS)
    assert set(of) == set(MIN_NEAR)
    assert all(near[kind] >= least * of[kind] for kind, least in MIN_NEAR.items())


def test_only_speeds_of_one_gpu_at_a_time_calibrate() -> None:
    """The prediction for a row that calibrates is its published speed."""
    for row in {row.paced_by for row in ROWS if row.paced_by is not None}:
        assert row.category == ALONE
        assert row.case.mode == "layer" or row.case.rig in ("3090", "4090", "5090", "A100")
        again = predicted(row.case, pace_of(row)).tokens_per_s
        assert again == pytest.approx(row.published)
        assert all(part > 0 for part in vars(pace_of(row)).values())


def test_what_does_not_pay_is_predicted_not_to_pay() -> None:
    """A small routed model on four GPUs with slow links is faster in layers."""

    def gain(alone: Row) -> float:
        split = [row for row in ROWS if row.paced_by is alone and not row.case.n_prompt]
        return speed_of(split[0]) / alone.published

    assert gain(GEMMA_A4B) < 0.85
    assert gain(GEMMA_31B) > 1.2
