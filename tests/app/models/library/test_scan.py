"""Models are found in the folders of all programs, each once, with their parts and helpers."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from app.models.library.scan import FoundModel, Place, known_places, scan


def put(path: Path, text: str = "GGUF") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def names(found: list[FoundModel]) -> list[tuple[str, str]]:
    return [(model.program, model.name) for model in found]


def put_ollama(top: Path, name: str, content: str = "GGUF", **layers: str) -> Path:
    """Write a model as Ollama does, and return its file."""
    parts = {"model": content, **layers}
    found = []
    for kind, text in parts.items():
        digest = hashlib.sha256(text.encode()).hexdigest()
        put(top / "blobs" / f"sha256-{digest}", text)
        media = f"application/vnd.ollama.image.{kind}"
        found.append({"mediaType": media, "digest": f"sha256:{digest}", "size": len(text)})
    put(top / "manifests" / name, json.dumps({"schemaVersion": 2, "layers": found}))
    return top / "blobs" / found[0]["digest"].replace(":", "-")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Return a home with models of four programs, one of which two of them have."""
    hub = tmp_path / ".cache/huggingface/hub/models--acme--tiny-GGUF"
    blob = put(hub / "blobs/abc", "GGUF of the hub")
    snapshot = hub / "snapshots/0123/tiny-q4_0.gguf"
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(blob)
    old = hub / "snapshots/0000/tiny-q4_0.gguf"
    old.parent.mkdir(parents=True)
    old.symlink_to(blob)
    studio = tmp_path / ".lmstudio/models/acme/big"
    put(studio / "big-00001-of-00003.gguf", "GGUF one")
    put(studio / "big-00003-of-00003.gguf", "GGUF three")
    put(studio / "mmproj-big-f16.gguf")
    put(studio / "notes.txt")
    put(studio / "half.gguf.part")
    os.link(blob, studio / "linked.gguf")
    put_ollama(tmp_path / ".ollama/models", "registry.ollama.ai/library/llama3/8b", "GGUF ollama")
    put(tmp_path / ".cache/llama.cpp/acme_small.gguf")
    return tmp_path


def test_every_program_s_models_are_found_once(home: Path) -> None:
    own = put(home / "Models/deep/er/own.GGUF")
    places = known_places([home / "Models"], home, {})
    assert [place.program for place in places] == [
        "Your folders", "Hugging Face", "LM Studio", "Ollama", "llama.cpp",
    ]  # fmt: skip
    found = scan(places)
    assert names(found) == [
        ("Your folders", "own"),
        ("Hugging Face", "acme/tiny-GGUF/tiny-q4_0"),
        ("LM Studio", "big"),
        ("Ollama", "llama3:8b"),
        ("llama.cpp", "acme_small"),
    ]
    assert found[0].path == own


def test_parts_are_one_model_and_helpers_none(home: Path) -> None:
    studio = home / ".lmstudio/models/acme/big"
    (found,) = [model for model in scan([Place(studio, "LM Studio")]) if model.name == "big"]
    assert found.path.name == "big-00001-of-00003.gguf"
    assert found.n_bytes == len("GGUF one") + len("GGUF three")
    assert found.missing == ("big-00002-of-00003.gguf",)
    assert found.projector == studio / "mmproj-big-f16.gguf"
    put(studio / "mtp-big.gguf")
    assert scan([Place(studio, "LM Studio")])[0].draft == studio / "mtp-big.gguf"


def test_programs_that_were_told_another_folder_are_found_there(tmp_path: Path) -> None:
    for name in ("hub", "hf/hub", "ollama", "llama"):
        (tmp_path / name).mkdir(parents=True)
    environment = {
        "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HOME": str(tmp_path / "hf"),
        "OLLAMA_MODELS": str(tmp_path / "ollama"), "LLAMA_CACHE": str(tmp_path / "llama"),
    }  # fmt: skip
    found = {place.path.relative_to(tmp_path).as_posix(): place.layout
             for place in known_places((), tmp_path / "nobody", environment)}  # fmt: skip
    assert found == {"hub": "hub", "hf/hub": "hub", "ollama": "ollama", "llama": "files"}


@pytest.mark.parametrize(
    "damage",
    ["{", "[]", '{"layers": 3}', '{"layers": [{"mediaType": 1}]}', "[" * 100_000, "\udcff"],
    ids=["cut", "list", "number", "no digest", "deep", "no text"],
)
def test_a_damaged_manifest_hides_its_model_only(tmp_path: Path, damage: str) -> None:
    top = tmp_path / "models"
    put_ollama(top, "registry.ollama.ai/library/good/latest", "GGUF good")
    bad = top / "manifests/registry.ollama.ai/acme/bad/latest"
    bad.parent.mkdir(parents=True)
    bad.write_bytes(damage.encode(errors="surrogateescape"))
    assert names(scan([Place(top, "Ollama", "ollama")])) == [("Ollama", "good:latest")]


def test_a_digest_names_no_file_elsewhere_and_what_is_no_model_is_left_out(tmp_path: Path) -> None:
    top = tmp_path / "models"
    put(tmp_path / "secret", "GGUF")
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:../../secret"}
    put(top / "manifests/host/library/evil/latest", json.dumps({"layers": [layer]}))
    put_ollama(top, "host/library/tensors/latest", "safetensors")
    put_ollama(top, "host/acme/eyes/1b", "GGUF eyes", projector="GGUF lens")
    (found,) = scan([Place(top, "Ollama", "ollama")])
    assert found.name == "acme/eyes:1b"
    assert found.projector is not None


def test_folders_that_cannot_be_read_and_loops_end_nothing(tmp_path: Path) -> None:
    put(tmp_path / "a/one.gguf")
    (tmp_path / "a/loop").symlink_to(tmp_path, target_is_directory=True)
    put(tmp_path / "a/.hidden/two.gguf")
    (tmp_path / "a/gone.gguf").symlink_to(tmp_path / "nowhere")
    deep = tmp_path / "/".join("abcdefghijkl") / "three.gguf"
    put(deep)
    assert names(scan([Place(tmp_path, "Your folders")])) == [("Your folders", "one")]
    assert scan([Place(tmp_path / "nowhere", "Your folders")]) == []


def test_a_scan_can_be_ended(tmp_path: Path) -> None:
    for number in range(5):
        put(tmp_path / f"{number}.gguf")
    asked = iter(range(100))
    assert len(scan([Place(tmp_path, "x")], lambda: next(asked) >= 3)) < 5
