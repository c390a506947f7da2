"""The subcommand `serve`: a model behind HTTP."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

from app.cli.arguments import add_model, add_sampling, sampling_params
from app.cli.load_options import add_load, load_params
from app.cli.server.machines import ServedMachines, add_machines
from app.cli.server.serving import EVERYWHERE, KEY_VARIABLE, ServerRun, further_models
from app.cli.split.default_split import with_comfortable_context, with_default_split
from app.server.settings import DEFAULT_PORT, ServerHints, ServerSettings
from app.server.web.server import listen
from engine import EngineError, LoadParams

PARALLEL = 4
"""Number of requests of full length for which there is room, if memory allows and no option says
otherwise."""


HINTS = ServerHints(
    host="Name it with --allow-host if it is.",
    page="List them with --cors.",
    ollama="Start the server with --ollama.",
)
"""What refusals say that can be done: options of this command."""


def add_serve(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    where = parser.add_argument_group("server")
    where.add_argument(
        "--host", metavar="ADDRESS", help="address to listen on (default: 127.0.0.1)"
    )
    where.add_argument(
        "--port", type=int, default=DEFAULT_PORT, metavar="N",
        help=f"port to listen on; 0 takes any that is free (default: {DEFAULT_PORT})",
    )  # fmt: skip
    where.add_argument(
        "--lan", action="store_true",
        help=f"be there for other machines, too: --host {EVERYWHERE}; needs a key",
    )  # fmt: skip
    key = where.add_mutually_exclusive_group()
    key.add_argument(
        "--api-key", metavar="KEY",
        help="key that clients must know; other programs can see it here, so better set "
        f"{KEY_VARIABLE}",
    )  # fmt: skip
    key.add_argument("--api-key-file", metavar="FILE", help="file with that key")
    where.add_argument(
        "--cors", action="append", default=[], metavar="ORIGIN",
        help="let web pages of this origin ask, such as http://localhost:3000; may be repeated",
    )  # fmt: skip
    where.add_argument(
        "--allow-host", action="append", default=[], metavar="NAME",
        help="further name of this machine in clients' addresses; may be repeated",
    )  # fmt: skip
    where.add_argument(
        "--alias", action="append", default=[], metavar="NAME",
        help="further name of the model for clients; may be repeated",
    )  # fmt: skip
    where.add_argument(
        "--keep", type=float, metavar="MINUTES",
        help="unload the model after this long without a request; the next one loads it again "
        "(default: keep it)",
    )  # fmt: skip
    where.add_argument(
        "--models", action="append", default=[], metavar="FOLDER",
        help="folder with further models, which requests may name; the one that is named is "
        "loaded in place of the other; may be repeated",
    )  # fmt: skip
    where.add_argument(
        "--only", action="store_true",
        help="offer this model alone, and not the others on this machine",
    )  # fmt: skip
    where.add_argument(
        "--ollama", action="store_true",
        help="answer programs that know only Ollama's protocol (/api), too",
    )  # fmt: skip
    where.add_argument(
        "--log-prompts", action="store_true", help="write what is asked to stderr, too"
    )
    add_machines(parser)
    add_load(parser)
    add_sampling(parser)


def run_serve(args: argparse.Namespace) -> None:
    settings = server_settings(args)
    given = load_params(args)
    if args.parallel is None and args.plan is None:
        given = replace(given, parallel=PARALLEL)
    machines = None if args.nodes is None else ServedMachines(args, given)
    params = machines.wait() if machines else served_params(args, given)
    keep_s = None if args.keep is None else args.keep * 60
    sock = listen(settings)  # before the load, which may take minutes
    try:
        others = None if args.only or machines else further_models(args, given)
        run = ServerRun(settings, params, keep_s, sock, others, machines)
        number = asyncio.run(run.run())
    finally:
        sock.close()
        if machines:
            machines.gathering.close()
    if number:
        signal.raise_signal(number)  # to whom it would have gone


def served_params(args: argparse.Namespace, given: LoadParams) -> LoadParams:
    """Choose the split and the context that no option gives.

    Raises:
        EngineError: the model cannot be run.
    """
    return with_comfortable_context(args, with_default_split(args, given))


def server_settings(args: argparse.Namespace) -> ServerSettings:
    """Return the settings of the options.

    Raises:
        EngineError: an option makes no sense, or the file of the key cannot be read.
    """
    if not 0 <= args.port <= 65535:
        raise EngineError(f"{args.port} is no port.", "Ports go from 0 to 65535.")
    if args.keep is not None and not 0 < args.keep < 1e6:
        raise EngineError("--keep needs a number of minutes above 0.")
    if args.lan and args.host not in (None, EVERYWHERE):
        raise EngineError(f"--lan listens on {EVERYWHERE}, not on {args.host}.", "Leave one out.")
    if args.only and args.models:
        raise EngineError("--only offers no models of --models.", "Leave one out.")
    host = EVERYWHERE if args.lan else args.host or "127.0.0.1"
    return ServerSettings(
        host=host,
        port=args.port,
        key=_key(args),
        origins=tuple(args.cors),
        hosts=tuple(args.allow_host),
        aliases=tuple(args.alias),
        sampling=sampling_params(args, -1),
        logs_prompts=args.log_prompts,
        has_ollama=args.ollama,
        hints=HINTS,
    )


def _key(args: argparse.Namespace) -> str:
    """Return the key of the options, or else of the environment; "" for none.

    Raises:
        EngineError: its file cannot be read, or it is empty.
    """
    if args.api_key_file is not None:
        try:
            key = Path(args.api_key_file).read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise EngineError(f"{args.api_key_file} cannot be read: {error}.") from None
    elif args.api_key is not None:
        key = args.api_key
    else:
        return os.environ.get(KEY_VARIABLE, "")
    if not key:
        raise EngineError("The key is empty.", "Give one of 8 characters or more.")
    return str(key)
