"""Checks grammars in a child process, so that none can hang or end the process that asks."""

from __future__ import annotations

import atexit
import json
import threading
from collections import OrderedDict

from engine.config.grammar import Grammar
from engine.constraints.limits import MAX_CHARACTERS, MAX_MEMORY, MAX_REQUEST, MAX_SECONDS
from engine.errors import EngineError, GrammarError
from engine.limited.child import ChildEnded, Excess, LimitedChild
from engine.programs import program_command

COMMAND = program_command("engine.constraints.program")
"""Command of the child."""

MOST_KNOWN = 64
"""Number of grammars that are known to be usable; the same ones come again and again."""

SIMPLER = "Make it simpler."


class GrammarChecker:
    """Checker of all grammars of a process; threads may share it and are served in turn."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: LimitedChild | None = None
        self._usable: OrderedDict[tuple[str, str], None] = OrderedDict()

    def check(self, grammar: Grammar) -> None:
        """Check a grammar.

        Raises:
            GrammarError: it cannot be used; the error names the place.
        """
        key = (grammar.kind, grammar.text)
        with self._lock:
            if key in self._usable:
                self._usable.move_to_end(key)
                return
            answer = self._ask(_request(grammar))
            if answer:
                raise GrammarError(answer["message"], answer["place"], answer["hint"])
            self._usable[key] = None
            if len(self._usable) > MOST_KNOWN:
                self._usable.popitem(last=False)

    def close(self) -> None:
        """End the child, also while it checks; the next grammar starts another."""
        child = self._child
        if child is not None:
            child.kill()  # whoever waits for its answer gets none, and gives the lock free
        with self._lock:
            self._drop()

    def _ask(self, request: bytes) -> dict[str, str]:
        try:
            child = self._started()
            child.wait_until_ready()
            return child.ask(request, MAX_SECONDS)
        except ChildEnded as error:
            self._drop()
            raise GrammarError(f"The grammar cannot be used: {_why(error)}.", "", SIMPLER) from None
        except OSError as error:
            self._drop()
            raise EngineError(
                f"The program that checks grammars cannot be started: {error}.",
                "Let Tandem start programs, or leave the form of the answer open.",
            ) from error
        except BaseException:  # such as Ctrl+C: an answer may be on its way
            self._drop()
            raise

    def _started(self) -> LimitedChild:
        if self._child is not None and not self._child.is_running:
            self._drop()
        if self._child is None:
            self._child = LimitedChild(COMMAND, MAX_MEMORY)
        return self._child

    def _drop(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None


def _request(grammar: Grammar) -> bytes:
    """Return the request to check a grammar, a line of JSON.

    Raises:
        GrammarError: it is too long.
    """
    text = json.dumps({"kind": grammar.kind, "text": grammar.text}, ensure_ascii=False)
    line = (text + "\n").encode("utf-8", "replace")
    if len(grammar.text) > MAX_CHARACTERS or len(line) > MAX_REQUEST:
        raise GrammarError(
            f"The grammar has {len(grammar.text)} characters; at most {MAX_CHARACTERS} are "
            "accepted.",
            "",
            SIMPLER,
        )
    return line


def _why(ended: ChildEnded) -> str:
    if ended.excess is Excess.TIME:
        return f"compiling it takes more than {MAX_SECONDS:g} seconds"
    if ended.is_out_of_memory:
        return f"compiling it takes more than {MAX_MEMORY >> 20} MiB of memory"
    return "its rules refer to each other too often"


shared_checker = GrammarChecker()
"""The checker of this process, whose child ends with it."""

atexit.register(shared_checker.close)


def check_grammar(grammar: Grammar) -> None:
    """Check a form for answers, in at most some seconds.

    Raises:
        GrammarError: it cannot be used; the error names the place.
    """
    shared_checker.check(grammar)
