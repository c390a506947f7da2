"""Sampling presets: their values, and the names of the user's own."""

import pytest

from app.chat.sampling import presets
from engine import SamplingParams, why_sampled_on_host

OWN = {"Mine": {"temperature": 0.4, "stop": ["END"]}, "broken": 7}


def test_presets_of_tandem_leave_sampling_to_the_gpus() -> None:
    names = [preset.name for preset in presets.all_presets({})]
    assert names == ["Model defaults", "Precise", "Balanced", "Creative"]
    for preset in presets.all_presets({}):
        params = presets.params_of(preset.chosen, SamplingParams())
        assert not why_sampled_on_host(params, 150_000, 4), preset.name
    heats = [
        presets.params_of(p.chosen, SamplingParams()).temperature for p in presets.all_presets({})
    ]
    assert heats[1] < heats[2] < heats[3]


def test_the_preset_in_use_is_known_by_its_values() -> None:
    found = presets.all_presets(OWN)
    assert [p.name for p in found if p.is_own] == ["Mine"], "invalid entries are skipped"
    recommended = SamplingParams(temperature=0.6, top_k=20)

    def used(chosen: dict[str, object]) -> str:
        match = presets.matching(found, chosen, recommended)
        return match.name if match else ""

    assert used({}) == "Model defaults"
    assert used({"top_k": 20}) == "Model defaults", "the same values"
    assert used({"temperature": 0.4, "stop": ("END",)}) == "Mine"
    assert used({"temperature": 0.41}) == ""


def test_values_that_the_engine_refuses_are_left_out() -> None:
    chosen = {"temperature": 99, "top_k": 3, "of the future": 1}
    assert presets.params_of(chosen, SamplingParams(min_p=0.3)) == SamplingParams(
        top_k=3, min_p=0.3
    )


def test_own_presets_are_kept_renamed_and_deleted() -> None:
    own = presets.with_preset({}, "x" * 99, {"top_k": 1})
    assert list(own) == ["x" * presets.MAX_NAME]
    own = presets.with_preset({"a": {}, "b": {}}, "c", {"seed": 3})
    own = presets.with_new_name(own, "a", "z")
    assert own == {"z": {}, "b": {}, "c": {"seed": 3}}
    assert presets.without_preset(own, "b") == {"z": {}, "c": {"seed": 3}}


@pytest.mark.parametrize(
    ("name", "renamed", "problem"),
    [
        ("Precise", "", "built-in"), ("Mine", "", ""), ("Mine", "Other", "already"),
        ("Mine", "Mine", ""), ("New", "Mine", ""),
    ],
)  # fmt: skip
def test_names_that_are_taken_are_refused(name: str, renamed: str, problem: str) -> None:
    found = presets.name_problem(name, OWN, renamed)
    assert problem in found
    assert bool(problem) == bool(found)
