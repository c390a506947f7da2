"""How a model was run the last time: its split and its measured speed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from app.core.settings import Settings
from app.core.translation import tr
from app.core.units import context_text


@dataclass(frozen=True, slots=True)
class LastUse:
    """The last load of a model, as far as it is known.

    Attributes:
        plan: its split in a few words; "" if it was never loaded.
        tokens_per_s: measured speed of the last answer; 0 if there was none.
    """

    plan: str = ""
    tokens_per_s: float = 0.0


def last_use(settings: Settings, path: str) -> LastUse:
    """Return how the model at `path` was run the last time."""
    plan, speed = settings.plans.get(path), settings.speeds.get(path)
    rate = float(speed) if isinstance(speed, int | float) and 0 < speed < 1e9 else 0.0
    return LastUse(_plan_text(plan) if isinstance(plan, Mapping) else "", rate)


def _plan_text(plan: Mapping[str, object]) -> str:
    """Return a split such as "Tensor 60 : 40 · context 32k"; what is damaged is left out."""
    modes = {
        "single": tr("One device"), "tensor": tr("Tensor"), "layer": tr("Layers"),
        "groups": tr("Groups"),
    }  # fmt: skip
    mode, ranks, n_ctx = plan.get("mode"), plan.get("ranks"), plan.get("n_ctx")
    parts = [modes.get(mode, "") if isinstance(mode, str) else ""]
    shares = [_share(rank) for rank in ranks] if isinstance(ranks, list) else []
    if mode != "single" and (on := [share for share in shares if share]):
        parts[0] += " " + " : ".join(f"{100 * share:.0f}" for share in on)
    if type(n_ctx) is int and n_ctx > 0:
        parts.append(tr("context {size}").format(size=context_text(n_ctx)))
    return " · ".join(part.strip() for part in parts if part.strip())


def _share(rank: object) -> float:
    """Return the share of a rank that is on; 0 for others and for what is damaged."""
    if not isinstance(rank, Mapping) or rank.get("on") is not True:
        return 0.0
    share = rank.get("share")
    return share if isinstance(share, float) and 0 <= share <= 1 else 0.0
