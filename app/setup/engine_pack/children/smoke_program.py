"""Child process program that tests a pack and prints one line of JSON."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec

import engine
from app.core.paths import demo_model
from engine import EngineError, SamplingParams, TokenText, error_line

PROMPT = "What is tensor parallelism?"
N_TOKENS = 8


def main() -> int:
    """Generate an answer with the demo model."""
    model_file = demo_model()
    if model_file is None:
        return _fail("The demo model is missing; reinstall Tandem.")
    spec = find_spec("torch")
    origin = (spec.origin if spec else "") or "nowhere"
    if not any(origin.startswith(folder) for folder in engine.pack_folders()):
        return _fail(f"torch is imported from {origin}")
    try:
        with engine.load_model(model_file, devices=["cpu"], n_ctx=256) as model:
            params = SamplingParams(temperature=0, max_tokens=N_TOKENS)
            events = list(model.generate(PROMPT, params))
        problem = engine.cuda_status()
        with suppress(ImportError, OSError):  # imported only to compile its bytecode
            import_module("triton")
    except EngineError as error:
        return _fail(error_line(str(error), error.hint))
    n_tokens = sum(isinstance(event, TokenText) for event in events)
    answer = {"n_tokens": n_tokens, "version": version("torch"), "gpu_problem": problem}
    sys.stdout.write(f"{json.dumps(answer)}\n")
    return 0


def _fail(why: str) -> int:
    sys.stderr.write(f"{why}\n")
    return 1


if __name__ == "__main__":
    engine.tie_to_parent()
    sys.exit(main())
