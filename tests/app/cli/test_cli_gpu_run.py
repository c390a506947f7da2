"""Public names by which a run on a GPU measures Tandem, from scripts outside of this repository."""

from pathlib import Path

import engine
from engine import Model
from tests.bench.synthetic import MODELS
from tests.helpers.command_line import GREEDY, Run


def test_commands_have_the_names_that_scripts_read(run: Run, model: Path) -> None:
    found = run("devices", "--json").document
    assert {"devices", "gpu", "measured", "kernel_problems"} <= found.keys()
    assert {"arithmetic", "launcher", "launcher_problem", "sentence"} <= found["gpu"].keys()
    assert {"id", "usable", "reason"} <= found["devices"][0].keys()
    where = ("--devices", "cpu", "--json")
    answer = run("generate", model, "--raw", "-p", "a", *GREEDY, *where).document
    assert {"ids", "text", "timings", "fallbacks"} <= answer.keys()
    assert "decode_per_s" in answer["timings"]
    sizes = ("-p", "8", "-n", "2", "-d", "0", "-r", "1", "--timeline")
    measured = run("bench", model, *sizes, *where).document
    assert {"name", "bytes_per_s", "bf16_flop_per_s"} <= measured["machine"][0].keys()
    row = measured["results"][-1]
    named = {"n_prompt", "n_gen", "n_depth", "avg_ts", "stddev_ts", "devices", "error", "load_s"}
    assert named | {"host_us", "fraction", "fallbacks", "timeline"} <= row.keys()
    assert {"rank", "token_s", "computed", "waited", "python"} <= row["timeline"][0].keys()


def test_the_library_and_the_models_to_measure_have_their_names() -> None:
    names = ("EngineError", "SamplingParams", "list_devices", "load_model", "prove_cards")
    assert all(hasattr(engine, name) for name in names)
    assert all(hasattr(Model, name) for name in ("logits", "generate", "warnings", "fallbacks"))
    assert {"llama-1b", "llama-8b", "moe-30b-4"} <= MODELS.keys()
