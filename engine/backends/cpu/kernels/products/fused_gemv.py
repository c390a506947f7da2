"""Several matrices times the same few tokens as one job, so that threads do not wait in between.

The tokens are packed first unless they already are, and in a second form as well if some matrices
need finer activations. The activation is applied after gate and up.
"""

from __future__ import annotations

from llvmlite import ir

from engine.backends.cpu.kernels.language.values import I64, VOID, Value, function
from engine.backends.cpu.kernels.products.gemm import ARGUMENTS as MULTIPLY
from engine.backends.cpu.kernels.products.panels import ARGUMENTS as QUANTISE
from engine.backends.cpu.kernels.running.thread_pool import add_run

JOB = ("task", "arguments", "n_piece", "form")
"""A product's entry, in 64-bit integers: address of its piece function, address of its arguments
(`kernels.products.gemm`), number of pieces, and 1 if it uses the second form of the tokens."""

JOB_BYTES = 8 * len(JOB)
"""Size of such an entry, in bytes."""

NAMES = ("multiply_all", "multiply_gated")

SECOND = ("second_quantise", "second_panels")
"""Arguments for the tokens' second form."""

ARGUMENTS = ("jobs", "n_job", "quantise", *QUANTISE, *SECOND, "out", "out_stride")
"""Arguments of `multiply_all`. `quantise`: address of the packing kernel, 0 if the panels exist;
its arguments follow. `SECOND`: the same for the second form, 0 if unused. All products'
results are side by side, in rows `out_stride` bytes apart. The kernel writes the addresses of
panels and results to the products' arguments."""

GATED = ("activation", "limit", "result", *ARGUMENTS)
"""Arguments of `multiply_gated`, for two matrices with the same number of rows, gate and up.
`activation`: address of a kernel in `kernels.small.activation`; `limit`: its limit; `result`:
address of its contiguous result."""


def build(module: ir.Module) -> None:
    """Emit `multiply_all(pool, *ARGUMENTS)` and `multiply_gated(pool, *GATED)`."""
    add_run(module)
    _add_piece(module)
    code, (pool, *values) = function(module, "multiply_all", 1 + len(ARGUMENTS))
    given = dict(zip(ARGUMENTS, values, strict=True))
    tokens = [given[name] for name in QUANTISE[:-1]]
    for address, goal in (("quantise", "panels"), SECOND):
        with code.when(given[address].differs(0)):
            code.call_at(given[address], VOID, pool, *tokens, given[goal])
    total, out = code.variable(code.number(0)), code.variable(given["out"])
    with code.loop(code.number(0), given["n_job"]) as job:
        _, arguments, n_piece, form = code.load_array(given["jobs"] + job * JOB_BYTES, len(JOB))
        panels = code.where(form.equals(0), given["panels"], given["second_panels"])
        code.store(panels, _place(arguments, "panels"))
        for name in ("n_tokens", "out_stride"):
            code.store(given[name], _place(arguments, name))
        code.store(out.get(), _place(arguments, "out"))
        out.set(out.get() + code.load(_place(arguments, "n_rows"), I64) * 4)
        total.set(total.get() + n_piece)
    task = code.function_address("piece")
    code.call("run_in_shares", VOID, pool, task, given["jobs"], total.get())
    code.builder.ret_void()
    _add_gated(module)


def _add_gated(module: ir.Module) -> None:
    code, (pool, *values) = function(module, "multiply_gated", 1 + len(GATED))
    given = dict(zip(GATED, values, strict=True))
    code.call("multiply_all", VOID, pool, *(given[name] for name in ARGUMENTS))
    gate, stride, n_tokens = given["out"], given["out_stride"], given["n_tokens"]
    n = stride // 8
    code.call_at(
        given["activation"], VOID, pool, gate, stride, gate + n * 4, stride, n_tokens, n,
        given["limit"], given["result"],
    )  # fmt: skip
    code.builder.ret_void()


def _place(arguments: Value, name: str) -> Value:
    return arguments + 8 * MULTIPLY.index(name)


def _add_piece(module: ir.Module) -> None:
    """Emit `piece(jobs, index)`: one piece; the index counts all products' pieces."""
    code, (jobs, index) = function(module, "piece", 2)
    entry, left = code.variable(jobs), code.variable(index)
    with code.forever() as leave:
        n_piece = code.load(entry.get() + 16, I64)
        leave(left.get() < n_piece)
        left.set(left.get() - n_piece)
        entry.set(entry.get() + JOB_BYTES)
    task, arguments = code.load_array(entry.get(), 2)
    code.call_at(task, VOID, arguments, left.get())
    code.builder.ret_void()
