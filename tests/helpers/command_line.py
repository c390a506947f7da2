"""The result of a run of `tandem`: its output, its messages and its exit status."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
GREEDY = ("-n", "8", "--temp", "0", "--ignore-eos")


@dataclass(frozen=True)
class Outcome:
    status: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """JSON document on stdout, which has nothing else."""
        assert self.status == 0, self.err
        return json.loads(self.out)


Run = Callable[..., Outcome]


def assert_refused(outcome: Outcome, problem: str) -> None:
    """Check for status 1, nothing on stdout and one line on stderr."""
    assert outcome.status == 1
    assert outcome.out == ""
    assert problem in outcome.err
    assert outcome.err.count("\n") == 1
    assert outcome.err.endswith("\n")
    assert "Traceback" not in outcome.err
