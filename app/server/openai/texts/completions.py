"""The route of completions: texts that are gone on with, without a chat template."""

from __future__ import annotations

from starlette.responses import Response

from app.server.desk import Desk
from app.server.ledger import RequestRecord
from app.server.openai.errors import error_document
from app.server.openai.forms import form_of, form_place
from app.server.openai.sampling import MOST_CHOICES, sampling_of
from app.server.openai.texts.completion_answer import CompletionAnswer
from app.server.openai.texts.completion_request import CompletionRequest
from app.server.openai.texts.inputs import separate_inputs
from app.server.refusal import FieldPlaces, bad_value
from app.server.web.responses import AwaitedJson, EventStream
from engine import Generate, ModelLoaded, ScoreTokens

DEFAULT_TOKENS = 16
"""Most tokens of a completion where the request does not say, as in OpenAI's protocol."""


async def completions(desk: Desk, record: RequestRecord, request: CompletionRequest) -> Response:
    """Go on with one or several texts.

    Raises:
        Refusal: the request cannot be answered.
    """
    model = desk.find(request.model, record)
    prompts = separate_inputs(request.prompt, "prompt", model.info.n_vocab)
    n_answers = len(prompts) * request.n
    refuse_impossible(request, n_answers)
    grammar = form_of(request)

    def make(loaded: ModelLoaded) -> list[Generate | ScoreTokens]:
        most = DEFAULT_TOKENS if request.max_tokens is None else request.max_tokens
        params = sampling_of(request, desk.settings.sampling, loaded.info, most)
        scored = prompts if request.wants_scores else ()
        answers = [
            Generate(
                prompt=prompt, suffix=request.suffix, sampling=one, timed_every=0,
                grammar=grammar, n_logprobs=request.logprobs,
            )
            for prompt in prompts
            for one in params
        ]  # fmt: skip
        return [*(ScoreTokens(prompt, request.logprobs or 0) for prompt in scored), *answers]

    needs_spelling = request.logprobs is not None or request.echo
    spell = await desk.spelling.of(model.info.path) if needs_spelling else None
    events = desk.answers(record, n_answers, make, places=FieldPlaces(form_place(request)))
    answer = CompletionAnswer(request, prompts, model.id, spell)
    if request.stream:
        return EventStream(answer.stream(events), error_document, desk.settings.ping_s)
    return AwaitedJson(lambda: answer.collect(events), error_document)


def refuse_impossible(request: CompletionRequest, n_answers: int) -> None:
    """Refuse what would be answered otherwise than it is meant.

    Raises:
        Refusal: there is something of that kind.
    """
    if n_answers > MOST_CHOICES:
        raise bad_value("n", f"n times the prompts are {n_answers}, at most {MOST_CHOICES} can be.")
    if request.best_of not in (None, request.n):
        raise bad_value("best_of", "best_of must be n; answers are not compared.")
    if request.suffix and request.echo:
        raise bad_value("echo", "echo cannot go with suffix: the answer is not behind the prompt.")
