"""The subcommand `serve`: a model behind HTTP."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from app.cli.arguments import add_model, add_sampling, sampling_params
from app.cli.load_options import add_load, load_params
from app.cli.loading import LoadWatch
from app.cli.output import note, note_progress, write
from app.cli.server.machines import ServedMachines, add_machines
from app.cli.split.default_split import with_comfortable_context, with_default_split
from app.core.paths import models_dir
from app.core.process.environment import chosen_host
from app.core.process.interruption import handle, restore
from app.models.library.scan import known_places, scan
from app.server.async_engine import AsyncEngine
from app.server.context import ServerContext
from app.server.models import LibraryModels, ModelShelf, SingleModel
from app.server.request_log import RequestRecord
from app.server.settings import DEFAULT_PORT, ServerHints, ServerSettings
from app.server.web.server import Listener, QuietServer, address_of, listen, serve
from engine import (
    Command,
    EngineError,
    LoadParams,
    LoadProgress,
    MachineLost,
    one_line,
    read_model_info,
)

if TYPE_CHECKING:
    from engine import EngineHost, ModelLoaded


@dataclass(frozen=True, slots=True)
class FurtherModels:
    """Finder of further models, and of the way in which each is loaded.

    Attributes:
        find: looks for their files.
        choose: says how the model of a path is loaded.
    """

    find: Callable[[], Iterable[Path]]
    choose: Callable[[str], LoadParams]


def further_models(args: argparse.Namespace, given: LoadParams) -> FurtherModels:
    """Return what the options say about further models.

    They are loaded like the first one, but for what concerns that file alone.

    Args:
        given: how the first one is loaded, before a split was chosen for it.

    Raises:
        EngineError: there is no such folder.
    """
    for folder in args.models:
        if not Path(folder).is_dir():
            raise EngineError(f"There is no folder {folder}.", "Name another one with --models.")
    usual = replace(
        given, split=None, groups=None, overrides=(), n_cpu_blocks=0, n_cpu_moe=0,
        control_vectors=(), control_layers=None, chat_template="",
        rope_scaling="", rope_factor=0.0, rope_base=0.0,
    )  # fmt: skip

    def find() -> list[Path]:
        places = known_places((*args.models, models_dir()))
        return [one.path for one in scan(places) if not one.missing]

    def choose(path: str) -> LoadParams:
        return with_comfortable_context(args, with_default_split(args, replace(usual, path=path)))

    return FurtherModels(find, choose)


KEY_VARIABLE = "TANDEM_API_KEY"
"""Environment variable with the key that clients must know."""

EVERYWHERE = "0.0.0.0"
"""Address of all networks that this machine is in."""

QUIET_ROUTES = ("GET /health", "GET /metrics", "GET /slots")
"""Routes that monitors ask all the time."""

MAX_TRIES = 3
"""Number of first loads that may fail, one after the other, while all machines are there."""

LOST_S = 3.5
"""Seconds after which it is known that a machine is gone."""

LOOK_S = 0.5
"""Seconds between two looks at the machines that are there."""

CLOSE_S = 10.0
"""Seconds in which the engine ends."""


class ServerRun:
    """The run of a server with an engine of its own, until a signal ends it."""

    def __init__(
        self, settings: ServerSettings, params: LoadParams, keep_s: float | None,
        sock: Listener, others: FurtherModels | None = None,
        machines: ServedMachines | None = None,
    ) -> None:  # fmt: skip
        self._settings, self._params, self._sock = settings, params, sock
        self._keep_s, self._others, self._machines = keep_s, others, machines
        self._host: EngineHost | None = None
        self._server: QuietServer | None = None
        self._main: asyncio.Task[None] | None = None
        self._context: ServerContext | None = None
        self._signal = 0  # the first one that came

    async def run(self) -> int:
        """Load the model and serve it; return the signal that has broken it off, or 0.

        Raises:
            EngineError: the model cannot be loaded.
        """
        self._main = asyncio.current_task()
        async_engine = AsyncEngine(self._submit, self._cancel)
        info = read_model_info(self._params.path)
        first = SingleModel(async_engine, self._params, info, self._settings.aliases, self._keep_s)
        models = self._models(async_engine, first)
        async_engine.open()
        make_host = chosen_host() if self._machines is None else self._machines.make_host
        self._host = make_host(async_engine.on_event)
        try:
            with self._signals():
                await self._serve(async_engine, first, models)
        except asyncio.CancelledError:
            return self._signal
        finally:
            models.close()
            async_engine.close()
            await asyncio.to_thread(self._host.close, CLOSE_S)
        return 0

    def _models(self, async_engine: AsyncEngine, first: SingleModel) -> SingleModel | LibraryModels:
        if self._others is None:
            return first
        shelf = ModelShelf(self._others.find)
        return LibraryModels(async_engine, first, shelf, self._others.choose, self._keep_s)

    async def _serve(
        self, async_engine: AsyncEngine, first: SingleModel, models: SingleModel | LibraryModels
    ) -> None:
        loaded = await self._load(first)
        for sentence in (*loaded.warnings, *(one.sentence for one in loaded.fallbacks)):
            note(sentence)
        if isinstance(models, LibraryModels):
            models.open()
        context = self._context = ServerContext(async_engine, models, self._settings)
        if self._machines is None:
            async_engine.on_loss = models.restore
        else:
            context.problem = partial(_problem, self._machines, async_engine)
            context.machines = partial(getattr, self._machines, "state")
            self._load_again(self._machines, first)
        context.request_log.on_end = note_request
        await serve(context, self._sock, self._tell_ready)

    async def _load(self, model: SingleModel) -> ModelLoaded:
        """Load the model for the first time, again if a machine is lost meanwhile.

        Raises:
            EngineError: it cannot be loaded, or fails again and again though no machine is missing.
        """
        machines, n_tries = self._machines, 0
        while True:
            watch = LoadWatch()
            try:
                return await model.load(
                    lambda event, watch=watch: watch(event)  # type: ignore[misc]
                    if isinstance(event, LoadProgress) else None
                )  # fmt: skip
            except MachineLost as error:
                n_tries += 1
                if machines is None or n_tries == MAX_TRIES:
                    raise
                note(f"{error.message} {error.hint}")
            finally:
                note_progress()
            await asyncio.sleep(LOST_S)  # by then a loss is known
            while machines.problem:
                n_tries = 0
                await asyncio.sleep(LOOK_S)

    def _load_again(self, machines: ServedMachines, model: SingleModel) -> None:
        loop = asyncio.get_running_loop()

        def on_change(sentence: str) -> None:
            note(sentence)
            if not machines.problem:
                with contextlib.suppress(RuntimeError):  # the loop has just been closed
                    loop.call_soon_threadsafe(model.load_soon)

        machines.gathering.on_change = on_change

    def _tell_ready(self, server: QuietServer) -> None:
        self._server = server
        address = address_of(self._sock)
        write(f"listening on {address}")
        note(example(address, has_key=bool(self._settings.key)))

    def _submit(self, command: Command) -> int:
        assert self._host is not None, "the engine starts before the first command"
        return self._host.submit(command)

    def _cancel(self, number: int) -> None:
        assert self._host is not None, "what can be cancelled was submitted"
        self._host.cancel(number)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """End the server in order at a first signal, and at once at a second one."""
        loop = asyncio.get_running_loop()

        def on_signal(number: int, frame: FrameType | None) -> None:
            loop.call_soon_threadsafe(self._on_signal, number)

        previous = handle(on_signal)
        try:
            yield
        finally:
            restore(previous)

    def _on_signal(self, number: int) -> None:
        server, context = self._server, self._context
        if server is None or context is None or server.should_exit:
            self._signal = number
            if self._main is not None:
                self._main.cancel()
            return
        server.should_exit = True
        if n_running := context.admission.n_running + context.admission.n_waiting:
            what = "an answer" if n_running == 1 else f"{n_running} answers"
            note(f"Waiting for {what} to end. Ctrl+C ends it now.")


def _problem(machines: ServedMachines, async_engine: AsyncEngine) -> str:
    """Return why the model of several machines cannot answer now; "" if it can.

    It names no machine, because `/health` needs no key.
    """
    if machines.problem:
        return "The model waits for another machine."
    return "" if async_engine.model else "The model is being loaded."


def example(address: str, *, has_key: bool) -> str:
    """Return a command that asks the server something, to try it with."""
    address = address.replace(EVERYWHERE, "127.0.0.1")
    key = f' -H "Authorization: Bearer ${KEY_VARIABLE}"' if has_key else ""
    body = '{"messages": [{"role": "user", "content": "Hello!"}]}'
    return f"Try: curl {address}/v1/chat/completions{key} -d '{body}'\nCtrl+C ends it."


def note_request(record: RequestRecord) -> None:
    """Write a line about a request that has ended to stderr, but for those of monitors."""
    if record.route in QUIET_ROUTES and record.status == 200:
        return
    speed = f", {record.tokens_per_s:.1f}/s" if record.tokens_per_s else ""
    tokens = f"  {record.n_tokens} tokens{speed}" if record.n_tokens else ""
    target = one_line(record.target)
    problem = f"  {one_line(record.problem)}" if record.problem else ""
    note(
        f"{time.strftime('%H:%M:%S')}  {record.client}  {target}  {record.status}{tokens}"
        f"  {record.seconds:.2f} s{problem}"
    )


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
