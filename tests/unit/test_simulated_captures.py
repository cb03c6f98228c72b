"""What public captures of nvidia-smi show of a board, its double answers too.

The facts stand in tests/support/captures, one file a capture: null is what nvidia-smi shows as N/A; `unit`
names what another board of the same kind has otherwise, `not_in_nvml` what nvidia-smi knows without a
function of that branch's NVML.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpukiln.clouds.embedded.gpus import library
from gpukiln.clouds.embedded.gpus.profile import make_machine
from gpukiln.clouds.embedded.gpus.start import initial_rows
from gpukiln.clouds.embedded.gpus.state import State, append_region
from tests.support import nvml_double

ROOT = Path(__file__).resolve().parents[2]
CAPTURES = {path.stem: path for path in sorted((ROOT / "tests" / "support" / "captures").glob("*.yaml"))}
# What a board has whatever it does and wherever it is.
OF_ANY_MACHINE = """
    name architecture mig vbios multi_gpu_board part_number inforom.image inforom.oem inforom.ecc
    inforom.power c2c addressing gsp_firmware pci_id subsystem pci_class pcie.max_gen pcie.board_max_gen
    pcie.max_width memory.total memory.reserved bar1.total ecc.current ecc.pending rows.banks
    temperature.shutdown temperature.slowdown temperature.gpu_max temperature.memory_max
    temperature.target tlimit.shutdown tlimit.slowdown tlimit.gpu tlimit.memory power.limit
    power.default power.min power.max power.module_limit power.module_min clocks.app_sm clocks.app_mem
    clocks.max_sm clocks.max_mem clocks.max_video clocks.boost edpp accounting_buffer protected_memory
"""
STATIC = set(OF_ANY_MACHINE.split())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nvml")


def answers(built: Path, state: Path, capture: dict[str, Any]) -> dict[str, Any]:
    """What the double says of the machine of a capture, by the names that the capture has."""
    driver, machine = capture["driver"], capture["machine"]
    document = make_machine(
        machine["board"],
        machine["gpus"],
        seed="capture",
        driver=driver,
        cuda=capture["cuda"],
        bare=machine["bare"],
    )
    append_region(state)
    State(state).write(initial_rows(document))
    double = nvml_double.build(built, branch=int(driver.partition(".")[0]))
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.nvml_answers"],
        env={**library.environment(double, state), "PYTHONPATH": os.fspath(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.mark.parametrize("name", sorted(CAPTURES))
def test_the_double_answers_what_the_capture_shows(built: Path, tmp_path: Path, name: str) -> None:
    capture = yaml.safe_load(CAPTURES[name].read_text(encoding="utf-8"))
    facts, answer = capture["facts"], answers(built, tmp_path / "state", capture)
    assert set(facts) == set(answer)
    missing = {key for key, value in facts.items() if value is not None and answer[key] is None}
    assert missing == set(capture.get("not_in_nvml", [])), "the capture shows them, the double has none"
    extra = {key: answer[key] for key, value in facts.items() if value is None and answer[key] is not None}
    assert extra == {}, "the capture has N/A"
    others = {
        key: (answer[key], facts[key])
        for key in STATIC - missing - set(capture["unit"])
        if answer[key] != facts[key]
    }
    assert others == {}, "the double's value, and the capture's"


def test_captures_name_their_source_and_no_machine() -> None:
    """Serial numbers, UUIDs and addresses are left out; boards with the same facts have one set of them."""
    assert len(CAPTURES) == 13
    for path in CAPTURES.values():
        capture = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert ":" in capture["source"]
        assert not {"serial", "uuid", "bus_id", "pdi"} & set(capture["facts"])
        assert set(capture["unit"]) <= STATIC, path.name
