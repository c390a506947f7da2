"""The program that checks grammars: for each line of JSON with one, a line with its error."""

from __future__ import annotations

import json
import threading

from engine.decoding.grammar.compiling import check
from engine.decoding.grammar.limits import MAX_MEMORY, MAX_SECONDS
from engine.errors import GrammarError
from engine.sampling_params import Grammar
from engine.util.sandbox.answering import answer_lines, ending_after

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
