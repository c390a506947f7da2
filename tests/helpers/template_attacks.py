"""Chat templates that try to hang the process that renders them, or to fill its memory."""

from collections.abc import Iterator

NESTED_LISTS = (
    "{% set n = namespace(a=[1], b=[1]) %}{% for i in range(DEPTH) %}"
    "{% set n.a = [n.a, n.a] %}{% set n.b = [n.b, n.b] %}{% endfor %}"
)
"""Lists `n.a` and `n.b`; to compare them takes as many steps as 2 to the power of DEPTH."""

NESTED_TUPLES = NESTED_LISTS.replace("[", "(").replace("]", ",)")
NESTED_DICTS = (
    "{% set n = namespace(a={}, b={}) %}{% for i in range(DEPTH) %}"
    "{% set n.a = {1: n.a, 2: n.a} %}{% set n.b = {1: n.b, 2: n.b} %}{% endfor %}"
)

COMPARISONS = {
    "equal": "n.a == n.b",
    "unequal": "n.a != n.b",
    "in": "n.a in [n.b]",
    "not in": "n.a not in (n.b,)",
    "is eq": "n.a is eq n.b",
    "is in": "n.a is in [n.b]",
    "count": "[n.b].count(n.a)",
    "index": "[n.b].index(n.a)",
    "select": "[n.a] | select('eq', n.b) | list",
    "reject": "[n.a] | reject('in', [n.b]) | list",
    "dict": "dict(a=n.a) == dict(a=n.b)",
}
"""Expressions that compare `n.a` with `n.b` for equality."""

ORDERS = {
    "less": "n.a < n.b",
    "not less": "n.a >= n.b",
    "sort": "[n.a, n.b] | sort",
    "min": "[n.a, n.b] | min",
    "max": "[n.a, n.b] | max",
    "groupby": "[{'k': n.a}, {'k': n.b}] | groupby('k')",
}
"""Expressions that ask which of `n.a` and `n.b` is less."""

HASHES = {
    "key": "{n.a: 1}",
    "get": "{}.get(n.a)",
    "unique": "[n.a] | unique | list",
    "in dict": "n.a in {}",
    "item": "{}[n.a]",
}
"""Expressions that hash `n.a`."""

SEARCHES = {
    "rfind": "('a' * SIZE).rfind('ab' ~ 'a' * (SIZE // 2))",
    "rindex": "('a' * SIZE).rindex('ab' ~ 'a' * (SIZE // 2))",
    "rpartition": "('a' * SIZE).rpartition('ab' ~ 'a' * (SIZE // 2))",
    "rsplit": "('a' * SIZE).rsplit('ab' ~ 'a' * (SIZE // 2))",
    "strip": "('a' * SIZE).strip('b' * SIZE ~ 'a')",
    "lstrip": "('a' * SIZE).lstrip('b' * SIZE ~ 'a')",
    "trim": "('a' * SIZE) | trim('b' * SIZE ~ 'a')",
}
"""Expressions that take SIZE squared steps; SIZE is about a million."""

NUMBERS = {
    "round": "1 | round(-SIZE)",
    "round floor": "1 | round(SIZE, 'floor')",
    "int round": "[7] | map('round', -SIZE) | list",
}
"""Expressions that compute a power of ten with SIZE digits; SIZE is about a billion."""

PARTS = "('ab ' * (7000 * SIZE))"
"""A text of millions of words."""

FILLS = {
    "format method": "('{0}' * SIZE).format('a' * 10000000)",
    "format of names": "('{a}' * SIZE).format(a='a' * 10000000)",
    "format_map": "('{a}' * SIZE).format_map({'a': 'a' * 10000000})",
    "format filter": "('%(a)s' * SIZE) | format(a='a' * 10000000)",
    "percent": "('%(a)s' * SIZE) % {'a': 'a' * 10000000}",
    "mapped format": "['%(a)s' * SIZE] | map('format', a='a' * 10000000) | list",
    "tojson": "range(10 * SIZE) | list | tojson(indent='a' * 1000000)",
    "tojson separators": "range(10 * SIZE) | list | tojson(separators=('a' * 1000000, ':'))",
    "strftime": "strftime_now('%c' * (10000 * SIZE))",
    "split": f"[{', '.join([PARTS + '.split()'] * 3)}] | length",
    "rsplit": f"[{', '.join([PARTS + '.rsplit()'] * 3)}] | length",
    "batch": "('a' * (20000 * SIZE)) | batch(1) | list | length",
    "sum of lists": "([[0] * 1000000] * SIZE) | sum(start=[]) | length",
    "slices": "('a' * (20000 * SIZE)) | map('list') | list | length",
}
"""Expressions that make gigabytes; SIZE is about 700."""

COMPILES = {
    "attributes": "{{ a.b }}",
    "loops": "{% for a in b %}{% endfor %}",
    "branches": "{% if a %}{% elif b %}{% endif %}",
    "filters": "{{ a | e }}",
    "sets": "{% set a = 1 %}",
    "macros": "{% macro a(b) %}{% endmacro %}",
}
"""Pieces of source whose repetition takes long to compile."""

DEEP_SOURCES = {
    "not": "{{ " + "not " * 30_000 + "1 }}",
    "minus": "{{ " + "-" * 100_000 + "1 }}",
    "lists": "{{ " + "[" * 60_000 + "]" * 60_000 + " }}",
    "ifs": "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
    "loops": "{% for a in b %}" * 3000 + "{% endfor %}" * 3000,
    "sum": "{{ 1" + "+1" * 60_000 + " }}",
    "power": "{{ 2" + "**1" * 40_000 + " }}",
    "joins": "{{ missing.name" + "~1" * 60_000 + " }}",
    "subscripts": "{{ a" + "[0]" * 40_000 + " }}",
    "filters": "{{ a" + "|string" * 15_000 + " }}",
}
"""Sources that are nested deeply."""


def comparisons(depth: int) -> Iterator[tuple[str, str]]:
    """Yield names and sources that compare or hash values nested `depth` deep."""
    kinds = {
        "lists": (NESTED_LISTS, COMPARISONS | ORDERS),
        "tuples": (NESTED_TUPLES, COMPARISONS | ORDERS | HASHES),
        "dicts": (NESTED_DICTS, COMPARISONS),
    }
    for kind, (start, expressions) in kinds.items():
        for name, expression in expressions.items():
            source = start.replace("DEPTH", str(depth)) + "{{ " + expression + " }}"
            yield f"{name} of {kind}, {depth} deep", source


def sized(expressions: dict[str, str], size: int) -> Iterator[tuple[str, str]]:
    """Yield names and sources of expressions that have SIZE in them."""
    for name, expression in expressions.items():
        yield f"{name}, {size}", "{{ " + expression.replace("SIZE", str(size)) + " }}"


def long_sources(n_chars: int) -> Iterator[tuple[str, str]]:
    """Yield names and sources of about `n_chars` characters that take long to compile."""
    for name, piece in COMPILES.items():
        yield f"{name}, {n_chars} characters", piece * (n_chars // len(piece))
