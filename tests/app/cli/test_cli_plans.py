"""Plans on the command line: saving, listing, loading by them, and "copy as command"."""

import argparse
import json
import os
import shlex
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from app.__main__ import COMMANDS
from app.cli.load_options import command_for, load_params
from engine import ControlVector, EngineError, LoadParams
from tests.helpers.command_line import GREEDY, Run, assert_refused

EVERYTHING = LoadParams(
    "/some where/it's.gguf", ("cuda:0", "cpu", "cuda:0"), (3, 1 / 3, 1e-7), "groups",
    n_ctx=8192, overrides=(("ffn_.*_exps=x", "cpu"), ("-attn $HOME", "#1")),
    kv_type="q8_0/q4_0", cpu_threads=6, n_batch=256,
    control_vectors=(ControlVector("/v=1.gguf", -0.5), ControlVector("w.gguf")),
    control_layers=(3, 9), groups=(2, 1), n_cpu_blocks=2, n_cpu_moe=1, kv_on_host=True,
    reserve=(("cuda:1", (1 << 30) + 1), ("cpu", 5 << 20)), p2p="off",
    rope_scaling="yarn", rope_factor=2.5, rope_base=1e6,
    chat_template="{% for m in messages %}\n'<{{ m.role }}>' {{ m.content }}{% endfor %}",
    fast_prompts=True, parallel=3, checkpoint_bytes=3 << 19, draft="ngram", draft_max=5,
    mmproj="eyes of it.gguf", mmproj_device="cpu", draft_vocab=4096,
)  # fmt: skip


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TANDEM_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def read(command: str, subcommand: str) -> LoadParams:
    """Return the parsed arguments of a subcommand's command line."""
    program, name, *arguments = shlex.split(command)
    assert (program, name) == ("tandem", subcommand)
    parser = argparse.ArgumentParser()
    getattr(import_module(f"app.cli.{COMMANDS[name][1]}"), f"add_{name}")(parser)
    extra = ["-p", "x"] if name == "generate" else []
    return load_params(parser.parse_args(arguments + extra))


@pytest.mark.skipif(os.name == "nt", reason="read here as a POSIX shell does")
@pytest.mark.parametrize("subcommand", ["chat", "generate", "plan"])
def test_the_command_of_a_plan_gives_the_plan(subcommand: str) -> None:
    assert read(command_for(EVERYTHING, subcommand), subcommand) == EVERYTHING
    one_type = replace(EVERYTHING, kv_type="q8_0")
    assert "--kv-type=q8_0" in command_for(one_type, subcommand)
    assert read(command_for(one_type, subcommand), subcommand) == one_type
    plain = LoadParams("m.gguf")
    assert command_for(plain, subcommand) == f"tandem {subcommand} m.gguf"
    assert read(command_for(plain, subcommand), subcommand) == plain
    odd = read(command_for(replace(plain, path="-m.gguf"), subcommand), subcommand)
    assert odd.path == os.path.join(".", "-m.gguf")


def test_every_field_has_its_option() -> None:
    for name in LoadParams.__dataclass_fields__:
        if name in ("path", "machines", "machine_link"):  # machines are those that join
            continue
        one = replace(LoadParams("m"), **{name: getattr(EVERYTHING, name)})
        if os.name != "nt":
            assert read(command_for(one), "chat") == one, name
        assert command_for(one) != command_for(LoadParams("m")), name


@pytest.mark.parametrize(
    ("options", "kv_type"),
    [
        ("--cache-type q8_0", "q8_0"), ("-ctk q8_0", "q8_0/f16"), ("-ctv q4_0", "f16/q4_0"),
        ("-ctk q8_0 -ctv q8_0", "q8_0"), ("--kv-type q8_0 --cache-type-v q4_0", "q8_0/q4_0"),
    ],
)  # fmt: skip
def test_keys_and_values_may_have_different_types(options: str, kv_type: str) -> None:
    assert read(f"tandem plan m {options}", "plan").kv_type == kv_type


def test_a_chat_template_is_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("{{ messages }}\n", encoding="utf-8")
    read_again = shlex.join(["tandem", "plan", "m", "--chat-template", f"@{file}"])
    assert read(read_again, "plan").chat_template == "{{ messages }}\n"
    with pytest.raises(EngineError, match="cannot be read"):
        read(f"tandem plan m --chat-template @{tmp_path / 'none'}", "plan")


def test_a_plan_is_saved_listed_used_measured_and_deleted(run: Run, model: Path) -> None:
    options = ("--devices", "cpu,cpu", "--split", "3,1", "--ctx", "96", "--threads", "1")
    assert run("plan", model, *options, "--save", "fast 8k").status == 0
    (listed,) = run("plans", model, "--json").document["plans"]
    assert listed["name"] == "fast 8k"
    assert listed["fits"]
    assert listed["badge"] is None
    assert listed["n_ctx"] == 96
    assert listed["params"]["devices"] == ["cpu", "cpu"]
    outcome = run("plan", model, "--plan", "Fast 8k", "--json").document
    assert [d["asked"] for d in outcome["devices"]] == [0.75, 0.25]
    assert outcome["n_ctx"] == 96
    values = run("plan", model, "--plan", "fast 8k", "-ctv", "f32", "--json").document
    assert (outcome["kv_type"], values["kv_type"]) == ("f16", "f16/f32")
    changed = run("plan", model, "--plan", "fast 8k", "--ctx", 48, "--json").document
    assert changed["n_ctx"] == 48
    assert len(changed["devices"]) == 2
    alone = run("plan", model, "--plan", "fast 8k", "--devices", "cpu", "--json").document
    assert len(alone["devices"]) == 1
    text = run("generate", model, "--plan", "fast 8k", "-p", "hello", *GREEDY, "--json").document
    plain = run("generate", model, "-p", "hello", *GREEDY, "--json").document
    assert text["ids"] == plain["ids"]
    bench = run("bench", model, "--plan", "fast 8k", "-p", 8, "-n", 3, "-r", 1, "--json").document
    assert [line["split"] for line in bench["results"]] == [[3, 1]] * 2
    (listed,) = run("plans", model, "--json").document["plans"]
    prefill, decode = (line["avg_ts"] for line in bench["results"])
    assert listed["badge"]["prefill_ts"] == pytest.approx(prefill)
    assert listed["badge"]["decode_ts"] == pytest.approx(decode)
    run("plan", model, *options, "--save", "FAST 8K")
    (listed,) = run("plans", model, "--json").document["plans"]
    assert listed["badge"], "the same plan keeps its speed"
    table = run("plans", model).out
    assert "FAST 8K" in table
    assert f"{decode:.1f} t/s" in table
    assert run("plans", model, "--delete", "fast 8k").out.startswith("There are no plans")


def test_plans_go_to_files_and_back(run: Run, model: Path, tmp_path: Path) -> None:
    run("plan", model, "--devices", "cpu,cpu", "--save", "both")
    file = tmp_path / "both.json"
    assert run("plans", model, "--export", "both", "--to", file).status == 0
    assert json.loads(file.read_text())["name"] == "both"
    run("plans", model, "--delete", "both")
    shown = run("plan", model, "--plan", file, "--json").document
    assert len(shown["devices"]) == 2
    run("plans", model, "--import", file)
    command = run("plans", model, "--command", "both").out
    assert command == f"tandem chat {shlex.quote(str(model))} --devices=cpu,cpu\n"


def test_the_fastest_plan_is_found(run: Run, model: Path) -> None:
    assert_refused(run("plan", model, "--plan", "auto"), "fits into the free memory")
    run("plan", model, "--ctx", 64, "--save", "one")
    run("plan", model, "--ctx", 128, "--devices", "cpu,cpu", "--save", "two")
    assert run("plan", model, "--plan", "auto", "--json").document["n_ctx"] == 128
    run("bench", model, "--plan", "one", "-p", 4, "-n", 2, "-r", 1, "--json")
    assert run("plan", model, "--plan", "auto", "--json").document["n_ctx"] == 64


def test_what_cannot_be_done_is_said(run: Run, model: Path, tmp_path: Path) -> None:
    assert_refused(run("chat", model, "--plan", "none"), "has no plan named 'none'")
    assert_refused(run("plans", model, "--delete", "none"), "has no plan named 'none'")
    assert_refused(run("plan", model, "--plan", tmp_path / "x.json"), "cannot be read")
    assert_refused(run("plan", model, "--save", "auto"), "cannot be the name")
    assert_refused(run("plan", model, "--reserve", "cpu=-1"), "is not DEVICE=MIB")
    assert_refused(run("plan", model, "--reserve", "cpu=nan"), "is not DEVICE=MIB")
    assert_refused(run("plan", model, "--split", ""), "is not a list of numbers")
