"""Small models for tests to break in one place each, and the kernels that compute them.

What models compute is compared exactly, so these tests run on the reference path; tests of the
CPU's kernels ask for the fixture `kernels`.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.model_draft import DraftTensor, ModelDraft
from tests.helpers.tiny_gguf import tiny_gguf


@pytest.fixture(autouse=True)
def _reference(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "kernels" not in request.fixturenames:
        monkeypatch.setenv("TANDEM_BACKEND", "reference")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute with kernels, as users do."""
    monkeypatch.delenv("TANDEM_BACKEND", raising=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile")


@pytest.fixture(scope="module")
def sound(folder: Path) -> ModelDraft:
    """Return a llama of two blocks, with a vocabulary of as many tokens as rows."""
    return ModelDraft.read(tiny_gguf(folder / "sound.gguf"))


@pytest.fixture(scope="module")
def routed(sound: ModelDraft) -> ModelDraft:
    """Return a llama of two blocks with four experts, two of them used, in place of each FFN."""
    draft, rng = sound.copy(), np.random.default_rng(0)
    draft.meta |= {"llama.expert_count": 4, "llama.expert_used_count": 2}
    for layer in range(2):
        for name, shape in (
            ("ffn_gate_inp", (4, 64)),
            ("ffn_gate_exps", (4, 96, 64)),
            ("ffn_up_exps", (4, 96, 64)),
            ("ffn_down_exps", (4, 64, 96)),
        ):
            values = rng.standard_normal(shape).astype(np.float32) / 8
            draft.tensors[f"blk.{layer}.{name}.weight"] = DraftTensor.of(values)
        for name in ("ffn_gate", "ffn_up", "ffn_down"):
            del draft.tensors[f"blk.{layer}.{name}.weight"]
    return draft


@pytest.fixture
def path(folder: Path) -> Iterator[Path]:
    path = folder / "hostile.gguf"
    yield path
    path.unlink(missing_ok=True)
