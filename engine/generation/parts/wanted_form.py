"""The form that an answer must have: a grammar that was asked for, or that of calls."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from engine.decoding.grammar.checker import check_grammar
from engine.errors import Cancelled, EngineError, GrammarError, PromptError, ToolError
from engine.sampling_params import Grammar
from engine.text.thinking import ThinkingMarks, thinking_marks
from engine.text.tool_calls.grammars import grammar_of_calls
from engine.text.tool_calls.turns import NO_PARAMETERS
from engine.util.progress import IsCancelled

if TYPE_CHECKING:
    from engine.decoding.grammar.matcher import Matcher
    from engine.generation.constrained.maker import Constraints
    from engine.generation.prompts import Prompts
    from engine.sampling_params import SamplingParams
    from engine.text.messages import Tool

log = logging.getLogger(__name__)


class AskedForm(Protocol):
    """What a request says of the form of its answer: see `engine.events.Generate`."""

    @property
    def sampling(self) -> SamplingParams: ...

    @property
    def grammar(self) -> Grammar | None: ...

    @property
    def tools(self) -> tuple[Tool, ...]: ...

    @property
    def tool_choice(self) -> str: ...


class WantedForm(NamedTuple):
    """The form that an answer must have.

    Attributes:
        matcher: matcher of the grammar; None where any answer will do.
        marks: marks of the thinking behind which it begins; None for those of the template.
    """

    matcher: Matcher | None
    marks: ThinkingMarks | None = None


def wanted_form(
    prompts: Prompts, constraints: Constraints, request: AskedForm, is_cancelled: IsCancelled
) -> WantedForm:
    """Return the form that the answer to a conversation must have.

    Where the model is to choose whether it calls a function, the schema of one may be beyond what
    grammars can say; then nothing holds it to the schema.

    Raises:
        GrammarError: the grammar that is asked for cannot be used.
        PromptError: the function that must be called is none that can be.
        Cancelled: `is_cancelled` has returned True.
    """
    tools, choice = callable_tools(request), request.tool_choice
    own = request.grammar or request.sampling.form
    if not tools or (choice == "auto" and own):
        return WantedForm(constraints.checked(own, own, is_cancelled) if own else None)
    form = prompts.template_use.form
    tokens = {text: token for token, text in prompts.control_marks.items()}
    grammar = grammar_of_calls(form, tools, tokens, choice)
    as_text = grammar_of_calls(form, tools, {}, choice)
    marks = form.thinking_marks if thinking_marks(prompts.template.source) else None
    try:
        return WantedForm(constraints.checked(grammar, as_text, is_cancelled), marks)
    except Cancelled:
        raise
    except EngineError as error:
        if choice != "auto":
            _check_parameters(tools, is_cancelled)
            raise PromptError(
                f"No call can be required of these functions. {error}", "Simplify their schemas."
            ) from error
        log.info("calls are not held to the schemas of their functions: %s", error)
        return WantedForm(None)


def _check_parameters(tools: Sequence[Tool], is_cancelled: IsCancelled) -> None:
    """Check the schemas of functions one by one.

    Raises:
        ToolError: one cannot be used; unlike an error of the grammar that is made of all of
            them, it names the function and the place in its schema.
    """
    for tool in tools:
        try:
            schema = Grammar("json_schema", tool.parameters or NO_PARAMETERS)
            check_grammar(schema, is_cancelled)
        except GrammarError as error:
            raise ToolError(
                f"The parameters of the function {tool.name} cannot be used. {error}",
                tool.name,
                "Correct them, or leave tool_choice open.",
            ) from error


def callable_tools(request: AskedForm) -> Sequence[Tool]:
    """Return the functions that an answer may call.

    Raises:
        PromptError: it must call one that there is not.
    """
    choice = request.tool_choice
    if choice == "none":
        return ()
    if choice.startswith("=") and choice[1:] not in {tool.name for tool in request.tools}:
        raise PromptError(f"There is no function {choice[1:]} to call.", "Name one of the tools.")
    if choice == "required" and not request.tools:
        raise PromptError("There is no function to call.", "Give the request tools.")
    return request.tools
