"""Random settings of loading a model, and the plan that the planner must make of them."""

from collections.abc import Callable

from hypothesis import strategies as st

from engine import EngineError, LoadParams
from engine.formats.gguf.reader import GGUFFile
from engine.load_params import KV_TYPES, SPLIT_MODES
from engine.model.architectures.declare import declare
from engine.planning.evaluation.evaluator import Evaluator
from engine.planning.plan import Plan, make_plan

DEVICES = ("cpu", "cuda:0", "cuda:1")
OVERRIDES = (
    ("attn_", "cpu"),
    ("ffn_", "cuda:1"),
    ("_exps", "cpu"),
    (r"blk\.0\.", "cuda:0"),
    ("^output|^token_embd", "cpu"),
    ("ssm_|shortconv", "#0"),
)

Question = tuple[LoadParams, dict[str, int] | None]


@st.composite
def questions(draw: st.DrawFn, path: str) -> Question:
    """Generate settings of loading, and the free memory by device."""
    n = draw(st.integers(1, 4))
    share = st.one_of(st.integers(0, 6), st.floats(0, 1))
    split = draw(st.lists(share, min_size=n, max_size=n).filter(any) | st.none())
    params = LoadParams(
        path,
        tuple(draw(st.sampled_from(DEVICES)) for _ in range(n)),
        None if split is None else tuple(map(float, split)),
        split_mode=draw(st.sampled_from(SPLIT_MODES)),
        n_ctx=draw(st.none() | st.integers(1, 9000)),
        overrides=tuple(draw(st.lists(st.sampled_from(OVERRIDES), max_size=2))),
        kv_type=draw(st.sampled_from([*KV_TYPES, "q8_0/q4_0", "f16/f32"])),
        n_batch=draw(st.sampled_from([None, None, 512, 7])),
        n_cpu_blocks=draw(st.sampled_from([0, 0, 1])),
        n_cpu_moe=draw(st.sampled_from([0, 0, 0, 1])),
        kv_on_host=draw(st.booleans()),
        fast_prompts=draw(st.booleans()),
        reserve=draw(st.sampled_from([(), (("cuda:0", 1 << 20),)])),
    )
    free = st.fixed_dictionaries({d: st.sampled_from([1 << 18, 1 << 22, 1 << 40]) for d in DEVICES})
    return params, draw(free | st.none())


def assert_as_declared(file: GGUFFile, evaluator: Evaluator, question: Question) -> None:
    """Check that the evaluator makes the plan of a model declared anew, or the same error."""
    params, free = question

    expected, problem = _outcome(lambda: make_plan(declare(file, params), params, free))
    found, other = _outcome(lambda: evaluator.evaluate(params, free).plan)
    assert (type(other), str(other)) == (type(problem), str(problem))
    assert found == expected


def _outcome(plan: Callable[[], Plan]) -> tuple[Plan | None, EngineError | None]:
    try:
        return plan(), None
    except EngineError as error:
        return None, error
