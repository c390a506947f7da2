"""Products of one to eight rows with one matrix for each head, in F32, in either direction.

Numbers W are read as (blocks, 16 rows, 32 columns), from planes or from plain matrices (LOW is 0).
Sums have the same order for any number of rows.
"""

import triton
import triton.language as tl

from engine.gpu.kernels.planes import weights


@triton.jit
def part_of(data, tile_bytes, n_tile, n_blocks, skip, n_rows, lead, n_columns, tile, first_block,
            BLOCKS: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, ZERO: tl.constexpr,
            TABLE: tl.constexpr, SCALE: tl.constexpr, SUB: tl.constexpr,
            SIGNED: tl.constexpr):  # fmt: skip
    """Some blocks of 16 rows of this program's head, F32 (BLOCKS, 16, 32); 0 where there are none.

    Args:
        data: bytes (n_head, n_tile, tile_bytes), or numbers (n_head, n_rows, n_columns).
    """
    head = tl.program_id(0).to(tl.int64)
    block = first_block + tl.arange(0, BLOCKS)[:, None]
    lane = tl.arange(0, 16)[None, :]
    if LOW > 0:
        start = data + (head * n_tile + tile) * tile_bytes
        return weights(start, n_blocks, block, lane, (block < n_blocks) & (lane >= 0), skip, LOW,
                       HIGH, ZERO, TABLE, SCALE, SUB, SIGNED)  # fmt: skip
    else:
        row = (tile * 16 + lane)[:, :, None]
        column = (block * 32 - lead)[:, :, None] + tl.arange(0, 32)[None, None, :]
        inside = (row < n_rows) & (column >= 0) & (column < n_columns)
        at = data + head * n_rows * n_columns + (row * n_columns + column)
        return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["n_tile", "n_blocks", "skip", "n_rows", "lead", "n_columns", "first",
                               "n_out", "n_row", "x_row", "x_head"])  # fmt: skip
def product(x, data, y, tile_bytes, n_tile, n_blocks, skip, n_rows, lead, n_columns, first, n_out,
            n_row, x_row, x_head, M: tl.constexpr, BLOCKS: tl.constexpr, LOW: tl.constexpr,
            HIGH: tl.constexpr, ZERO: tl.constexpr, TABLE: tl.constexpr, SCALE: tl.constexpr,
            SUB: tl.constexpr, SIGNED: tl.constexpr):  # fmt: skip
    """`y = x Wᵀ` with rows `first` to `first + n_out` of W: one head and tile for each program.

    Args:
        x: (n_row, n_head, n_columns), F32; x_row, x_head: elements between rows and between heads.
        data, tile_bytes, n_tile, n_blocks, skip, n_rows, lead, n_columns: see `part_of`.
        y: (n_row, n_head, n_out), F32, without gaps.
        M: n_row or more.
    """
    head, tile = tl.program_id(0), first // 16 + tl.program_id(1)
    totals = ()
    for _ in tl.static_range(M):
        totals = totals + (tl.zeros((BLOCKS, 16, 32), tl.float32),)
    for block in range(0, n_blocks, BLOCKS):
        w = part_of(data, tile_bytes, n_tile, n_blocks, skip, n_rows, lead, n_columns, tile, block,
                    BLOCKS, LOW, HIGH, ZERO, TABLE, SCALE, SUB, SIGNED)  # fmt: skip
        at = (block + tl.arange(0, BLOCKS))[:, None] * 32 + tl.arange(0, 32)[None, :] - lead
        inside = (at >= 0) & (at < n_columns)
        sums = ()
        for m in tl.static_range(M):
            start = x + tl.minimum(m, n_row - 1).to(tl.int64) * x_row + head * x_head
            number = tl.load(start + at, mask=inside, other=0.0)
            sums = sums + (totals[m] + w * number[:, None, :],)
        totals = sums
    goal = tile * 16 + tl.arange(0, 16) - first
    for m in tl.static_range(M):
        total = tl.sum(tl.sum(totals[m], axis=2), axis=0)
        out = y + m * tl.num_programs(0) * n_out
        tl.store(out + head * n_out + goal, total,
                 mask=(goal >= 0) & (goal < n_out) & (m < n_row))  # fmt: skip


@triton.jit(do_not_specialize=["n_tile", "n_blocks", "skip", "n_rows", "lead", "n_columns", "first",
                               "n_in", "n_row", "x_row", "x_head"])  # fmt: skip
def transposed(x, data, y, tile_bytes, n_tile, n_blocks, skip, n_rows, lead, n_columns, first, n_in,
               n_row, x_row, x_head, M: tl.constexpr, BLOCKS: tl.constexpr, LOW: tl.constexpr,
               HIGH: tl.constexpr, ZERO: tl.constexpr, TABLE: tl.constexpr, SCALE: tl.constexpr,
               SUB: tl.constexpr, SIGNED: tl.constexpr):  # fmt: skip
    """`y = x W` with rows `first` to `first + n_in` of W: a head and BLOCKS blocks each program.

    Args:
        x: (n_row, n_head, n_in), F32.
        y: (n_row, n_head, n_columns), F32, without gaps; else as `product`.
    """
    head, block = tl.program_id(0), tl.program_id(1) * BLOCKS
    totals = ()
    for _ in tl.static_range(M):
        totals = totals + (tl.zeros((BLOCKS, 16, 32), tl.float32),)
    for tile in range(first // 16, (first + n_in + 15) // 16):
        w = part_of(data, tile_bytes, n_tile, n_blocks, skip, n_rows, lead, n_columns, tile, block,
                    BLOCKS, LOW, HIGH, ZERO, TABLE, SCALE, SUB, SIGNED)  # fmt: skip
        at = tile * 16 + tl.arange(0, 16) - first
        inside = (at >= 0) & (at < n_in)
        sums = ()
        for m in tl.static_range(M):
            start = x + tl.minimum(m, n_row - 1).to(tl.int64) * x_row + head * x_head
            number = tl.load(start + at, mask=inside, other=0.0)
            sums = sums + (totals[m] + w * number[None, :, None],)
        totals = sums
    goal = (block + tl.arange(0, BLOCKS))[:, None] * 32 + tl.arange(0, 32)[None, :] - lead
    for m in tl.static_range(M):
        total = tl.sum(totals[m], axis=1)
        out = y + m * tl.num_programs(0) * n_columns + head * n_columns
        tl.store(out + goal, total, mask=(goal >= 0) & (goal < n_columns) & (m < n_row))
