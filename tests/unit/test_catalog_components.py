"""components.yaml and what --set does to it."""

from pathlib import Path

import pytest
import yaml

from gpukiln.catalog.components import apply_overrides, load_components, to_plain_data
from gpukiln.catalog.images import image_names, load_image
from gpukiln.catalog.load import version_key
from gpukiln.errors import UsageError

ROOT = Path(__file__).parents[2]
TEXT = """
components:
  nvidia_driver:
    {version: "535.309.01", branch: 535, modules: proprietary, source: s, reason: r, review: 2026-12-15}
  docker: {distribution: true, source: s, reason: r, review: 2026-12-15}
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "components.yaml"
    path.write_text(text)
    return path


def test_the_shipped_file() -> None:
    components = load_components()
    driver, toolkit = components["nvidia_driver"], components["nvidia_container_toolkit"]
    assert (driver.version, driver.branch) == ("535.309.01", 535)
    assert version_key(toolkit.version or "") >= (1, 19, 1)
    found = [
        repository
        for c in components.values()
        for repository in (c.repository and (c.repository.apt, c.repository.rpm)) or ()
        if repository
    ]
    assert len(found) >= 4
    assert all(len(repository.key_fingerprint) == 40 for repository in found)
    assert components["cuda"].version == "12.1"
    assert all(component.source and component.reason for component in components.values())


def test_playbooks_read_it_once() -> None:
    """Ansible parses a file of `vars_files` again for each task and node: 15 ms each time."""
    files = [file for name in ("ansible", "molecule") for file in (ROOT / name).rglob("*.yml")]
    plays = [play for file in files for play in yaml.safe_load(file.read_text()) if "hosts" in play]
    reading = [play for play in plays if "components.yaml" in str(play)]
    assert len(reading) >= 4
    assert not [play["name"] for play in reading if "vars_files" in play]


def test_what_is_optional_is_in_no_image_that_does_not_list_it() -> None:
    optional = {name for name, component in load_components().items() if component.optional}
    assert optional == {"dcgm", "dcgm_exporter", "kasmvnc"}
    assert all(optional.isdisjoint(load_image(name).components) for name in image_names())


def test_plain_is_the_form_of_the_file(tmp_path: Path) -> None:
    plain = to_plain_data(load_components(written(tmp_path, TEXT)))
    assert plain["nvidia_driver"]["branch"] == 535
    assert plain["nvidia_driver"]["review"] == "2026-12-15"
    assert "repository" not in plain["docker"]
    assert list(to_plain_data(load_components())["docker"]["repository"]) == ["rpm"]


def test_a_repository_is_for_the_distributions_that_it_names() -> None:
    components = load_components()
    docker, toolkit = components["docker"].repository, components["nvidia_container_toolkit"].repository
    assert docker
    assert toolkit
    assert docker.of("redhat", "rocky") == docker.rpm
    assert docker.of("redhat", "amazon") is docker.of("debian", "debian") is None
    assert toolkit.of("redhat", "amazon") == toolkit.rpm
    assert toolkit.of("debian", "ubuntu") == toolkit.apt


def test_what_is_read_first_of_a_repository() -> None:
    toolkit = load_components()["nvidia_container_toolkit"].repository
    assert toolkit
    assert toolkit.apt
    assert toolkit.rpm
    root = "https://nvidia.github.io/libnvidia-container/stable"
    assert toolkit.apt.probe("arm64") == f"{root}/deb/arm64/InRelease"
    assert toolkit.rpm.probe("arm64") == f"{root}/rpm/aarch64/repodata/repomd.xml"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("branch: 535", "brunch: 535", "brunch"),
        ("review: 2026-12-15}\n  docker", "review: soon}\n  docker", "review"),
        ("distribution: true, ", "", "docker needs either a version or"),
        ("distribution: true", "distribution: true, version: '1'", "docker needs either a version or"),
        ("branch: 535", "branch: 580", "535.309.01 is not of branch 580"),
        ("modules: proprietary, ", "", "kind of its modules"),
        ("components:", "things:", "wanted: components"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_components(written(tmp_path, TEXT.replace(old, new)))
    assert message in "\n".join([caught.value.message, *caught.value.details])


def test_a_branch_brings_its_last_release() -> None:
    driver = apply_overrides(load_components(), ["nvidia_driver.branch=580"])["nvidia_driver"]
    assert (driver.version, driver.branch) == ("580.178.04", 580)


def test_build_tools_stay_unless_told_otherwise() -> None:
    components = load_components()
    assert to_plain_data(components)["nvidia_driver"]["keep_build_tools"] is True
    changed = apply_overrides(components, ["nvidia_driver.keep_build_tools=false"])
    assert to_plain_data(changed)["nvidia_driver"]["keep_build_tools"] is False


def test_a_version_brings_its_branch() -> None:
    driver = apply_overrides(load_components(), ["nvidia_driver.version=550.163.01"])["nvidia_driver"]
    assert (driver.version, driver.branch) == ("550.163.01", 550)


def test_both_may_be_given_when_they_agree() -> None:
    both = ["nvidia_driver.branch=580", "nvidia_driver.version=580.82.07"]
    assert apply_overrides(load_components(), both)["nvidia_driver"].version == "580.82.07"
    with pytest.raises(UsageError, match="is not of branch 580"):
        apply_overrides(load_components(), ["nvidia_driver.branch=580", "nvidia_driver.version=550.163.01"])


def test_other_values() -> None:
    before = load_components()
    after = apply_overrides(before, ["nvidia_container_toolkit.repository.apt.url=http://127.0.0.1:1/deb"])
    repository = after["nvidia_container_toolkit"].repository
    assert repository
    assert repository.apt
    assert repository.apt.url == "http://127.0.0.1:1/deb"
    assert before["nvidia_container_toolkit"] != after["nvidia_container_toolkit"]


@pytest.mark.parametrize(
    ("override", "message", "hint"),
    [
        ("nvidia_drver.branch=580", "unknown component 'nvidia_drver'", "did you mean nvidia_driver?"),
        ("nvidia_driver.brnch=580", "unknown key of nvidia_driver 'brnch'", "did you mean branch?"),
        ("nvidia_driver.branch=581", "unknown driver branch '581'; valid: 470", ""),
        ("nvidia_driver.branch=new", "found 'new', wanted a whole number", ""),
        ("nvidia_driver.branch=620", "no release of driver branch 620", "nvidia_driver.version"),
        ("nvidia_driver.modules=closed", "'proprietary', 'open' or 'auto'", ""),
        ("nvidia_driver.packages=x", "unknown key", ""),
        ("nvidia_driver.keep_build_tools=some", "found 'some', wanted true or false", ""),
        ("docker.keep_build_tools=false", "unknown key of docker", ""),
        ("nvidia_driver.from_base=true", "unknown key", ""),
        ("docker.version=26.1.0", "comes in the version of the distribution", "--base"),
        ("nvidia_container_toolkit.repository.apt.url=https://me:secret@x/deb", "holds credentials", "proxy"),
        ("nvidia_container_toolkit.repository.url=x", "unknown key", "repository.apt.url"),
        ("nvtop.repository.rpm.includepkgs=x", "unknown key", ""),
        ("nvtop.repository.apt.url=x", "unknown key", "repository.rpm.url"),
        ("nvidia_driver", "can't read --set", "component.key=value"),
        ("nvidia_driver.branch=", "can't read --set", ""),
    ],
)
def test_a_wrong_override_is_named(override: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        apply_overrides(load_components(), [override])
    assert message in caught.value.message
    assert hint in caught.value.hint
