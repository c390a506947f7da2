"""A Jinja sandbox with limits on time and memory, because templates come from untrusted files.

Jinja's own sandbox protects Python's internals, but does not limit time or memory. Here every loop
step, call, operator, filter and output draws on a budget of time and text, and an operation with a
result far larger than its inputs is refused before it runs. Work inside a single C function is not
counted, but the limits of the process stop it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from string import Formatter
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_TEXT = 1 << 24  # maximum characters in one text
MAX_TOTAL = 1 << 29  # maximum characters in all texts of one rendering
MAX_BITS = 4096  # maximum size of an integer
ITEM_SIZE = 16  # additional characters charged per list item
FREE_FILTERS = frozenset({"attr", "count", "d", "default", "first", "last", "length"})
"""Filters that read at most one item, so they are not charged by the value's size."""

WIDE = r"(\d{4,}|\*)"
WIDE_PERCENT = re.compile(rf"%(\([^)]*\))?[-+ #0]*({WIDE}|\d*\.{WIDE})")
WIDE_BRACES = re.compile(r"\d{4,}|\{")  # in a format specification, after the colon


class SandboxError(SecurityError):
    """Error in a template: the end of a sentence with placeholders, and their values.

    `engine.errors` is not imported, because the program must start quickly.
    """

    def __init__(self, template: str, **values: str | float) -> None:
        super().__init__(template.format(**values) if values else template)
        self.template, self.values = template, values


class Budget:
    """Remaining time and text of one rendering."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._left = MAX_TOTAL

    def spend(self, size: int) -> None:
        """Charge `size` characters; raise SandboxError if the budget is exceeded."""
        self._left -= size
        self.check_size(size if self._left >= 0 else MAX_TEXT + 1)
        if time.monotonic() > self._deadline:
            raise SandboxError("it runs for more than {n:g} seconds", n=self._seconds)

    def check_size(self, size: int, most: int = MAX_TEXT) -> None:
        """Raise SandboxError if one text is too long."""
        if size > most:
            raise SandboxError("it produces text that is too long")


_budget: ContextVar[Budget | None] = ContextVar("budget", default=None)


@contextmanager
def limited(seconds: float) -> Iterator[Budget]:
    """Set the budget of the rendering inside the `with` block."""
    budget = Budget(seconds)
    token = _budget.set(budget)
    try:
        yield budget
    finally:
        _budget.reset(token)


def spend(size: int) -> None:
    """Charge `size` characters to the current budget, if there is one."""
    budget = _budget.get()
    if budget is not None:
        budget.spend(size)


def text_size(value: object) -> int:
    """Return an upper bound on the length of `value` as text; counting stops at `MAX_TEXT`."""
    total, todo = 0, [value]
    while todo and total <= MAX_TEXT:
        item = todo.pop()
        total += ITEM_SIZE
        if isinstance(item, str | bytes):
            total += len(item)
        elif isinstance(item, Mapping):
            todo += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set | frozenset):
            todo += item
    return total


def result_size(name: str, text: str | bytes, args: list[Any]) -> int:
    """Return an upper bound on the length of what method or filter `name` returns for `text`."""
    largest = _largest(args)
    longest = max((text_size(arg) for arg in args), default=0)
    if name in ("center", "ljust", "rjust", "zfill", "truncate"):
        return len(text) + largest
    if name in ("expandtabs", "indent"):
        tab = "\t" if isinstance(text, str) else b"\t"
        places = len(text.splitlines()) if name == "indent" else text.count(tab)  # type: ignore[arg-type]
        return len(text) + (places + 1) * max(largest, longest)
    if name == "replace" and all(isinstance(arg, type(text)) for arg in args[:2]):
        old, new = args[:2]
        return len(text) + text.count(old) * len(new)
    if name in ("replace", "translate", "wordwrap"):
        return (len(text) + 1) * (longest + 1)
    if name in ("format", "format_map"):
        return MAX_TEXT + 1 if formats_wide(text) else len(text) + longest
    return len(text)


def formats_wide(text: str | bytes) -> bool:
    """Return whether a format has a width in the thousands, or takes it from its arguments."""
    text = str(text)
    if WIDE_PERCENT.search(text):
        return True
    try:
        return any(spec and WIDE_BRACES.search(spec) for _, _, spec, _ in Formatter().parse(text))
    except ValueError:
        return False  # invalid; formatting reports it


def _largest(args: Iterable[object]) -> int:
    return max((abs(arg) for arg in args if isinstance(arg, int)), default=0)


class BoundedCode(CodeGenerator):
    """Template compiler that makes loops, macros and `~` charge the budget."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:  # noqa: N802
        size = nodes.Const(literal_size(node.body))
        node.iter = call_environment("counted", node.iter, size)
        super().visit_For(node, frame)

    def visit_Macro(self, node: nodes.Macro, frame: Frame) -> None:  # noqa: N802
        charge = call_environment("charge", nodes.Const(literal_size(node.body)))
        node.body.insert(0, nodes.ExprStmt(charge))
        super().visit_Macro(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self.visit(call_environment("joined", *node.nodes), frame)


def literal_size(body: list[nodes.Node]) -> int:
    """Return the number of characters of literal text in a template's body."""
    return sum(len(data.data) for node in body for data in _find_texts(node))


def _find_texts(node: nodes.Node) -> Iterator[nodes.TemplateData]:
    if isinstance(node, nodes.TemplateData):
        yield node
    yield from node.find_all(nodes.TemplateData)


def call_environment(name: str, *args: nodes.Node) -> nodes.Call:
    """Return a call to the environment's method `name`."""
    return nodes.Call(nodes.EnvironmentAttribute(name), list(args), [], None, None)


class GenerationTag(Extension):
    """The tag `{% generation %}`, which marks replies for training; only a scope here."""

    tags = {"generation"}  # noqa: RUF012  Jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(lineno)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The Jinja environment that Hugging Face's chat templates expect, with a budget."""

    code_generator_class = BoundedCode
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, filters: Mapping[str, Callable[..., Any]] | None = None) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[LoopControlExtension, GenerationTag],
            finalize=_count_output,
        )
        del self.globals["lipsum"]
        for name, function in [*self.filters.items(), *(filters or {}).items()]:
            self.filters[name] = _bounded(name, function)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        """Raise immediately; Jinja would print `x.__class__` as an empty string."""
        text = "it accesses '{name}' on a {type}"
        raise SandboxError(text, name=attribute, type=type(obj).__name__)

    def counted(self, items: Iterable[Any], size: int) -> Iterator[Any]:
        """Yield the items of a loop whose body has `size` characters of literal text."""
        for item in items:
            spend(1 + size)
            yield item

    def charge(self, size: int) -> None:
        """Charge for a macro whose body has `size` characters of literal text."""
        spend(1 + size)

    def joined(self, *parts: object) -> str:
        """Concatenate the parts of a `~` expression."""
        spend(sum(map(text_size, parts)))
        return "".join(map(str, parts))

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function or method, charging for its result."""
        method = getattr(function, "__wrapped__", function)  # Jinja's sandbox wraps str.format
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, int):
            spend(_largest([*args, *kwargs.values()]))
        elif isinstance(owner, str | bytes):
            if name == "join" and args:
                args = (list(args[0]), *args[1:])
            _check_growth(name, owner, [*args, *kwargs.values()])
        spend(1)
        return super().call(context, function, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute a binary operator, charging for its result."""
        if operator == "+" or (operator == "%" and isinstance(left, str | bytes)):
            spend(text_size(left) + text_size(right))
            if operator == "%" and formats_wide(left):
                raise SandboxError("it uses a format width that is too large")
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length()
            bits = bits * abs(right) if operator == "**" else bits + right.bit_length()
            if bits > MAX_BITS:
                raise SandboxError("it computes a number that is too large")
        elif operator == "*":
            count, items = (left, right) if isinstance(left, int) else (right, left)
            unit = len(items) if isinstance(items, str | bytes) else text_size(items)
            spend(unit * max(count, 0) if isinstance(count, int) else 0)
        return super().call_binop(context, operator, left, right)


def _count_output(value: Any) -> Any:
    spend(text_size(value))
    return value


def _check_growth(name: str, text: str | bytes, args: list[Any]) -> None:
    if name == "join":
        items = args[0] if args else []
        spend(text_size(items) + len(items) * len(text))
    else:
        spend(result_size(name, text, args))


def _bounded(name: str, filter_: Callable[..., Any]) -> Callable[..., Any]:
    passed_first = 1 if hasattr(filter_, "jinja_pass_arg") else 0  # e.g. the environment

    @wraps(filter_)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        value, *rest = args[passed_first:]
        rest += kwargs.values()
        if name in ("batch", "slice"):
            spend(_largest(rest))
        if name == "join":
            value = list(value)
            args = (*args[:passed_first], value, *args[passed_first + 1 :])
            spend(text_size(value) + len(value) * max(map(text_size, rest), default=0))
        elif isinstance(value, str):
            _check_growth(name, value, rest)
        elif name not in FREE_FILTERS:
            spend(text_size(value) * (1 + _largest(rest) if name == "tojson" else 1))
        return filter_(*args, **kwargs)

    return bounded
