"""The subcommand `serve`: an HTTP server for models."""

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
    """How to find further models, and how to load the model at a path."""

    find: Callable[[], Iterable[Path]]
    choose: Callable[[str], LoadParams]


def further_models(args: argparse.Namespace, given: LoadParams) -> FurtherModels:
    """Return how to find and load the models in the `--models` folders and the window's folders.

    They are loaded like the first model, but without options that depend on its file.

    Args:
        given: the first model's load parameters, before the default split.

    Raises:
        EngineError: a folder does not exist.
    """
    for folder in args.models:
        if not Path(folder).is_dir():
            raise EngineError(
                "There is no folder {folder}.",
                "Specify another folder with --models.",
                folder=folder,
            )
    usual = replace(
        given, split=None, groups=None, overrides=(), n_cpu_blocks=0, n_cpu_moe=0,
        control_vectors=(), control_layers=None, chat_template="",
        rope_scaling="", rope_factor=0.0, rope_base=0.0,
    )  # fmt: skip

    def find() -> list[Path]:
        places = known_places((*args.models, models_dir()))
        return [one.path for one in scan(places) if not one.missing]

    def choose(path: str) -> LoadParams:
        return served_params(args, replace(usual, path=path))

    return FurtherModels(find, choose)


KEY_VARIABLE = "TANDEM_API_KEY"  # environment variable with the API key
EVERYWHERE = "0.0.0.0"  # listens on all network interfaces
QUIET_ROUTES = ("GET /health", "GET /metrics", "GET /slots")  # routes that monitors poll
MAX_TRIES = 3
"""Maximum number of consecutive failures of the first load while all machines are connected."""

LOST_S = 3.5  # seconds after which the loss of a machine is noticed
LOOK_S = 0.5  # interval in seconds between checks of the machines
CLOSE_S = 10.0  # timeout in seconds for closing the engine


class ServerRun:
    """A server with its own engine; it runs until a signal stops it."""

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
        self._signal = 0  # the first one received

    async def run(self) -> int:
        """Load the model and serve it; return the signal that interrupted this, or 0.

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
        await serve(context, self._sock, self._on_ready)

    async def _load(self, model: SingleModel) -> ModelLoaded:
        """Load the first model, retrying if a machine is lost meanwhile.

        Raises:
            EngineError: loading failed, or machines kept dropping out although all were connected.
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
            await asyncio.sleep(LOST_S)
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

    def _on_ready(self, server: QuietServer) -> None:
        self._server = server
        address = address_of(self._sock)
        write(f"listening on {address}")
        note(example(address, has_key=bool(self._settings.key)))

    def _submit(self, command: Command) -> int:
        assert self._host is not None, "the engine starts before the first command"
        return self._host.submit(command)

    def _cancel(self, number: int) -> None:
        assert self._host is not None, "only submitted commands are cancelled"
        self._host.cancel(number)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
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
            note(f"Waiting for {what} to finish. Press Ctrl+C to stop now.")


def _problem(machines: ServedMachines, async_engine: AsyncEngine) -> str:
    """Return why a model on several machines cannot answer now, or "".

    The text names no machine, because `/health` needs no key.
    """
    if machines.problem:
        return "The model is waiting for another machine."
    return "" if async_engine.model else "The model is being loaded."


def example(address: str, *, has_key: bool) -> str:
    """Return a command for trying the server."""
    address = address.replace(EVERYWHERE, "127.0.0.1")
    key = f' -H "Authorization: Bearer ${KEY_VARIABLE}"' if has_key else ""
    body = '{"messages": [{"role": "user", "content": "Hello!"}]}'
    return f"Try: curl {address}/v1/chat/completions{key} -d '{body}'\nPress Ctrl+C to stop."


def note_request(record: RequestRecord) -> None:
    """Write a line about a finished request to stderr, unless it is a monitor's poll."""
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


PARALLEL = 4  # default number of parallel full-length requests, if memory allows


HINTS = ServerHints(
    host="Allow it with --allow-host.",
    page="Allow them with --cors.",
    ollama="Start the server with --ollama.",
)


def add_serve(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    where = parser.add_argument_group("server")
    where.add_argument(
        "--host", metavar="ADDRESS", help="address to listen on (default: 127.0.0.1)"
    )
    where.add_argument(
        "--port", type=int, default=DEFAULT_PORT, metavar="N",
        help=f"port to listen on; 0 for any free port (default: {DEFAULT_PORT})",
    )  # fmt: skip
    where.add_argument(
        "--lan", action="store_true",
        help=f"accept requests from other machines, like --host {EVERYWHERE}; requires a key",
    )  # fmt: skip
    key = where.add_mutually_exclusive_group()
    key.add_argument(
        "--api-key", metavar="KEY",
        help=f"API key for clients; prefer setting {KEY_VARIABLE}, since other programs can see "
        "this option",
    )  # fmt: skip
    key.add_argument("--api-key-file", metavar="FILE", help="file with the API key")
    where.add_argument(
        "--cors", action="append", default=[], metavar="ORIGIN",
        help="allow web pages from this origin, e.g. http://localhost:3000; repeatable",
    )  # fmt: skip
    where.add_argument(
        "--allow-host", action="append", default=[], metavar="NAME",
        help="additional host name for this machine in URLs; repeatable",
    )  # fmt: skip
    where.add_argument(
        "--alias", action="append", default=[], metavar="NAME",
        help="additional name for the model; repeatable",
    )  # fmt: skip
    where.add_argument(
        "--keep", type=float, metavar="MINUTES",
        help="unload the model after this many minutes without a request; the next request reloads "
        "it (default: never)",
    )  # fmt: skip
    where.add_argument(
        "--models", action="append", default=[], metavar="FOLDER",
        help="folder with more models that requests may use, loaded one at a time; repeatable",
    )  # fmt: skip
    where.add_argument(
        "--only", action="store_true",
        help="serve only this model, not the others on this machine",
    )  # fmt: skip
    where.add_argument(
        "--ollama", action="store_true",
        help="also enable Ollama's API (/api)",
    )  # fmt: skip
    where.add_argument("--log-prompts", action="store_true", help="also write prompts to stderr")
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
        signal.raise_signal(number)  # now end the process as the signal would have


def served_params(args: argparse.Namespace, given: LoadParams) -> LoadParams:
    """Return load parameters with the default split and context.

    Raises:
        EngineError: the model cannot be run.
    """
    return with_comfortable_context(args, with_default_split(args, given))


def server_settings(args: argparse.Namespace) -> ServerSettings:
    """Build the server's settings from the options.

    Raises:
        EngineError: an option is invalid, or the key file cannot be read.
    """
    if not 0 <= args.port <= 65535:
        raise EngineError(
            "{port} is not a valid port.", "Ports range from 0 to 65535.", port=args.port
        )
    if args.keep is not None and not 0 < args.keep < 1e6:
        raise EngineError("--keep needs a positive number of minutes.")
    if args.lan and args.host not in (None, EVERYWHERE):
        text = "--lan listens on {all}, not on {host}."
        raise EngineError(text, "Omit one of the two.", all=EVERYWHERE, host=args.host)
    if args.only and args.models:
        raise EngineError("--only cannot be combined with --models.", "Omit one of the two.")
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
    if args.api_key_file is not None:
        try:
            key = Path(args.api_key_file).read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            text = "{path} cannot be read: {problem}."
            raise EngineError(text, path=args.api_key_file, problem=str(error)) from None
    elif args.api_key is not None:
        key = args.api_key
    else:
        return os.environ.get(KEY_VARIABLE, "")
    if not key:
        raise EngineError("The key is empty.", "Use at least 8 characters.")
    return str(key)
