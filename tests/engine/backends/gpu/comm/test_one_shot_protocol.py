"""The one-shot protocol, in every order in which programs may run and packets may arrive.

The model states in a few steps what `engine.backends.gpu.kernels.one_shot` does: `push`, `received`
and `end_round` do what the functions of these names do. All possible states are visited. A
packet may become visible at any time until the kernel that wrote it has ended, and those at
different addresses in any order. The model is only worth something if it finds errors: so each
rule of the protocol is left out once.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import pytest

T = TypeVar("T")

PLACES = 3
"""Pairs of packets in a half of a slot: one per program, so also the most programs."""


class Packet(NamedTuple):
    """A packet as read atomically: its flag, and the meaning of its word, which readers ignore."""

    flag: int
    kind: str = "nothing"
    turn: int = -1


UNWRITTEN = Packet(0)


class Turn(NamedTuple):
    """A round: its number of pairs of packets, and the members without a value."""

    n_pairs: int
    empty: frozenset[int] = frozenset()
    waits: bool = True


@dataclass(frozen=True)
class Rules:
    """Rules of the protocol that can be switched off, and the sizes of the model.

    Attributes:
        n_flag: number of round numbers before they repeat.
        gives_up: whether any program may stop waiting at any time.
        is_flushed: a kernel's packets have arrived when it ends.
    """

    halves: int = 2
    empty_ones_write: bool = True
    empty_ones_are_awaited: bool = True
    renews: bool = True
    spares_values: bool = True
    age: int = 2
    programs_are_counted: bool = True
    kernels_follow: bool = True
    n_flag: int = 1 << 32
    gives_up: bool = False
    is_flushed: bool = True


class Member(NamedTuple):
    """State of a rank.

    Attributes:
        turn: index of the kernel that runs.
        epoch: number of the round, as in the device's `words`.
        programs: by program: None before it begins, its `epoch` while it runs, -1 once done.
        stop: whether later kernels do not wait, as in the device's `flags`.
        left: turns and programs of kernels that did not wait for their packets.
    """

    turn: int
    epoch: int
    programs: tuple[int | None, ...]
    stop: bool = False
    left: frozenset[tuple[int, int]] = frozenset()


Cell = tuple[Packet, ...]
"""Packets that a reader may find at an address: the last to arrive, then the ones in flight."""

Slots = tuple[tuple[Cell, ...], ...]
"""Slots by writer * n + reader: the cells of both halves, headers first."""


class State(NamedTuple):
    members: tuple[Member, ...]
    slots: Slots


class Violation(AssertionError):
    """A state in which the protocol is violated."""


class Model:
    """Model of some rounds of n members, with all orders of events."""

    def __init__(self, n: int, turns: Sequence[Turn], rules: Rules) -> None:
        self.n, self.turns, self.rules = n, turns, rules

    def first(self, epoch: int = 1, slots: Slots | None = None) -> State:
        """Return the state before the first round."""
        empty = (((UNWRITTEN,),) * (2 * (1 + PLACES)),) * self.n**2
        member = Member(0, epoch, (None,) * self.turns[0].n_pairs)
        return State((member,) * self.n, slots or empty)

    def explore(self, first: State) -> set[State]:
        """Visit all states; return the final ones.

        Raises:
            Violation: a wrong packet is taken, or one is overwritten too early, or members
                wait forever.
        """
        seen, todo, ends = {first}, [first], set()
        while todo:
            state = todo.pop()
            following = list(self.steps(state))
            if not following:
                if any(member.turn < len(self.turns) for member in state.members):
                    raise Violation("they wait for ever")
                ends.add(state)
            for new in following:
                if new not in seen:
                    seen.add(new)
                    todo.append(new)
        self.n_state = len(seen)
        return ends

    def steps(self, state: State) -> Iterator[State]:
        """Return the states that may follow."""
        for seat, member in enumerate(state.members):
            if member.turn == len(self.turns) or not self.may_begin(state, member):
                continue
            for program, epoch in enumerate(member.programs):
                if epoch is None:
                    yield self.push(state, seat, program)
                elif epoch >= 0:
                    yield from self.collect(state, seat, program)

    def may_begin(self, state: State, member: Member) -> bool:
        """Return whether a kernel may begin: waiting ones only after ones that do not wait."""
        hasty = [turn for turn, one in enumerate(self.turns) if not one.waits]
        if not hasty or member.turn <= hasty[-1]:
            return True
        return all(other.turn > hasty[-1] for other in state.members)

    def push(self, state: State, seat: int, program: int) -> State:
        """Make a program read the round's number and write its packets for all others."""
        rules, member = self.rules, state.members[seat]
        turn, epoch = self.turns[member.turn], member.epoch
        has_own = seat not in turn.empty
        writes: list[tuple[int, Packet]] = []
        if has_own:
            writes.append((1 + program, Packet(epoch, "values", member.turn)))
        if program == 0 and (has_own or rules.empty_ones_write):
            kind = "header" if has_own else "empty"
            writes.append((0, Packet(epoch, kind, member.turn)))
            old = (epoch >> 1) % PLACES
            if rules.renews and not (rules.spares_values and has_own and old < turn.n_pairs):
                flag = (epoch - rules.age) % rules.n_flag
                writes.append((1 + old, Packet(flag, "renewed", member.turn)))
        slots = list(state.slots)
        half = epoch % rules.halves * (1 + PLACES)
        for peer in range(self.n):
            if peer != seat:
                cells = list(slots[seat * self.n + peer])
                for place, packet in writes:
                    self.check_overwritten(state, peer, cells[half + place][-1], place)
                    cells[half + place] += (packet,)
                slots[seat * self.n + peer] = tuple(cells)
        begun = member._replace(programs=put(member.programs, program, epoch))
        return State(put(state.members, seat, begun), tuple(slots))

    def check_overwritten(self, state: State, peer: int, packet: Packet, place: int) -> None:
        """Check that overwritten packets have been read, unless a member gave up."""
        if packet.kind in ("nothing", "renewed", "header") or not self.turns[packet.turn].waits:
            return
        if any(member.stop for member in state.members):
            return
        reader = state.members[peer]
        if (packet.turn, place - 1) in reader.left:
            raise Violation("a packet is overwritten that a kernel before has not read")
        if reader.turn == packet.turn:
            readers = reader.programs if place == 0 else reader.programs[place - 1 : place]
            is_read = all(epoch == -1 for epoch in readers)
        else:
            is_read = reader.turn > packet.turn
        if not is_read:
            raise Violation("an unread packet is overwritten")

    def collect(self, state: State, seat: int, program: int) -> Iterator[State]:
        """End a program that has the packets of all others, or does not wait for them."""
        member = state.members[seat]
        turn, epoch = self.turns[member.turn], member.programs[program]
        assert epoch is not None
        is_there = all(
            self.received(state, seat, peer, program, epoch)
            for peer in range(self.n)
            if peer != seat and (self.rules.empty_ones_are_awaited or peer not in turn.empty)
        )
        if is_there or member.stop or not turn.waits:
            yield self.end_round(state, seat, program, epoch)
        if self.rules.gives_up and not is_there:
            late = State(put(state.members, seat, member._replace(stop=True)), state.slots)
            yield self.end_round(late, seat, program, epoch)

    def received(self, state: State, seat: int, peer: int, program: int, epoch: int) -> bool:
        """Return whether a program may find its packets, and check that it can take no other."""
        cells = state.slots[peer * self.n + seat]
        half = epoch % self.rules.halves * (1 + PLACES)
        values = [p for p in cells[half + 1 + program] if p.flag == epoch]
        headers = [p for p in cells[half] if p.flag == epoch and p.kind == "empty"]
        turn = state.members[seat].turn
        is_empty = peer in self.turns[turn].empty
        if self.turns[turn].waits:
            if any(p.kind != "values" or p.turn != turn or is_empty for p in values):
                raise Violation("a packet is taken that is not meant")
            if any(p.turn != turn or not is_empty for p in headers):
                raise Violation("a member is taken to be empty that is not")
        return bool(values or headers)

    def end_round(self, state: State, seat: int, program: int, epoch: int) -> State:
        """Make the last program of a kernel count the round, so that the next kernel may begin."""
        rules, member = self.rules, state.members[seat]
        programs = put(member.programs, program, -1)
        following = (epoch + 1) % rules.n_flag
        if not rules.programs_are_counted:
            member = member._replace(epoch=following)
        is_end = all(one == -1 for one in programs)
        slots = state.slots
        if is_end or (not rules.kernels_follow and programs[0] == -1):
            new = member.turn + 1
            n_program = self.turns[new].n_pairs if new < len(self.turns) else 0
            left = {(new - 1, at) for at, one in enumerate(programs) if one != -1}
            member = Member(new, following, (None,) * n_program, member.stop, frozenset(left))
            if rules.is_flushed:
                slots = self.flushed(slots, seat)
        else:
            member = member._replace(programs=programs)
        return State(put(state.members, seat, member), slots)

    def flushed(self, slots: Slots, seat: int) -> Slots:
        """Return slots in which all packets of a member have arrived."""
        return tuple(
            tuple(cell[-1:] for cell in cells) if at // self.n == seat else cells
            for at, cells in enumerate(slots)
        )


def put(items: tuple[T, ...], at: int, item: T) -> tuple[T, ...]:
    """Return a tuple with one item replaced."""
    return (*items[:at], item, *items[at + 1 :])


def turns_of(n: int, length: int, seed: int, most: int = 2) -> list[Turn]:
    """Return rounds of changing sizes in which some members, or all, have no value."""
    draw = random.Random(seed)
    return [
        Turn(draw.randint(1, most), frozenset(seat for seat in range(n) if draw.random() < 0.3))
        for _ in range(length)
    ]


SOUND = Rules()

FEW_FLAGS = replace(SOUND, n_flag=16)
"""Rules with round numbers that wrap after 16; every packet is rewritten within 6 rounds."""


def explored(n: int, turns: Sequence[Turn], rules: Rules, first: int = 1) -> int:
    """Explore a model; return its number of states."""
    model = Model(n, turns, rules)
    ends = model.explore(model.first(first))
    assert ends
    return model.n_state


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("is_flushed", [True, False])
def test_two_members(seed: int, *, is_flushed: bool) -> None:
    rules = replace(SOUND, is_flushed=is_flushed)
    assert explored(2, turns_of(2, 8, seed), rules) > 100


@pytest.mark.parametrize("seed", range(3))
def test_three_members(seed: int) -> None:
    assert explored(3, turns_of(3, 5, seed), SOUND) > 500


@pytest.mark.parametrize("seed", range(4))
def test_numbers_of_rounds_that_come_again(seed: int) -> None:
    """Small rounds leave packets of large ones in place until round numbers repeat."""
    large = [Turn(3), Turn(3)]
    turns = [*large, *turns_of(2, 12, seed, most=1), *large, Turn(3, frozenset({1}))]
    for first in (1, 7):
        assert explored(2, [*turns, *turns_of(2, 16, seed + 9, most=3)], FEW_FLAGS, first) > 200


def test_members_that_do_not_wait_at_first() -> None:
    hasty = [turn._replace(waits=False) for turn in turns_of(2, 3, 5)]
    assert explored(2, [*hasty, *turns_of(2, 5, 6)], SOUND) > 100


@pytest.mark.parametrize(("n", "length"), [(2, 5), (3, 3)])
def test_who_gives_up_gives_nobody_wrong_values(n: int, length: int) -> None:
    """A member that still waits takes the right packets, or gives up as well."""
    rules = replace(SOUND, gives_up=True)
    assert explored(n, turns_of(n, length, 2), rules) > 500


LARGE, SMALL = Turn(3), Turn(1)

LONG_AGO = [LARGE, LARGE, *[SMALL] * 14, LARGE, LARGE]
"""Rounds in which the first and the last large ones have the same of 16 numbers."""

BROKEN = {
    "one half only": replace(SOUND, halves=1),
    "empty members write nothing": replace(SOUND, empty_ones_write=False),
    "empty members are not awaited": replace(SOUND, empty_ones_are_awaited=False),
    "nothing is renewed": replace(FEW_FLAGS, renews=False),
    "renewed packets overwrite values": replace(SOUND, spares_values=False),
    "renewed packets have this round's number": replace(SOUND, age=0),
    "the first program counts the round": replace(SOUND, programs_are_counted=False),
    "kernels overlap": replace(SOUND, kernels_follow=False),
}


def explored_all(scripts: Sequence[Sequence[Turn]], rules: Rules) -> None:
    """Explore all rounds between two members."""
    for turns in scripts:
        explored(2, turns, rules)


@pytest.mark.parametrize("rules", BROKEN.values(), ids=list(BROKEN))
def test_each_rule_is_needed(rules: Rules) -> None:
    """Without a rule some rounds go wrong that are right with it."""
    scripts = [turns_of(2, 6, seed, most=3) for seed in range(4)]
    scripts.append(LONG_AGO)
    with pytest.raises(Violation):
        explored_all(scripts, rules)
    explored_all(scripts, SOUND if rules.n_flag > len(LONG_AGO) else FEW_FLAGS)


@pytest.mark.parametrize("is_fresh", [True, False])
def test_packets_that_arrive_after_a_reset(*, is_fresh: bool) -> None:
    """They are ignored, as round numbers continue; restarted numbers would accept them."""
    before, after = turns_of(2, 4, 3), turns_of(2, 4, 4)
    first = Model(2, before, replace(SOUND, gives_up=True, is_flushed=False))
    second = Model(2, [*before, *after], SOUND)
    for end in first.explore(first.first()):
        late = tuple(tuple((UNWRITTEN, cell[-1]) for cell in cells) for cells in end.slots)
        epoch = max(member.epoch for member in end.members) if is_fresh else 1
        member = Member(len(before), epoch, (None,) * after[0].n_pairs)
        begun = State((member, member), late)
        if not is_fresh:
            with pytest.raises(Violation):
                second.explore(begun)
            return
        assert second.explore(begun)
