"""The subcommand `join`: this machine computes a model together with another one."""

from __future__ import annotations

import argparse

import engine  # what starts processes is resolved when it is used
from app.cli.output import note
from app.cli.server.machines import PORT, TOKEN_VARIABLE, add_token, local_devices, token_of
from engine import EngineError


def add_join(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "address", metavar="HOST:PORT", help="address that `tandem serve --nodes` shows"
    )
    add_token(parser.add_argument_group("handshake"))
    group = parser.add_argument_group("this machine")
    group.add_argument(
        "--model", metavar="FILE",
        help="this machine's copy of the model's file (default: the path on the server)",
    )  # fmt: skip
    group.add_argument(
        "--devices", metavar="LIST",
        help="one device per rank, such as cuda:0,cuda:1 (default: all GPUs, else the CPU)",
    )  # fmt: skip
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: one a core)")
    group.add_argument(
        "--interface", default="", metavar="NAME",
        help="network interface, or its address (default: the one that routes to the server)",
    )  # fmt: skip


def run_join(args: argparse.Namespace) -> None:
    host, port = engine.parse_address(args.address, PORT)
    token = token_of(args)
    if not token:
        raise EngineError("The token is missing.", f"Give it with --token or in {TOKEN_VARIABLE}.")
    request = engine.JoinRequest(
        host, port, token, local_devices(args), args.model or "", args.interface, args.threads
    )
    engine.join_machines(request, note)
