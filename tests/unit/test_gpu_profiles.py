"""Healthy machines of several kinds are found healthy, and a fault of each is found."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gpukiln.clouds.embedded.gpus import library as nvml
from tests.support import nvml_double
from tests.support.gpu_profiles import PROFILES, Profile
from tests.support.host_evaluate import CHECKS, evaluate_check
from tests.support.host_gpu_faults import Fault
from tests.support.host_machine import Data

ROOT = Path(__file__).parents[2]
LAYERS = ("gpu", "compute", "container", "multi-gpu", "monitoring")
JUDGED = [i for i, (c, _) in CHECKS.items() if c.layer in LAYERS and "node" in c.profiles]
READ = """
import json
from gpukiln.probe.nvml import read_nvlinks, read_nvml
print(json.dumps([read_nvml(), read_nvlinks()]))
"""


def judged(check_id: str, data: Data) -> tuple[str, str]:
    return evaluate_check(check_id, data, profile="node", expect_gpus=len(data["gpus"]["pci"]))


@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)
def test_nothing_is_found_on_a_healthy_machine(profile: Profile) -> None:
    found = {check_id: judged(check_id, profile.make()) for check_id in JUDGED}
    assert {i: reason for i, (outcome, reason) in found.items() if outcome == "failed"} == {}
    not_run = {i: reason for i, (outcome, reason) in found.items() if outcome != "passed"}
    assert set(not_run) == set(profile.not_run)
    for check_id, word in profile.not_run.items():
        assert found[check_id][0] == "not_run"
        assert word in not_run[check_id]


@pytest.mark.parametrize(
    ("make", "check_id", "fault", "words"),
    [(p.make, *fault) for p in PROFILES.values() for fault in p.faults],
    ids=[f"{name}-{fault[0]}-{n}" for name, p in PROFILES.items() for n, fault in enumerate(p.faults)],
)
def test_a_fault_is_found(make: Fault, check_id: str, fault: Fault, words: str) -> None:
    data = make()
    fault(data)
    outcome, reason = judged(check_id, data)
    assert outcome == "failed", reason
    assert words in reason


def test_every_kind_of_machine_has_its_fault() -> None:
    assert all(profile.faults for profile in PROFILES.values())


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """The double by whether it is that of an old driver."""
    folder = tmp_path_factory.mktemp("nvml")
    return {old: nvml_double.build(folder, branch=535 if old else 580) for old in (False, True)}


@pytest.mark.parametrize(
    ("profile", "old"),
    [(profile, old) for profile in PROFILES.values() for old in {False, profile.old_driver}],
    ids=[f"{name}-{old}" for name, profile in PROFILES.items() for old in {False, profile.old_driver}],
)
def test_nvml_tells_it_as_the_profile_has_it(
    libraries: dict[bool, Path], tmp_path: Path, profile: Profile, *, old: bool
) -> None:
    data, spec = profile.make(), tmp_path / "spec"
    wanted = {key: value for key, value in data["nvml"].items() if key != "at"}
    again = [{"index": gpu["index"], "nvlinks": gpu["nvlinks"]} for gpu in data["nvml"]["gpus"]]
    nvml.write_state(spec, wanted)
    done = subprocess.run(
        [sys.executable, "-c", READ],
        env={**nvml.environment(libraries[old], spec), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert json.loads(done.stdout) == [wanted, {"error": None, "gpus": again}]
