"""Calibration of predicted speeds, in `plan` and in the window, by measured ones."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from statistics import median

from app.cli.bench.row import BenchRow
from engine import Forecaster, Planner


def learn(path: str, quant: str, rows: Sequence[BenchRow]) -> None:
    """Store by how much measured times differ from predicted ones.

    Tests that mix a prompt with generation are left out.

    Args:
        path: file of the model.
        quant: quantisation of the model.
        rows: rows of a benchmark; those without a result are left out.
    """
    forecaster = Forecaster.of_machine()
    with closing(Planner(path)) as planner:
        for row in rows:
            if row.result is None:
                continue
            test, params = row.test, row.params
            evaluation = planner.evaluate(params, forecaster.free_bytes)
            seconds = median(row.result.samples_s)
            for _ in row.result.samples_s[:2]:  # several count as two runs that agree
                if not test.n_prompt:
                    middle = test.n_depth + test.n_gen // 2
                    forecaster.learn_decode(evaluation, params, quant, seconds / test.n_gen, middle)
                elif not test.n_gen:
                    forecaster.learn_prefill(
                        evaluation, params, quant, test.n_prompt, seconds, test.n_depth
                    )
