"""The tree of a chat's messages, with versions of questions and answers, and the path on screen.

Messages with the same parent are *versions* of each other: answers to the same question, or edits
of a question. At each fork, one version is chosen, by default the newest. The *path* leads from the
first message along the chosen versions to a leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from app.chat.message import Message

ROOT = 0
"""Parent id of a first message."""


@dataclass(frozen=True, slots=True)
class Removed:
    """Removed nodes, and the data to restore them.

    Attributes:
        nodes: removed nodes by ascending id; all others descend from the first one.
        above: ids of the first node's ancestors, from the root.
        followers: ids of the first node's remaining children.
        chosen: id of each node's chosen child, by the node's id.
        was_chosen: whether the first node was the chosen version.
    """

    nodes: tuple[Message, ...]
    above: tuple[int, ...]
    followers: tuple[int, ...]
    chosen: Mapping[int, int]
    was_chosen: bool


class MessageTree:
    """Messages by id, with one chosen version at each fork.

    Ids are never reused while the tree exists, so removed nodes can be restored. Parents have
    smaller ids than their children, so there are no cycles.
    """

    def __init__(self, nodes: Iterable[Message] = (), chosen: Iterable[int] = ()) -> None:
        """Build a tree from nodes that have ids and parents.

        Args:
            chosen: ids of chosen versions that are not the newest; unknown ids are ignored.

        Raises:
            ValueError: ids are not unique or not positive, or a parent is missing or not older.
        """
        self._nodes: dict[int, Message] = {}
        self._children: dict[int, list[int]] = {ROOT: []}
        self._chosen: dict[int, int] = {}
        self._path: list[Message] | None = None  # cached until the tree changes
        self._last_id = ROOT
        for node in sorted(nodes, key=lambda node: node.id):
            self._insert(node)
        for number in chosen:
            if number in self._nodes:
                parent = self._nodes[number].parent
                self._set(parent, self._children[parent], number)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MessageTree):
            return NotImplemented
        return self._chosen == other._chosen and self._nodes == other._nodes

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Message]:
        """Yield all nodes by ascending id, and hence parents before their children."""
        return iter([self._nodes[number] for number in sorted(self._nodes)])

    def __contains__(self, number: int) -> bool:
        return number in self._nodes

    def __getitem__(self, number: int) -> Message:
        return self._nodes[number]

    def get(self, number: int) -> Message | None:
        """Return the node with this id, or None."""
        return self._nodes.get(number)

    @property
    def chosen(self) -> list[int]:
        """Ids of chosen versions that are not the newest, in ascending order."""
        return sorted(self._chosen.values())

    @property
    def path(self) -> Sequence[Message]:
        """The nodes on screen, from the first one along the chosen versions."""
        if self._path is None:
            self._path = list(self._down(ROOT))
        return self._path

    def versions(self, number: int) -> tuple[Message, ...]:
        """Return a node and its siblings, oldest first."""
        return tuple(self._nodes[n] for n in self._children[self._nodes[number].parent])

    def above(self, number: int) -> tuple[Message, ...]:
        """Return a node's ancestors, from the first one to its parent."""
        found, parent = [], self._nodes[number].parent
        while parent != ROOT:
            found.append(self._nodes[parent])
            parent = self._nodes[parent].parent
        return tuple(reversed(found))

    def branch(self, number: int) -> tuple[Message, ...]:
        """Return a node and all its descendants, by ascending id."""
        found, left = [], [number]
        while left:
            found.append(n := left.pop())
            left += self._children[n]
        return tuple(self._nodes[n] for n in sorted(found))

    def add(self, node: Message, parent: int) -> Message:
        """Add a node as the newest version after `parent`, with a new id, and choose it."""
        node.id, node.parent = self._last_id + 1, parent
        self._insert(node)
        return node

    def choose(self, number: int) -> None:
        """Route the path through a node."""
        while number != ROOT:
            parent = self._nodes[number].parent
            self._set(parent, self._children[parent], number)
            number = parent

    def remove(self, number: int) -> Removed:
        """Remove one node; its children move to its parent."""
        return self._remove((self._nodes[number],), tuple(self._children[number]))

    def remove_branch(self, number: int) -> Removed:
        """Remove a node and all its descendants."""
        return self._remove(self.branch(number), ())

    def restore(self, removed: Removed) -> None:
        """Undo `remove` or `remove_branch`.

        If the first node's parent has been removed, the node follows its nearest remaining
        ancestor. Its former children follow it again, unless they have been removed or moved.
        """
        first = removed.nodes[0]
        parent = next((n for n in reversed(removed.above) if n in self._nodes), ROOT)
        siblings, shown = self._children[parent], self._shown(parent)
        followers = [n for n in removed.followers if n in siblings]
        first.parent = parent
        for node in removed.nodes:
            self._nodes[node.id], self._children[node.id] = node, []
            if node is not first:
                self._children[node.parent].append(node.id)
        for number in followers:
            self._nodes[number].parent = first.id
        self._children[first.id] += followers
        for node in removed.nodes:
            wanted = shown if node is first and shown in followers else removed.chosen.get(node.id)
            self._set(node.id, self._children[node.id], wanted)
        is_chosen = removed.was_chosen or shown in followers
        stayed = [n for n in siblings if n not in followers]
        self._set(parent, sorted([*stayed, first.id]), first.id if is_chosen else shown)

    def copy(self, copied: Callable[[Message], Message]) -> MessageTree:
        """Return a copy of the tree with nodes copied by `copied`."""
        tree = MessageTree()
        tree._nodes = {number: copied(node) for number, node in self._nodes.items()}
        tree._children = {number: list(found) for number, found in self._children.items()}
        tree._chosen, tree._last_id = dict(self._chosen), self._last_id
        return tree

    def _down(self, number: int) -> Iterator[Message]:
        while (child := self._shown(number)) is not None:
            yield self._nodes[child]
            number = child

    def _shown(self, parent: int) -> int | None:
        children = self._children[parent]
        return self._chosen.get(parent, children[-1]) if children else None

    def _set(self, parent: int, children: list[int], shown: int | None) -> None:
        self._children[parent], self._path = children, None
        if shown in children[:-1] and shown is not None:
            self._chosen[parent] = shown
        else:
            self._chosen.pop(parent, None)

    def _insert(self, node: Message) -> None:
        if node.id <= self._last_id or not ROOT <= node.parent < node.id:
            raise ValueError(f"message {node.id} cannot follow {node.parent}")
        if node.parent not in self._children:
            raise ValueError(f"there is no message {node.parent}")
        self._nodes[node.id], self._children[node.id] = node, []
        self._last_id = node.id
        self._set(node.parent, [*self._children[node.parent], node.id], node.id)

    def _remove(self, nodes: tuple[Message, ...], followers: tuple[int, ...]) -> Removed:
        first = nodes[0]
        parent, siblings = first.parent, self._children[first.parent]
        shown, heir, place = self._shown(parent), self._shown(first.id), siblings.index(first.id)
        above = tuple(node.id for node in self.above(first.id))
        chosen = {n.id: shown_there for n in nodes if (shown_there := self._shown(n.id))}
        for node in nodes:
            del self._nodes[node.id], self._children[node.id]
            self._chosen.pop(node.id, None)
        for number in followers:
            self._nodes[number].parent = parent
        stayed = [n for n in siblings if n != first.id]
        if shown == first.id:  # choose its chosen child, or else the version next to it
            neighbour = stayed[max(0, place - 1)] if stayed else None
            after = heir if heir in followers else neighbour
        else:
            after = shown
        self._set(parent, sorted([*stayed, *followers]), after)
        return Removed(nodes, above, followers, chosen, shown == first.id)
