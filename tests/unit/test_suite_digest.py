"""The suite's digest: what judges a machine changes it, and what only shows a verdict does not."""

import shutil
from pathlib import Path

import pytest

from gpukiln.catalog.load import ROOT
from gpukiln.probe.packing import module_sources
from gpukiln.probe.scripts import FILES
from gpukiln.verify.digest import suite_digest, suite_files


@pytest.fixture(scope="module")
def before() -> str:
    return suite_digest(ROOT)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What the suite could be made of, to be changed."""
    for folder in (
        "tests/host",
        "gpukiln/gpus",
        "gpukiln/probe",
        "gpukiln/reports",
        "gpukiln/verify",
        "gpukiln/catalog",
    ):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    for file in (ROOT / "gpukiln").glob("*.py"):
        shutil.copy(file, tmp_path / "gpukiln")
    for name in FILES.values():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize(
    "name",
    [
        "tests/host/test_gpu.py",
        "tests/host/conftest.py",
        "gpukiln/probe/gather.py",
        "gpukiln/probe/cuda.py",  # sent to the machine, and imported by nothing here
        "gpukiln/gpus/rules.py",
        "gpukiln/gpus/gpu_facts.py",
        "gpukiln/verify/checks.py",
        "gpukiln/verify/plugin.py",
        "gpukiln/catalog/xid.py",
        "gpukiln/catalog/data/xid.yaml",
        "roles/image_hygiene/files/machine-identities.txt",
    ],
)
def test_another_check_or_way_to_look_is_another_suite(checkout: Path, before: str, name: str) -> None:
    assert suite_digest(checkout) == before
    suite_digest.cache_clear()
    with (checkout / name).open("a") as file:
        file.write("\n# changed\n")
    assert suite_digest(checkout) != before


def test_a_new_check_is_another_suite(checkout: Path, before: str) -> None:
    (checkout / "tests/host/test_new.py").write_text("")
    assert suite_digest(checkout) != before


@pytest.mark.parametrize(
    "name",
    [
        *("gpukiln/verify/html.py", "gpukiln/verify/report.html.j2", "gpukiln/verify/verification.py"),
        *("gpukiln/reports/html.py", "gpukiln/reports/junit.py", "gpukiln/catalog/data/prices.yaml"),
    ],
)
def test_what_only_shows_or_has_no_part_in_it_changes_nothing(checkout: Path, before: str, name: str) -> None:
    with (checkout / name).open("a") as file:
        file.write("\n# changed\n")
    assert suite_digest(checkout) == before


def test_everything_that_is_sent_to_the_machine_counts() -> None:
    files = suite_files(ROOT)
    sent = {
        f"{name.replace('.', '/')}.py" for name in module_sources() if name not in ("gpukiln.probe", "pynvml")
    }
    assert sent <= set(files)
