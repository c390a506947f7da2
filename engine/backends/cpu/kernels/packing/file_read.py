"""Reads a part of a file into memory, each thread a large page of it at a time."""

from __future__ import annotations

from llvmlite import ir

from engine.backends.cpu.kernels.language.loops import add_kernel, ceil_div, piece
from engine.backends.cpu.kernels.language.values import I64, function
from engine.backends.cpu.kernels.running.thread_pool import add_run

ARGUMENTS = ("read", "descriptor", "offset", "goal", "n_bytes", "page_bytes", "failed")
"""Arguments of the kernel. `read` is the address of POSIX's pread, `descriptor` that of the file.
`n_bytes` from `offset` on are read to `goal`. Pieces end where pages of `page_bytes` do: of two
threads that touch the same fresh page, both would clear all of it. At `failed` is a 64-bit word,
which is set to 1 where a read fails."""


def build(module: ir.Module) -> None:
    """Write `read_file(pool, *ARGUMENTS)`."""
    add_run(module)
    add_fill(module)
    with piece(module, "read_file", ARGUMENTS) as (code, given, index):
        page_bytes, n_bytes = given["page_bytes"], given["n_bytes"]
        begin = index * page_bytes - given["goal"] % page_bytes
        end = code.min_signed(begin + page_bytes, n_bytes)
        begin = code.where(begin < 0, code.number(0), begin)
        left = code.call(
            "fill", I64, given["read"], given["descriptor"], given["goal"] + begin, end - begin,
            given["offset"] + begin,
        )  # fmt: skip
        with code.when(left > 0):
            code.store(code.number(1), given["failed"])
    add_kernel(
        module, "read_file", ARGUMENTS,
        lambda _, g: ceil_div(g["goal"] % g["page_bytes"] + g["n_bytes"], g["page_bytes"]),
    )  # fmt: skip


def add_fill(module: ir.Module) -> None:
    """Write `fill(read, descriptor, goal, n, offset)`: reads n bytes; returns how many it lacks."""
    code, (read, descriptor, goal, n, offset) = function(module, "fill", 5, I64)
    code.builder.function.linkage = "internal"
    done = code.variable(code.number(0))
    with code.forever() as leave:
        so_far = done.get()
        leave(so_far >= n)
        got = code.call_at(read, I64, descriptor, goal + so_far, n - so_far, offset + so_far)
        leave(got <= 0)
        done.set(so_far + got)
    code.builder.ret((n - done.get()).raw)
