"""`pytest --changed` runs first what a change affects."""

import subprocess

import pytest

from tests.affected import MENTIONED, ROOT, affected, changed_files, distances, importers
from tests.conftest import nearest_first


@pytest.fixture
def repository(tmp_path):
    def git(*words):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=tmp_path, check=True)

    git("init", "-q")
    (tmp_path / "one.py").write_text("")
    git("add", ".")
    git("commit", "-qm", "first")
    (tmp_path / "two.py").write_text("")
    git("add", ".")
    git("commit", "-qm", "second")
    return tmp_path


def test_what_is_not_committed_counts_and_else_the_last_commit(repository):
    assert changed_files("", repository) == ["two.py"]
    (repository / "one.py").write_text("changed")
    (repository / "new.py").write_text("")
    assert changed_files("", repository) == ["one.py", "new.py"]
    assert changed_files("HEAD~1", repository) == ["one.py", "two.py", "new.py"]


def test_a_revision_that_git_does_not_know_is_named(repository):
    with pytest.raises(ValueError, match="--changed nowhere: "):
        changed_files("nowhere", repository)


def test_tests_of_a_package_are_near_to_it_and_others_are_not():
    near = distances(["gpukiln/offers/select.py"], importers())
    assert near["tests.unit.test_offers_listing"] <= 2
    assert "tests.unit.test_redact" not in near


class Item:
    def __init__(self, name, *, machines=False):
        self.path, self.machines = ROOT / "tests" / name, machines

    def get_closest_marker(self, _):
        return self.machines or None


def test_the_nearest_tests_come_first_and_machines_after_them(monkeypatch):
    near = {ROOT / "tests/far.py": 3, ROOT / "tests/near.py": 1, ROOT / "tests/machine.py": 1}
    monkeypatch.setattr("tests.affected.affected", lambda _: near)
    items = [Item("other.py"), Item("far.py"), Item("machine.py", machines=True), Item("near.py")]
    nearest_first("", items)
    assert [item.path.name for item in items] == ["near.py", "far.py", "machine.py", "other.py"]


def test_a_file_that_is_no_python_affects_the_tests_that_mention_it(monkeypatch):
    monkeypatch.setattr("tests.affected.changed_files", lambda *_: ["ami/channels.yaml"])
    near = affected("")
    assert near[ROOT / "tests/unit/test_release_needs.py"] == MENTIONED
    assert ROOT / "tests/unit/test_redact.py" not in near
