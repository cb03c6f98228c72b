"""gpukiln-gpu as one file: the same bytes wherever it is made, and it runs where there is nothing else."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpukiln.gpus import zipapp
from gpukiln.gpus.manual import completion, man_page
from gpukiln.gpus.verbs import verbs
from tests.support import nvml_double
from tests.support.gpus import double

PYTHONS = Path.home() / ".pyenv" / "versions"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packed") / "gpukiln-gpu"
    zipapp.build(path)
    return path


def test_the_same_sources_make_the_same_bytes(program: Path, tmp_path: Path) -> None:
    code = "import os, sys; os.umask(0o077); from gpukiln.gpus import zipapp; zipapp.main(sys.argv[1:])"
    again = tmp_path / "elsewhere"
    env = {**os.environ, "TZ": "Asia/Tokyo", "LC_ALL": "C", "PYTHONHASHSEED": "7"}
    subprocess.run([sys.executable, "-c", code, str(again)], env=env, check=True)
    assert again.read_bytes() == program.read_bytes()
    assert oct(again.stat().st_mode) == oct(program.stat().st_mode) == oct(0o100755)


@pytest.mark.parametrize("python", ["/usr/bin/python3", "3.9"])
def test_it_runs_where_nothing_else_is(program: Path, tmp_path: Path, python: str) -> None:
    if python == "3.9" and not (found := sorted(PYTHONS.glob("3.9.*/bin/python3.9"))):
        pytest.skip("no Python 3.9 here")
    interpreter = str(found[0]) if python == "3.9" else python
    node = double(nvml_double.build(tmp_path, branch=535), tmp_path, "p4d.24xlarge")
    env = {name: value for name, value in node.environment.items() if name not in ("PYTHONPATH", "PATH")}
    for words, code in (
        (["list", "--json"], 0),
        (["lease", "-n", "2", "--json"], 0),
        (["run", "--", "true"], 127),
    ):
        # Isolated and without site packages: what it needs is in it.
        done = subprocess.run(
            [interpreter, "-I", "-S", str(program), *words],
            env={**env, "PATH": "/nowhere"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, done.stderr
        if "--json" in words:
            assert json.loads(done.stdout)["failed"] == []


def test_limits_are_read_where_python_has_no_toml(program: Path, tmp_path: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(program)!r}); import tomli; print(tomli.loads('a = 1'))"
    done = subprocess.run(
        ["/usr/bin/python3", "-I", "-S", "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout == "{'a': 1}\n"


def test_nothing_of_the_cloud_and_no_compiled_code_is_in_it() -> None:
    names = set(zipapp.contents())
    assert {"__main__.py", "gpukiln/gpus/facts.json", "pynvml.py", "tomli/__init__.py"} <= names
    assert all(name.endswith((".py", ".json")) for name in names)
    assert not [name for name in names if "clouds" in name or "contact" in name]


def test_the_files_of_a_machine_are_made_once(tmp_path: Path) -> None:
    made = zipapp.tree(tmp_path)
    files = {str(path.relative_to(made)): path for path in made.rglob("*") if path.is_file()}
    assert {name: oct(path.stat().st_mode & 0o777) for name, path in files.items()} == {
        "usr/local/bin/gpukiln-gpu": "0o755",
        "usr/local/share/man/man1/gpukiln-gpu.1": "0o644",
        "usr/share/bash-completion/completions/gpukiln-gpu": "0o644",
    }
    before = files["usr/local/bin/gpukiln-gpu"].stat().st_ino
    assert zipapp.tree(tmp_path) == made
    assert files["usr/local/bin/gpukiln-gpu"].stat().st_ino == before


def test_another_man_page_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, digest = zipapp.tree(tmp_path), zipapp.digest()
    monkeypatch.setattr(zipapp, "man_page", lambda: man_page() + ".\n")
    made = zipapp.tree(tmp_path)
    assert (made / "usr/local/share/man/man1/gpukiln-gpu.1").read_text() == man_page() + ".\n"
    assert made != before
    assert zipapp.digest() != digest


def test_two_who_make_the_files_at_once_both_get_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, other = zipapp.write_atomic, []

    def meanwhile(path: Path, content: bytes, *, mode: int) -> None:
        monkeypatch.setattr(zipapp, "write_atomic", write)
        other.append(zipapp.tree(tmp_path))  # as another process does in the midst of this one
        write(path, content, mode=mode)

    monkeypatch.setattr(zipapp, "write_atomic", meanwhile)
    assert [zipapp.tree(tmp_path)] == other == list(tmp_path.iterdir())


def test_files_that_can_not_be_written_are_told_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_arguments: object, **_options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(zipapp, "write_atomic", full)
    with pytest.raises(OSError, match="No space left"):
        zipapp.tree(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_man_page_has_every_verb_and_option_and_roff_has_no_complaint() -> None:
    text = man_page()
    for verb in verbs().values():
        assert f".SS {verb.name}" in text
        for option in verb.options:
            assert option.flag.replace("-", "\\-") in text
    if shutil.which("groff") is None:
        pytest.skip("no groff here")
    done = subprocess.run(
        ["groff", "-man", "-ww", "-z", "-Tutf8"], input=text, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


COMPLETE = """
source "$1"; shift
COMP_WORDS=(gpukiln-gpu "$@"); COMP_CWORD=$#
_gpukiln_gpu
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        (["le"], ["lease", "leases"]),
        (["topo"], ["topology"]),
        (["lease", "--mem"], ["--memory"]),
        (["run", "--", "--mem"], [""]),
        (["nothing", ""], [""]),
    ],
)
def test_what_is_typed_is_completed(tmp_path: Path, typed: list[str], wanted: list[str]) -> None:
    file = tmp_path / "completion"
    file.write_text(completion())
    done = subprocess.run(
        ["bash", "-c", COMPLETE, "bash", str(file), *typed], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == wanted
    checked = subprocess.run(
        [str(Path(sys.executable).parent / "shellcheck"), "-s", "bash", str(file)],
        capture_output=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout
