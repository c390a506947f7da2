"""A short attack on a server; `python -m tests.fuzz.server_attacker 10000` is a long one."""

import logging

import pytest

pytest.importorskip("schemathesis")

from tests.fuzz.server_attacker import attack, still_running
from tests.helpers.served import EngineOnThread, Served


@pytest.mark.slow
def test_generated_requests_get_an_answer_or_a_sentence(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    engine = EngineOnThread(parallel=2)
    try:
        with Served(engine, has_ollama=True) as server:
            findings = attack(server.address, 120, 5)
            findings.problems += still_running(server.address)
    finally:
        engine.close()
    assert not findings.problems
    assert {status for _, status in findings.statuses} >= {200, 400}
