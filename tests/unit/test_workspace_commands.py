"""What people type after `invoke workspace.`, against a cloud without machines: answer, error, exit code."""

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gpukiln.clouds import select
from gpukiln.clouds.embedded import scarcity
from gpukiln.commands import workspace as commands
from gpukiln.errors import UnavailableError
from gpukiln.instances.tags import tag_list
from gpukiln.options import options_of
from gpukiln.verify.verdict import CheckResult, Verdict
from gpukiln.workspaces import operations, provision, reach, ssh_config
from gpukiln.workspaces.lifecycle import find_workspaces
from tests.support import documents
from tests.support.exit_codes import invoke
from tests.support.release_cloud import Cloud, changes, fault, make_image, running, server, tell, verdict

ROOT = Path(__file__).parents[2]
VISION = ("--name", "vision", "--owner", "ann")
T4 = (
    *("--gpu", "T4:1", "--simulated", "--cpu", "8", "--memory", "32GiB", "--storage", "5Gi"),
    *("--region", "us-west-2"),
)


class Said(NamedTuple):
    stdout: str
    stderr: str


Typed = Callable[..., Said]


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    tell("reset")
    yield make_image("b1")
    tell("reset")


@pytest.fixture
def typed(
    image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Typed]:
    """Run a command line of the noun, which must end with a code; the agent is done at once."""
    assert image
    monkeypatch.setenv("GPUKILN_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    (tmp_path / "user").mkdir()
    monkeypatch.setattr(select, "make_cloud", lambda _, region, **__: Cloud(region))
    monkeypatch.setattr(provision, "POLL_S", 0.01)
    monkeypatch.setattr(reach, "ask_busy", lambda *_: None)

    def run(*words: str, code: int = 0) -> Said:
        with pytest.raises(SystemExit) as ended:
            invoke([f"workspace.{words[0]}", *words[1:]])
        shown = Said(*capsys.readouterr())
        assert (ended.value.code or 0) == code, shown
        return shown

    yield run
    for one in ("us-west-2", "eu-west-1"):
        for found in find_workspaces(Cloud(one)):
            run("down", found.name, "--force", "--yes", "--owner", found.owner, "--region", one)
    tell("forget")


def tag(stage: str, name: str = "gpukiln:stage") -> None:
    ids = list(running())
    Cloud().client("ec2").create_tags(Resources=ids, Tags=tag_list({name: stage}))


def raised(typed: Typed, *more: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(
        typed("up", "--yes", *VISION, *T4, "--no-wait", "--json", *more).stdout
    )
    tag("done")
    return document


def test_every_document_has_its_published_form(typed: Typed) -> None:
    shown = [raised(typed)["schema"]]
    for words in (("show", "vision"), ("list",), ("status", "vision"), ("usage",), ("env", "vision")):
        shown.append(documents.read(typed(*words, "--json").stdout)["schema"])
    names = ("show", "show", "list", "status", "usage", "env")
    assert shown == [f"workspace.{name}/1" for name in names]


def test_a_workspace_is_listed_shown_and_put_away(typed: Typed) -> None:
    done = raised(typed)
    machine = done["workspace"]["machines"][0]["instance_id"]
    assert machine in typed("list").stdout
    shown = typed("show", "vision").stdout
    assert "0.752 USD/hour" in shown
    assert "export GPUKILN_WORKSPACE=vision" in typed("env", "vision").stdout
    assert f"HostKeyAlias={machine}" in typed("ssh", "vision", "--print").stdout
    stopped = json.loads(typed("stop", "vision", "--json").stdout)
    assert stopped["workspace"]["machines"][0]["state"] == "stopped"
    assert "wanted running" in typed("ssh", "vision", code=4).stderr
    assert "stopped" in typed("start", "vision", "--no-wait").stderr or running()
    kept = typed("down", "vision", "--keep-home")
    assert "is kept" in kept.stderr
    assert "home " in typed("list").stdout
    assert typed("show", "vision").stdout.splitlines()[-1].endswith("kept")
    assert "has no machine now" in typed("status", "vision", code=4).stderr
    typed("down", "vision", "--owner", "ann", "--yes")
    assert "this computer knows no workspace" in typed("show", "vision", code=2).stderr
    used = json.loads(typed("usage", "--json").stdout)
    assert [(one["owner"], one["running"]) for one in used["owners"]] == [("ann", False)]
    assert "ann" in typed("usage").stdout


def test_ssh_reaches_a_workspace_by_its_name_until_it_is_removed(typed: Typed, tmp_path: Path) -> None:
    entry, config = tmp_path / "ssh_config.d/vision.conf", tmp_path / "user/.ssh/config"
    typed("up", *VISION, *T4, "--yes", "--no-wait", "--no-ssh-config")
    assert not entry.exists()
    said = typed("up", *VISION, *T4, "--yes", "--no-wait").stderr
    assert f"`ssh -F '{entry}' vision` reaches it" in said
    assert not config.exists()  # there was no terminal to ask on
    [machine] = running()
    asked = subprocess.run(["ssh", "-G", "-F", entry, "vision"], capture_output=True, text=True, check=True)
    assert f"hostkeyalias {machine}" in asked.stdout
    ssh_config.include(tmp_path / "user")
    assert "`ssh vision` reaches it" in typed("up", *VISION, *T4, "--yes", "--no-wait").stderr
    typed("down", "vision", "--yes")
    assert not entry.exists()
    assert ssh_config.is_included(tmp_path / "user")


@pytest.mark.parametrize("answer", [b"yes\n", b"no\n"])
def test_the_line_in_the_users_configuration_is_asked_for_once(
    typed: Typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    config = tmp_path / "user/.ssh/config"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(terminal := io.BytesIO(answer)))
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    question = "adding a line at the top of ~/.ssh/config: type yes to go on:"
    assert question in typed("up", *VISION, *T4, "--yes", "--no-wait").stderr
    assert config.exists() == (answer == b"yes\n")
    assert question not in typed("up", *VISION, *T4, "--yes", "--no-wait").stderr


def test_a_host_that_the_user_has_is_not_hidden(typed: Typed, tmp_path: Path) -> None:
    config = tmp_path / "user/.ssh/config"
    config.parent.mkdir()
    config.write_text("Host vision\n  HostName 198.51.100.9\n")
    said = typed("up", *VISION, *T4, "--yes", "--no-wait").stderr
    assert (
        "note: `ssh vision` does not reach it: ~/.ssh/config has a host vision already (198.51.100.9)" in said
    )
    assert not (tmp_path / "ssh_config.d").exists()


def test_a_command_on_a_workspace_is_given_to_ssh_word_by_word(
    typed: Typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised(typed)
    said = tmp_path / "said"
    program = tmp_path / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >{said}\nexit 7\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    for words in (["echo", "a", "b"], ["echo", "reboot"], ["-v", "a  b", "$HOME", "--", "c"], ["uptime"]):
        typed("ssh", "vision", "--", *words, code=7)
        mark, host, *given = said.read_text().splitlines()[-len(words) - 2 :]
        assert (mark, host[:4], given) == ("--", "ann@", words)
    typed("ssh", "vision", "--command", "echo a b", code=7)
    assert said.read_text().splitlines()[-1] == "echo a b"
    typed("ssh", "vision", code=7)
    assert said.read_text().splitlines()[-1].startswith("ann@")


def test_what_is_typed_wrong_is_told_before_anything_is_done(typed: Typed) -> None:
    assert "--name is missing" in typed("up", "--yes", "--owner", "ann", code=2).stderr
    assert "--owner is missing" in typed("up", "--yes", "--name", "vision", code=2).stderr
    assert "no workspace is named" in typed("show", code=2).stderr
    assert "small letters" in typed("up", "--yes", "--name", "V", "--owner", "ann", code=2).stderr
    assert (
        "unknown service 'olama'" in typed("up", "--yes", *VISION, *T4, "--service", "olama", code=2).stderr
    )
    assert (
        "no machine in us-west-2 has" in typed("up", *VISION, "--gpu", "A100:1", "--simulated", code=3).stderr
    )
    assert (
        "desktop" in typed("up", "--yes", *VISION, *T4, "--set", "capabilities.gui_vnc=true", code=3).stderr
    )
    assert "every address" in typed("up", "--yes", *VISION, *T4, "--ssh-from", "0.0.0.0/0", code=2).stderr
    assert (
        "for Windows"
        in typed("up", "--yes", *VISION, *T4, "--set", "capabilities.gui_rdp=true", code=2).stderr
    )
    assert running() == {}


def test_a_file_is_the_contract(typed: Typed, tmp_path: Path) -> None:
    file = tmp_path / "vision.yaml"
    file.write_text(
        "workspace_name: vision\nowner: ann\nregion: us-west-2\ncompute_profile: {storage: 5Gi}\n"
    )
    done = json.loads(
        typed(
            "up", "--yes", "--from", str(file), "--gpu", "T4:1", "--simulated", "--no-wait", "--json"
        ).stdout
    )
    assert done["workspace"]["homes"][0]["size_gib"] == 5
    file.write_text("workspace_name: vision\nowner: ann\nsubnet_id: subnet-1\n")
    assert "subnet_ids: [" in typed("up", "--yes", "--from", str(file), code=2).stderr


def test_nobody_has_capacity(typed: Typed) -> None:
    layout = server()[1]
    for zone in "abcd":
        scarcity.add(layout, f"us-west-2{zone}:*")
    try:
        done = typed("up", "--yes", *VISION, *T4, code=75)
    finally:
        scarcity.clear(layout)
    assert "InsufficientInstanceCapacity" in done.stderr
    assert "no capacity now" in done.stderr


def test_status_says_what_counts_as_use(typed: Typed) -> None:
    raised(typed)
    assert "in use: no\n" in typed("status", "vision").stdout
    tag("processors: python3 (pid 77) of ann", "gpukiln:busy")
    shown = typed("status", "vision").stdout
    assert "in use: processors: python3 (pid 77) of ann\n" in shown
    assert "does not stop" not in shown


def test_status_names_a_machine_that_its_idle_rule_never_stops(typed: Typed) -> None:
    raised(typed)
    tag("unknown: utilization of GPU 0 reads 'ERR!'", "gpukiln:busy")
    shown = " ".join(typed("status", "vision").stdout.split())
    assert "in use: unknown: utilization of GPU 0 reads 'ERR!'" in shown
    assert "the idle rule does not stop it while a reading is unknown" in shown
    assert "`invoke workspace.stop vision` to stop it" in shown


def test_somebody_elses_is_not_put_away_by_mistake(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    raised(typed)
    tag("ann is there", "gpukiln:busy")
    assert "vision is in use" in typed("down", "vision", "--yes", code=6).stderr
    monkeypatch.setattr("gpukiln.workspaces.network.state_home", lambda: Path("/nowhere"))
    assert "this computer did not start it" in typed("down", "vision", code=6).stderr
    assert "not on this computer" in typed("ssh", "vision", code=6).stderr


def interrupt_after(stage: str) -> Callable[..., None]:
    """A wait in which somebody presses Ctrl-C when the machine has reached a stage."""

    def wait(*_: object, **__: object) -> None:
        tag(stage)
        raise KeyboardInterrupt

    return wait


def test_ctrl_c_removes_what_is_not_usable_yet(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provision, "wait_until_done", interrupt_after("home"))
    said = typed("up", "--yes", *VISION, *T4, code=130).stderr
    assert "was not usable yet and is removed, and all that was made with it" in said
    assert running() == {}
    assert find_workspaces(Cloud(), "vision") == ()
    assert "vision" not in typed("list").stdout


def test_ctrl_c_keeps_a_home_that_was_there(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    home = raised(typed)["workspace"]["homes"][0]["volume_id"]
    typed("down", "vision", "--keep-home")
    monkeypatch.setattr(provision, "wait_until_done", interrupt_after("home"))
    assert "is removed; the home stays" in typed("up", "--yes", *VISION, *T4, code=130).stderr
    [left] = find_workspaces(Cloud(), "vision")
    assert (left.machines, [one.volume_id for one in left.homes]) == ((), [home])


@pytest.mark.parametrize(("more", "stage"), [(("--keep",), "home"), ((), "done, 3 stages")])
def test_ctrl_c_says_what_runs_and_what_it_costs(
    typed: Typed, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...], stage: str
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(provision, "wait_until_done", interrupt_after(stage))
        said = typed("up", "--yes", *VISION, *T4, *more, code=130).stderr
    [machine] = running()
    assert f"vision runs: {machine}, g4dn.2xlarge in us-west-2" in said
    assert "0.752 USD/hour" in said
    on, away = re.findall(r"`invoke ([^`]*)`", said)
    assert (on.split()[0], away.split()[0]) == ("workspace.up", "workspace.down")
    monkeypatch.setattr(provision, "wait_until_done", lambda *_, **__: None)
    assert f"has a machine already: {machine}" in typed(*on.removeprefix("workspace.").split()).stderr
    typed(*away.removeprefix("workspace.").split(), "--yes")
    assert running() == {}


def test_ctrl_c_never_removes_a_machine_that_was_there(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    raised(typed)
    monkeypatch.setattr(provision, "wait_until_done", interrupt_after("home"))
    assert "vision runs: i-" in typed("up", "--yes", *VISION, *T4, code=130).stderr
    assert running()


def test_ctrl_c_that_can_not_remove_it_says_so(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provision, "wait_until_done", interrupt_after("home"))
    tell("faults", [fault("TerminateInstances", "denied")])
    try:
        said = typed("up", "--yes", *VISION, *T4, code=130).stderr
    finally:
        tell("faults", [])
    assert "vision may still run and cost money" in said
    assert "`invoke workspace.down vision` removes it" in said


def test_ctrl_c_while_it_starts_again_says_what_runs(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    raised(typed)
    typed("stop", "vision")
    monkeypatch.setattr(operations, "wait_until_done", interrupt_after("home"))
    assert "vision runs: i-" in typed("start", "vision", code=130).stderr


def test_the_price_is_shown_before_anything_is_started(
    typed: Typed, image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("yes\n"))
    refused = typed("up", *VISION, *T4, code=6).stderr
    rows = [line.split() for line in refused.splitlines() if line.startswith("g4dn.")]
    # us-west-2 of catalog/data/prices.yaml; a month: 730 h of machine and address (0.005), 5 GB at 0.08
    assert (len(rows), rows[0][0]) == (3, "g4dn.2xlarge")
    assert rows[0][-2:] == ["0.752", "553.01"]
    assert re.search(r"and where these have no capacity \d+ more", refused)
    assert f"image {image}: it was named" in typed("up", *VISION, *T4, "--image", image, code=6).stderr
    assert "; passed 20" in refused
    assert "starting vision needs consent" in refused
    assert running() == {}
    monkeypatch.setattr("sys.stdin", Terminal("no\n"))
    assert "'no' was typed" in typed("up", *VISION, *T4, code=6).stderr
    assert find_workspaces(Cloud()) == ()
    monkeypatch.setattr("sys.stdin", Terminal("yes\n"))
    typed("up", *VISION, *T4, "--no-wait")
    assert running()
    monkeypatch.setattr("sys.stdin", io.StringIO())
    typed("up", *VISION, *T4, "--no-wait")  # it runs: nothing more is spent


DIFFERENT = [
    (("--gpu", "L4:1"), "it has 1 T4, wanted L4"),
    (("--gpu", "T4:4"), "it has 1 T4, wanted 4"),
    (("--gpu", "0"), "it has 1 T4, wanted none"),
    (("--cpu", "16"), "it has 8 vCPU, wanted 16"),
    (("--memory", "64GiB"), "it has 32768 MiB of memory, wanted 65536"),
    (("--instance-types", "g4dn.4xlarge"), "it is a g4dn.2xlarge, wanted g4dn.4xlarge"),
    (("--image", "ami-1"), "wanted ami-1"),
    (("--spot",), "it is on demand, wanted spot"),
    (("--service", "jupyter"), "services: it was started without, wanted jupyter"),
    (("--ssh-from", "203.0.113.0/24"), "ssh_from: it was started without, wanted 203.0.113.0/24"),
    (("--idle-minutes", "30"), "idle_minutes: it was started with another one, wanted 30"),
    (("--set", "capabilities.network_egress=open"), "network_egress: it was started without, wanted open"),
    (("--set", "agent_init_script=reboot"), "agent_init_script: it was started without, wanted reboot"),
    (("--roles", "https://example.org/r@" + "0" * 40), "roles: it was started without, wanted https://"),
    (("--max-price", "0.5"), "it costs 0.752 USD/hour, wanted at most 0.5"),
    (("--budget", "500"), "its machine alone costs 548.96 USD a month, wanted at most 500"),
]


def test_a_machine_that_differs_is_not_taken_for_what_is_asked_for(typed: Typed) -> None:
    raised(typed, "--idle-minutes", "60")
    [before] = running()
    for more, difference in DIFFERENT:
        for dry in ((), ("--dry-run",)):
            said = typed("up", "--yes", *VISION, "--region", "us-west-2", *more, *dry, code=6).stderr
            assert difference in said, more
            assert "`invoke workspace.down vision --keep-home`" in said
    two = typed("up", "--yes", *VISION, "--gpu", "L4:1", "--spot", "--region", "us-west-2", code=6).stderr
    assert [line for line in two.splitlines() if line.startswith("  ")] == [
        "  it has 1 T4, wanted L4",
        "  it is on demand, wanted spot",
    ]
    same = ("--gpu", "T4:1", "--cpu", "4", "--idle-minutes", "60", "--max-price", "0.752", "--no-wait")
    typed("up", *VISION, "--region", "us-west-2", *same)
    typed("up", *VISION, "--region", "us-west-2", "--no-wait")  # nothing is asked for
    assert list(running()) == [before]


def test_options_of_up_are_all_compared() -> None:
    fields = {one.name for one in options_of(commands.WorkspaceUp)}
    typed_ = {word[2:].replace("-", "_") for more, _ in DIFFERENT for word in more if word.startswith("--")}
    how = {"yes", "dry_run", "json", "keep", "no_wait", "no_ssh_config", "replace_unhealthy"}
    where = {"name", "owner", "region", "cloud", "profile"}  # which workspace it is
    elsewhere = {"from_", "storage", "simulated"}  # a home grows; the last is in the test below
    assert fields - typed_ == how | where | elsewhere


def test_a_machine_without_a_gpu_that_differs(typed: Typed, image: str) -> None:
    small = ("--gpu", "0", "--instance-types", "m5.large", "--image", image, "--region", "us-west-2")
    typed("up", "--yes", *VISION, *small, "--no-wait")
    simulated = typed("up", *VISION, *small, "--simulated", code=6).stderr
    assert "it has no simulated GPUs, wanted --simulated" in simulated
    assert "it has no GPU, wanted 1 T4" in typed("up", *VISION, *T4[:2], *T4[-2:], code=6).stderr
    assert "m5.large has 2 vCPU" in typed("up", *VISION, *small, "--cpu", "4", code=6).stderr
    priced = typed("up", *VISION, *small, "--max-price", "1", code=6).stderr
    assert "its price is not known" in priced


def test_a_cloud_without_gpus_has_none_to_give(typed: Typed) -> None:
    for more in (("--gpu", "T4:1"), (), ("--gpu", "T4:1", "--dry-run")):
        said = typed("up", "--yes", *VISION, "--region", "us-west-2", "--no-wait", *more, code=2).stderr
        assert "machines of --cloud embedded have no GPUs, wanted 1" in said
        assert "--simulated gives them simulated ones" in said
    assert running() == {}


@pytest.mark.parametrize(("gpus", "wanted"), [("1", 1), ("0", 0)])
def test_a_deep_look_expects_the_gpus_of_the_contract(
    typed: Typed, image: str, monkeypatch: pytest.MonkeyPatch, gpus: str, wanted: int
) -> None:
    one = ("--gpu", gpus, "--instance-types", "g4dn.xlarge", "--image", image, "--region", "us-west-2")
    up_ = ("up", "--yes", *VISION, *one, *(["--simulated"] if wanted else []), "--no-wait")
    typed(*up_)
    typed(*up_)  # it is what is asked for
    if wanted:  # as machines of the embedded cloud were started before
        Cloud().client("ec2").delete_tags(Resources=list(running()), Tags=[{"Key": "gpukiln:gpus"}])
    asked: list[object] = []

    def suite(*_: object, **options: object) -> Verdict:
        asked.append(options["expect_gpus"])
        return verdict()

    monkeypatch.setattr(reach, "run_suite", suite)
    tag("done")
    typed("status", "vision", "--deep")
    assert asked == [wanted]


def test_a_dry_run_of_up_starts_nothing(typed: Typed) -> None:
    tell("calls")
    ahead = json.loads(typed("up", *VISION, *T4, "--dry-run", "--json").stdout)
    documents.check(ahead)
    assert (ahead["schema"], ahead["runs"], ahead["home_gib"]) == ("workspace.plan/1", "", 5)
    assert ahead["offers"][0]["usd_hour"] == "0.752"
    assert "553.01" in typed("up", *VISION, *T4, "--dry-run").stdout
    assert changes() == []
    machine = raised(typed)["workspace"]["machines"][0]["instance_id"]
    assert f"has a machine already, {machine}" in typed("up", *VISION, *T4, "--dry-run").stdout


def test_what_a_machine_may_cost_is_a_limit(typed: Typed) -> None:
    dry = ("up", *VISION, *T4, "--dry-run", "--json")
    cheap = json.loads(typed(*dry, "--max-price", "0.8").stdout)["offers"]
    assert [one["instance_type"] for one in cheap] == ["g4dn.2xlarge"]
    assert "wanted at most 0.5" in typed(*dry, "--max-price", "0.5", code=3).stderr
    fit = json.loads(typed(*dry, "--budget", "600").stdout)["offers"]
    assert [one["instance_type"] for one in fit] == ["g4dn.2xlarge"]
    assert "costs 553.01" in typed(*dry, "--budget", "553", code=6).stderr
    two = (*VISION, *T4[:-1], "us-west-2,eu-west-1", "--budget", "9")
    assert "none of us-west-2, eu-west-1" in typed("up", "--yes", *two, code=6).stderr
    assert "none of us-west-2, eu-west-1" in typed("up", "--dry-run", *two, code=6).stderr
    assert "is not a price" in typed(*dry, "--max-price", "x", code=2).stderr
    without = ("--gpu", "0", "--instance-types", "m5.large", "--region", "us-west-2", "--max-price", "1")
    assert "m5.large is not known" in typed("up", *VISION, *without, "--dry-run", code=3).stderr
    assert running() == {}


def test_a_machine_that_holds_its_users_files_is_not_replaced(
    typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    homeless = ("--set", "capabilities.persistent_home=false")
    raised(typed, *homeless)
    bad = verdict(failed=[("gpu.xid", "Xid 79")])
    monkeypatch.setattr(reach, "run_suite", Suite([bad]))
    said = typed("up", "--yes", *VISION, *T4, *homeless, "--replace-unhealthy", code=1).stderr
    assert "it has no home volume, so that its user's files are on it" in said
    assert running()


def test_a_region_that_can_not_be_asked_hides_no_other(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    raised(typed)
    typed("list", "--refresh", "--regions", "us-west-2,eu-west-1")

    def make_cloud(_: str, region: str, **__: object) -> Cloud:
        if region == "eu-west-1":
            raise UnavailableError("no credentials")
        return Cloud(region)

    monkeypatch.setattr(select, "make_cloud", make_cloud)
    for command in ("list", "usage"):
        said = typed(command, "--refresh", code=5)
        assert "vision" in said.stdout
        assert "eu-west-1: no credentials" in said.stderr
    assert "no credentials" in typed("list", "--refresh", "--regions", "eu-west-1", code=4).stderr


def test_a_list_says_how_old_it_is(typed: Typed, tmp_path: Path) -> None:
    raised(typed)
    assert "ago; state and health may have changed" not in typed("list").stdout
    [file] = (tmp_path / "workspaces" / "known").glob("*.json")
    document = json.loads(file.read_text())
    then = datetime.now(UTC) - timedelta(days=3, hours=1)
    file.write_text(json.dumps({**document, "at": then.isoformat(timespec="seconds")}))
    said = typed("list").stdout
    assert "3 days ago; state and health may have changed, --refresh updates them" in said


def test_a_home_that_was_kept_is_of_this_computer(typed: Typed) -> None:
    raised(typed)
    typed("down", "vision", "--keep-home")
    typed("down", "vision", "--yes")
    assert find_workspaces(Cloud()) == ()


class Terminal(io.StringIO):
    """Standard input of somebody who types."""

    def isatty(self) -> bool:
        return True


def test_a_home_is_removed_when_its_name_is_typed(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    home = raised(typed)["workspace"]["homes"][0]["volume_id"]
    monkeypatch.setattr("sys.stdin", Terminal("visions\n"))
    refused = typed("down", "vision", code=6).stderr
    assert f"home {home} of 5 GiB in us-west-2" in refused
    assert "made less than a minute ago" in refused
    assert "'visions' was typed, wanted 'vision'" in refused
    assert "--keep-home keeps the home" in refused
    monkeypatch.setattr("sys.stdin", Terminal(""))
    assert "nothing was typed" in typed("down", "vision", code=6).stderr
    assert running()
    monkeypatch.setattr("sys.stdin", Terminal("vision\n"))
    assert "is removed" in typed("down", "vision").stderr


def test_off_a_terminal_a_home_is_removed_with_yes_alone(
    typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = raised(typed)["workspace"]["homes"][0]["volume_id"]
    monkeypatch.setattr("sys.stdin", io.StringIO("vision\n"))
    refused = typed("down", "vision", code=6).stderr
    assert "there is no terminal to ask on" in refused
    assert f"home {home} of 5 GiB" in refused
    assert "--yes consents" in refused
    monkeypatch.setattr("sys.stdin", None)  # as a service has it
    assert "there is no terminal to ask on" in typed("down", "vision", code=6).stderr
    assert f"would remove home {home}" in typed("down", "vision", "--dry-run").stdout
    assert [one.volume_id for one in find_workspaces(Cloud())[0].homes] == [home]
    assert running()
    assert "is kept" in typed("down", "vision", "--keep-home").stderr
    assert "would remove home" in typed("down", "vision", "--owner", "ann", "--yes", "--dry-run").stdout
    assert "is removed" in typed("down", "vision", "--owner", "ann", "--yes").stderr


def test_a_machine_without_a_home_volume_is_removed_with_consent(
    typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised(typed, "--set", "capabilities.persistent_home=false")
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert "with all files on it: it has no home volume" in typed("down", "vision", code=6).stderr
    assert "there is no terminal" in typed("down", "vision", "--keep-home", code=6).stderr
    typed("down", "vision", "--yes")
    assert running() == {}


def test_what_is_left_over_is_listed(typed: Typed) -> None:
    done = raised(typed)
    ec2 = Cloud().client("ec2")
    machine, home = done["workspace"]["machines"][0], done["workspace"]["homes"][0]
    ec2.terminate_instances(InstanceIds=[machine["instance_id"]])
    ec2.get_waiter("instance_terminated").wait(
        InstanceIds=[machine["instance_id"]], WaiterConfig={"Delay": 1, "MaxAttempts": 60}
    )
    ec2.delete_volume(VolumeId=home["volume_id"])
    assert "orphaned in us-west-2: vision" in typed("list", "--refresh").stdout
    typed("down", "vision")
    assert "vision" not in typed("list", "--refresh").stdout


def hint(said: str) -> list[str]:
    """The words of the command that an error's hint names, without the noun."""
    return re.findall(r"`invoke workspace\.([^`]*)`", said)[-1].split()


def test_a_home_without_a_machine_in_its_zone_is_moved_as_the_hint_says(typed: Typed) -> None:
    zone = raised(typed)["workspace"]["homes"][0]["zone"]
    typed("down", "vision", "--keep-home")
    layout = server()[1]
    scarcity.add(layout, f"{zone}:*")
    try:
        refused = typed("up", "--yes", *VISION, *T4, "--no-wait", code=75).stderr
        assert "--zone us-west-2" in refused
        typed(*hint(refused))
        typed("up", "--yes", *VISION, *T4, "--no-wait")
    finally:
        scarcity.clear(layout)
    assert set(running().values()) != {zone}


def test_a_zone_is_known_by_its_id_too(typed: Typed) -> None:
    zone = raised(typed)["workspace"]["homes"][0]["zone"]
    typed("down", "vision", "--keep-home")
    rows = Cloud().client("ec2").describe_availability_zones()["AvailabilityZones"]
    other = next(row for row in rows if row["ZoneName"] != zone)
    assert f"in {other['ZoneName']}" in typed("move", "vision", "--zone", other["ZoneId"]).stdout


def test_a_home_is_moved(typed: Typed) -> None:
    zone = raised(typed)["workspace"]["homes"][0]["zone"]
    other = "us-west-2b" if zone != "us-west-2b" else "us-west-2a"
    typed("stop", "vision")
    busy = typed("move", "vision", "--zone", other, code=75).stderr
    typed(*hint(busy))
    assert "unknown zone 'us-west-2x'" in typed("move", "vision", "--zone", "us-west-2x", code=2).stderr
    assert f"in {other}" in typed("move", "vision", "--zone", other).stdout
    again = raised(typed)
    assert again["workspace"]["machines"][0]["zone"] == other
    assert "--zone is missing" in typed("move", "vision", code=2).stderr


@dataclass
class Suite:
    """The verification suite's place: what it says of each machine in turn."""

    says: list[Verdict | Exception]

    def __call__(self, *_: object, **__: object) -> Verdict:
        answer = self.says.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_a_deep_look_is_kept_with_the_workspace(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    raised(typed)
    bad = verdict(failed=[("gpu.xid", "Xid 79")])
    monkeypatch.setattr(reach, "run_suite", Suite([bad, UnavailableError("can't be reached"), verdict()]))
    done = typed("status", "vision", "--deep", code=1)
    assert "unhealthy: gpu.xid" in done.stdout
    assert "unhealthy: gpu.xid" in typed("status", "vision", code=1).stdout
    assert "unhealthy: can't be reached" in typed("status", "vision", "--deep", code=1).stdout
    answer = json.loads(typed("status", "vision", "--deep", "--json").stdout)
    assert answer["health"].startswith("healthy: 1 checks passed")
    assert answer["verdict"]["passed"] is True
    assert "healthy" in typed("list", "--refresh").stdout


def test_a_deep_look_shows_each_check_once(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is looked at; what is printed at the end is what failed, and the counts."""
    raised(typed)
    well = verdict()

    def judged(*_: object, on_check: Callable[[CheckResult], None], **__: object) -> Verdict:
        for result in well.checks:
            on_check(result)
        return well

    monkeypatch.setattr(reach, "run_suite", judged)
    done = typed("status", "vision", "--deep")
    lines = (done.stdout + done.stderr).splitlines()
    assert [sum(one.id in line for line in lines) for one in well.checks] == [1] * len(well.checks)
    assert "1 passed" in done.stdout


def test_a_start_looks_whether_it_is_well(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    raised(typed)
    bad = verdict(failed=[("gpu.xid", "Xid 79")])
    monkeypatch.setattr(reach, "run_suite", Suite([bad, verdict()]))
    monkeypatch.setattr(operations, "wait_until_done", lambda *_, **__: tag("done"))
    typed("stop", "vision")
    done = typed("start", "vision", code=1)
    assert "vision is unhealthy: gpu.xid" in done.stderr
    typed("stop", "vision")
    assert "healthy: 1 checks passed" in typed("start", "vision").stdout


def test_an_unhealthy_machine_is_replaced_by_the_next(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = verdict(failed=[("gpu.xid", "Xid 79")])
    monkeypatch.setattr(reach, "run_suite", Suite([bad, verdict()]))
    monkeypatch.setattr(provision, "wait_until_done", lambda *_, **__: tag("done"))
    done = typed("up", "--yes", *VISION, *T4, "--replace-unhealthy", "--json")
    assert "g4dn.2xlarge) is removed: vision is unhealthy: gpu.xid" in done.stderr
    answer = json.loads(done.stdout)
    assert answer["workspace"]["machines"][0]["instance_type"] != "g4dn.2xlarge"
    assert answer["outputs"]["health"].startswith("healthy")
    assert len(running()) == 1
    assert len(answer["workspace"]["homes"]) == 1
