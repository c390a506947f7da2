"""One engine with the demo model for all tests of the server, and a server before it."""

from collections.abc import Iterator

import httpx2
import pytest
from openai import OpenAI

from app.server.request_body import SMALL_BODY
from tests.helpers.served import EngineOnThread, Served


@pytest.fixture(scope="session")
def demo_engine() -> Iterator[EngineOnThread]:
    engine = EngineOnThread(parallel=4)
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def served(demo_engine: EngineOnThread) -> Iterator[Served]:
    with Served(demo_engine) as server:
        large = {"content": "x" * 2 * SMALL_BODY}  # starts the thread that parses such bodies
        httpx2.post(f"{server.address}/tokenize", json=large, timeout=60, trust_env=False)
        yield server


@pytest.fixture(scope="session")
def client(served: Served) -> Iterator[OpenAI]:
    with served.client() as client:
        yield client


@pytest.fixture(scope="session")
def http(served: Served) -> Iterator[httpx2.Client]:
    """A bare client of the same server."""
    with httpx2.Client(base_url=served.address, timeout=60, trust_env=False) as client:
        yield client
