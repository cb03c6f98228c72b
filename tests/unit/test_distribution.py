"""Where the suite runs in several processes, what shares an image or a machine stays in one of them."""

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
OF_ONE_IMAGE = ["tests/e2e/test_build.py", "tests/e2e/test_rehearsal.py"]
OF_ONE_RPM_IMAGE = ["[rocky-9]", "[amazon-2023]", "test_driver_dnf.py"]
OF_MACHINES_APART = ["tests/e2e/test_runtime_platforms.py", "tests/e2e/test_volumes.py"]
OF_ANOTHERS_IMAGE = "tests/e2e/test_export_boot.py"
WITHOUT_MACHINES = [f"tests/unit/test_{number}.py::test" for number in range(3)]


class Process:
    """A process of pytest as a scheduler of pytest-xdist sees it: it takes tests, and runs none."""

    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.workerinput = {"workerid": name}
        self.shutting_down = False
        self.taken: list[int] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        self.taken += indices

    def shutdown(self) -> None:
        self.shutting_down = True


@pytest.fixture(scope="module")
def collected() -> list[str]:
    """The ids of the tests of some modules, as pytest collects them."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-n0",
        *OF_ONE_IMAGE,
        "tests/e2e/test_driver_dnf.py",
        OF_ANOTHERS_IMAGE,
        *OF_MACHINES_APART,
    ]
    # PYTEST_ADDOPTS may have -v, which lists in another form.
    env = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if line.startswith("tests/e2e/") and "::" in line]


def who_ran(config: pytest.Config, tests: list[str], count: int = 3) -> dict[str, list[str]]:
    """The tests of each process, as the scheduler that pytest-xdist would use distributes them."""
    options: dict[str, Any] = {"dist": "loadscope", "loadscopereorder": False, "tx": ["popen"] * count}
    asked: Any = SimpleNamespace(
        getoption=options.__getitem__,
        getvalue=options.__getitem__,
        option=SimpleNamespace(**options),
        hook=SimpleNamespace(),
    )
    # the hook as pytest-xdist calls it: tests/conftest.py comes before its own
    scheduler = config.hook.pytest_xdist_make_scheduler(config=asked, log=None)
    processes = [Process(f"gw{number}") for number in range(count)]
    for process in processes:
        scheduler.add_node(process)
        scheduler.add_node_collection(process, tests)
    assert scheduler.collection_is_completed
    scheduler.schedule()
    ran: defaultdict[str, list[str]] = defaultdict(list)
    while any(process.taken for process in processes):
        for process in processes:
            while process.taken:
                index = process.taken.pop(0)
                ran[process.gateway.id].append(tests[index])
                scheduler.mark_test_complete(process, index)
    assert sorted(test for its in ran.values() for test in its) == sorted(tests)
    return ran


def test_the_modules_that_share_an_image_run_in_one_process(
    collected: list[str], request: pytest.FixtureRequest
) -> None:
    tests = [test for test in collected if test.partition("::")[0] in OF_ONE_IMAGE]
    assert {test.partition("::")[0] for test in tests} == set(OF_ONE_IMAGE)
    assert len(who_ran(request.config, tests)) == 1  # two modules of two images get one each


def test_the_machines_that_begin_with_the_same_image_run_in_one_process(
    collected: list[str], request: pytest.FixtureRequest
) -> None:
    tests = [test for test in collected if any(name in test for name in OF_ONE_RPM_IMAGE)]
    assert len(who_ran(request.config, tests)) == 1


@pytest.mark.parametrize("module", OF_MACHINES_APART)
def test_each_machine_of_a_module_is_in_one_process_and_they_are_apart(
    collected: list[str], request: pytest.FixtureRequest, module: str
) -> None:
    tests = [test for test in collected if test.startswith(module) and "[amazon" not in test]
    ran = who_ran(request.config, tests)
    machines = {(process, test[test.index("[") :]) for process, its in ran.items() for test in its}
    assert len(machines) == len({process for process, _ in machines}) == 2


def test_a_fourth_process_begins_with_what_has_no_machine(
    collected: list[str], request: pytest.FixtureRequest
) -> None:
    ran = who_ran(request.config, [*collected, *WITHOUT_MACHINES], count=4)
    assert ran["gw3"][0] in WITHOUT_MACHINES
    assert who_ran(request.config, collected, count=4)["gw3"]  # nothing else is left: it has machines, too


def test_what_needs_an_image_of_another_process_begins_when_the_longest_have_begun(
    collected: list[str],
) -> None:
    modules = list(dict.fromkeys(test.partition("::")[0] for test in collected))
    first, waiting = modules.index("tests/e2e/test_driver_dnf.py"), modules.index(OF_ANOTHERS_IMAGE)
    assert modules[0] == "tests/e2e/test_build.py"
    assert first < waiting < min(map(modules.index, OF_MACHINES_APART))
