"""The engine for the window: commands as methods, events as Qt signals."""

from app.core.engine_client.answers import AnswerStage, RunningAnswer
from app.core.engine_client.client import AsideAnswer, EngineClient, EngineState, is_cancelled

__all__ = [
    "AnswerStage", "AsideAnswer", "EngineClient", "EngineState", "RunningAnswer", "is_cancelled",
]  # fmt: skip
