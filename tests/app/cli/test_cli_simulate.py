"""`plan`: predicted speed, on this machine and on simulated ones."""

from pathlib import Path

import pytest

from engine import DeviceFacts, MachineFile, list_devices
from tests.helpers.command_line import Run, assert_refused


def test_a_rig_gets_a_plan_on_all_its_gpus(run: Run, model: Path) -> None:
    document = run("plan", model, "--simulate", "2x3090,1x3060", "--json").document
    assert [d["device"] for d in document["devices"]] == ["cuda:0", "cuda:1", "cuda:2"]
    assert [d["free"] >> 30 for d in document["devices"]] == [23, 23, 11]
    assert document["fits"]
    for test in ("prefill", "decode"):
        found = document["speed"][test]
        assert found["tokens_per_s"] == pytest.approx(found["n_tokens"] / found["seconds"])
        assert sum(found["path"].values()) == pytest.approx(found["seconds"])
        assert [r["device"] for r in found["ranks"]] == ["cuda:0", "cuda:1", "cuda:2"]
    assert document["speed"]["decode"]["n_tokens"] == 1


def test_people_see_whether_it_fits_and_what_limits(run: Run, model: Path) -> None:
    out = run("plan", model, "--simulate", "3090,3060", "--prompt", "100").out
    assert "It fits." in out
    assert "Predicted speed (simulated: assumes Tandem's kernels):\n" in out
    assert "a prompt of 100 tokens: " in out
    assert "of the time." in out
    speed = out[out.index("READS") :].splitlines()
    assert [line.split()[1] for line in speed[1:3]] == ["cuda:0", "cuda:1"]
    short = run("plan", model, "--simulate", "3060", "--ctx", "99999999999").out
    assert "It fits." not in short
    assert "cuda:0 is " in short


def test_devices_of_a_rig_can_be_chosen(run: Run, model: Path) -> None:
    options = ("--simulate", "2x3090", "--json", "--devices")
    one = run("plan", model, *options, "cuda:1").document
    assert [d["device"] for d in one["devices"]] == ["cuda:1"]
    mixed = run("plan", model, *options, "cuda:0,cpu").document
    assert [d["device"] for d in mixed["devices"]] == ["cuda:0", "cpu"]
    cpu = run("plan", model, "--simulate", "7950x", "--json").document
    assert [d["device"] for d in cpu["devices"]] == ["cpu"]


def test_a_better_link_is_sooner(run: Run, model: Path) -> None:
    speeds = [
        run("plan", model, "--simulate", f"4x4090@{way}", "--json").document["speed"]["decode"]
        for way in ("p2p", "host", "shm")
    ]
    times = [speed["seconds"] for speed in speeds]
    assert times == sorted(times)
    assert speeds[-1]["path"]["link_s"] > speeds[0]["path"]["link_s"]
    assert "links" in speeds[-1]["reason"]


def test_links_and_what_sums_take_are_shown(run: Run, model: Path) -> None:
    options = ("plan", model, "--simulate", "2x3090@nvlink,x8", "--prompt", "100", "--batch", "64")
    document = run(*options, "--json").document
    (link,) = document["links"]
    assert (link["a"], link["b"], link["kind"]) == ("cuda:0", "cuda:1", "nvlink")
    assert link["latency_s"] < 1e-5 < 1 / link["bytes_per_s"] * 1e9
    assert [found["n_tokens"] for found in document["sums"]] == [1, 1, 64, 64]
    used = [found for found in document["sums"] if found["is_used"]]
    assert [(found["how"], found["wire"]) for found in used] == [("lane", "F32")] * 2
    assert all(found["ranks"] == [0, 1] for found in document["sums"])
    out = run(*options).out
    assert "4 × NVLink 3" in out
    assert f"{1e6 * used[0]['seconds']:.1f} µs" in out
    assert out.count("not used") == 2


def test_there_are_no_links_where_there_is_one_device_or_none_is_simulated(
    run: Run, model: Path
) -> None:
    one = run("plan", model, "--simulate", "3090", "--json").document
    assert one["links"] == one["sums"] == []
    assert "ALL-REDUCE OF RANKS" not in run("plan", model, "--simulate", "3090").out
    in_turn = run("plan", model, "--simulate", "2x3090", "--split-mode", "layer", "--json").document
    assert len(in_turn["links"]) == 1
    assert in_turn["sums"] == []
    here = run("plan", model, "--json").document
    assert "links" not in here


def test_a_rig_that_cannot_be_meant_is_refused(run: Run, model: Path) -> None:
    assert_refused(run("plan", model, "--simulate", "3091"), "Did you mean RTX 3090?")
    assert_refused(run("plan", model, "--simulate", ""), "For example 2x3090,1x3060.")
    assert_refused(run("plan", model, "--simulate", "2x4090@nvlink"), "Use p2p or host instead.")


def test_a_device_that_the_rig_does_not_have_has_no_speed(run: Run, model: Path) -> None:
    document = run("plan", model, "--simulate", "3090", "--devices", "cuda:5", "--json").document
    assert document["speed"] is None
    assert document["devices"][0]["free"] is None


def test_what_was_measured_here_counts(run: Run, model: Path, home: Path) -> None:
    cpu = list_devices()[-1]
    slow = DeviceFacts("cpu", 1e3, 1e15, n_threads=1, thread_bytes_per_s=1e3)
    before = run("plan", model, "--json").document["speed"]["decode"]
    MachineFile.of_user().keep_device(cpu, slow)
    after = run("plan", model, "--json").document["speed"]["decode"]
    assert after["seconds"] > 100 * before["seconds"]
    assert after["reason"].startswith("Limited by memory bandwidth")


def test_this_machine_is_measured_where_that_is_asked_for(
    run: Run, model: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def measure(device: object, kinds: object, file: MachineFile) -> None:
        asked.append((device, kinds))
        file.keep_device(list_devices()[-1], DeviceFacts("cpu", 1e3, 1e15))

    monkeypatch.setattr("engine.measure_facts", measure)
    speed = run("plan", model, "--measure", "--json").document["speed"]["decode"]
    assert [(device.id, kinds) for device, kinds in asked] == [("cpu", ["F32"])]
    assert speed["reason"].startswith("Limited by memory bandwidth")
    run("plan", model, "--measure", "--simulate", "3090")
    assert len(asked) == 1


def test_what_a_benchmark_measures_corrects_the_next_prediction(run: Run, model: Path) -> None:
    def predicted() -> dict[str, float]:
        speed = run("plan", model, "--prompt", "16", "--json").document["speed"]
        return {test: speed[test]["tokens_per_s"] for test in ("prefill", "decode")}

    cpu = list_devices()[-1]
    wrong = DeviceFacts("cpu", 3e7, 3e9, n_threads=1, thread_bytes_per_s=3e7)
    MachineFile.of_user().keep_device(cpu, wrong)
    before = predicted()
    bench = run("bench", model, "-p", "16", "-n", "8", "-r", "3", "--json").document
    after = predicted()
    measured = {
        "prefill" if line["n_prompt"] else "decode": line["avg_ts"] for line in bench["results"]
    }
    for test, speed in measured.items():
        assert before[test] < speed / 2
        assert speed / 4 < after[test] < 4 * speed
    simulated = run("plan", model, "--simulate", "3090", "--json").document
    assert simulated["speed"]["decode"]["tokens_per_s"] > 0


def test_several_machines_are_planned_with_their_network(run: Run, model: Path) -> None:
    rig = ("--simulate", "1x3090 / 1x4090", "--wire", "1gbit,2ms")
    out = run("plan", model, *rig).out
    assert "Do not split over this link; run a copy on each machine that can hold the model." in out
    assert "the network" in out
    document = run("plan", model, *rig, "--json").document
    assert [d["device"] for d in document["devices"]] == ["cuda:0", "1/cuda:0"]
    assert (document["split_mode"], document["groups"]) == ("groups", [1, 1])
    (link,) = document["links"]
    assert link["latency_s"] == pytest.approx(2e-3)
    assert document["speed"]["decode"]["path"]["link_s"] > 2 * 2e-3
    wrong = run("plan", model, "--simulate", "3090 / 4090", "--wire", "fast")
    assert_refused(wrong, "is not a network")
