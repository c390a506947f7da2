"""Finds texts that the window would show in English, whatever its language.

Two rules, both over string literals that no function of `core.translation` gets: what a function
shows that is known to show its argument (`SHOWN`), and whatever reads like words anywhere else.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOOKED_UP = ("tr", "tr_later", "tr_n")

SHOWN: dict[str, tuple[int | str, ...]] = {
    "label": (0,), "button": (0, 2, "name"), "set_tip": (1,), "PlainLabel": (0, "text"),
    "ElidedLabel": (0, "text"), "IconButton": (1,), "HoverButton": (1,), "Dock": (0,),
    "QDockWidget": (0,), "QAction": (0, 1), "QPushButton": (0,), "QCheckBox": (0,),
    "QRadioButton": (0,), "QMenu": (0,), "QGroupBox": (0,),
    "Notice": (0, 1, 3, "text", "hint", "action"),
    "setText": (0, 1), "setAccessibleName": (0,), "setAccessibleDescription": (0,),
    "setWindowTitle": (0,), "setPlaceholderText": (0,), "setTitle": (0,), "setToolTip": (0,),
    "setSuffix": (0,), "setPrefix": (0,), "setSpecialValueText": (0,), "setLabelText": (0,),
    "setHorizontalHeaderLabels": (0,), "set_text": (0,), "set_full_text": (0,), "add_button": (1,),
    "add_panel": (1,), "addAction": (0, 1), "addItem": (0,), "addItems": (0,), "addRow": (0,),
    "addTab": (1,), "addMenu": (0,), "insertItem": (1,), "setTabText": (1,),
    "row_item": (0, 1, "tip"),
    "list_item": (0, 1, "tip"), "getOpenFileName": (1, 3), "getSaveFileName": (1, 3),
    "getExistingDirectory": (1,), "EngineError": (0, 1, "hint"), "warning": (1, 2),
    "question": (1, 2), "information": (1, 2), "drawText": (-1,), "set_signs": (1,), "Sign": (1, 2),
}  # fmt: skip
"""Functions and methods that show words, and the positions or names of the arguments shown."""

UNSEEN = (
    "setObjectName", "setProperty", "QKeySequence", "setShortcut", "setStyleSheet", "LatestJob",
    "Thread", "getLogger", "compile", "sub", "fullmatch", "match", "search", "split", "partition",
    "ValueError", "TypeError", "RuntimeError", "AssertionError", "NotImplementedError", "KeyError",
    "OSError", "deque", "fromtimestamp", "strftime", "namedtuple", "TypeVar", "setApplicationName",
    "DatabaseError", "Cancelled", "set_role", "setApplicationDisplayName", "_option",
)  # fmt: skip
"""Functions and methods whose words nobody sees."""

LOGS = ("log", "logging")

EVERYWHERE = (
    "Tandem", "Bearer", "MiB", "GiB", "tok/s", "min",
    "Inter", "JetBrains Mono", "DejaVu Sans Mono", "Menlo", "Consolas",
)  # fmt: skip
"""Words that are the same in all languages, or nobody sees."""

NAMES = {
    "app/chat/views/message_parts.py": {"delete branch"},
    "app/chat/attachments/documents.py": {"no file", "no text", "too large", "too long"},
    "app/chat/attachments/draft_files.py": {"file "},
    "app/chat/store.py": {"id, version, title, updated, head", "chat, id, data"},  # SQL
    "app/chat/export.py": {"Markdown (*.md)", "PDF (*.pdf)", "JSON (*.json)"},
    "app/chat/tool_use.py": {  # what a model is told
        "This call was cut off before it was complete, so it did not run.",
        "The user has not approved this call.",
        "This call has no result yet.",
        "This call succeeded without any output.",
        "This call failed.",
        "The user refused this call.",
        "The user stopped this call before it had a result.",
    },
    "app/chat/listing/titles.py": {  # what a model is asked
        "Write a title for this conversation in at most six words, in the language of the "
        "conversation. Reply with the title only."
    },
    "app/chat/library.py": {"restore "},
    "app/server/page/session.py": {"server of this window"},
    "app/tools/page/tool_session.py": {"secrets of "},
    "app/tools/page/server_form.py": {
        "npx -y @modelcontextprotocol/server-filesystem /home/me/Documents",
        '{"mcpServers": {"files": {"command": "npx", "args": ["-y", "…"]}}}',
        "Authorization: Bearer …",
    },
    "app/tools/results.py": {  # for the model
        "[The tool returned nothing.]",
        "\n[Truncated: the first ",
        " bytes",
    },
    "app/tools/server_store.py": {'{"mcpServers": {"name": {"command": "…"}}}', "headers of "},
    "app/server/page/server_panel.py": {  # for a terminal
        "http://localhost:3000, https://example.org",
        ' -H "Authorization: Bearer YOUR_KEY"',
        r'"{\"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}]}"',
        '-H "Content-Type: application/json"',
        "curl ",
    },
    "app/chat/views/chat_list.py": {"MMM yyyy"},
    "app/widgets/theme.py": {"Fusion"},
    "app/chat/markdown/__init__.py": {"Formula", "Piece", "Portion", "Rule", "Table"},
    "app/chat/views/code_view.py": {"Comment", "Keyword", "Token."},
    "app/window/desktop.py": {"Update"},
    "app/devices/split/views/device_row.py": {"KV cache", "other programs"},
    "app/core/process/spare_time.py": {"Forecaster", "Calibration", "Planner", "Fit"},
    "app/widgets/shortcuts.py": {
        "Esc",
        "Return",
        "Enter",
        "Del",
        "Backspace",
        "Right",
        "Up",
        "Left",
        "Down",
        "Home",
        "End",
    },
    "app/models/current/model_session.py": {  # for a model that knows English alone
        "What is Tandem?",
        "What is tensor parallelism?",
        "What is a KV cache?",
        "What does Q4_K_M mean?",
    },
    "app/core/process/crash.py": {"%(asctime)s %(levelname)s %(name)s: %(message)s"},
    "app/window/help/diagnostics.py": {  # a report is in English, for whoever mends the mistake
        "# Tandem diagnostics",
        "## Settings that differ from the default",
        "not usable: ",
        "Python",
        "Qt",
        "Triton",
    },
    "app/window/help/licences.py": {"Classifier"},
    "app/devices/monitor/record.py": {
        "Time",
        "Seconds",
        "Message",
        "Tokens per second",
    },  # of a CSV file
    "app/devices/monitor/views/graph.py": {" computed", " waited"},
    "app/models/library/scan.py": {"Hugging Face", "LM Studio", "Ollama", "Jan"},
    "app/core/settings.py": {
        "Appearance",
        "Chats",
        "Models",
        "Downloads",
        "Engine",
        "Notifications",
        "Updates",
        "Privacy",
        "at once",
        "next load",
        "next start",
        "English",
        "Deutsch",
    },
}
"""Words that are names in the code, by file; what is shown for them is looked up."""

CODE = re.compile(
    r"^[<'][a-z!]|\{[a-z-]+:|-src |^\"\]::"
    r"|\b(SELECT|INSERT|DELETE FROM|CREATE|PRAGMA|BEGIN|PARTITION BY)\b"
)
"""HTML, rules of style sheets and browsers, and SQL."""

WORDS = re.compile(
    r"[A-Za-z]{2}\S* (\S+ )*?\S*[A-Za-z]{2}"  # two words
    r"|^[A-Z][a-z]+[ .…:]?$"  # one with a capital letter
    r"|\d [a-z]{3}|^ [a-z]{3}[a-z .,;:]*$|^[a-z .,;:]*[a-z]{3} $"  # with a number
)
"""What reads like words that people see."""


def unseen_texts(tree: ast.Module) -> set[int]:
    """Return the identities of all nodes in which no text is shown, or all are looked up."""
    found: set[int] = set()
    for node in ast.walk(tree):
        inner: list[ast.AST] = []
        if isinstance(node, ast.Call):
            name = called(node)
            is_log = isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) in LOGS
            if name in LOOKED_UP or name in UNSEEN or is_log:
                inner = [node]
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            inner = [node]  # a docstring
        elif isinstance(node, ast.AnnAssign | ast.arg):
            inner = [node.annotation] if node.annotation else []
        elif isinstance(node, ast.FunctionDef):
            inner = [node.returns] if node.returns else []
        elif isinstance(node, ast.Dict):
            inner = [key for key in node.keys if key is not None]
        elif isinstance(node, ast.Assert):
            inner = [node]
        elif isinstance(node, ast.Subscript):
            inner = [node.slice]
        elif isinstance(node, ast.Compare):
            inner = [node.left, *node.comparators]
        elif isinstance(node, ast.FormattedValue) and node.format_spec is not None:
            inner = [node.format_spec]
        found |= {id(each) for part in inner for each in ast.walk(part)}
    return found


def called(node: ast.Call) -> str:
    """Return the name of the function or method that is called."""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def shown_arguments(node: ast.Call) -> Iterator[ast.AST]:
    """Yield the arguments of a call that a function of `SHOWN` shows."""
    for place in SHOWN.get(called(node), ()):
        if isinstance(place, str):
            yield from (key.value for key in node.keywords if key.arg == place)
        elif -len(node.args) <= place < len(node.args):
            yield node.args[place]


def literals(node: ast.AST) -> Iterator[ast.Constant]:
    """Yield the string literals of an argument, not those inside further calls."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node
    if isinstance(node, ast.Call):
        return
    for child in ast.iter_child_nodes(node):
        yield from literals(child)


def forgotten_texts(path: Path) -> list[str]:
    """Return the texts of a file that are not looked up, as "line: text"."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    unseen, found = unseen_texts(tree), {}
    names = NAMES.get(path.relative_to(ROOT).as_posix(), set())
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and id(node) not in unseen:
            for argument in shown_arguments(node):
                for literal in literals(argument):
                    if re.search("[A-Za-z]{2}", str(literal.value)):
                        found[id(literal)] = literal
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and WORDS.search(node.value)
        ):
            found[id(node)] = node
    return [
        f"{literal.lineno}: {literal.value!r}"
        for key, literal in found.items()
        if key not in unseen
        and literal.value not in names
        and str(literal.value).strip(" –") not in EVERYWHERE
        and not CODE.search(str(literal.value))
    ]


def bad_lookups(path: Path) -> list[str]:
    """Return calls of `app.core.translation` that no catalog can serve, as "line: why".

    An argument is one literal, or comes from a constant that `tr_later` has listed: whatever is put
    together before it is looked up is in no catalog.
    """
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call) or called(node) not in LOOKED_UP:
            continue
        name = called(node)
        for argument in node.args[: 2 if name == "tr_n" else 1]:
            is_literal = isinstance(argument, ast.Constant)
            is_made = isinstance(argument, ast.JoinedStr | ast.BinOp) or (
                isinstance(argument, ast.Call) and called(argument) in ("format", "join", "replace")
            )
            if not is_literal and (is_made or name != "tr"):
                found.append(f"{node.lineno}: {name}() of {ast.unparse(argument)}")
    return found
