"""Copies of a server behind a router, and the files for containers that say the same."""

import json
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import yaml  # type: ignore[import-untyped]

from tests.helpers.serve_process import ServeProcess

FOLDER = Path(__file__).parents[2] / "packaging" / "machines"
KNOWN_S = 20.0
"""Seconds in which a router must be there."""


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8")))


def test_kubernetes_asks_for_health_and_keeps_clients_with_their_copy() -> None:
    deployment, service = documents("kubernetes.yaml")
    assert (deployment["kind"], service["kind"]) == ("Deployment", "Service")
    pod = deployment["spec"]["template"]
    assert deployment["spec"]["selector"]["matchLabels"] == pod["metadata"]["labels"]
    assert service["spec"]["selector"] == pod["metadata"]["labels"]
    (container,) = pod["spec"]["containers"]
    for probe in ("startupProbe", "readinessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": "http"}
    assert "httpGet" not in container["livenessProbe"], "a load is no reason to end the process"
    (port,) = container["ports"]
    assert (port["name"], port["containerPort"]) == ("http", 11435)
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]
    assert service["spec"]["sessionAffinity"] == "ClientIP"
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["spec"]["volumes"]}
    name = container["args"][container["args"].index("--allow-host") + 1]
    assert name == service["metadata"]["name"], "the gate knows the name that clients use"


def test_compose_has_two_copies_behind_nginx() -> None:
    (found,) = documents("compose.yaml")
    services = found["services"]
    command = services["router"]["command"][-1]
    conf = (FOLDER / "nginx.conf").read_text(encoding="utf-8")
    for copy in ("copy1", "copy2"):
        assert "/health" in services[copy]["healthcheck"]["test"][-1]
        assert services["router"]["depends_on"][copy] == {"condition": "service_healthy"}
        assert f"/{copy}:11435/" in command
    for place in ("127.0.0.1:11441", "127.0.0.1:11442", "listen 127.0.0.1:11440"):
        assert place in conf, "the router's command replaces it"
        assert place in command
    dockerfile = FOLDER.parents[1] / services["copy1"]["build"]["dockerfile"]
    assert 'ENTRYPOINT ["tandem"]' in dockerfile.read_text(encoding="utf-8")


@contextmanager
def nginx(folder: Path, *copies: str) -> Iterator[str]:
    """Run nginx with the configuration that is documented, before servers at other ports."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{found.getsockname()[1]}"
    text = (FOLDER / "nginx.conf").read_text(encoding="utf-8").replace("127.0.0.1:11440", place)
    for written, copy in zip(("127.0.0.1:11441", "127.0.0.1:11442"), copies, strict=True):
        text = text.replace(written, copy.removeprefix("http://"))
    conf = folder / "nginx.conf"
    conf.write_text(text, encoding="utf-8")
    router = subprocess.Popen(
        ["nginx", "-c", str(conf), "-p", str(folder), "-g", "daemon off;"]
    )  # fmt: skip
    try:
        end = time.monotonic() + KNOWN_S
        while True:
            try:
                httpx.get(f"http://{place}/health", timeout=5)
                break
            except httpx.HTTPError:
                assert time.monotonic() < end
                assert router.poll() is None
                time.sleep(0.05)
        yield f"http://{place}"
    finally:
        router.send_signal(signal.SIGQUIT)
        router.wait(20)


def answers(server: str) -> int:
    """Return how many answers a server has given."""
    lines = httpx.get(f"{server}/metrics").text.splitlines()
    return int(next(x for x in lines if x.startswith("tandem_answers_total ")).split()[1])


def ask(router: str, messages: list[dict[str, str]], **headers: str) -> str:
    """Return the answer to a conversation."""
    body = json.dumps(
        {"model": "tandem-demo", "messages": messages, "max_tokens": 4, "temperature": 0}
    )
    names = {"content-type": "application/json"}
    names |= {name.replace("_", "-"): value for name, value in headers.items()}
    found = httpx.post(
        f"{router}/v1/chat/completions", content=body, headers=names, timeout=60
    )  # fmt: skip
    assert found.status_code == 200, found.text
    return str(found.json()["choices"][0]["message"]["content"])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
def test_what_begins_alike_goes_to_one_copy_and_to_another_if_that_is_gone(tmp_path: Path) -> None:
    with ServeProcess() as one, ServeProcess() as two:
        servers = one.address, two.address
        with nginx(tmp_path, *servers) as router:
            begin = "You are a patient teacher. " * 40  # more than the router looks at
            talk = [{"role": "system", "content": begin}]
            for turn in range(4):
                talk.append({"role": "user", "content": f"Question {turn}?"})
                talk.append({"role": "assistant", "content": ask(router, talk)})
            n_of = [answers(server) for server in servers]
            assert sorted(n_of) == [0, 4], "all turns of a conversation went to one copy"
            for topic in range(12):
                ask(router, [{"role": "user", "content": f"Topic {topic}: what is it?"}])
            assert all(answers(server) for server in servers), "conversations are spread"
            before = [answers(server) for server in servers]
            for topic in range(6):
                ask(router, [{"role": "user", "content": f"{topic}"}], x_conversation="mine")
            rise = [answers(s) - n for s, n in zip(servers, before, strict=True)]
            assert sorted(rise) == [0, 6], "a client may name its conversations"

            (one if n_of[0] else two).kill()
            talk.append({"role": "user", "content": "Are you there?"})
            assert ask(router, talk) is not None
            assert httpx.get(f"{router}/health").status_code == 200
            left = servers[1] if n_of[0] else servers[0]
            assert answers(left) >= 1
            for topic in range(12):
                ask(router, [{"role": "user", "content": f"Topic {topic}: what is it?"}])
