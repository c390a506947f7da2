"""The divergence of probabilities, against numbers worked out by hand."""

import numpy as np
import pytest

from tests.bench.divergence import divergence, report


def test_divergence_is_that_of_the_probabilities() -> None:
    exact = np.log(np.array([[0.5, 0.5], [0.25, 0.75]], np.float32)) + 3
    found = np.log(np.array([[0.25, 0.75], [0.25, 0.75]], np.float32)) - 5
    expected = [0.5 * np.log(0.5 / 0.25) + 0.5 * np.log(0.5 / 0.75), 0.0]
    assert divergence(exact, found) == pytest.approx(expected, abs=1e-6)


def test_a_report_has_mean_largest_and_agreement() -> None:
    exact = np.log(np.array([[0.9, 0.1], [0.2, 0.8]], np.float32))
    assert report("x", exact, exact) == "x: KL 0.00e+00, at most 0.0e+00, the same token 100.0%"
