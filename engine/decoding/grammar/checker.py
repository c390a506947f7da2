"""Checks grammars in child processes, so that none can hang or crash the engine."""

from __future__ import annotations

import atexit
import json
import re
import threading
import time
from collections import OrderedDict
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from engine.decoding.grammar.schema import (
    MAX_AT_ONCE,
    MAX_CHARACTERS,
    MAX_DEPTH,
    MAX_MEMORY,
    MAX_REQUEST,
    MAX_SECONDS,
    MAX_STATES,
    MAX_SYMBOLS,
    NO_TEXT,
    Schema,
    as_lark,
    error_of,
    line_and_column,
    place_of_rule,
    read_schema,
    short_problem,
    unusable,
)
from engine.errors import Cancelled, EngineError, GrammarError, Sentence
from engine.sampling_params import Grammar
from engine.util.child_program import answer_lines, ending_after
from engine.util.programs import program_command
from engine.util.progress import IsCancelled, never
from engine.util.sandbox import ChildEnded, Excess, FairSemaphore, LimitedChild

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

ITEM_SEPARATOR, KEY_SEPARATOR = ", ?", ": ?"
"""Regular expressions for the separators between JSON items and after a key.

They allow the whitespace that most models write within a line. More whitespace would not help
programs, and a confused model might write nothing else.
"""

PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
"""Line and column at the start of a message about a Lark grammar."""

REGEX_PLACE = re.compile(r"^ {4}( *)\^", re.MULTILINE)
"""The line that points at a column in a message about a regular expression."""

OPENING, CLOSING = "([{", ")]}"


def source_of(grammar: Grammar) -> str:
    """Return a grammar in llguidance's format.

    Raises:
        GrammarError: it is too long or too deeply nested, or has a syntax error.
    """
    _check_length(grammar)
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


def _check_length(grammar: Grammar, n_bytes: int = 0) -> None:
    n = len(grammar.text)
    if n > MAX_CHARACTERS or n_bytes > MAX_REQUEST:
        text = "The grammar has {n} characters; at most {most} are accepted."
        raise GrammarError(text, "", SIMPLER, n=n, most=MAX_CHARACTERS)


def _check_depth(text: str) -> None:
    """Reject brackets that are nested too deeply for a parser's stack."""
    depth = 0
    for char in text:
        depth += (char in OPENING) - (char in CLOSING and depth > 0)
        if depth > MAX_DEPTH:
            raise GrammarError("The grammar is nested more than {n} levels deep.", n=MAX_DEPTH)


def limits() -> LLParserLimits:
    """Return the limits for compiling a grammar and computing a mask."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_grammar_size=MAX_SYMBOLS, max_lexer_states=MAX_STATES, verbose_errors=False
    )


def compiled(grammar: Grammar, tokenizer: LLTokenizer) -> LLMatcher:
    """Return a matcher for a checked grammar.

    Raises:
        GrammarError: llguidance refuses it.
    """
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, source_of(grammar), log_level=0, limits=limits())
    if problem := matcher.get_error():
        raise error_from(grammar, problem)
    return matcher


def check(grammar: Grammar) -> None:
    """Check a grammar without a time limit.

    Raises:
        GrammarError: it cannot be used.
    """
    from llguidance import LLTokenizer

    matcher = compiled(grammar, LLTokenizer("byte"))
    is_possible = any(matcher.compute_bitmask()) and not matcher.get_error()
    if not is_possible and not matcher.is_accepting():
        problem = matcher.get_error()
        raise unusable(short_problem(problem) if problem else NO_TEXT)


def error_from(grammar: Grammar, problem: str) -> GrammarError:
    """Return the error for a grammar that llguidance refuses with the message `problem`."""
    if grammar.kind == "json_schema":
        return error_of(read_schema(grammar.text), problem, _problem_of)
    place = ""
    if grammar.kind == "regex" and (caret := REGEX_PLACE.search(problem)):
        place = Sentence("column {n}", n=len(caret[1]) + 1)
    elif grammar.kind == "lark" and (at := PLACE.match(problem)):
        place = place_of_rule(grammar.text, problem) or line_and_column(int(at[1]), int(at[2]))
    return unusable(short_problem(PLACE.sub("", problem)), place)


def _problem_of(schema: Schema) -> str:
    from llguidance import LLMatcher

    is_error, messages = LLMatcher.validate_grammar_with_warnings(
        _schema_source(schema), limits=limits()
    )
    return messages[0] if is_error else ""


COMMAND = program_command("engine.decoding.grammar.checker")  # command of the child
MAX_KNOWN = 256  # number of grammars with a cached result; requests often repeat the same ones
MAX_REMEMBERED = 2048  # maximum length of a cached error, which may quote the grammar

EXCESS_S = 60.0
"""Seconds for which an error about time or memory is cached; a later attempt may succeed."""

SIMPLER = Sentence("Simplify it.")


class GrammarChecker:
    """Checker of all grammars in a process: a few in parallel, others in order of arrival."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turns = FairSemaphore(MAX_AT_ONCE)
        self._idle: list[LimitedChild] = []
        self._busy: set[LimitedChild] = set()
        self._known: OrderedDict[bytes, tuple[GrammarError | None, float]] = OrderedDict()

    def check(self, grammar: Grammar, is_cancelled: IsCancelled = never) -> None:
        """Check a grammar; thread-safe.

        Raises:
            GrammarError: it cannot be used; the error names the place.
            Cancelled: `is_cancelled` has returned True.
        """
        request = _request(grammar)
        key = blake2b(request, digest_size=16).digest()
        if not self._recall(key):
            if not self._turns.acquire(is_cancelled):
                raise Cancelled(CHECKING)
            try:
                if not self._recall(key):  # another thread may have checked it meanwhile
                    self._ask(key, request, is_cancelled)
            finally:
                self._turns.release()

    def close(self) -> None:
        """Stop the children, even busy ones; the next grammar starts a new one."""
        with self._lock:
            for child in self._busy:
                child.kill()  # closed by the thread that waits for its answer
            idle, self._idle = self._idle, []
        for child in idle:
            child.close()

    def _recall(self, key: bytes) -> bool:
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
        child = None
        error: GrammarError | None = None
        try:
            child = self._taken()
            child.wait_until_ready(is_cancelled)
            if answer := child.ask(request, MAX_SECONDS, is_cancelled):
                message, place, hint = (_read(answer[n]) for n in ("message", "place", "hint"))
                error = GrammarError(message, place, hint)
            self._remember(key, error, float("inf"))
        except ChildEnded as ended:
            self._drop(child)
            if ended.excess is Excess.CANCELLED:
                raise Cancelled(CHECKING) from None
            error = unusable(_why(ended), hint=SIMPLER)
            self._remember(key, error, EXCESS_S)
        except OSError as problem:
            self._drop(child)
            raise EngineError(
                "The program that checks grammars cannot be started: {problem}.",
                "Allow Tandem to start programs, or do not use structured output.",
                problem=Sentence(problem.strerror or str(problem)),
            ) from problem
        except BaseException:  # e.g. KeyboardInterrupt, after which an answer may still arrive
            self._drop(child)
            raise
        else:
            with self._lock:
                self._busy.discard(child)
                self._idle.append(child)
        if error is not None:
            raise error

    def _taken(self) -> LimitedChild:
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


CHECKING = Sentence("Checking the grammar")


def _request(grammar: Grammar) -> bytes:
    text = json.dumps({"kind": grammar.kind, "text": grammar.text}, ensure_ascii=False)
    line = (text + "\n").encode("utf-8", "replace")
    _check_length(grammar, len(line))
    return line


def _why(ended: ChildEnded) -> Sentence:
    if ended.excess is Excess.TIME:
        return Sentence("compiling it takes more than {n:g} seconds", n=MAX_SECONDS)
    if ended.is_out_of_memory:
        return Sentence("compiling it takes more than {n} MiB of memory", n=MAX_MEMORY >> 20)
    return Sentence("its rules are nested too deeply")


shared_checker = GrammarChecker()  # this process's checker; its children exit with the process

atexit.register(shared_checker.close)


def check_grammar(grammar: Grammar, is_cancelled: IsCancelled = never) -> None:
    """Check a grammar for structured output, which takes a few seconds at most, plus any waiting.

    Args:
        is_cancelled: polled on any thread; True cancels the check.

    Raises:
        GrammarError: it cannot be used; the error names the place.
        Cancelled: `is_cancelled` has returned True.
    """
    shared_checker.check(grammar, is_cancelled)


STACK = 512 << 10
"""Stack size for checking, smaller than that of any engine thread, so that the child crashes
instead of the engine if a grammar makes llguidance recurse too deeply."""


def _answer(line: bytes) -> dict[str, object]:
    request = json.loads(line)
    grammar, answer = Grammar(request["kind"], request["text"]), dict[str, object]()
    with ending_after(2 * MAX_SECONDS):
        checking = threading.Thread(target=_check, args=(grammar, answer))
        checking.start()
        checking.join()
    return answer


def _check(grammar: Grammar, answer: dict[str, object]) -> None:
    try:
        check(grammar)
        return
    except GrammarError as caught:
        error = caught
    except Exception as caught:  # noqa: BLE001 llguidance's unexpected errors must not pass
        why = f"{type(caught).__name__}: {caught}"
        error = unusable(why)
    answer.update({n: _plain(getattr(error, n)) for n in ("message", "place", "hint")})


def _plain(value: object) -> object:
    """Return a message's value in JSON-compatible form, with templates as lists."""
    if not isinstance(value, Sentence):
        return value
    return [value.template, {name: _plain(inner) for name, inner in value.values.items()}]


def _read(plain: Any) -> Any:
    if not isinstance(plain, list):
        return plain
    template, values = plain
    return Sentence(template, **{name: _read(inner) for name, inner in values.items()})


if __name__ == "__main__":
    threading.stack_size(STACK)
    answer_lines(_answer, MAX_MEMORY)
