"""Every linter and every rule of the project, on every file of the tree; and proof that each can fail."""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml
from pip._internal.models.index import PyPI  # pip's own default index; its host is written nowhere here

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
LARGEST_FILE = 512 * 1024  # bytes
ANSIBLE = ("ansible", "molecule", "roles")


@cache
def tree() -> tuple[Path, ...]:
    """The files that are tracked or about to be, without what git ignores; paths from the root."""
    listed = subprocess.run(
        [
            "git",
            "-c",
            f"safe.directory={ROOT}",
            "ls-files",
            "-z",
            "--cached",
            "--others",
            "--exclude-standard",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return tuple(sorted({Path(name) for name in listed.split("\0") if name and (ROOT / name).is_file()}))


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def is_shell(path: Path) -> bool:
    if path.suffix in {".j2", ".md", ".py"}:
        return False
    with path.open("rb") as file:
        first = file.readline(200)
    return path.suffix == ".sh" or re.match(rb"#!.*\b(ba|da)?sh\b", first) is not None


def is_ansible(path: Path) -> bool:
    return path.parts[0] in ANSIBLE and path.suffix in {".yml", ".yaml"}


def is_workflow(path: Path) -> bool:
    return path.parent.name == "workflows"  # of this project, and those that its users copy


def is_action(path: Path) -> bool:
    return path.name == "action.yml"


@dataclass(frozen=True)
class Linter:
    """One tool: its command line, the files it looks at, and a file that it must refuse.

    Args:
        name: The test's name.
        command: The command line without the files.
        concerns: Which of the tree's files it is given.
        bad: A file's name and text that the linter must refuse.
        beside: What of the tree has to be beside that file.
        below: Where it finds its files by itself, (): in the whole tree; None: it is given a list of them.
        absent: Why it may be missing; the others come with the lock, and without one the test fails.
    """

    name: str
    command: tuple[str, ...]
    concerns: Callable[[Path], bool]
    bad: tuple[str, str]
    beside: tuple[str, ...] = ()
    below: tuple[str, ...] | None = None
    absent: str = ""

    def run(self, files: list[str], *, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
        path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
        tool = shutil.which(self.command[0], path=path)
        if tool is None and self.absent:
            pytest.skip(self.absent)
        assert tool is not None, f"{self.command[0]} is not on PATH; run the tests with scripts/run"
        return subprocess.run(
            [tool, *self.command[1:], *files],
            cwd=cwd,
            env={**os.environ, "PATH": path, "NO_COLOR": "1", "CHECKPOINT_DISABLE": "1"},
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )


LINTERS = [
    Linter(
        "ruff-check",
        ("ruff", "check", "--config", str(ROOT / "pyproject.toml")),
        lambda path: path.suffix == ".py",
        ("bad.py", '"""Doc."""\n\nimport os\n'),
    ),
    Linter(
        "ruff-format",
        ("ruff", "format", "--check", "--config", str(ROOT / "pyproject.toml")),
        lambda path: path.suffix == ".py",
        ("bad.py", "x = {  'a':1 }\n"),
    ),
    Linter(
        "mypy",
        ("mypy", "--config-file", str(ROOT / "pyproject.toml")),
        lambda path: path.suffix == ".py" and path.parts[0] in {"gpukiln", "tasks.py"},
        ("bad.py", "def untyped(x):\n    return x\n"),
        below=(),
    ),
    Linter(
        "lint-imports",
        ("lint-imports", "--no-cache"),
        lambda path: path.suffix == ".py" and path.parts[0] == "gpukiln",
        ("gpukiln/catalog/upwards.py", "import gpukiln.commands\n"),
        beside=("gpukiln", "pyproject.toml"),
        below=(),
    ),
    Linter(
        "yamllint",
        ("yamllint", "--strict", "--config-file", str(ROOT / ".yamllint")),
        lambda path: path.suffix in {".yml", ".yaml"},
        ("bad.yml", "a: 1\na: 2\n"),
    ),
    Linter(
        "ansible-lint",
        ("ansible-lint", "--config-file", str(ROOT / ".ansible-lint"), "--nocolor", "-q"),
        is_ansible,
        ("playbook.yml", "- hosts: all\n  tasks:\n    - shell: echo unnamed\n      ignore_errors: true\n"),
        below=(".ansible-lint", *ANSIBLE),  # for other files it has only the rules of yamllint
    ),
    Linter(
        "shellcheck", ("shellcheck",), lambda path: is_shell(ROOT / path), ("bad.sh", "#!/bin/sh\nrm $1\n")
    ),
    Linter(
        "hadolint",
        ("hadolint",),
        lambda path: path.parts[0] == "docker" and path.name.startswith("Dockerfile"),
        ("Dockerfile", "FROM debian\nRUN cd /tmp && sudo apt-get install gcc\n"),
    ),
    Linter(
        "workflow-schema",
        ("check-jsonschema", "--builtin-schema", "vendor.github-workflows"),
        is_workflow,
        ("bad.yml", "on: push\njobs: {a: {runs-on: x, steps: [{runs: typo}]}}\n"),
    ),
    Linter(
        "action-schema",
        ("check-jsonschema", "--builtin-schema", "vendor.github-actions"),
        is_action,
        ("bad.yml", "name: a\ndescription: b\nruns: {using: composite, steps: [{run: no shell}]}\n"),
    ),
    Linter(
        "actionlint",
        ("actionlint",),
        is_workflow,
        ("bad.yml", "on: push\njobs: {a: {runs-on: x, steps: [{run: 'echo ${{ no.such }}'}]}}\n"),
        absent="actionlint is not on PATH; its PyPI package downloads the program, so the lock can't pin it",
    ),
]
linters = pytest.mark.parametrize("linter", LINTERS, ids=[linter.name for linter in LINTERS])


@linters
def test_linter_is_content_with_the_tree(linter: Linter) -> None:
    files = [str(path) for path in tree() if linter.concerns(path)]
    if not files:
        pytest.skip(f"{linter.name}: the tree has no file of its kind")
    answer = linter.run(files if linter.below is None else list(linter.below))
    assert answer.returncode == 0, answer.stdout + answer.stderr


@linters
def test_linter_can_fail(linter: Linter, tmp_path: Path) -> None:
    for path in tree():
        if path.parts[0] in linter.beside:
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, tmp_path / path)
    name, text = linter.bad
    (tmp_path / name).write_text(text)
    answer = linter.run([] if linter.beside else [name], cwd=tmp_path)
    assert answer.returncode != 0
    said = answer.stdout + answer.stderr
    module = name.removesuffix(".py").replace("/", ".")
    assert name in said or module in said, f"it failed for another reason: {said}"


# --- packer ---------------------------------------------------------------------------------------------


def packer_fmt(path: Path) -> subprocess.CompletedProcess[str]:
    packer = shutil.which("packer")
    if packer is None:
        pytest.skip("packer is not on PATH (scripts/run installs it as root)")
    return subprocess.run(
        [packer, "fmt", "-check", "-diff", str(path)], capture_output=True, text=True, check=False
    )


def test_packer_templates_are_formatted() -> None:
    """One file a call: Packer 1.6 takes only one."""
    files = [path for path in tree() if path.name.endswith((".pkr.hcl", ".pkrvars.hcl"))]
    if not files:
        pytest.skip("packer fmt: the tree has no file of its kind")
    answers = [packer_fmt(ROOT / path) for path in files]
    assert not [answer.stdout + answer.stderr for answer in answers if answer.returncode != 0]


def test_packer_fmt_can_fail(tmp_path: Path) -> None:
    bad = tmp_path / "bad.pkr.hcl"
    bad.write_text('variable "a" {\ntype=string\n}\n')
    assert packer_fmt(bad).returncode != 0


# --- the shell in workflows -----------------------------------------------------------------------------


def run_blocks(workflow: str) -> Iterator[str]:
    document = yaml.safe_load(workflow)
    for job in (document.get("jobs") or {"action": document.get("runs") or {}}).values():
        for step in job.get("steps") or []:
            if "run" in step:
                yield re.sub(r"\$\{\{.*?\}\}", "expression", step["run"])


def shellcheck_blocks(workflow: str, folder: Path) -> list[str]:
    problems = []
    for number, block in enumerate(run_blocks(workflow)):
        script = folder / f"step{number}.sh"
        script.write_text(f"#!/bin/bash -e\n{block}\n")
        answer = next(linter for linter in LINTERS if linter.name == "shellcheck").run([str(script)])
        problems += [answer.stdout] if answer.returncode else []
    return problems


@pytest.mark.parametrize("path", [path for path in tree() if is_workflow(path) or is_action(path)], ids=str)
def test_shell_in_workflows(path: Path, tmp_path: Path) -> None:
    assert not shellcheck_blocks(text_of(ROOT / path), tmp_path)


def test_shell_in_workflows_can_fail(tmp_path: Path) -> None:
    assert shellcheck_blocks("jobs: {a: {steps: [{run: 'rm $1'}]}}", tmp_path)


# --- the project's rules: each takes a path and says what is wrong with it ---------------------------------


@cache
def registry_hosts() -> frozenset[str]:
    """The hosts that this machine installs packages from: apt's, pip's and npm's own configuration."""
    places = [PyPI.url]
    for source in [Path("/etc/apt/sources.list"), *Path("/etc/apt/sources.list.d").glob("*")]:
        if source.is_file():
            places += re.findall(r"\bhttps?://\S+", re.sub(r"(?m)^\s*#.*$", "", text_of(source)))
    for command in (
        [sys.executable, "-m", "pip", "config", "list"],
        ["npm", "config", "get", "registry"],
    ):
        if shutil.which(command[0]):
            answer = subprocess.run(command, capture_output=True, text=True, check=False)
            places += re.findall(r"https?://[^\s'\"]+", answer.stdout)
    places += [value for name, value in os.environ.items() if name.startswith("PIP_") and "://" in value]
    # NVIDIA's repository is where a component comes from; a machine may have it in its sources as well.
    vendors = re.findall(r"https?://([^/\s\"']+)", text_of(ROOT / "components.yaml"))
    hosts = {host for place in places if (host := urlsplit(place).hostname)}
    local = {"localhost", "127.0.0.1"}
    return frozenset(
        hosts - local - {host for host in vendors if host.endswith(("nvidia.com", "nvidia.github.io"))}
    )


def names_a_registry(path: Path) -> list[str]:
    """An address ties the project to one mirror, and a private one tells the world about it."""
    text = text_of(path)
    return [f"{path}: names the package registry {host}" for host in sorted(registry_hosts()) if host in text]


MASK = re.compile(r"\|\|\s*(?:true\b|:(?=\s|$))|\bfailed_when:\s*false\b|\bignore_errors:\s*(?:true|yes)\b")


def is_comment(line: str) -> bool:
    return line.lstrip().startswith("#")


def masks_a_failure(path: Path) -> list[str]:
    """What hides a failure says why, in a comment on its line or the one above."""
    if path.suffix in {".md", ".py"}:
        return []
    problems = []
    before = ""
    for number, line in enumerate(text_of(path).splitlines(), start=1):
        found = None if is_comment(line) else MASK.search(line)
        if found and "#" not in line[found.end() :] and not is_comment(before):
            problems.append(f"{path}:{number}: '{found.group()}' without a reason beside it")
        before = line
    return problems


def is_too_large(path: Path) -> list[str]:
    """Data that large belongs into a package or is made by a build."""
    size = path.stat().st_size
    return [f"{path}: {size} bytes, at most {LARGEST_FILE}"] if size > LARGEST_FILE else []


def is_left_unformatted(path: Path) -> list[str]:
    """Every file has one form; what reads badly in it is written in another way."""
    if path.suffix != ".py":
        return []
    marks = re.findall(r"#\s*fmt:\s*(?:skip|off)\b", text_of(path))
    return [f"{path}: '{mark}'; wanted: as ruff formats it" for mark in marks]


def imports_a_test_module(path: Path) -> list[str]:
    """A test module is changed for its own tests; what several share is in tests/support or conftest.py."""
    if path.suffix != ".py" or not path.name.startswith(("test_", "conftest")):
        return []
    problems = []
    for node in ast.walk(ast.parse(text_of(path))):
        named = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom):
            named = [f"{node.module or ''}.{name}" for name in named]
        problems += [
            f"{path}:{node.lineno}: imports {name}; wanted: what both need in tests/support or conftest.py"
            for name in named
            if any(part.startswith("test_") for part in name.split("."))
        ]
    return problems


# Words of every sentence, and the `s` of a possessive.
SMALL_WORDS = "s a an and are as at be by for from in is it its of on or that the their this to with"


def words_of(text: str) -> set[str]:
    """The words of a text, or of names such as `make_plan` and `ToolRun`, in the singular."""
    words = {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+|\d+", text)}
    return {word.removesuffix("s") for word in words - set(SMALL_WORDS.split())}


def types_of(node: ast.AST) -> dict[str, str]:
    """The types of a function's arguments and of a class's fields, as they are written."""
    return {
        one.arg if isinstance(one, ast.arg) else ast.unparse(one.target): ast.unparse(one.annotation)
        for one in ast.walk(node)
        if isinstance(one, ast.arg | ast.AnnAssign) and one.annotation
    }


def repeats_a_name(path: Path) -> list[str]:
    """A line below `Args:` says what the signature can't: units, shapes, where it comes from."""
    if path.suffix != ".py":
        return []
    problems = []
    for node in ast.walk(ast.parse(text_of(path))):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        _, _, section = (ast.get_docstring(node) or "").partition("Args:\n")
        section = re.split(r"(?m)^\S", section)[0]
        types = types_of(node)
        for name, told in re.findall(r"(?ms)^ {4}\*{0,2}(\w+): (.*?)(?=^ {4}\S|\Z)", section):
            if words_of(told) <= words_of(f"{name} {types.get(name, '')} {node.name}"):
                problems.append(f"{path}:{node.lineno}: '{name}: {told.strip()}' repeats the signature")
    return problems


RULES = [
    names_a_registry,
    masks_a_failure,
    is_too_large,
    is_left_unformatted,
    imports_a_test_module,
    repeats_a_name,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_no_file_breaks_a_rule(rule: Callable[[Path], list[str]]) -> None:
    assert not [problem for path in tree() for problem in rule(ROOT / path)]


def documented(head: str, argument: str) -> str:
    return f'{head}\n    """Do it.\n\n    Args:\n        {argument}\n    """\n'


# The marks are put together here, so that this file keeps the rules that it tests.
@pytest.mark.parametrize(
    ("rule", "name", "text"),
    [
        (names_a_registry, "pip.conf", f"[global]\nindex-url = {PyPI.simple_url}\n"),
        (masks_a_failure, "a.sh", "make || " + "true\n"),
        (masks_a_failure, "a.sh", "make ||" + ":\n"),
        (masks_a_failure, "a.yml", "- name: A\n  failed_when: " + "false\n"),
        (masks_a_failure, "a.yml", "- name: A\n  ignore_errors: " + "true\n"),
        (is_too_large, "a.bin", "x" * (LARGEST_FILE + 1)),
        (is_left_unformatted, "a.py", "x = [1,2]  # fmt: " + "skip\n"),
        (imports_a_test_module, "test_a.py", "from test_b import plan\n"),
        (imports_a_test_module, "test_a.py", "def test_it():\n    import tests.unit.test_b\n"),
        (imports_a_test_module, "conftest.py", "from . import test_b\n"),
        (repeats_a_name, "a.py", documented("def read(path):", "path: The path.")),
        (repeats_a_name, "a.py", documented("def make_plan(root: Path):", "root: The plan's root path.")),
        (repeats_a_name, "a.py", documented("class Build:", "tool_run: A run of\n            the tool.")),
    ],
)
def test_a_rule_can_fail(rule: Callable[[Path], list[str]], name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    assert rule(tmp_path / name)


@pytest.mark.parametrize(
    ("rule", "name", "text"),
    [
        (masks_a_failure, "a.sh", "kill 1 || " + "true # it may have ended\n"),
        (masks_a_failure, "a.sh", "# it may have ended\nkill 1 || " + "true\n"),
        (is_left_unformatted, "a.py", "x = 1  # as ruff's own fmt writes it\n"),
        (imports_a_test_module, "test_a.py", "from tests.support.plans import plan\nimport pytest\n"),
        (imports_a_test_module, "a.py", "from test_b import plan\n"),
        (repeats_a_name, "a.py", documented("def read(path):", "path: Below the home of the state.")),
        (repeats_a_name, "a.py", documented("def wait(seconds: float):", "seconds: At most.")),
        (is_too_large, "a.bin", "x" * LARGEST_FILE),
    ],
)
def test_a_rule_allows(rule: Callable[[Path], list[str]], name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    assert not rule(tmp_path / name)
