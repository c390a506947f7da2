"""The sampling settings: accepted values, error sentences, metadata for a panel."""

import dataclasses
import math
import pickle

import numpy as np
import pytest

from engine.errors import EngineError
from engine.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"temperature": -0.1}, "'temperature' must be a number from 0.0 to 5.0, not -0.1"),
        ({"temperature": math.nan}, "'temperature' must be a number"),
        ({"temperature": "hot"}, "'temperature' must be a number from 0.0 to 5.0, not 'hot'"),
        ({"temperature": 10**400}, "'temperature' must be a number"),
        ({"temperature": None}, "'temperature' must be a number"),
        ({"top_p": 1.01}, "'top_p' must be a number from 0.0 to 1.0, not 1.01"),
        ({"top_k": -1}, "'top_k' must be a whole number from 0"),
        ({"top_k": 4.0}, "'top_k' must be a whole number"),
        ({"top_k": True}, "'top_k' must be a whole number"),
        ({"repeat_last_n": -2}, "'repeat_last_n' must be a whole number from -1"),
        ({"repeat_penalty": 0}, "'repeat_penalty' must be a number from 0.1"),
        ({"seed": -1}, "'seed' must be a whole number from 0"),
        ({"stop": "END"}, "'stop' must be a list of non-empty strings"),
        ({"stop": ("",)}, "'stop' must be a list of non-empty strings"),
        ({"ignore_eos": 1}, "'ignore_eos' must be true or false, not 1"),
        ({"on_overflow": "crash"}, "'on_overflow' must be 'stop' or 'shift', not 'crash'"),
    ],
)
def test_a_bad_setting_is_named_with_its_bounds(changes, expected):
    with pytest.raises(EngineError) as caught:
        SamplingParams(**changes)
    assert expected in str(caught.value)


def test_numbers_and_lists_from_json_or_numpy_become_the_fields_own_kind():
    got = SamplingParams(temperature=0, top_k=np.int64(3), min_p=np.float32(0.5), stop=["a"])
    assert got == SamplingParams(temperature=0.0, top_k=3, min_p=0.5, stop=("a",))
    assert type(got.temperature) is float
    assert type(got.top_k) is int


def test_every_setting_tells_what_a_settings_panel_needs():
    for spec in dataclasses.fields(SamplingParams):
        assert spec.metadata["title"], spec.name
        assert spec.metadata["help"].endswith("."), spec.name
        if spec.metadata["kind"] in (int, float):
            assert {"min", "max", "step"} <= set(spec.metadata), spec.name


def test_every_slider_has_a_range_that_a_hand_can_set():
    for spec in dataclasses.fields(SamplingParams):
        facts = spec.metadata
        if facts["kind"] in (int, float) and spec.name != "seed":
            end = facts.get("soft_max", facts["max"])
            assert facts["min"] < end <= facts["max"], spec.name
            assert (end - facts["min"]) / facts["step"] < 10_000, spec.name


def test_settings_survive_pickling():
    settings = SamplingParams(seed=5, stop=("x",))
    assert pickle.loads(pickle.dumps(settings)) == settings
