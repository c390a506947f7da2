"""The tree of a chat's messages keeps its invariants, whatever is done to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from app.chat.tree import ROOT, MessageTree, Removed

Steps = Sequence[tuple[str, int]]


@dataclass
class Leaf:
    """A message without text."""

    text: str = ""
    id: int = 0
    parent: int = 0


Tree = MessageTree

steps = st.lists(
    st.tuples(st.sampled_from(["add", "choose", "remove", "branch"]), st.integers(0, 30)),
    max_size=30,
)


def ids(tree: Tree) -> list[int]:
    return [node.id for node in tree]


def path(tree: Tree) -> list[int]:
    return [node.id for node in tree.path]


def played(steps: Steps) -> Tree:
    """Return a tree after steps, each with a message counted from the first one."""
    tree = Tree()
    for name, number in steps:
        there = ids(tree)
        if name == "add" or not there:
            tree.add(Leaf(), [ROOT, *there][number % (len(there) + 1)])
            continue
        target = there[number % len(there)]
        do: Callable[[int], object] = {
            "choose": tree.choose, "remove": tree.remove, "branch": tree.remove_branch
        }[name]  # fmt: skip
        do(target)
    return tree


def again(tree: Tree) -> Tree:
    """Return a tree as restored from a file."""
    return Tree([replace(node) for node in tree], tree.chosen)


@given(steps)
def test_a_path_leads_from_the_beginning_to_an_end(steps: Steps) -> None:
    tree = played(steps)
    above = ROOT
    for node in tree.path:
        assert node.parent == above
        above = node.id
    assert all(node.parent != above for node in tree)
    assert bool(tree.path) == bool(len(tree))


@given(steps)
def test_all_messages_are_versions_of_themselves_and_older_than_what_follows(steps: Steps) -> None:
    tree = played(steps)
    for node in tree:
        assert node in tree.versions(node.id)
        assert node.parent < node.id
        assert node.parent == ROOT or node.parent in tree
        assert all(other.parent == node.parent for other in tree.versions(node.id))
        row = [*tree.above(node.id), node]
        assert [n.parent for n in row] == [ROOT, *(n.id for n in row[:-1])]
        following = [n for n in tree if node in (*tree.above(n.id), n)]
        assert list(tree.branch(node.id)) == following


@given(steps)
def test_a_tree_survives_its_file(steps: Steps) -> None:
    tree = played(steps)
    assert again(tree) == tree
    assert path(again(tree)) == path(tree)


@given(steps, st.integers(0, 30))
def test_a_chosen_message_is_on_the_path_and_other_forks_keep_theirs(
    steps: Steps, number: int
) -> None:
    tree = played([*steps, ("add", 0)])
    target = ids(tree)[number % len(tree)]
    before = {node.id: path_behind(tree, node.id) for node in tree}
    tree.choose(target)
    assert target in path(tree)
    row = {node.id for node in tree.above(target)}
    after = {node.id: path_behind(tree, node.id) for node in tree}
    assert all(after[n] == before[n] for n in before if n not in row)


def path_behind(tree: Tree, number: int) -> list[int]:
    """Return the path after a message."""
    copy = again(tree)
    copy.choose(number)
    row = path(copy)
    return row[row.index(number) + 1 :]


@given(steps, st.integers(0, 30))
def test_a_message_that_is_removed_leaves_all_others(steps: Steps, number: int) -> None:
    tree = played([*steps, ("add", 0)])
    target = ids(tree)[number % len(tree)]
    others, seen = [n for n in ids(tree) if n != target], path(tree)
    is_end = seen[-1] == target
    tree.remove(target)
    assert ids(tree) == others
    if not is_end:
        assert path(tree) == [n for n in seen if n != target]


@given(steps, st.integers(0, 30))
def test_a_branch_that_is_removed_leaves_what_does_not_follow(steps: Steps, number: int) -> None:
    tree = played([*steps, ("add", 0)])
    target = ids(tree)[number % len(tree)]
    gone = {node.id for node in tree.branch(target)}
    left, seen = [n for n in ids(tree) if n not in gone], path(tree)
    tree.remove_branch(target)
    assert ids(tree) == left
    assert path(tree)[: len(seen)] == seen or target in seen


@given(steps, st.integers(0, 30), st.booleans())
def test_what_is_restored_is_as_if_it_had_stayed(
    steps: Steps, number: int, whole_branch: bool
) -> None:
    tree = played([*steps, ("add", 0)])
    before, target = again(tree), ids(tree)[number % len(tree)]
    removed = tree.remove_branch(target) if whole_branch else tree.remove(target)
    tree.restore(removed)
    assert tree == before
    assert path(tree) == path(before)


@given(steps)
def test_a_copy_does_not_change_with_its_tree(steps: Steps) -> None:
    tree = played([*steps, ("add", 0)])
    copy, before = tree.copy(replace), again(tree)
    tree.path[-1].text = "changed"
    tree.add(Leaf(), ROOT)
    assert copy == before
    copy.add(Leaf(), ROOT)
    assert ids(copy) == ids(tree)


class Undone(RuleBasedStateMachine):
    """Messages that are restored after other changes."""

    removals = Bundle("removals")

    def __init__(self) -> None:
        super().__init__()
        self.tree, self.gone = Tree(), set[int]()
        self.tree.add(Leaf(), ROOT)

    @rule(number=st.integers(0, 30))
    def add(self, number: int) -> None:
        places = [ROOT, *ids(self.tree)]
        node = self.tree.add(Leaf(), places[number % len(places)])
        assert node.id not in self.gone, "no id is reused"

    @rule(number=st.integers(0, 30))
    def choose(self, number: int) -> None:
        if there := ids(self.tree):
            self.tree.choose(there[number % len(there)])

    @rule(target=removals, number=st.integers(0, 30), whole=st.booleans())
    def remove(self, number: int, whole: bool) -> Removed | None:
        if not (there := ids(self.tree)):
            return None
        target = there[number % len(there)]
        removed = self.tree.remove_branch(target) if whole else self.tree.remove(target)
        self.gone |= {node.id for node in removed.nodes}
        return removed

    @rule(removed=consumes(removals))
    def restore(self, removed: Removed | None) -> None:
        if removed is not None:
            others = ids(self.tree)
            self.tree.restore(removed)
            assert ids(self.tree) == sorted([*others, *(n.id for n in removed.nodes)])
            self.gone -= {node.id for node in removed.nodes}

    @invariant()
    def is_a_tree(self) -> None:
        assert again(self.tree) == self.tree
        assert path(again(self.tree)) == path(self.tree)


TestUndone = Undone.TestCase


def test_a_new_version_is_shown_and_an_old_one_with_what_followed() -> None:
    tree = Tree()
    question = tree.add(Leaf("Q"), ROOT)
    first = tree.add(Leaf("A"), question.id)
    thanks = tree.add(Leaf("Thanks"), first.id)
    second = tree.add(Leaf("A2"), question.id)
    assert list(tree.path) == [question, second]
    assert tree.versions(second.id) == (first, second)
    tree.choose(first.id)
    assert list(tree.path) == [question, first, thanks]
    assert tree.chosen == [first.id]


def test_the_version_before_a_removed_one_is_shown() -> None:
    tree = Tree([Leaf(id=n, parent=0) for n in (1, 2, 3)], [2])
    tree.remove(2)
    assert path(tree) == [1]
    tree.remove(1)
    assert path(tree) == [3]


@pytest.mark.parametrize(
    "places", [[(1, 1)], [(1, 2), (2, 0)], [(0, 0)], [(2, 1)], [(1, 0), (1, 0)], [(1, -1)]]
)
def test_what_is_no_tree_is_refused(places: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="message"):
        Tree([Leaf(id=number, parent=parent) for number, parent in places])
