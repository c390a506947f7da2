"""Checks grammars in child processes, so that none can hang or end the process that asks."""

from __future__ import annotations

import atexit
import json
import re
import threading
import time
from collections import OrderedDict
from hashlib import blake2b
from typing import TYPE_CHECKING

from engine.decoding.grammar.schema import (
    MAX_AT_ONCE,
    MAX_CHARACTERS,
    MAX_DEPTH,
    MAX_MEMORY,
    MAX_REQUEST,
    MAX_SECONDS,
    MAX_STATES,
    MAX_SYMBOLS,
    Schema,
    as_lark,
    error_of,
    place_of_rule,
    read_schema,
    told,
)
from engine.errors import Cancelled, EngineError, GrammarError
from engine.sampling_params import Grammar
from engine.util.child_program import answer_lines, ending_after
from engine.util.programs import program_command
from engine.util.progress import IsCancelled, never
from engine.util.sandbox import ChildEnded, Excess, FairSemaphore, LimitedChild

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

ITEM_SEPARATOR, KEY_SEPARATOR = ", ?", ": ?"
"""Regular expressions of what stands between the items of JSON, and behind a key.

That is the white space that most models write in a line. More would be no better to read for a
program, and a model that has lost its way might write nothing else.
"""

PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
"""Line and column at the beginning of a message on a Lark grammar."""

REGEX_PLACE = re.compile(r"^ {4}( *)\^", re.MULTILINE)
"""The line with which a message on a regular expression points at a column."""

OPENING, CLOSING = "([{", ")]}"


def source_of(grammar: Grammar) -> str:
    """Return a grammar in the form that llguidance compiles.

    Raises:
        GrammarError: it is too long, nested too deep, or not written in its language.
    """
    if len(grammar.text) > MAX_CHARACTERS:
        n = len(grammar.text)
        raise GrammarError(
            f"The grammar has {n} characters; at most {MAX_CHARACTERS} are accepted."
        )
    if grammar.kind == "json_schema":
        return _schema_source(read_schema(grammar.text))
    from llguidance import LLMatcher

    _check_depth(grammar.text)
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    text = as_lark(grammar.text) if grammar.kind == "gbnf" else grammar.text
    return LLMatcher.grammar_from_lark(text)


def _schema_source(schema: Schema) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_json_schema(
        schema,
        overrides={
            "whitespace_flexible": False, "item_separator": ITEM_SEPARATOR,
            "key_separator": KEY_SEPARATOR, "lenient": False, "coerce_one_of": False,
        },
    )  # fmt: skip


def _check_depth(text: str) -> None:
    """Refuse brackets that are nested too deep for a parser's stack."""
    depth = 0
    for char in text:
        depth += (char in OPENING) - (char in CLOSING and depth > 0)
        if depth > MAX_DEPTH:
            raise GrammarError(f"The grammar is nested more than {MAX_DEPTH} deep.")


def limits() -> LLParserLimits:
    """Return what compiling a grammar and computing a mask may take."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_grammar_size=MAX_SYMBOLS, max_lexer_states=MAX_STATES, verbose_errors=False
    )


def compiled(grammar: Grammar, tokenizer: LLTokenizer) -> LLMatcher:
    """Return the matcher of a grammar that was checked.

    Raises:
        GrammarError: llguidance refuses it.
    """
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, source_of(grammar), log_level=0, limits=limits())
    if problem := matcher.get_error():
        raise error_from(grammar, problem)
    return matcher


def check(grammar: Grammar) -> None:
    """Check a grammar, however long that takes; see `engine.decoding.grammar.checker` for limits.

    Raises:
        GrammarError: it cannot be used.
    """
    from llguidance import LLTokenizer

    matcher = compiled(grammar, LLTokenizer("byte"))
    is_possible = any(matcher.compute_bitmask()) and not matcher.get_error()
    if not is_possible and not matcher.is_accepting():
        problem = matcher.get_error() or "no text has this form"
        raise GrammarError(f"The grammar cannot be used: {told(problem)}.")


def error_from(grammar: Grammar, problem: str) -> GrammarError:
    """Return the error of a grammar that llguidance refuses.

    Args:
        problem: why it does.
    """
    if grammar.kind == "json_schema":
        return error_of(read_schema(grammar.text), problem, _problem_of)
    place = ""
    if grammar.kind == "regex" and (caret := REGEX_PLACE.search(problem)):
        place = f"column {len(caret[1]) + 1}"
    elif grammar.kind == "lark" and (found := PLACE.match(problem)):
        place = place_of_rule(grammar.text, problem) or f"line {found[1]}, column {found[2]}"
    at = f" at {place}" if place else ""
    why = told(PLACE.sub("", problem))
    return GrammarError(f"The grammar cannot be used{at}: {why}.", place)


def _problem_of(schema: Schema) -> str:
    """Return why llguidance refuses a schema; "" if it does not."""
    from llguidance import LLMatcher

    is_error, messages = LLMatcher.validate_grammar_with_warnings(
        _schema_source(schema), limits=limits()
    )
    return messages[0] if is_error else ""


COMMAND = program_command("engine.decoding.grammar.checker")
"""Command of the child."""

MAX_KNOWN = 256
"""Number of grammars whose check is remembered; the same ones come again and again."""

MAX_REMEMBERED = 2048
"""Longest refusal that is remembered, in characters; it may quote the grammar."""

EXCESS_S = 60.0
"""Seconds for which a refusal for too much time or memory is remembered: a machine that is less
busy may come to another result."""

SIMPLER = "Make it simpler."


class GrammarChecker:
    """Checker of all grammars of a process; a few at once, others in order of arrival."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turns = FairSemaphore(MAX_AT_ONCE)
        self._idle: list[LimitedChild] = []
        self._busy: set[LimitedChild] = set()
        self._known: OrderedDict[bytes, tuple[GrammarError | None, float]] = OrderedDict()

    def check(self, grammar: Grammar, is_cancelled: IsCancelled = never) -> None:
        """Check a grammar; any thread may.

        Raises:
            GrammarError: it cannot be used; the error names the place.
            Cancelled: `is_cancelled` has returned True.
        """
        request = _request(grammar)
        key = blake2b(request, digest_size=16).digest()
        if not self._recall(key):
            if not self._turns.acquire(is_cancelled):
                raise Cancelled("Checking the grammar")
            try:
                if not self._recall(key):  # another thread may have checked it meanwhile
                    self._ask(key, request, is_cancelled)
            finally:
                self._turns.release()

    def close(self) -> None:
        """End the children, also while they check; the next grammar starts another."""
        with self._lock:
            for child in self._busy:
                child.kill()  # the thread that waits for its answer closes it
            idle, self._idle = self._idle, []
        for child in idle:
            child.close()

    def _recall(self, key: bytes) -> bool:
        """Return whether a grammar is known to be usable.

        Raises:
            GrammarError: it is known to be unusable.
        """
        with self._lock:
            if key not in self._known:
                return False
            self._known.move_to_end(key)
            error, expires = self._known[key]
            if time.monotonic() > expires:
                del self._known[key]
                return False
        if error is not None:
            raise GrammarError(error.message, error.place, error.hint)
        return True

    def _remember(self, key: bytes, error: GrammarError | None, seconds: float) -> None:
        if error is not None and len(error.message) + len(error.place) > MAX_REMEMBERED:
            return
        with self._lock:
            self._known[key] = error, time.monotonic() + seconds
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)

    def _ask(self, key: bytes, request: bytes, is_cancelled: IsCancelled) -> None:
        """Have a child check a grammar, and remember what it says."""
        child = None
        error: GrammarError | None = None
        try:
            child = self._taken()
            child.wait_until_ready(is_cancelled)
            if answer := child.ask(request, MAX_SECONDS, is_cancelled):
                error = GrammarError(answer["message"], answer["place"], answer["hint"])
            self._remember(key, error, float("inf"))
        except ChildEnded as ended:
            self._drop(child)
            if ended.excess is Excess.CANCELLED:
                raise Cancelled("Checking the grammar") from None
            error = GrammarError(f"The grammar cannot be used: {_why(ended)}.", "", SIMPLER)
            self._remember(key, error, EXCESS_S)
        except OSError as problem:
            self._drop(child)
            raise EngineError(
                f"The program that checks grammars cannot be started: {problem}.",
                "Let Tandem start programs, or leave the form of the answer open.",
            ) from problem
        except BaseException:  # such as Ctrl+C: an answer may be on its way
            self._drop(child)
            raise
        else:
            with self._lock:
                self._busy.discard(child)
                self._idle.append(child)
        if error is not None:
            raise error

    def _taken(self) -> LimitedChild:
        """Take a child that is idle and runs, or start one."""
        while True:
            with self._lock:
                if not self._idle:
                    break
                child = self._idle.pop()
                self._busy.add(child)
            if child.is_running:
                return child
            self._drop(child)
        child = LimitedChild(COMMAND, MAX_MEMORY)
        with self._lock:
            self._busy.add(child)
        return child

    def _drop(self, child: LimitedChild | None) -> None:
        if child is not None:
            child.close()
            with self._lock:
                self._busy.discard(child)


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
"""The checker of this process, whose children end with it."""

atexit.register(shared_checker.close)


def check_grammar(grammar: Grammar, is_cancelled: IsCancelled = never) -> None:
    """Check a form for answers, in at most some seconds once it is its turn.

    Args:
        is_cancelled: asked again and again, on any thread; returning True ends the check.

    Raises:
        GrammarError: it cannot be used; the error names the place.
        Cancelled: `is_cancelled` has returned True.
    """
    shared_checker.check(grammar, is_cancelled)


STACK = 512 << 10
"""Bytes of stack for checking, less than any thread of the engine has: where a grammar makes
llguidance call itself too often, this program ends rather than the engine."""


def _answer(line: bytes) -> dict[str, str]:
    request = json.loads(line)
    found = dict[str, str]()
    with ending_after(2 * MAX_SECONDS):
        checking = threading.Thread(
            target=_check, args=(Grammar(request["kind"], request["text"]), found)
        )
        checking.start()
        checking.join()
    return found


def _check(grammar: Grammar, found: dict[str, str]) -> None:
    """Put the error of a grammar into `found`, if it has one."""
    try:
        check(grammar)
    except GrammarError as error:
        found.update(message=error.message, hint=error.hint, place=error.place)
    except Exception as error:  # noqa: BLE001 what llguidance does not expect must not pass
        why = f"{type(error).__name__}: {error}"
        found.update(message=f"The grammar cannot be used: {why}.", hint="", place="")


if __name__ == "__main__":
    threading.stack_size(STACK)
    answer_lines(_answer, MAX_MEMORY)
