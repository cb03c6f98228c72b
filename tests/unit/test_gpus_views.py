"""What people and programs see of GPUs: total on every machine, of one form whatever is broken."""

import contextlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from gpukiln.cli import schemas
from gpukiln.clouds.embedded.gpus import settings
from gpukiln.clouds.embedded.gpus.state import State
from gpukiln.errors import UsageError
from gpukiln.gpus import cli, collect
from gpukiln.gpus.model import Device, plain
from gpukiln.gpus.processes import container_of
from gpukiln.gpus.selection import DeviceRequest, select
from gpukiln.gpus.verbs import verbs
from gpukiln.probe.nvml import NvmlAnswer

TYPES = ("g4dn.xlarge", "g5.12xlarge", "g6f.xlarge", "p3dn.24xlarge", "p4d.24xlarge", "p5.48xlarge")
LOOKS = ("list", "show", "memory", "processes", "topology")
ROOT = Path(__file__).parents[2]
Typed = Callable[..., tuple[int, str]]
Machine = Callable[..., State]


@pytest.fixture
def machine(simulated: Machine) -> Machine:
    return simulated


@pytest.fixture
def typed(typed_gpu: Callable[..., tuple[int, str, str]]) -> Typed:
    return lambda *words: typed_gpu(*words)[:2]


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(schemas.schema_of("gpu"))


def test_a_document_that_lacks_a_field_does_not_fit(
    machine: Machine, typed: Typed, validator: jsonschema.Draft202012Validator
) -> None:
    machine("g4dn.xlarge")
    document = json.loads(typed("list", "--json")[1])
    validator.validate(document)
    del document["nodes"][0]["devices"][0]["serial"]
    with pytest.raises(jsonschema.ValidationError):
        validator.validate(document)


@pytest.mark.parametrize("instance_type", TYPES)
@pytest.mark.parametrize("verb", LOOKS)
def test_every_view_is_total_on_every_machine(
    machine: Machine, typed: Typed, validator: jsonschema.Draft202012Validator, instance_type: str, verb: str
) -> None:
    machine(instance_type)
    code, text = typed(verb)
    assert code == 0, text
    assert "SIMULATED" in text
    code, said = typed(verb, "--json")
    assert code == 0
    document = json.loads(said)
    validator.validate(document)
    for device in document["nodes"][0]["devices"]:
        reasons = device["unavailable"]
        for name, value in device.items():
            if name in ("error", "mig_index", "parent", "profile"):
                continue
            assert (value is None) == (name in reasons), (name, value, reasons.get(name))


BROKEN = {
    "lost": (5, "LOST", "GPU_IS_LOST"),
    "fallen-off-bus": (5, "LOST", "UNKNOWN"),
    "hung": (5, "HUNG", "HUNG"),
    "hot": (0, "thermal-slowdown", None),
    "ecc": (0, "SICK (ecc-uncorrected)", None),
    "remap-pending": (0, "SICK (recovery-action, remap-pending)", None),
    "mig-mixed": (0, "MIG-", None),
    "mismatch": (4, "mismatch: libnvidia-ml.so.1 has another version", None),
    "no-driver": (4, "the kernel module nvidia is not loaded", None),
}


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("scenario", BROKEN)
def test_what_is_broken_is_a_row_or_a_reason_and_never_a_gap(
    machine: Machine,
    typed: Typed,
    validator: jsonschema.Draft202012Validator,
    scenario: str,
) -> None:
    machine("p4d.24xlarge", scenario=scenario)
    code, told, reason = BROKEN[scenario]
    found, text = typed("list")
    assert (found, told in text) == (code, True), text
    found, said = typed("list", "--json")
    document = json.loads(said)
    validator.validate(document)
    [node] = document["nodes"]
    assert found == node["exit_code"] == code
    gpus = [one for one in node["devices"] if one["kind"] == "gpu"]
    assert len(gpus) == (0 if code == 4 else 8)
    if reason:
        last = gpus[-1]
        assert (last["uuid"], last["health"], last["allocatable"]) == (None, told.lower(), False)
        assert last["unavailable"]["temperature_c"] == reason
        [error] = node["errors"]
        assert (error["object"], error["severity"]) == ("GPU 7", "error")
        assert error["evidence"]["name"] == reason
        assert error["id"] == reason.lower().replace("_", "-")
        assert all(one["health"] == "ok" and one["allocatable"] for one in gpus[:-1])
    if scenario == "mig-mixed":
        parts = [one for one in node["devices"] if one["kind"] == "mig"]
        assert [one["profile"] for one in parts] == ["1g.5gb"] * 7 + ["3g.20gb"] * 2
        assert {one["parent"] for one in parts} == {gpus[0]["uuid"], gpus[1]["uuid"]}
        assert [one["allocatable"] for one in gpus] == [False, False] + [True] * 6
        assert all(one["allocatable"] for one in parts)


BUS = [{"address": "0000:00:1e.0", "device": "0x1eb8"}]


@pytest.mark.parametrize(
    ("pci", "given", "contained", "error", "state", "code", "fix"),
    [
        ([], [], False, None, "no-device", 0, "lspci"),
        (BUS, [], True, None, "not-granted", 0, "--gpus all"),
        (BUS, BUS, False, 12, "no-driver", 4, "the role nvidia_driver"),
        (BUS, BUS, True, 12, "no-library", 4, "NVIDIA_DRIVER_CAPABILITIES"),
        (BUS, BUS, False, 9, "no-driver", 4, "modprobe nvidia"),
        (BUS, BUS, False, 18, "mismatch", 4, "reboot"),
        (BUS, BUS, False, 4, "no-permission", 4, "/dev/nvidia"),
        (BUS, BUS, False, 999, "failed", 4, "dmesg"),
    ],
)
def test_without_gpus_to_read_it_says_which_kind_of_nothing_it_is(
    monkeypatch: pytest.MonkeyPatch,
    pci: list[Any],
    given: list[Any],
    contained: bool,
    error: int | None,
    state: str,
    code: int,
    fix: str,
) -> None:
    head = {"error": {"_error": "an error", "code": error}} if error else {}
    monkeypatch.setattr(collect, "bus_gpus", lambda: pci)
    monkeypatch.setattr(collect, "accessible_gpus", lambda: given)
    monkeypatch.setattr(collect, "in_container", lambda: contained)
    monkeypatch.setattr(collect, "is_simulated", lambda: False)
    monkeypatch.setattr(collect, "ask_nvml", lambda **_: NvmlAnswer(head))
    found = collect.collect()
    assert (found.state, found.code) == (state, code)
    assert found.message
    assert fix in found.fix
    assert found.devices == ()


def test_one_gpu_is_named_in_every_way_that_people_know(machine: Machine, typed: Typed) -> None:
    machine("g5.12xlarge")
    [node] = json.loads(typed("list", "--json")[1])["nodes"]
    third = node["devices"][2]
    for name in (third["uuid"], third["uuid"][:12], "2", third["bus_id"]):
        [found] = json.loads(typed("show", name, "--json")[1])["nodes"][0]["devices"]
        assert found["uuid"] == third["uuid"]
    for name in ("GPU-", "9", "nonsense"):
        assert typed("show", name)[0] == 2


def test_the_best_linked_group_is_named(machine: Machine, typed: Typed) -> None:
    machine("p3dn.24xlarge")
    [node] = json.loads(typed("topology", "--best", "4", "--json")[1])["nodes"]
    best = node["best"]["uuids"]
    ways = {one["uuid"]: {peer["uuid"]: peer["nvlinks"] for peer in one["peers"]} for one in node["devices"]}
    assert min(ways[a][b] for a in best for b in best if a != b) >= 1
    far = [one["uuid"] for one in node["devices"] if one["uuid"] not in best]
    assert any(ways[best[0]][other] == 0 for other in far)  # not every four are so
    assert typed("topology", "--best", "9")[0] == 3


def test_a_container_is_known_by_its_control_group() -> None:
    id = "0123456789abcdef" * 4
    pod = "11112222-3333-4444-5555-666677778888"
    known = {
        f"0::/system.slice/docker-{id}.scope": ("docker", id, None),
        f"12:devices:/docker/{id}": ("docker", id, None),
        f"0::/machine.slice/libpod-{id}.scope/container": ("podman", id, None),
        f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{pod.replace('-', '_')}.slice/"
        f"cri-containerd-{id}.scope": ("containerd", id, pod),
        f"9:cpu:/kubepods/besteffort/pod{pod}/{id}": ("containerd", id, pod),
        f"0::/kubepods.slice/kubepods-pod{pod.replace('-', '_')}.slice/crio-{id}.scope": ("crio", id, pod),
        "0::/default/mine": ("containerd", "mine", None),
        "0::/user.slice/user-1000.slice/session-3.scope": None,
        "0::/": None,
    }
    for text, wanted in known.items():
        found = container_of(text)
        assert (found and (found.engine, found.id, found.pod)) == wanted, text


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("seed", range(10))
def test_on_machines_drawn_by_chance_views_hold_and_nothing_ineligible_is_chosen(
    machine: Machine,
    typed: Typed,
    validator: jsonschema.Draft202012Validator,
    seed: int,
) -> None:
    draw = random.Random(seed)  # noqa: S311 - machines, no secrets
    state = machine(draw.choice(TYPES))
    count = len([one for one in collect.collect().devices if one.kind == "gpu"])
    for _ in range(draw.randrange(6)):
        gpu = draw.randrange(count)
        text = draw.choice(
            (
                f"{gpu}.temperature={draw.randrange(20, 110)}",
                f"{gpu}.memory_used={draw.randrange(0, 1 << 17)}",
                f"{gpu}.utilization={draw.randrange(0, 101)}",
                f"{gpu}.ecc_uncorrected=1",
                f"{gpu}.remap_failed=true",
                f"{gpu}.recovery_action=2",
                f"{gpu}.compute_mode=2",
                f"{gpu}.lost=true",
                f"{gpu}.fallen_off_bus=true",
                f"{gpu}.nvlink_down=0",
            )
        )
        with contextlib.suppress(UsageError):  # what this board does not tell
            state.change(lambda rows, text=text: settings.apply_setting(rows, text))  # type: ignore[misc]
    if draw.random() < 0.3:
        with contextlib.suppress(UsageError):
            state.change(lambda rows: settings.play_scenario(rows, "mig-mixed"))
    for verb in LOOKS:
        code, said = typed(verb, "--json")
        assert code in (0, 5), said
        validator.validate(json.loads(said))
        assert typed(verb)[0] == code
    found = collect.collect()
    for request in (
        DeviceRequest(count=draw.randrange(1, count + 1)),
        DeviceRequest(memory_mib=draw.randrange(1, 1 << 16)),
        DeviceRequest(mig="any"),
        DeviceRequest(models=("A100",), count=draw.randrange(1, 3)),
        DeviceRequest(capability=(8, 0)),
        DeviceRequest(linked=True, count=2),
    ):
        chosen = select(request, found.devices, found.processes or (), found.driver, {}).devices
        assert len(chosen) in (0, request.count)
        for one in chosen:
            check_eligible(request, one)
        if request.linked:
            assert all(
                peer.nvlinks for one in chosen for peer in one.peers if peer.uuid in {c.uuid for c in chosen}
            )


def check_eligible(request: DeviceRequest, one: Device) -> None:
    """What must be true of a device that somebody gets, said once more and otherwise."""
    assert one.uuid
    assert one.error is None
    assert not one.ecc_uncorrected
    assert not one.remap_failed
    assert one.recovery_action in (None, "none")
    assert one.compute_mode != "prohibited"
    assert (one.kind == "mig") == bool(request.mig)
    assert one.kind == "mig" or not one.mig_enabled
    if request.memory_mib:
        assert (one.memory_free_mib or 0) >= request.memory_mib
    if request.models:
        assert "A100" in (one.name or "")
    if request.capability:
        assert float(one.compute_capability or 0) >= 8.0


def test_the_keys_are_those_of_every_other_device(machine: Machine, typed: Typed) -> None:
    machine("p4d.24xlarge", "7.lost=true", scenario="mig-mixed")
    [node] = json.loads(typed("list", "--json")[1])["nodes"]
    assert {tuple(one) for one in node["devices"]} == {tuple(plain(Device("x", "gpu", 0)))}


def test_every_verb_says_what_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in verbs():
        assert cli.main([verb, "-h"]) == 0
        shown = capsys.readouterr().out
        assert f"gpukiln-gpu {verb}" in shown


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["lits"], "there is no verb 'lits'\nnext: did you mean list"),
        (["xyzzy"], "there is no verb 'xyzzy'\nnext: `gpukiln-gpu -h` lists them"),
        (
            ["list", "--frree"],
            "--json\nnext: did you mean --free?",
        ),
        (["lease", "--cuont=2"], "did you mean --count"),
        (["lease", "--xyzzy"], "next: `gpukiln-gpu lease -h` lists the options"),
        (["run", "python3"], "run takes no argument 'python3'\nnext: `gpukiln-gpu run -h`"),
        (["release", "all"], "'all' is not an id of a lease\nnext: wanted: such as L-42"),
        (["list", "--", "x"], "list takes no command, but -- x is given"),
        (["lease", "--count", "two"], "--count 'two' is not a whole number"),
        (["lease", "--memory", "lots"], "--memory 'lots' is not an amount of memory"),
        (["lease", "--for", "soon"], "--for 'soon' is not a duration"),
        (["lease", "--shared"], "--shared is given without --memory"),
        (["run"], "run lacks the command"),
        (["run", "--json", "--", "true"], "run has no JSON document"),
        (["release"], "no lease is named, or several options name leases"),
    ],
)
def test_what_is_typed_wrong_ends_with_2_and_says_so(
    machine: Machine, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    machine("g4dn.xlarge")
    assert cli.main(words) == 2
    assert told in capsys.readouterr().err


def test_a_reader_that_has_read_enough_is_no_failure() -> None:
    """`gpukiln-gpu -h | head -0`."""
    reader, writer = os.pipe()
    os.close(reader)
    program = "import sys\nfrom gpukiln.gpus.cli import main\nsys.exit(main(['-h']))"
    done = subprocess.run(
        [sys.executable, "-c", program], stdout=writer, stderr=subprocess.PIPE, cwd=ROOT, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_another_broken_pipe_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pipe to a program that ended too early, for example."""

    def end(*_: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(cli, "run", end)
    assert cli.main(["list"]) == 4
    assert "Broken pipe" in capsys.readouterr().err
