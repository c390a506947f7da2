"""Numbers beyond their range are never allowed, however its ends are written."""

import json
import random
from collections.abc import Iterator, Mapping

import jsonschema
import pytest

from app.core.paths import demo_model
from engine import Grammar, GrammarError, check_grammar, load_tokenizer
from engine.decoding.grammar.matcher import MaskVocabulary
from engine.decoding.grammar.schema import read_schema

BOUNDS = (-100, -17, -1.5, -1, -0.5, -0.1, 0, 0.0, 0.1, 0.25, 0.5, 1, 1.5, 2, 9, 10, 100)
STEPS = (0, 1e-9, 0.001, 0.25, 0.5, 1, 9)


@pytest.fixture(scope="module")
def vocabulary() -> MaskVocabulary:
    path = demo_model()
    assert path is not None
    return MaskVocabulary(load_tokenizer(path))


def is_allowed(vocabulary: MaskVocabulary, schema: Mapping[str, object], text: str) -> bool:
    matcher = vocabulary.matcher(Grammar("json_schema", json.dumps(schema))).copy()
    for token in vocabulary.encode(text.encode()):
        if not matcher.can_accept(token):
            return False
        matcher.accept(token)
    return matcher.is_over or bool(matcher.allowed()[vocabulary.eog_ids].any())


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.5}, "0.5", "0"),
        ({"exclusiveMinimum": 1, "exclusiveMaximum": 1.5}, "1.25", "1"),
        ({"exclusiveMinimum": 0.0, "exclusiveMaximum": 0.1, "maximum": 1.5}, "0.05", "0"),
        ({"exclusiveMaximum": 0, "minimum": -0.5}, "-0.5", "0"),
        ({"exclusiveMaximum": 0, "exclusiveMinimum": -0.5, "minimum": -7}, "-0.25", "0"),
    ],
)
def test_an_excluded_whole_number_is_not_allowed(
    vocabulary: MaskVocabulary, schema: dict[str, object], right: str, wrong: str
) -> None:
    schema["type"] = "number"
    assert is_allowed(vocabulary, schema, right)
    assert not is_allowed(vocabulary, schema, wrong)


def random_range(rng: random.Random) -> dict[str, object]:
    low, high = sorted(rng.sample(BOUNDS, 2))
    schema: dict[str, object] = {"type": rng.choice(("number", "integer"))}
    if rng.random() < 0.8:
        schema[rng.choice(("minimum", "exclusiveMinimum"))] = low
    if rng.random() < 0.8:
        schema[rng.choice(("maximum", "exclusiveMaximum"))] = high
    if rng.random() < 0.2:
        schema |= {"maximum": high, "exclusiveMaximum": rng.choice(BOUNDS)}
    return schema


def near_the_ends(schema: Mapping[str, object]) -> Iterator[str]:
    """Yield numbers around the ends of a range, in several ways to write them."""
    for bound in schema.values():
        if isinstance(bound, int | float):
            for step in STEPS:
                for number in (bound - step, bound + step):
                    yield from (f"{number:.1f}", f"{number:.2f}", f"{number:.12f}")
                    if number == int(number):
                        yield str(int(number))


@pytest.mark.parametrize("seed", range(30))
def test_what_is_allowed_lies_in_the_range(vocabulary: MaskVocabulary, seed: int) -> None:
    schema = random_range(random.Random(seed))
    validator = jsonschema.Draft202012Validator(schema)
    try:
        check_grammar(Grammar("json_schema", json.dumps(schema)))
    except GrammarError:  # no number is in it
        texts = [*near_the_ends(schema), *map(str, range(-110, 110))]
        assert not any(validator.is_valid(json.loads(text)) for text in texts)
        return
    wrong = {text for text in near_the_ends(schema) if not validator.is_valid(json.loads(text))}
    assert [text for text in sorted(wrong) if is_allowed(vocabulary, schema, text)] == []


def test_a_range_that_no_float_holds_is_refused() -> None:
    schema = {"type": "number", "exclusiveMinimum": 10**400, "maximum": 10**400}
    with pytest.raises(GrammarError, match="a number of 401 digits"):
        read_schema(json.dumps(schema))
