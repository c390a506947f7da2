"""Several kernels' jobs as one: what is shared among the threads once need not wait in between."""

from __future__ import annotations

from llvmlite import ir

from engine.kernels.team import add_run
from engine.kernels.values import I64, VOID, function

JOB = ("task", "arguments", "n_piece")
"""Of one job, 64-bit integers: the address of its kernel's task, of its arguments, and how many
pieces it has."""

JOB_BYTES = 8 * len(JOB)

ARGUMENTS = ("jobs", "n_job")


def build(module: ir.Module) -> None:
    """`run_all(team, jobs, n_job)`: all pieces of all jobs, in their order."""
    add_run(module)
    _add_piece(module)
    code, (team, jobs, n_job) = function(module, "run_all", 3)
    total = code.variable(code.number(0))
    with code.loop(code.number(0), n_job) as job:
        total.set(total.get() + code.load(jobs + job * JOB_BYTES + 16, I64))
    code.call("run", VOID, team, code.address("piece"), jobs, total.get())
    code.builder.ret_void()


def _add_piece(module: ir.Module) -> None:
    """`piece(jobs, index)`: the index counts the pieces of all jobs one after another."""
    code, (jobs, index) = function(module, "piece", 2)
    entry, left = code.variable(jobs), code.variable(index)
    with code.forever() as leave:
        n_piece = code.load(entry.get() + 16, I64)
        leave(left.get() < n_piece)
        left.set(left.get() - n_piece)
        entry.set(entry.get() + JOB_BYTES)
    task, arguments, _ = code.listed(entry.get(), len(JOB))
    kind = ir.FunctionType(VOID, [I64, I64])
    work = code.builder.inttoptr(task.raw, kind.as_pointer())
    code.builder.call(work, [arguments.raw, left.get().raw])
    code.builder.ret_void()
