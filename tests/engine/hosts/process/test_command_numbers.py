"""Numbers of commands on both sides of the engine's process, without a record of each."""

import random

from engine.hosts.process.channel import CommandNumbers


def test_both_numbers_lead_to_each_other() -> None:
    rng, numbers, window = random.Random(1), CommandNumbers(), 40
    known = {}
    for own in range(1, 400):
        window += rng.choice((1, 1, 1, 5))  # what could not be sent has a number, too
        numbers.add(window)
        known[window] = own
        assert numbers.of_window(own) == window
    assert [numbers.of_window(own) for own in known.values()] == list(known)
    found = {number: numbers.of_host(number) for number in range(1, window + 9)}
    assert {number: own for number, own in found.items() if own} == known
    assert numbers.of_window(0) == 0


def test_what_is_kept_does_not_grow_with_the_commands() -> None:
    numbers = CommandNumbers()
    for window in range(7, 10_007):
        numbers.add(window)
    assert sum(len(value) for value in vars(numbers).values() if isinstance(value, list)) == 4
    assert numbers.of_host(10_006) == 10_000
