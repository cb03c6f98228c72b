"""What gpukiln/ implements once stays so: the bars of tests/concepts.py, and proof that each can fail."""

from pathlib import Path

import pytest

from tests.concepts import BARS, ROOT, Bar, Module, main, modules

# What breaks each bar: files of a made-up package; the same text in as many files as it needs.
BREAKS: dict[str, tuple[str, int]] = {
    "class names that exist twice": ("class Plan:\n    pass\n", 2),
    "call sites of DescribeImages": ("def look(ec2):\n    return ec2.describe_images(Owners=['self'])\n", 6),
    "wait loops of EC2": (
        "def wait(ec2, time):\n    while not ec2.describe_instances():\n        time.sleep(1)\n",
        2,
    ),
    "builders of ssh's command line": (
        "def command(host):\n    return ['ssh', '-o', 'BatchMode=yes', host]\n",
        2,
    ),
    "parsers of sizes": (
        "UNITS = {'K': 1, 'M': 2, 'G': 3}\nFORM = r'([0-9]+)([KMG]i?)'\n",
        2,
    ),
    "parsers of durations": ("UNITS = {'s': 1, 'm': 60, 'h': 3600}\nFORM = r'([0-9]+)([smh])'\n", 2),
    "runners of programs": ("import subprocess\n\nsubprocess.run(['true'])\n", 5),
    "classes of findings": ("class Finding:\n    pass\n", 2),
    "writers of JUnit": ("def write(ET):\n    return ET.Element('testsuites', name='a')\n", 2),
    "vocabularies of severities and outcomes": (
        "from typing import Literal\n\nL = Literal['error', 'info']\n",
        2,
    ),
}
# What only speaks of the same things.
PROSE = '''"""class Finding, class Plan, subprocess.run, ec2.describe_images(), "ssh -o", testsuites."""

# subprocess.run(["ssh", "-o", host]) and Literal["error", "warning"]
def words(text: str) -> str:
    """A size such as 24Gi, a duration such as 90s: ([0-9]+)([smh])."""
    return f"{text} is found in describe_images, while EC2 sleeps"
'''


def bars() -> list[object]:
    return [pytest.param(bar, id=bar.name) for bar in BARS]


def made_up(root: Path, text: str, files: int) -> Path:
    (root / "gpukiln").mkdir()
    for number in range(files):
        (root / "gpukiln" / f"module{number}.py").write_text(text)
    return root


@pytest.fixture(scope="module")
def package() -> list[Module]:
    return modules(ROOT)


@pytest.mark.parametrize("bar", bars())
def test_what_exists_once_stays_so(bar: Bar, package: list[Module]) -> None:
    found = list(bar.find(package))
    assert len(found) <= bar.most, "\n".join(found)


@pytest.mark.parametrize("bar", BARS, ids=lambda bar: bar.name)
def test_each_bar_can_fail(bar: Bar, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, files = BREAKS[bar.name]
    assert len(list(bar.find(modules(made_up(tmp_path, text, files))))) > bar.most
    assert main(tmp_path) == 1
    assert f"\n    {'Plan: ' if bar.most == 0 else 'module0.py'}" in capsys.readouterr().out


@pytest.mark.parametrize("bar", BARS, ids=lambda bar: bar.name)
def test_words_are_not_counted(bar: Bar, tmp_path: Path) -> None:
    assert list(bar.find(modules(made_up(tmp_path, PROSE, 9)))) == []
