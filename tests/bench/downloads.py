"""How fast the downloader is, and how much memory it takes, beside one plain stream.

    python -m tests.bench.downloads --mb 400 --rounds 3

The server is a process of its own on this machine, so that neither a network nor it decides.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
import threading
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import httpx2
import psutil

from app.models.downloads.transfer.part_file import PartFile
from app.models.downloads.transfer.source import RemoteFile, Source
from app.models.downloads.transfer.transfer import FileTransfer
from tests.helpers.hostile_server import hostile_server

MB = 10**6


def serve(channel: Connection, data: bytes) -> None:
    """Serve one file until a word comes."""
    with hostile_server() as server:
        server.files["/m.gguf"] = data
        channel.send(server.url)
        channel.recv()


def own(url: str, data: bytes, sha256: str, folder: Path) -> float:
    """Return the seconds of a download with all that belongs to it."""
    file = RemoteFile(f"{url}/m.gguf", "m.gguf", len(data), sha256)
    source, started = Source(url), time.perf_counter()
    FileTransfer(PartFile(folder / "m.gguf", file), source, threading.Event()).run()
    source.close()
    (folder / "m.gguf").unlink()
    return time.perf_counter() - started


def plain(url: str, folder: Path) -> float:
    """Return the seconds of one stream into a file, without a hash or fsync."""
    started = time.perf_counter()
    with httpx2.stream("GET", f"{url}/m.gguf") as response, (folder / "plain").open("wb") as file:
        for chunk in response.iter_raw():
            file.write(chunk)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    data = b"GGUF" + bytes(options.mb * MB)
    sha256 = hashlib.sha256(data).hexdigest()
    context = get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=serve, args=(there, data))
    child.start()
    url, me = here.recv(), psutil.Process()
    with tempfile.TemporaryDirectory() as name:
        for _ in range(options.rounds):
            before = me.memory_info().rss
            ours = own(url, data, sha256, Path(name))
            grown = (me.memory_info().rss - before) / MB
            other = plain(url, Path(name))
            print(  # noqa: T201
                f"{options.mb / ours:.0f} MB/s in pieces with hash and fsync;"
                f" {options.mb / other:.0f} MB/s in one stream; ratio {other / ours:.2f};"
                f" memory grew by {grown:.1f} MB"
            )
    here.send("end")
    child.join()


if __name__ == "__main__":
    main()
