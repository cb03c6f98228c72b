"""What is said of a machine with simulated GPUs, and that nothing takes it for a proof."""

import io
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree as ET

import pytest
from rich.console import Console

from gpukiln.errors import RefusedError, UsageError
from gpukiln.images.channels import load_channel
from gpukiln.pipeline.verdict_tags import summarize_verdict, verdict_tags, write_verdict_tags
from gpukiln.probe.base import NOT_REACHED
from gpukiln.probe.simulated import NOTE
from gpukiln.release.needs import require_verified
from gpukiln.release.notes import make_notes
from gpukiln.release.verification import verification_from_record, verification_from_tags
from gpukiln.typed import dump, load
from gpukiln.verify import report
from gpukiln.verify.diagnosis import diagnosis
from gpukiln.verify.facts import Facts, environment
from gpukiln.verify.html import render
from gpukiln.verify.junit import write_junit
from gpukiln.verify.needs import SIMULATED
from gpukiln.verify.verdict import Verdict
from gpukiln.verify.verification import Verification
from tests.support.host_evaluate import CHECKS, evaluate_check
from tests.support.host_machine import machine, simulated_machine
from tests.support.host_runner_faults import RUNNER_FAULTS
from tests.support.release_cloud import HOME, tags, verdict

NEED_GPUS = [name for name, (check, _) in CHECKS.items() if "gpu" in check.needs]
DEEP = ("compute", "container")
REAL = verdict(on="g4dn.xlarge", saw_gpu=True)
DOUBLE = replace(REAL, simulated=True)


@pytest.mark.parametrize("check_id", NEED_GPUS)
@pytest.mark.parametrize("expected", [None, 8])
def test_what_needs_gpus_is_not_run_where_they_are_simulated(check_id: str, expected: int | None) -> None:
    found = evaluate_check(check_id, simulated_machine(), profile="node", expect_gpus=expected)
    assert found == ("not_run", SIMULATED)


def test_every_check_of_the_layers_about_gpus_needs_them() -> None:
    layers = ("gpu", "compute", "container", "multi-gpu")
    here = {name for name, (check, _) in CHECKS.items() if check.layer in layers} - set(RUNNER_FAULTS)
    assert here <= set(NEED_GPUS)


@pytest.mark.parametrize("check_id", NEED_GPUS)
def test_asked_for_what_nvml_tells_is_judged(check_id: str) -> None:
    check, _ = CHECKS[check_id]
    outcome, reason = evaluate_check(check_id, simulated_machine(), expect_gpus=2, simulated=True)
    if check.layer in DEEP or "real-gpu" in check.needs:
        assert (outcome, reason) == ("not_run", SIMULATED)
    else:
        assert outcome == "passed", reason
    assert check.layer not in DEEP or "real-gpu" in check.needs


def test_simulated_gpus_are_counted_as_nvml_tells_them() -> None:
    data = simulated_machine(gpus=2)
    assert evaluate_check("gpu.nvml", data, expect_gpus=8, simulated=True) == (
        "failed",
        "2 GPUs simulated, at least 8 expected on this machine",
    )
    data["gpus"]["rows"].pop()
    assert evaluate_check("gpu.nvidia-smi", data, expect_gpus=2, simulated=True) == (
        "failed",
        "nvidia-smi lists 1 GPUs, NVML has 2",
    )


def test_who_asks_for_simulated_gpus_takes_no_others() -> None:
    outcome, reason = evaluate_check("gpu.nvml", machine(gpus=1), simulated=True)
    assert (outcome, "found no simulated GPUs" in reason) == ("failed", True)


def test_where_nothing_ran_it_is_unknown_whether_gpus_are_simulated() -> None:
    """As on a node whose pods do not start: that is a finding of its own."""
    data = {**machine(gpus=1), "simulated": {NOT_REACHED: "no pod started"}}
    assert evaluate_check("gpu.nvml", data, simulated=True) == ("not_reached", "no pod started")


def test_a_real_machine_is_judged_as_before() -> None:
    data = machine()
    del data["simulated"]
    assert evaluate_check("gpu.nvml", data)[0] == "passed"


@pytest.mark.parametrize(
    ("profile", "asked", "outcome"),
    [
        ("image", False, "failed"),
        ("eks-node", False, "failed"),
        ("image", True, "passed"),
        ("eks-node", True, "passed"),
        ("node", False, "passed"),
        ("node", True, "passed"),
    ],
)
def test_a_simulated_machine_s_own_note_is_excused_where_that_is_known(
    profile: str, asked: bool, outcome: str
) -> None:
    found = evaluate_check("hygiene.simulated", simulated_machine(), profile=profile, simulated=asked)
    assert found[0] == outcome, found


@pytest.mark.parametrize("profile", ["image", "eks-node", "node", "runner"])
@pytest.mark.parametrize("asked", [False, True])
def test_an_image_baked_on_simulated_gpus_fails(profile: str, asked: bool) -> None:
    """Its note alone, on a machine that has none; the double itself everywhere."""
    data = machine(gpus=0)
    data["simulated"]["disk"] = [NOTE]
    assert evaluate_check("hygiene.simulated", data, profile=profile, simulated=asked)[0] == "failed"
    data = simulated_machine()
    data["simulated"]["disk"].append("/usr/lib64/libnvidia-ml.so.580.1")
    outcome, reason = evaluate_check("hygiene.simulated", data, profile=profile, simulated=asked)
    assert outcome == "failed"
    assert "/usr/lib64/libnvidia-ml.so.580.1" in reason


def test_everything_that_is_written_says_it(tmp_path: Path) -> None:
    facts = Facts(simulated_machine(gpus=2))
    assert environment(facts)["GPUs"].endswith(" (simulated)")
    assert diagnosis(facts.to_dict()).startswith("The GPUs of this machine are simulated (2 x ")
    assert "simulated" not in diagnosis(machine())
    assert dump(DOUBLE)["simulated"] is True
    assert load(Verdict, dump(DOUBLE), where="x") == DOUBLE
    for one, said in ((DOUBLE, True), (REAL, False)):
        for shown in (report.render(one), report.ending(one)):
            out = io.StringIO()
            Console(file=out, width=160).print(shown)
            assert ("SIMULATED GPUS, NOT VALID FOR A RELEASE" in out.getvalue()) is said
        for machines in ([Verification("a", one)], [Verification("a", one), Verification("b", REAL)]):
            page = render(machines)
            assert ('<p class="simulated" role="alert">' in page) is said
            assert ("(SIMULATED GPUs)" in page) is said
        write_junit([Verification("a", one)], tmp_path / "junit.xml")
        suite = ET.parse(tmp_path / "junit.xml").getroot()[0]  # noqa: S314 - written a moment ago by ourselves
        properties = {p.get("name"): p.get("value") for p in suite.findall("properties/property")}
        assert properties["simulated"] == str(said).lower()


def test_it_passes_and_proves_nothing() -> None:
    assert (REAL.passed, REAL.passed_without_simulation) == (True, True)
    assert (DOUBLE.passed, DOUBLE.passed_without_simulation) == (True, False)
    assert not summarize_verdict(DOUBLE).passed
    written = verdict_tags("eks-gpu", [summarize_verdict(DOUBLE)])
    assert written["gpukiln:verdict"] == "failed"
    assert written["gpukiln:image"] == "not-proven"


def test_no_tag_of_an_image_tells_of_it() -> None:
    cloud = SimpleNamespace(client=lambda _: pytest.fail("the cloud was called"))
    write_verdict_tags(cloud, SimpleNamespace(), DOUBLE)


def test_it_takes_no_real_verdict_s_place(proven) -> None:
    [build] = proven.all()
    record = build.read()
    [real] = record.verdicts
    rehearsed = replace(record, verdicts=(real, replace(real, simulated=True)))
    assert rehearsed.newest_verdicts == {real.instance_type: real}
    assert rehearsed.verdict == real
    alone = replace(record, verdicts=(replace(real, simulated=True),))
    assert alone.newest_verdicts == {}
    assert alone.verdict == alone.verdicts[0]
    proof = verification_from_record(alone)
    with pytest.raises(RefusedError, match="simulated GPUs only") as caught:
        require_verified("candidate", load_channel("candidate"), proof, has_gpus=False)
    assert "without --simulated" in (caught.value.hint or "")
    with pytest.raises(UsageError, match="only on simulated ones"):
        make_notes(SimpleNamespace(record=alone, baked=alone.bake), None)


def test_a_channel_refuses_what_only_a_double_has_shown() -> None:
    """Also where somebody wrote it beside a real verdict."""
    proof = verification_from_tags("ami-1", HOME, tags("b1"))
    judged = {
        one.instance_type: summarize_verdict(one)
        for one in (DOUBLE, replace(REAL, instance_type="g5.xlarge"))
    }
    with pytest.raises(RefusedError, match=r"not `passed` on g4dn\.xlarge"):
        require_verified(
            "candidate", load_channel("candidate"), replace(proof, verdicts=judged), has_gpus=True
        )
