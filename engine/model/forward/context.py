"""Context of a forward pass on one rank: access to cache, operations and other ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from engine.model.forward.batch import KEPT_STATES, MAX_AT_ONCE, SMALL_BATCH, Batch, Piece
from engine.model.forward.communicator import Communicator, Group
from engine.model.forward.operands import Addend, NormLayer, PlacedStates, RopeLayer, Scores
from engine.model.sharding.shares import Ranges

if TYPE_CHECKING:
    from engine.model.forward.cache import Cache
    from engine.model.forward.ops import Ops
    from engine.model.forward.state import KVState, RecurrentState


class HiddenStates:
    """Hidden states of all sequences' last tokens, on one rank of an MTP block.

    Each block has a level with the states that it reads. A position's state is in its sequence's
    part (`Piece.batch_index`), in the row given by the position modulo `KEPT_STATES`. Unwritten
    rows are zero or stale.

    Args:
        n_levels: number of MTP blocks.
    """

    def __init__(self, n_embd: int, device: torch.device, n_levels: int = 1) -> None:
        n_rows = MAX_AT_ONCE * KEPT_STATES
        self._levels = [torch.zeros(n_rows, n_embd, device=device) for _ in range(n_levels)]
        self._own, self._before = (
            torch.zeros(MAX_AT_ONCE, dtype=torch.int64, device=device) for _ in range(2)
        )
        self._pieces: tuple[Piece, ...] = ()
        self._is_of_singles = False

    @property
    def n_bytes(self) -> int:
        """Size in bytes."""
        return sum(rows.nbytes for rows in self._levels)

    def begin(self, batch: Batch) -> None:
        """Set the rows of a pass; single tokens use the same index memory each time."""
        self._pieces = batch.pieces
        n = len(batch.pieces)
        self._is_of_singles = batch.is_of_few_singles
        if self._is_of_singles:
            _write(self._own[:n], [_row(piece, piece.n_past) for piece in batch.pieces])
            _write(self._before[:n], [_row(piece, piece.n_past - 1) for piece in batch.pieces])

    def forget(self, batch_index: int) -> None:
        """Zero the hidden states of a sequence."""
        for rows in self._levels:
            rows[batch_index * KEPT_STATES : (batch_index + 1) * KEPT_STATES].zero_()

    def follow(self, position: Tensor) -> None:
        """Store the next single token's hidden state at a position (1,) in device memory.

        The positions of run-ahead tokens are known only there. All work is done on the device, so
        that it is captured with the token.
        """
        own = self._own[:1]
        own.sub_(own % KEPT_STATES).add_(position % KEPT_STATES)

    def keep(self, hidden: Tensor, level: int = 0, first: int = 0) -> None:
        """Store the hidden states of a pass, (T, n_embd), from row `first` on."""
        own = self._rows_of(self._own, 0)
        self._levels[level].index_copy_(0, own[first:], hidden[first:])

    def before(self, level: int = 0) -> Tensor:
        """Return the stored hidden state of each token's predecessor, (T, n_embd)."""
        return self._levels[level].index_select(0, self._rows_of(self._before, -1))

    def _rows_of(self, of_singles: Tensor, distance: int) -> Tensor:
        """Return the row of each token in the pass, or of the token `distance` after it, (T,)."""
        if self._is_of_singles:
            return of_singles[: len(self._pieces)]
        rows = [
            _row(piece, position + distance)
            for piece in self._pieces
            for position in range(piece.n_past, piece.stop)
        ]
        return torch.tensor(rows, device=self._own.device)

    def exchanged(self, hidden: Tensor, level: int = 0) -> Tensor:
        """Store the last hidden state of each piece in a prompt pass, (T, n_embd); return the
        previous token's hidden state for each token."""
        device, parts, first, rows = hidden.device, list[Tensor](), 0, self._levels[level]
        earlier = [_row(piece, piece.n_past - 1) for piece in self._pieces]
        kept = rows.index_select(0, torch.tensor(earlier, device=device))
        for number, piece in enumerate(self._pieces):
            parts += [kept[number : number + 1], hidden[first : first + piece.n - 1]]
            first += piece.n
            rows[_row(piece, piece.stop - 1)] = hidden[first - 1]
        return torch.cat(parts)


def _write(memory: Tensor, numbers: list[int]) -> None:
    if len(numbers) == 1:  # without a temporary tensor
        memory.fill_(numbers[0])
    else:
        memory.copy_(torch.tensor(numbers))


def _row(piece: Piece, position: int) -> int:
    return piece.batch_index * KEPT_STATES + position % KEPT_STATES


MaybeTensor = TypeVar("MaybeTensor", Tensor, Tensor | None)


class Context:
    """State of one rank during one forward pass.

    The residual stream is current on the ranks of one group at a time; `join` and `enter` move it,
    and the collectives run in that group.

    Args:
        kinds: kind of each rank's device; devices of the same kind round identically.

    Attributes:
        batch: rows of this pass.
        positions: position of each row in this pass, int64 (T,); single-token passes use the same
            memory each time.
        directions: control vectors to add to the residual stream after blocks, by block index.
        side: additional tensors that an architecture passes to its blocks.
        run_live: runs a recorded pass's last step; replays call it instead of replaying the step.
        is_sliced: whether each rank keeps its slice of the logits.
        keeps_rows: whether all rows go through all blocks; see `drop_rows`.
        head_input: hidden states from which the logits were computed, (rows, n_embd), if they have
            the same bits on all ranks.
    """

    def __init__(
        self, comm: Communicator, ops: Ops, cache: Cache, device: torch.device, kinds: Sequence[str]
    ) -> None:
        self.rank = comm.rank
        self.ops = ops
        self.device = device
        self.batch = Batch.of_one(0, 0, 0)
        self._comm = comm
        self._kinds = kinds
        self.cache = cache
        self._group: Group = ()
        self.positions = torch.empty(0)
        self._of_singles, self._shifts = (
            torch.zeros(MAX_AT_ONCE, dtype=torch.int64, device=device) for _ in range(2)
        )
        self._is_shifted = False
        self.run_live: Callable[[Callable[[], Tensor | None]], Tensor | None] | None = None
        self.is_sliced = False
        self.head_input: Tensor | None = None
        self.directions: dict[int, Tensor] = {}
        self._hidden_states: HiddenStates | None = None
        self.side: dict[str, Tensor] = {}
        self._angles: dict[int, tuple[Tensor, Tensor]] = {}
        self._normed: tuple[Tensor, NormLayer, Tensor] | None = None
        self._indices: dict[tuple[int, ...], Tensor] = {}
        self.keeps_rows = False
        self._ending: Batch | None = None
        self._has_dropped = False

    def begin(self, batch: Batch) -> None:
        """Prepare for a pass."""
        self.batch = batch
        self._ending, self._has_dropped = None, False
        self._angles.clear()
        self._normed = None
        self.side.clear()
        for piece in batch.pieces:
            if piece.n_past == 0:
                self.cache.reset(piece.state_slot)
        self.positions = self._written_positions(batch)
        if self._hidden_states is not None:
            self._hidden_states.begin(batch)
        self.ops.begin(batch, self.positions)

    def let_rows_drop(self) -> None:
        """Mark the next block as the last one that needs rows without wanted logits.

        It caches their keys and values or updates recurrent states. Small passes keep all rows,
        because dropping them would need extra kernels for a negligible gain.
        """
        if self.batch.n_rows > SMALL_BATCH and not self.keeps_rows:
            ending = self.batch.ending()
            self._ending = None if ending is self.batch else ending

    def drop_rows(self) -> None:
        """Drop unwanted rows from the pass, if the current block no longer needs them.

        `kept` drops these rows from earlier values. Every rank calls this at the same point between
        two collectives, no later than after the block.
        """
        batch, self._ending = self._ending, None
        if batch is None:
            return
        self.batch, self._has_dropped = batch, True
        self.positions = self.positions[-batch.n_rows :]
        self._angles.clear()
        self.ops.begin(batch, self.positions)

    def kept(self, x: MaybeTensor) -> MaybeTensor:
        """Return x (T, ...) without the dropped rows, or None if x is None."""
        n = self.positions.shape[0]
        return x if x is None or x.shape[0] == n else x[-n:]

    def _written_positions(self, batch: Batch) -> Tensor:
        n = len(batch.pieces)
        if not batch.is_of_singles or n > MAX_AT_ONCE:
            parts = [torch.arange(p.n_past, p.stop, device=self.device) for p in batch.pieces]
            return parts[0] if n == 1 else torch.cat(parts)
        if any(piece.shift for piece in batch.pieces):
            _write(self._shifts[:n], [piece.shift for piece in batch.pieces])
            self._is_shifted = True
        elif self._is_shifted:
            self._shifts.zero_()
            self._is_shifted = False
        positions = self._of_singles[:n]
        _write(positions, [piece.n_past for piece in batch.pieces])
        return positions

    def keep_hidden_states(self, n_embd: int, n_blocks: int) -> None:
        """Allocate the hidden states (n_embd elements each) that MTP blocks read later."""
        self._hidden_states = HiddenStates(n_embd, self.device, n_blocks)

    @property
    def hidden_states(self) -> HiddenStates:
        """Hidden states that MTP blocks read later."""
        assert self._hidden_states is not None, "only an MTP block's ranks may call it"
        return self._hidden_states

    def follow_position(self) -> None:
        """Store the next hidden state according to the token's position in device memory."""
        if self._hidden_states is not None:
            self._hidden_states.follow(self.position)

    def forget_hidden_states(self, batch_index: int) -> None:
        """Zero a sequence's hidden states for MTP blocks, if any."""
        if self._hidden_states is not None:
            self._hidden_states.forget(batch_index)

    @property
    def group(self) -> Group:
        """Ranks on which the residual stream is current."""
        return self._group

    @property
    def position(self) -> Tensor:
        """Position of a token that is computed alone, int64 (1,), always in the same memory."""
        return self._of_singles[:1]

    @property
    def waited_s(self) -> float:
        """Seconds spent waiting for other ranks so far, excluding replays."""
        return self._comm.waited_s

    def owns(self, ranges: Ranges) -> bool:
        """Return whether this rank has a slice of `ranges`."""
        return ranges.size(self.rank) > 0

    def join(self, group: Group) -> bool:
        """Make `group` the current one without moving a value; return whether this rank is in
        it."""
        self._group = group
        return self.rank in group

    def enter(self, x: Tensor | None, group: Group, n: int | None = None) -> Tensor | None:
        """Move x (T, n) to `group` if necessary; return None on other ranks. For n see
        `all_reduce`."""
        previous, self._group = self._group, group
        if group != previous and not set(group) <= set(previous):
            source = previous[0]
            involved = tuple(sorted({source, *group}))
            if self.rank in involved:
                x = self._comm.broadcast(x, source, involved, self._shape(n))
        return x if self.rank in group else None

    def with_images(self, x: Tensor | None) -> Tensor | None:
        """Replace the embeddings x (T, n_embd) of image rows by image features."""
        if x is None or not self.batch.pictures:
            return x
        x = x.clone()
        n = x.shape[1]
        for rows in self.batch.pictures:
            x[rows.row : rows.row + len(rows.features)] = rows.features[:, :n].to(self.device)
        return x

    def deepen(self, x: Tensor, layer: int) -> Tensor:
        """Add image features to the residual stream x after block `layer`, if there are any for
        it."""
        if not self.deepens(x.shape[1], layer):
            return x
        x, n = x.clone(), x.shape[1]
        for rows in self.batch.pictures:
            more = rows.features[:, n * (layer + 1) : n * (layer + 2)]
            if more.shape[1]:
                x[rows.row : rows.row + len(more)] += more.to(self.device)
        return x

    def deepens(self, n_embd: int, layer: int) -> bool:
        """Return whether image features are added after block `layer` or a later one."""
        return any(rows.features.shape[1] > n_embd * (layer + 1) for rows in self.batch.pictures)

    def steer(self, x: Tensor, layer: int) -> Tensor:
        """Add the control vector for `layer`, if any, to the residual stream x."""
        direction = self.directions.get(layer)
        return x if direction is None else x + direction

    def all_reduce(
        self, x: Tensor | None, bias: Tensor | None = None, n: int | None = None
    ) -> Tensor:
        """Sum the partial sums (T, n) of the group's ranks, then add `bias` once.

        Collective; a rank with an empty slice passes None.

        Args:
            n: number of columns; if all ranks pass it, ranks without a value need no extra message.
        """
        total = self._comm.all_reduce(x, self._group, self._shape(n))
        return total if bias is None else total + bias

    def _shape(self, n: int | None) -> tuple[int, int] | None:
        return None if n is None else (self.positions.shape[0], n)

    def all_reduce_add(self, x: Tensor, addend: Addend, norm: NormLayer | None = None) -> Tensor:
        """All-reduce the addend over the group's ranks and add it to the residual stream x (T,
        n_embd).

        Collective. Unwanted rows are dropped; see `drop_rows`.

        Args:
            norm: norm that reads the result next, so that both can be fused; `normed` then returns
                its result.
        """
        self.drop_rows()
        if self._has_dropped:
            x, addend = self.kept(x), addend._replace(partial=self.kept(addend.partial))
        one_shot = None if addend.is_whole else self._comm.one_shot(self._group, x.numel())
        if one_shot is None and not addend.is_whole:
            addend = addend.summed(self._comm.all_reduce(addend.partial, self._group, x.shape))
        x, normed = self.ops.add_norm(x, addend, norm, one_shot)
        self._normed = None if norm is None or normed is None else (x, norm, normed)
        return x

    def normed(self, x: Tensor, norm: NormLayer) -> Tensor | None:
        """Return `norm` of x if `all_reduce_add` computed it along with x; a second call returns
        None."""
        if self._normed is None or self._normed[0] is not x or self._normed[1] is not norm:
            return None
        _, _, ready = self._normed
        self._normed = None
        return ready

    def agree(self, x: Tensor, ranks: Group) -> Tensor:
        """Return the first rank's x if the devices of `ranks` differ in kind, else x.

        All ranks computed x from the same bits, but different kinds of devices round differently,
        and a choice that depends on the last bit must be the same everywhere. Collective over
        `ranks`.
        """
        if self._are_of_one_kind(ranks):
            return x
        return self._comm.broadcast(x, ranks[0], ranks, x.shape)

    def _are_of_one_kind(self, ranks: Group) -> bool:
        return len({self._kinds[rank] for rank in ranks}) == 1

    def gather(self, x: Tensor | None, alike: Tensor) -> Tensor | None:
        """Concatenate slices along the last dimension on the group's first rank; None elsewhere.

        All ranks of the group have computed `alike`; if the copies differ, a rank is faulty.
        """
        group = self._group
        if self.is_sliced:
            self.head_input = alike if self._are_of_one_kind(group) else None
            return x
        if self.run_live is None:
            return self._comm.gather(x, group, alike)
        return self.run_live(lambda: self._comm.gather(x, group, alike))

    def rope(self, x: Tensor, rope: RopeLayer) -> Tensor:
        """Rotate x (T, n_head, head_dim) by the positions of this pass."""
        return self.ropes(rope, x)[0]

    def ropes(
        self, rope: RopeLayer, *xs: Tensor, norms: Sequence[NormLayer] = ()
    ) -> Sequence[Tensor]:
        """Rotate tensors (for example queries and keys) by the pass's positions, after their
        `norms`, if any."""
        angles = self._angles.get(id(rope))
        if angles is None:
            angles = self._angles[id(rope)] = self._rope_angles(rope)
        return self.ops.ropes(xs, *angles, rope.params.style, norms)

    def _rope_angles(self, rope: RopeLayer) -> tuple[Tensor, Tensor]:
        params, batch = rope.params, self.batch
        if not params.sections:
            return self.ops.rope_angles(params, rope.weight, self.positions)
        if batch.is_of_few_singles and not self._has_dropped:
            shifted = self.positions + self._shifts[: len(batch.pieces)]
            return self.ops.rope_angles(params, rope.weight, shifted)
        own, *others = (
            range(piece.n_past + piece.shift, piece.stop + piece.shift) for piece in batch.pieces
        )
        angles = []
        for place in batch.places or [own]:
            positions = torch.tensor([*place, *chain(*others)], device=self.device)
            angles.append(self.ops.rope_angles(params, rope.weight, positions))
        if len(angles) == 1:
            return angles[0]
        axis = self.index(params.axes())
        cos, sin = (
            torch.where(axis == 1, height, torch.where(axis == 2, width, time))
            for time, height, width in zip(*angles, strict=True)
        )
        return cos, sin

    def attention(
        self, state: KVState, q: Tensor, k: Tensor | None, v: Tensor | None, scores: Scores, *,
        sinks: Tensor | None = None, slopes: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Append k and v to the cache and attend with q; all (T, heads of this rank, head_dim).

        Queries of unwanted rows are dropped after the last keys and values; see `drop_rows`.

        Args:
            k: keys; None if another layer declared `state` and has written them.
            v: values; None if they are part of the keys.
            sinks: logits that take weight but have no value, (heads of this rank,); or None.
            slopes: decrease in the scores per token of distance, (heads of this rank,); or None.

        Returns:
            (remaining rows, heads of this rank, head_dim_v)
        """
        cache = self.cache.kv(state)
        if k is not None and self._ending is not None:
            self.ops.write_cache(cache, k, v, self.batch)
            self.drop_rows()
            q, k = self.kept(q), None
        if k is None:
            return self.ops.attention(q, cache, self.batch, scores, sinks, slopes)
        return self.ops.new_attention(q, k, v, cache, self.batch, scores, sinks, slopes)

    def index(self, numbers: tuple[int, ...]) -> Tensor:
        """Return numbers as an int64 tensor (n,) on the device, cached by value."""
        if numbers not in self._indices:
            self._indices[numbers] = torch.tensor(numbers, device=self.device)
        return self._indices[numbers]

    @property
    def indices(self) -> Mapping[tuple[int, ...], Tensor]:
        """Tensors that `index` has returned, keyed by their numbers."""
        return self._indices

    def states(self, state: RecurrentState, name: str) -> PlacedStates:
        """Return a recurrent layer's tensor together with the pass's rows, which update it in
        place."""
        return PlacedStates(self.cache.states(state, name), self.batch)
