"""A process that is one rank: it computes what a test asks for, and writes the results to files.

The test starts it with a folder, in which `job.json` says what to do.
"""

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
from engine.distributed.program import RankModel
from engine.distributed.wire import GlooWire


def generated(model: RankModel, prompt: list[int], sampling: dict[str, Any]) -> list[int]:
    events = model.generate(prompt, SamplingParams(**sampling))
    return [i for event in events for i in getattr(event, "ids", ())]


def params(task: dict[str, Any]) -> LoadParams:
    """Return the settings of loading; JSON knows no tuples."""
    given = task["params"].items()
    return LoadParams(**{k: tuple(v) if isinstance(v, list) else v for k, v in given})


def work(task: dict[str, Any], wire: GlooWire, folder: Path) -> None:
    """Load a model, and write its logits and the tokens that it samples."""
    model = RankModel(params(task), wire)
    logits = model.logits(task["ids"])
    if logits is not None:
        np.save(folder / f"{task['name']}.npy", logits)
    answers = [generated(model, task["prompt"], sampling) for sampling in task["sampling"]]
    (folder / f"{task['name']}.{wire.rank}.json").write_text(json.dumps(answers))
    model.close()


def end(how: str, task: dict[str, Any], wire: GlooWire) -> None:
    """Make one rank go away in the middle of an answer."""
    model = RankModel(params(task), wire)
    wire._limit_s = 1.5
    for n, _ in enumerate(model.generate(task["prompt"], SamplingParams(max_tokens=50))):
        if n == 5 and wire.rank == 1:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)


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
