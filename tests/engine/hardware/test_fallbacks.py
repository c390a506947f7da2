"""The list of what makes a model's GPUs slower than they could be."""

from typing import get_args

import pytest

from engine.errors import EngineError, Sentence
from engine.hardware.fallbacks import MAX_REASON, Fallback, FallbackKind, Fallbacks


@pytest.mark.parametrize("kind", get_args(FallbackKind))
def test_each_kind_has_words_of_its_own(kind: FallbackKind) -> None:
    found = Fallback(kind, ("cuda:0", "cuda:1", "cuda:2"), "it snows")
    assert found.sentence == f"{found.title}: it snows. {found.cost} {found.help}"
    assert all(text.endswith(".") for text in (found.cost, found.help))
    assert "{" not in found.title
    others = [Fallback(other, (), "it snows").title for other in get_args(FallbackKind)]
    assert len(set(others)) == len(others)


def test_the_sentence_names_device_reason_and_help() -> None:
    found = Fallback("graph", ("cuda:0", "cuda:1", "cuda:0"), "it snows.\n  at line 3", "Wait.")
    assert found.sentence == (
        "On cuda:0 and cuda:1, kernels are launched one by one: it snows. Token generation is"
        " slower. Wait."
    )
    assert len(Fallback("graph", (), "x" * 9999).why) == MAX_REASON
    assert Fallback("graph", (), " \n").why == "the reason is unknown"


def test_what_is_reported_twice_is_there_once_until_it_is_withdrawn() -> None:
    found = Fallbacks()
    found.report("graph", ["cuda:0"], "it snows")
    found.report("sampling", ["cuda:0"], "it rains")
    found.report("graph", ["cuda:0"], "it snows")
    assert [f.kind for f in found.current] == ["graph", "sampling"]
    found.withdraw("graph")
    assert [f.kind for f in found.current] == ["sampling"]


def test_a_model_has_what_its_gpus_share_with_others() -> None:
    shared = Fallbacks()
    model, cpu_only = Fallbacks(["cuda:0"], shared), Fallbacks((), shared)
    shared.report("memory", ["cuda:1"], "it snows")
    assert model.current == ()
    shared.report("memory", ["cuda:0"], "it snows")
    shared.report("compiling", (), "the disk is full")
    assert [f.kind for f in model.current] == ["memory", "compiling"]
    assert cpu_only.current == ()


def test_handed_over_weights_keep_their_fallback_where_they_stay() -> None:
    old, new = Fallbacks(["cuda:0", "cuda:1"]), Fallbacks(["cuda:0"])
    old.report("weights", ["cuda:0"], "Q4_K came out wrong")
    old.report("weights", ["cuda:1"], "Q4_K came out wrong")
    old.report("graph", ["cuda:0"], "it snows")
    new.take_over(old, "weights")
    assert [(f.kind, f.devices) for f in new.current] == [("weights", ("cuda:0",))]


def test_a_reason_keeps_its_template_without_its_full_stop() -> None:
    error = EngineError("{device} has no room.", device="cuda:0")
    why = Fallback("exchange", ("cuda:0",), str(error)).why
    assert isinstance(why, Sentence)
    assert (why, why.template) == ("cuda:0 has no room", "{device} has no room")
