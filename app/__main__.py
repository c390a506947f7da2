"""The program `tandem`: opens the window or runs a subcommand."""

from __future__ import annotations

from app.core.process.interruption import Interruption, end_at_once, importing

with importing():  # these imports take a while, and Ctrl+C must not print a traceback meanwhile
    import argparse
    import gc
    import os
    import sys
    from collections.abc import Iterator, Sequence
    from contextlib import contextmanager
    from importlib import import_module
    from pathlib import Path
    from typing import NoReturn

    from app.cli.output import (
        CommandParser,
        finish_output,
        note_error,
        prepare_streams,
        version,
        write,
    )
    from app.core.process.environment import check_display, missing_qt_library
    from app.setup.engine_pack.activation import activate as use_engine_pack
    from engine import EngineError

COMMANDS = {
    "devices": ("list this machine's devices", "facts"),
    "inspect": ("show the header of a GGUF file", "facts"),
    "plan": ("predict the memory use and speed of a split", "facts"),
    "plans": ("list, delete, export and import a model's saved plans", "split.plans"),
    "generate": ("answer one prompt", "talk"),
    "chat": ("chat in the terminal", "chat"),
    "serve": ("serve models over HTTP with an OpenAI-compatible API", "server.serve"),
    "join": ("run a model together with another machine", "server.machines"),
    "bench": ("measure a model's speed", "bench.bench"),
    "tune": ("find the fastest split by measuring", "tune"),
    "tokenize": ("split a text into tokens", "score"),
    "perplexity": ("measure a model's perplexity on a text", "score"),
    "engine": ("show, install or remove engine packs (PyTorch)", "engine"),
}
"""Each subcommand's summary and its module in `app.cli`, which defines `add_...` and `run_...`.
Only the given command's module is imported."""

PROC_MEMORY = Path("/proc/meminfo")


def main(argv: Sequence[str] | None = None) -> int:
    """Run `tandem` and return its exit status.

    0: success, 1: error, 2: wrong usage, 128 + n: stopped by signal n.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    interruption = Interruption()
    try:
        with interruption.raised():
            try:
                return _run(arguments)
            finally:
                finish_output()
    except KeyboardInterrupt:
        return interruption.status
    except EngineError as error:
        note_error(error)
        return 1
    except BrokenPipeError:
        return 0  # the reader closed the pipe
    except Exception:
        if interruption.is_set:  # compiled modules may turn it into another exception
            return interruption.status
        raise


def run() -> NoReturn:
    """Run `tandem` as a process; signals during its last steps stop it immediately."""
    status = main()
    end_at_once()
    gc.freeze()  # the system frees the memory faster than Python
    sys.exit(status)


def _run(arguments: Sequence[str]) -> int:
    use_engine_pack()
    if arguments and arguments[0] in COMMANDS:
        prepare_streams()
        return _run_command(arguments)
    return _open_window(arguments)


def _run_command(arguments: Sequence[str]) -> int:
    name = arguments[0]
    summary, module = COMMANDS[name]
    with importing():
        code = import_module(f"app.cli.{module}")
    sentence = f"{summary[0].upper()}{summary[1:]}."
    parser = CommandParser(prog=f"tandem {name}", description=sentence)
    getattr(code, f"add_{name}")(parser)
    args = parser.parse_args(arguments[1:])
    _check_surroundings()
    getattr(code, f"run_{name}")(args)
    return 0


def _open_window(arguments: Sequence[str]) -> int:
    prepare_streams()
    width = max(len(name) for name in COMMANDS)
    lines = [f"  {name:{width}}  {summary}" for name, (summary, _) in COMMANDS.items()]
    parser = CommandParser(
        prog="tandem",
        usage="tandem [MODEL.gguf | --demo] [--simulate RIG] [--new-window]\n"
        "       tandem COMMAND [options]\n       tandem --quit\n       tandem --version",
        description="Run one GGUF language model on all devices of this machine.",
        epilog="commands:\n"
        + "\n".join(lines)
        + "\n\n`tandem COMMAND --help` shows a command's options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model", nargs="?", metavar="MODEL.gguf", help="open the window with this model"
    )
    parser.add_argument(
        "--demo", action="store_true", help="open the window with the bundled model"
    )
    parser.add_argument(
        "--simulate", metavar="RIG", default="",
        help="plan for simulated devices, for example 2x3090,1x3060",
    )  # fmt: skip
    parser.add_argument(
        "--new-window", action="store_true",
        help="open another window instead of using the open one",
    )  # fmt: skip
    parser.add_argument(
        "--quit", action="store_true", help="close the open window and wait until it has closed"
    )
    parser.add_argument("--version", action="store_true", help="show the version and exit")
    args = parser.parse_args(arguments)
    if args.version:
        write(f"tandem {version()}")
        return 0
    if args.quit:
        return _quit_window()
    _check_surroundings()
    is_demo = args.demo or args.model == "demo"
    if args.model is not None and not is_demo:
        _check_model(args.model)
    model = None if is_demo else args.model
    with _explaining_qt():
        check_display()
        if not (args.new_window or args.simulate):
            from app.core.process.single_window import hand_over

            if hand_over(model, demo=is_demo):
                write("Tandem is already open; its window was notified.")
                return 0
        from app.run import run_window
    return run_window(model, demo=is_demo, simulate=args.simulate)


def _quit_window() -> int:
    with _explaining_qt():
        from app.core.process.single_window import quit_window

        if not quit_window():
            raise EngineError("Tandem's window did not close.", "Close it manually.")
    return 0


def _check_surroundings() -> None:
    """Check what psutil and MKL need; without it, they fail with a traceback or a crash.

    Raises:
        EngineError: the working directory was deleted, or /proc is not mounted.
    """
    try:
        os.getcwd()
    except OSError:
        raise EngineError(
            "The working directory was deleted.", "Start Tandem from another folder."
        ) from None
    if sys.platform == "linux" and not PROC_MEMORY.exists():
        raise EngineError(
            "{path} cannot be read, so this machine's memory is unknown.",
            "Mount /proc.",
            path=str(PROC_MEMORY),
        )


def _check_model(word: str) -> None:
    if Path(word).exists():
        return
    if Path(word).suffix or Path(word).name != word:
        raise EngineError("There is no file {path}.", "Check its path.", path=word)
    from difflib import get_close_matches  # imported late to speed up the start

    meant = get_close_matches(word, COMMANDS, 1)
    raise EngineError(
        "{word} is neither a command nor a file.",
        "Did you mean 'tandem {meant}'?" if meant else "`tandem --help` lists the commands.",
        word=word,
        meant="".join(meant),
    )


@contextmanager
def _explaining_qt() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        if missing := missing_qt_library(error):
            raise missing from None
        raise


if __name__ == "__main__":
    run()
