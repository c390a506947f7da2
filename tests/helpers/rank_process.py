"""A process that is one rank: it computes what a test asks for, and writes the results to files.

The test starts it with a folder, in which `job.json` says what to do.
"""

import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import engine.hardware.environment  # noqa: F401 before torch, which reads it

# isort: split
import numpy as np

from engine import EngineError, LoadParams, SamplingParams
from engine.distributed.process_rank import ProcessRank
from engine.distributed.rank_model import Leader, RankModel
from engine.distributed.wire import GlooWire


def generated(leader: Leader, asked: list[tuple[list[int], dict[str, Any]]]) -> list[list[int]]:
    """Return the tokens of answers that are computed at once."""
    answers = [leader.generate(prompt, SamplingParams(**sampling)) for prompt, sampling in asked]
    found: list[list[int]] = [[] for _ in answers]
    while not all(answer.is_over for answer in answers):
        for answer, ids in zip(answers, found, strict=True):
            ids += getattr(next(answer, None), "ids", ())
    return found


def params(task: dict[str, Any]) -> LoadParams:
    """Return the settings of loading; JSON knows no tuples."""
    given = task["params"].items()
    return LoadParams(**{k: tuple(v) if isinstance(v, list) else v for k, v in given})


def work(task: dict[str, Any], wire: GlooWire, folder: Path) -> None:
    """Load a model; on rank 0 write its logits and the tokens that it samples."""
    model = RankModel(params(task), wire)
    if model.leader is None:
        model.follow()
    else:
        np.save(folder / f"{task['name']}.npy", model.leader.logits(task["ids"]))
        asked = list(zip(task["prompts"], task["sampling"], strict=True))
        found = [*generated(model.leader, asked)]
        found += [generated(model.leader, [one])[0] for one in asked]
        (folder / f"{task['name']}.json").write_text(json.dumps(found))
    model.close()


def end(how: str, task: dict[str, Any], wire: GlooWire) -> None:
    """Make one rank go away in the middle of an answer."""
    model = RankModel(params(task), wire)
    wire._limit_s = 1.5
    if wire.rank == 1:
        leave_in_the_middle(model.rank, how)
    if model.leader is None:
        model.follow()
    else:
        list(model.leader.generate(task["prompts"][0], SamplingParams(max_tokens=50)))


def leave_in_the_middle(rank: ProcessRank, how: str) -> None:
    """Have a rank do something else than its fifth order."""
    n_orders, do = itertools.count(), rank.do

    def leave(order: str, *values: Any) -> Any:
        if next(n_orders) < 5:
            return do(order, *values)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
        return None

    rank.do = leave  # type: ignore[method-assign]


def main(folder: Path) -> None:
    job, begun = json.loads((folder / "job.json").read_text()), time.perf_counter()
    wire = GlooWire(60)
    try:
        for task in job["tasks"]:
            work(task, wire, folder)
        begun = time.perf_counter()
        end(job["end"], job["tasks"][0], wire)
    except EngineError as error:
        wire.tell(error)
        found = [type(error).__name__, str(error), error.hint, time.perf_counter() - begun]
        (folder / f"end.{wire.rank}.json").write_text(json.dumps(found))
        os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
