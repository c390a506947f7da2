"""Tools and template variables that a request wishes in its prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.errors import PromptError
from engine.text.messages import EFFORT_VARIABLE, THINKING_VARIABLES, Tool
from engine.text.tool_calls.turns import read_object

_TAKEN = frozenset({"self", "messages", "tools", "add_generation_prompt", "now"})


@dataclass(frozen=True, slots=True)
class PromptWishes:
    """Tools and template variables that a request wishes in its prompt.

    Attributes:
        variables: variables of the chat template.
        tools: functions that the model is told about.
    """

    variables: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[Tool, ...] = ()

    @classmethod
    def of(
        cls, thinks: bool | None, effort: str, variables: str = "", tools: Sequence[Tool] = ()
    ) -> PromptWishes:
        """Return the wishes of a request; see `engine.events.Generate`.

        Raises:
            PromptError: the variables are no JSON object, or would replace what a request has.
        """
        wished: dict[str, Any] = {} if thinks is None else dict.fromkeys(THINKING_VARIABLES, thinks)
        if effort:
            wished[EFFORT_VARIABLE] = effort
        if variables:
            wished |= read_object(variables, "The variables for the chat template")
        if taken := sorted(_TAKEN & wished.keys()):
            raise PromptError(
                f"The chat template gets {taken[0]} from the request itself.",
                "Leave it out of the variables.",
            )
        return cls(wished, tuple(tools))
