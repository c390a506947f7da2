"""The comparison with other engines, with a script in the place of their llama-bench."""

from pathlib import Path

import pytest

from engine import BenchTest
from tests.bench.beside import Peer, Round, _report, token_bytes
from tests.helpers.tiny_gguf import tiny_gguf

BENCH = """#!/usr/bin/env python3
import json, sys
if "--help" in sys.argv:
    sys.exit(HELP)
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
speed = 10.0 * float(given["-n"]) + float(given.get("-rtr", 0)) + (100.0 if "-gp" in given else 0)
print(json.dumps([{"avg_ts": 0.0}, {"avg_ts": speed}]))
"""


def peer(folder: Path, said: str, *options: str) -> Peer:
    """Return an engine whose speeds show what it was asked."""
    script = folder / "llama-bench"
    script.write_text(BENCH.replace("HELP", repr(said)))
    script.chmod(0o755)
    return Peer(script, options, n_threads=2)


def test_a_peer_counts_with_its_best_options(tmp_path: Path) -> None:
    other = peer(tmp_path, "--n-depth", "-rtr 0", "-rtr 5", "-rtr 3")
    assert other.speed(Path("m"), BenchTest(n_gen=4), "f16") == 45.0
    assert other.speed(Path("m"), BenchTest(n_gen=4, n_depth=64), "q8_0") == 45.0


def test_one_that_knows_no_depth_generates_behind_a_prompt(tmp_path: Path) -> None:
    other = peer(tmp_path, "nothing of the kind")
    assert other.speed(Path("m"), BenchTest(n_gen=4, n_depth=64), "f16") == 100.0
    assert other.speed(Path("m"), BenchTest(n_prompt=4, n_depth=64), "f16") is None


def test_a_token_reads_what_it_uses(tmp_path: Path) -> None:
    tied = token_bytes(tiny_gguf(tmp_path / "tied.gguf", tied=True))
    with_head = token_bytes(tiny_gguf(tmp_path / "head.gguf"))
    assert with_head == tied, "the embedding is read only where it is the head as well"
    routed = [
        token_bytes(tiny_gguf(tmp_path / f"{n}.gguf", arch="olmoe", n_expert=n)) for n in (8, 16)
    ]
    routers = 2 * 8 * 64 * 4  # bytes of eight more rows in two layers
    assert routed[1] - routed[0] == routers, "as many experts are used as before"


def test_a_report_has_medians_spread_and_shares(capsys: pytest.CaptureFixture[str]) -> None:
    _report("tg", [Round(9, 10, 1e9), Round(10, 5, 1e9), Round(12, 10, 1e9)], 50_000_000)
    said = capsys.readouterr().out
    assert said == (
        "tg: 10.00 t/s beside 10.00, ratio 1.20 (0.90 to 2.00);"
        " of a plain sum's 1.0 GB/s 50% and 50%\n"
    )
