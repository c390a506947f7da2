"""`devices`, `inspect` and `plan`: facts that need no loaded model."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from engine import load_model
from engine.hardware.devices.torch_builds import TorchBuild
from tests.helpers.command_line import Run, assert_refused
from tests.helpers.fake_amd import RX9070, XTX, install_amd
from tests.helpers.fake_nvml import install, three_gpus, use_build
from tests.helpers.model_draft import DraftTensor, ModelDraft
from tests.helpers.tiny_gguf import tiny_gguf


def test_devices_lists_the_cpu(run: Run) -> None:
    document = run("devices", "--json").document
    cpu = next(device for device in document["devices"] if device["id"] == "cpu")
    assert cpu["usable"]
    assert 0 < cpu["free_bytes"] <= cpu["total_bytes"]
    gpu = document["gpu"]
    assert gpu["launcher"] in ("triton", "own", "")
    shown = run("devices").out
    assert "cpu" in shown
    assert gpu["sentence"] in shown, "how GPUs compute, or what is missing for them"


def test_gpus_are_named_by_uuid_wherever_a_device_is_named(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """UUIDs name ranks, targets of overrides, devices of a reserve, and devices of saved plans."""
    install(three_gpus(), monkeypatch)
    named = (
        "--devices", "GPU-aaaa1,cpu,gpu-bbbb", "--override", "ffn=GPU-aaaa3333", "--reserve",
        "GPU-bbbb2222=100",
    )  # fmt: skip
    document = run("plan", model, *named, "--save", "mine", "--json").document
    placed = [device["device"] for device in document["devices"]]
    assert placed == ["cuda:2", "cpu", "cuda:0", "cuda:1"]
    assert document["overrides"] == [["ffn", "cuda:1"]]
    assert document["reserve"] == {"cuda:0": 100 << 20}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-aaaa3333,GPU-aaaa1111,GPU-bbbb2222")
    again = run("plan", model, "--plan", "mine", "--json").document
    assert [device["device"] for device in again["devices"]] == [
        "cuda:1",
        "cpu",
        "cuda:2",
        "cuda:0",
    ]
    assert again["reserve"] == {"cuda:2": 100 << 20}
    assert_refused(run("plan", model, "--devices", "GPU-aaaa"), "write more of it")


def test_cards_that_torch_cannot_use_have_a_command_of_their_own_line(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(three_gpus(), monkeypatch)
    use_build(monkeypatch, TorchBuild(True, "", version="2.15.0"))
    command = (
        'pip install --force-reinstall "torch>=2.11" '
        "--index-url https://download.pytorch.org/whl/cu130"
    )
    shown = run("devices").out
    assert f"To use cuda:0, cuda:1, cuda:2:\n  {command}\n" in shown
    assert "this PyTorch build has no CUDA support" in shown
    document = run("devices", "--json").document
    assert document["gpu"]["remedy"] == command
    assert [device["remedy"] for device in document["devices"]] == [command] * 3 + [""]
    generated = run("generate", model, "-p", "a", "-n", "1")
    assert f"To use it: {command}" in generated.err


def test_what_is_not_proven_about_a_card_is_told(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install_amd(monkeypatch, tmp_path, [XTX, RX9070])
    assert "cuda:0, cuda:1: Tandem has not been run on AMD GPUs yet.\n" in run("devices").out
    card = run("devices", "--json").document["devices"][0]
    assert (card["arch"], card["usable"]) == ("gfx1100", True)
    assert card["note"] == "Tandem has not been run on AMD GPUs yet."


def test_what_hides_gpus_is_told(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    install(three_gpus(), monkeypatch)
    assert run("devices", "--json").document["hidden"] == ""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,9")
    document = run("devices", "--json").document
    assert [device["id"] for device in document["devices"]] == ["cuda:0", "cpu"]
    assert document["hidden"].endswith(
        "there is no GPU 9, as only 3 are present, which ends the list."
    )
    assert document["hidden"] in run("devices").out


def test_inspect_tells_what_the_file_says(run: Run, model: Path, draft: ModelDraft) -> None:
    document = run("inspect", model, "--json").document
    expected = {
        "architecture": "llama", "supported": True, "quant": "F32", "gguf_version": 3,
        "name": "tiny llama", "n_layer": 2, "n_embd": 64, "n_head": 4, "n_head_kv": 4,
        "n_vocab": 301, "n_ctx_train": 512, "has_chat_template": True,
        "n_bytes": model.stat().st_size, "files": [str(model)],
        "tensor_types": {"F32": len(draft.tensors)},
    }  # fmt: skip
    assert {key: document[key] for key in expected} == expected
    assert set(document["metadata"]) == set(draft.meta)
    assert {t["name"]: tuple(t["shape"]) for t in document["tensors"]} == {
        name: tensor.shape for name, tensor in draft.tensors.items()
    }
    assert (document["problem"], document["split"]["modes"]) == ("", ["tensor", "layer", "groups"])
    attention, ffn, _ = document["split"]["parts"]
    assert (attention["name"], attention["n_layer"], attention["n_pieces"]) == ("attention", 2, 4)
    assert (ffn["n_pieces"], ffn["unit"]) == (3, "32 columns")
    human = run("inspect", model, "--metadata", "--tensors").out
    assert "attention: 4 pieces of a head, in 2 blocks" in human
    assert all(key in human for key in (*draft.meta, *draft.tensors))


def test_inspect_works_on_what_cannot_be_run(
    run: Run, vocabulary: Path, foreign: Path, folder: Path
) -> None:
    document = run("inspect", vocabulary, "--json").document
    assert (document["n_vocab"], document["n_params"], document["tensors"]) == (301, 0, [])
    assert "no: " in run("inspect", vocabulary).out
    assert "contains no model weights" in document["problem"]
    assert document["split"] == {"modes": [], "parts": []}
    document = run("inspect", foreign, "--json").document
    assert (document["architecture"], document["supported"]) == ("mumble", False)
    assert "mumble (not supported yet)" in run("inspect", foreign).out
    assert "the architecture 'mumble', which Tandem cannot run" in document["problem"]
    nameless = ModelDraft({"some.key": 1}, {}).write(folder / "nameless.gguf")
    assert run("inspect", nameless, "--json").document["architecture"] == "unknown"


def test_inspect_warns_of_a_vocabulary_that_is_cut_in_an_unknown_way(
    run: Run, folder: Path, model: Path
) -> None:
    pre = "tokenizer.ggml.pre"
    path = tiny_gguf(folder / "cut.gguf", arch="qwen2", extra={pre: "from-the-future"})
    (warning,) = run("inspect", path, "--json").document["warnings"]
    assert "'from-the-future' is unknown" in warning
    assert warning in run("inspect", path).out.splitlines()
    assert run("inspect", model, "--json").document["warnings"] == []


def test_names_in_a_file_cannot_drive_the_terminal(
    run: Run, folder: Path, draft: ModelDraft
) -> None:
    evil = "evil\x1b[2J\r"
    meta = {**draft.meta, "general.name": evil, f"key {evil}": evil}
    tensors = {**draft.tensors, evil: DraftTensor.of(np.zeros(32, np.float32))}
    path = ModelDraft(meta, tensors).write(folder / "evil.gguf")
    out = run("inspect", path, "--metadata", "--tensors").out
    assert "evil" in out
    assert "\x1b" not in out
    assert "\r" not in out


PLANS = [
    (("cpu",), None, ()),
    (("cpu", "cpu"), (3, 1), ()),
    (("cpu", "cpu", "cpu"), (5, 0, 1), ("--kv-type", "f32")),
    (("cpu",) * 6, None, ("--ctx", "100")),
    (("cpu", "cpu"), (1, 2), ("--split-mode", "layer", "--kv-type", "bf16")),
    (("cpu", "cpu"), (1, 1), ("--override", "attn=cpu", "--ctx", "64")),
    (("cpu", "cpu"), (0, 1), ("--override", "ffn=#0")),
    (("cpu",) * 3, (1, 2, 1), ("--split-mode", "groups", "--groups", "1,2")),
    (("cpu",) * 3, None, ("--split-mode", "groups", "--n-cpu-blocks", "1")),
]


@pytest.mark.parametrize(("devices", "split", "options"), PLANS, ids=str)
def test_a_plan_is_what_a_load_then_measures(
    run: Run,
    model: Path,
    devices: Sequence[str],
    split: Sequence[int] | None,
    options: Sequence[str],
) -> None:
    where = ["--devices", ",".join(devices)]
    where += ["--split", ",".join(map(str, split))] if split else []
    plan = run("plan", model, *where, *options, "--json").document
    given = dict(zip(options[::2], options[1::2], strict=True))
    loaded = load_model(
        model,
        devices,
        split,
        n_ctx=int(given["--ctx"]) if "--ctx" in given else None,
        split_mode=given.get("--split-mode", "tensor"),
        kv_type=given.get("--kv-type", "f16"),
        overrides=[given["--override"].split("=")] if "--override" in given else [],
        groups=[int(n) for n in given["--groups"].split(",")] if "--groups" in given else None,
        n_cpu_blocks=int(given.get("--n-cpu-blocks", 0)),
    )
    with loaded:
        measured = [(m.device, m.measured.weights, m.measured.kv) for m in loaded.memory()]
        assert plan["n_ctx"] == loaded.n_ctx
    assert [(d["device"], d["weights"], d["kv"]) for d in plan["devices"]] == measured
    assert plan["total_bytes"] == sum(d["total"] for d in plan["devices"])
    assert plan["fits"]
    assert plan["max_ctx"] == 512
    assert plan["remedies"] == []


def test_a_plan_shows_where_everything_was_asked_to_be(run: Run, model: Path) -> None:
    options = (
        "--devices", "cuda:0,cuda:1,cuda:2", "--split-mode", "groups", "--n-cpu-blocks", "1",
        "--kv-on-host", "--override", "attn=#0", "--reserve", "cuda:0=512",
    )  # fmt: skip
    document = run("plan", model, *options, "--json").document
    assert document["split_mode"] == "groups"
    assert document["groups"] == [2, 1]
    assert document["n_cpu_blocks"] == 1
    assert document["kv_on_host"] is True
    assert document["overrides"] == [["attn", "#0"]]
    assert document["reserve"] == {"cuda:0": 512 << 20}
    devices = document["devices"]
    assert [d["device"] for d in devices] == ["cuda:0", "cuda:1", "cuda:2", "cpu"]
    assert [d["kv"] for d in devices] == [0] * 4
    assert [bool(d["host_kv"]) for d in devices] == [True, False, False, False]
    assert list(document["overhead"]) == ["cuda:0", "cuda:1"], "nothing lies on the third"
    total = sum(d["total"] + d["host_kv"] + d["pinned"] for d in devices)
    assert document["total_bytes"] == total + sum(document["overhead"].values())
    out = run("plan", model, *options).out
    assert "weights stored as small as in the file" in out
    assert "of KV cache is in host memory" in out
    assert "512.00 MiB on cuda:0 is kept free" in out
    assert "CUDA itself takes another 500.00 MiB on cuda:1" in out


def test_a_plan_says_what_does_not_fit(run: Run, model: Path) -> None:
    options = ("--ctx", "9999999999")
    document = run("plan", model, *options, "--json").document
    assert not document["fits"]
    assert document["short"]["cpu"] == document["total_bytes"] - document["devices"][0]["free"]
    assert document["max_ctx"] == 512
    (remedy,) = (r for r in document["remedies"] if r["kind"] == "context")
    assert remedy["changes"] == {"n_ctx": 512}
    human = run("plan", model, *options)
    assert human.status == 0
    assert "The longest context that fits is 512 tokens." in human.out
    assert f"- {remedy['sentence']}" in human.out
    assert "trained with 512 tokens" in human.out


def test_a_plan_shows_a_row_for_each_rank(run: Run, model: Path) -> None:
    out = run("plan", model, "--devices", "cpu,cpu", "--split", "3,1").out
    header, *rows = out.splitlines()
    assert header.split() == [
        "RANK", "DEVICE", "ASKED", "GETS", "WEIGHTS", "KV", "COMPUTE", "ROUNDING", "TOTAL",
    ]  # fmt: skip
    assert rows[0].startswith("0     cpu     75.0 %")
    assert rows[1].startswith("1     cpu     25.0 %")
    assert rows[2] == "512 tokens of context, weights stored as small as in the file"
    assert rows[3] == "Room at the same time for 1 request of 512 tokens, or 2 of 256"
    assert rows[4] == "Prompts are processed 512 tokens at a time"


def test_a_plan_says_how_many_requests_run_at_once(run: Run, model: Path) -> None:
    options = ("plan", model, "--devices", "cpu", "--ctx", "512", "--parallel", "6")
    told = "Room at the same time for 6 requests of 512 tokens, or 12 of 256"
    assert told in run(*options).out.splitlines()
    document = run(*options, "--json").document
    assert document["parallel"] == 6
    assert document["rooms"] == [
        {"requests": 6, "tokens": 512}, {"requests": 12, "tokens": 256}
    ]  # fmt: skip
    assert run(*options[:-1], "17").status == 1


def test_a_plan_says_how_many_prompt_tokens_are_computed_at_once(run: Run, model: Path) -> None:
    for options, expected in (((), 512), (("--batch", "64"), 64)):
        assert run("plan", model, *options, "--json").document["n_batch"] == expected
    out = run("plan", model, "--simulate", "2x4090", "--ctx", "4096").out
    assert "Prompts are processed 2048 tokens at a time" in out
