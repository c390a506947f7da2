"""300 generated templates that try to hang or fill: each ends in one sentence within 3 s."""

import pytest

from tests.fuzz.template_attacker import attacks, tried


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_generated_attacks_end_in_a_sentence_in_time(part: int) -> None:
    for name, source in attacks(30, seed=part):
        outcome = tried(name, source)
        assert outcome.sentence, name
        assert "\n" not in outcome.sentence
        assert outcome.seconds < 3, outcome
        assert outcome.peak_bytes < 600 << 20, outcome
