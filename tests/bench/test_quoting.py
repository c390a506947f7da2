"""The model that edits the code in its prompt: its blocks, and its answer."""

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from engine import load_model
from engine.formats.quants.dequantise import dequantise
from tests.bench.drafts import CODE, PROMPTS, answered
from tests.bench.quoting import lag_of, quoted_words, write_model
from tests.bench.synthetic import Sizes
from tests.bench.whole_numbers import LEAST, MOST, blocks_of

SIZES = Sizes("llama", 2, 256, 4, 2, 512, 600, tied=True, n_ctx=512)


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q6_K, Kind.F16, Kind.BF16, Kind.F32])
def test_blocks_hold_whole_numbers_exactly(kind: Kind) -> None:
    numbers = np.random.default_rng(2).integers(LEAST, MOST + 1, (3, 512), np.int8)
    found = dequantise(torch.tensor(blocks_of(kind, numbers, 0.125)), kind)
    assert found.numpy().reshape(3, 512).tolist() == (0.125 * numbers).tolist()


def test_other_types_are_refused() -> None:
    with pytest.raises(ValueError, match="not written as Q5_K"):
        blocks_of(Kind.Q5_K, np.zeros((1, 256), np.int8), 1.0)


def test_the_prompts_quote_from_as_far_away() -> None:
    assert lag_of(quoted_words("quoting")) == lag_of(quoted_words("editing"))


@pytest.mark.parametrize("replaced", [[], ["shape=figure"], ["kind=name", "side=edge"]])
def test_the_answer_is_the_code_with_words_replaced(replaced: list[str], tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", SIZES, "Q4_K_M", replaced)
    with load_model(path, n_ctx=512, draft="off") as model:
        prompt, temperature = PROMPTS["editing"]
        n = len(model.tokenizer.encode(prompt))
        assert n == len(quoted_words())  # a word, a token
        ids, _ = answered(model, prompt, temperature, 84)
        text = "def area" + model.tokenizer.decode(ids)
    wanted = CODE
    for old, new in (one.split("=") for one in replaced):
        wanted = wanted.replace(old, new)
    assert text[: len(wanted)] == wanted
