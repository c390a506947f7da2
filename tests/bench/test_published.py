"""Published speeds: which ones the predictions of simulated rigs come near."""

from tests.bench.published import ROWS, lines, predicted


def test_every_row_is_in_the_table() -> None:
    table = list(lines())
    assert len(table) == 2 + len(ROWS) + 1
    assert all(line.count("|") == 6 for line in table)


def test_one_gpu_is_predicted_within_a_quarter_where_the_engine_is_near_the_limit() -> None:
    """gpt-fast's int4 reaches half of the bandwidth, which no constant of ours knows."""
    alone = [row for row in ROWS if row[1] in ("3090", "4090", "5090", "1xA100")]
    assert len(alone) == 5
    for name, rig, model, mode, published, is_prompt in alone:
        if "70B int4" in name:
            continue
        speed = predicted(rig, model, mode, is_prompt=is_prompt).tokens_per_s
        assert 0.75 < speed / published < 1.25, (name, rig)


def test_what_does_not_pay_is_predicted_not_to_pay() -> None:
    """A small routed model on four cards that reach each other slowly is faster in layers."""
    routed = [row for row in ROWS if "26B-A4B" in row[0]]
    speeds = {mode: predicted(rig, model, mode).tokens_per_s for _, rig, model, mode, *_ in routed}
    assert speeds["tensor"] < speeds["layer"]
    dense = [row for row in ROWS if "31B" in row[0]]
    speeds = {mode: predicted(rig, model, mode).tokens_per_s for _, rig, model, mode, *_ in dense}
    assert speeds["tensor"] > 1.2 * speeds["layer"]
