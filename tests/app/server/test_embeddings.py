"""Embeddings, asked for by OpenAI's own client, which asks for base64 unless told otherwise."""

import base64
import math
from array import array

import pytest
from openai import BadRequestError, OpenAI

from app.core.paths import demo_model
from engine import load_tokenizer

TEXTS = ["Tensor parallelism", "A rank is one device"]


def test_each_text_has_a_vector_of_length_one(client: OpenAI) -> None:
    done = client.embeddings.create(model="tandem-demo", input=TEXTS)
    assert [one.index for one in done.data] == [0, 1]
    for one in done.data:
        assert len(one.embedding) == 256
        assert math.isclose(math.hypot(*one.embedding), 1, rel_tol=1e-5)
    assert done.data[0].embedding != done.data[1].embedding
    assert done.usage.prompt_tokens == done.usage.total_tokens > 2


def test_numbers_are_the_same_in_both_encodings_and_from_tokens(client: OpenAI) -> None:
    written = client.embeddings.create(model="", input=TEXTS[0], encoding_format="float")
    encoded = client.embeddings.create(model="", input=TEXTS[0], encoding_format="base64")
    ids = load_tokenizer(str(demo_model())).encode(TEXTS[0])
    from_ids = client.embeddings.create(model="", input=[ids, ids], encoding_format="float")
    numbers = array("f", base64.b64decode(str(encoded.data[0].embedding)))
    assert [*numbers] == pytest.approx(written.data[0].embedding, rel=1e-6)
    assert from_ids.data[1].embedding == written.data[0].embedding
    single = client.embeddings.create(model="", input=ids, encoding_format="float")
    assert single.data[0].embedding == written.data[0].embedding


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"input": ""}, "is empty"),
        ({"input": []}, "at least 1"),
        ({"input": ["x", ""]}, "is empty"),
        ({"input": [1, 2, "x"]}, r"input\[2\] must be a whole number"),
        ({"input": [[1, 99999]]}, "from 0 to 1535"),
        ({"input": "x", "dimensions": 12}, "must be 256"),
    ],
    ids=str,
)
def test_what_cannot_be_embedded_is_told(
    client: OpenAI, fields: dict[str, object], sentence: str
) -> None:
    with pytest.raises(BadRequestError, match=sentence):
        client.embeddings.create(model="", **fields)  # type: ignore[arg-type]
