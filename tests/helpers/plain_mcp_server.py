"""A server of tools on its pipes without any package, which begins at once and can misbehave.

`python plain_mcp_server.py WAY`; it speaks the protocol of 2025-06-18.
"""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

WAY = sys.argv[1] if len(sys.argv) > 1 else ""

SLEEPER = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"]
ORPHANS = f"""
from subprocess import DEVNULL, Popen
print([Popen({SLEEPER}, stdout=DEVNULL, start_new_session=True).pid for _ in range(5)])
"""

tools = ["echo", "die", "grow", "wait", "ask", "slow"]


def send(**message: Any) -> None:
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def listed() -> dict[str, Any]:
    return {"tools": [{"name": name, "inputSchema": {"type": "object"}} for name in tools]}


def called(number: Any, name: str, arguments: dict[str, Any], token: Any) -> None:
    """Answer a call; signs of progress bear its token."""
    if name == "die":
        sys.exit("out of cheese")
    if name == "wait":
        return
    for step in range(6 if name == "slow" else 0):
        send(method="notifications/progress", params={"progressToken": token, "progress": step})
        time.sleep(0.6)
    if name == "grow":
        tools.append("new")
        send(method="notifications/tools/list_changed")
    if name == "ask":
        send(id="q", method="sampling/createMessage", params={"messages": [], "maxTokens": 1})
        answer = json.loads(sys.stdin.readline())
        arguments = {"text": answer["error"]["message"]}
    content = [{"type": "text", "text": str(arguments.get("text", ""))}]
    send(id=number, result={"content": content})


def answer(message: dict[str, Any]) -> None:
    """Answer one message."""
    number, method = message.get("id"), message.get("method")
    if method == "initialize":
        info = {"name": "plain", "version": "1"}
        capabilities = {"tools": {"listChanged": True}}
        send(
            id=number,
            result={
                "protocolVersion": "2025-06-18",
                "capabilities": capabilities,
                "serverInfo": info,
            },
        )
    elif method == "tools/list":
        send(id=number, result=listed())
    elif method == "tools/call":
        asked = message["params"]
        token = asked.get("_meta", {}).get("progressToken")
        called(number, asked["name"], asked.get("arguments") or {}, token)
    elif method == "notifications/cancelled" and WAY:
        Path(WAY).write_text("cancelled")
    elif number is not None:
        send(id=number, error={"code": -32601, "message": "no such method"})


def flood(way: str) -> None:
    """Print without end."""
    line = {
        "rubbish lines": "x\n", "line": "x",
        "list_changed": '{"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}\n',
        "requests": '{"jsonrpc": "2.0", "id": 1, "method": "ping"}\n',
    }[way]  # fmt: skip
    while True:
        sys.stdout.write(line * 100)


def main() -> None:
    if WAY == "hang":
        time.sleep(600)
    if WAY == "rubbish":
        sys.stdout.write("Welcome!\n" * 100)
        sys.stdout.flush()
        time.sleep(600)
    if WAY.startswith("stubborn="):  # does not end, and has a child that does not either
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(WAY.partition("=")[2]).write_text(str(child.pid))
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if WAY.startswith("setsid="):
        own = [subprocess.Popen(SLEEPER, start_new_session=True).pid for _ in range(5)]
        orphans = json.loads(subprocess.check_output([sys.executable, "-I", "-c", ORPHANS]))
        Path(WAY.partition("=")[2]).write_text(json.dumps([*own, *orphans]))
    if WAY.startswith("tools="):
        tools[:] = [f"tool {number}" for number in range(int(WAY.partition("=")[2]))]
    for number, line in enumerate(sys.stdin):
        message = json.loads(line)
        if WAY == "picky" and number == 0 and message["method"] != "initialize":
            sys.exit("expected initialize")
        answer(message)
        if WAY.startswith("flood=") and message["method"] == "tools/list":
            flood(WAY.partition("=")[2])
    if WAY.startswith("stubborn="):
        time.sleep(600)


if __name__ == "__main__":
    main()
