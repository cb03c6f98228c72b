"""What the roles apt_sources and package_repository decide: tables, without any machine."""

from typing import Any

import pytest
import yaml

from gpukiln.catalog.load import ROOT
from roles.apt_sources import decide as sources
from roles.package_repository import decide as repositories
from roles.plan import Node
from tests.support.roles import asked, node

DEB822 = """\
Types: deb
# a note
URIs: http://mirror.example.com/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://vendor.example.com/apt
Suites: bookworm
Components: main
Signed-By: /usr/share/keyrings/vendor.gpg
"""


def test_components_are_added_to_the_archives_own_stanza_alone() -> None:
    changed = sources.with_components(DEB822, "bookworm", ["contrib", "non-free"])
    assert changed == DEB822.replace("Components: main\n", "Components: main contrib non-free\n", 1)
    assert sources.with_components(changed, "bookworm", ["contrib", "non-free"]) == changed


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        ("deb http://m.example.com/debian bookworm main", "contrib"),
        ("deb [arch=amd64] http://m.example.com/debian bookworm-security main", "contrib"),
        ("deb [signed-by=/k/debian-archive-keyring.gpg] http://m.example.com/d bookworm main", "contrib"),
        ("deb http://m.example.com/debian bookworm main contrib", ""),
        ("deb [signed-by=/k/vendor.gpg] http://m.example.com/debian bookworm main", ""),
        ("deb http://m.example.com/pg bookworm-pgdg main", ""),
        ("deb http://m.example.com/flat /", ""),
        ("deb-src http://m.example.com/debian bookworm main", ""),
        ("# deb http://m.example.com/debian bookworm main", ""),
    ],
)
def test_components_in_one_line_form(line: str, changed: str) -> None:
    wanted = f"{line} {changed}\n" if changed else f"{line}\n"
    assert sources.with_components(line + "\n", "bookworm", ["contrib"]) == wanted


def test_disabled_stanzas_stay() -> None:
    text = "Enabled: no\n" + DEB822.split("\n\n", maxsplit=1)[0]
    assert sources.with_components(text, "bookworm", ["contrib"]) == text


def archive(text: str, *, lists: bool = True, retired: str = "") -> Node:
    globs = {pattern: [] for pattern in sources.RETIRED} | {
        sources.LISTS: ["/var/lib/apt/lists/a_Packages"] * lists
    }
    if retired:
        globs[sources.RETIRED[2]] = [retired]
    files = {"/etc/apt/sources.list": text} | ({retired: "deb http://gone /\n"} if retired else {})
    return node(files=files, globs=globs, ages={sources.STAMP: None, sources.FOLDER: 60.0})


MAIN = "deb http://m.example.com/debian bookworm main\n"


@pytest.mark.parametrize(
    ("there", "files", "fetch"),
    [
        (archive(MAIN), {"/etc/apt/sources.list": MAIN.replace("main", "main contrib")}, True),
        (archive(MAIN.replace("main", "main contrib")), {}, False),
        (archive(MAIN.replace("main", "main contrib"), lists=False), {}, True),
    ],
)
def test_sources_and_lists_are_renewed_where_they_have_to_be(
    there: Node, files: dict[str, str], *, fetch: bool
) -> None:
    plan = sources.decide(asked("apt_sources", components=["contrib"]), there)
    assert {file.path: file.text for file in plan.files} == files
    assert all(file.secret for file in plan.files)
    assert plan.do == {"fetch": fetch, "known": True}
    in_check = sources.decide(asked("apt_sources", components=["contrib"], check=True), there)
    assert in_check.do["known"] is not fetch


@pytest.mark.parametrize(
    ("ages", "given", "fetch"),
    [
        ({"stamp": None, "folder": 3599.0}, {}, False),
        ({"stamp": None, "folder": 3601.0}, {}, True),
        ({"stamp": 60.0, "folder": 3601.0}, {}, False),
        ({"stamp": 3601.0, "folder": 60.0}, {}, True),
        ({"stamp": None, "folder": 60.0}, {"lists_valid_s": 0}, True),
        ({"stamp": None, "folder": 60.0}, {"lists_valid_s": "30"}, True),  # as `-e` gives it
        # another role of the run has seen to it
        ({"stamp": None, "folder": 3601.0}, {"had": ["main"]}, False),
    ],
)
def test_old_lists_are_fetched_at_the_beginning_of_a_run(
    ages: dict[str, float | None], given: dict[str, Any], *, fetch: bool
) -> None:
    there = archive(MAIN) | {"ages": {sources.STAMP: ages["stamp"], sources.FOLDER: ages["folder"]}}
    plan = sources.decide(asked("apt_sources", components=["main"], **given), there)
    assert plan.do == {"fetch": fetch, "known": True}


def test_lists_of_repositories_that_were_given_up_go() -> None:
    path = "/etc/apt/sources.list.d/nvidia-docker.list"
    plan = sources.decide(asked("apt_sources", components=["contrib"]), archive(MAIN, retired=path))
    assert plan.absent == [path]
    assert [file.path for file in plan.files] == ["/etc/apt/sources.list"]


KEY = "A" * 40
TOOLKIT = {
    "apt": {"url": "https://r.example.com/deb/$(ARCH)", "suite": "/", "key_url": "https://r.example.com/k"},
    "rpm": {"url": "https://r.example.com/rpm/$basearch", "repo_gpgcheck": True, "key_url": "file:///k"},
}
CUDA = {
    "apt": {
        "url": "https://c.example.com/{cuda_distribution}/{cuda_arch}/",
        "suite": "/",
        "key_fingerprint": KEY,
    },
    "rpm": {"url": "https://c.example.com/{cuda_distribution}/{cuda_arch}", "includepkgs": ["a", "b"]},
}


def repository(system: str, name: str = "toolkit", given: dict[str, Any] = TOOLKIT, **more: Any) -> Any:
    return asked("package_repository", system, name=name, **{"key_fingerprint": KEY, **given, **more})


def host(*keys: str, file: tuple[str, str] | None = None, packages: dict[str, str] | None = None) -> Node:
    class Keyrings(dict[str, list[str]]):
        def __missing__(self, _: str) -> list[str]:
            return list(keys)

    class Globs(dict[str, list[str]]):
        def __missing__(self, _: str) -> list[str]:
            return []

    files = {file[0]: file[1]} if file else {}
    return node(packages or {}, files, keyrings=Keyrings(), globs=Globs())


@pytest.mark.parametrize(
    ("system", "name", "given", "path", "lines"),
    [
        (
            "debian-12",
            "toolkit",
            TOOLKIT,
            "/etc/apt/sources.list.d/toolkit.list",
            ["deb [signed-by=/usr/share/keyrings/toolkit.gpg] https://r.example.com/deb/$(ARCH) /"],
        ),
        (
            "ubuntu-22.04",
            "cuda",
            CUDA,
            "/etc/apt/sources.list.d/cuda.list",
            ["deb [signed-by=/usr/share/keyrings/cuda.gpg] https://c.example.com/ubuntu2204/x86_64/ /"],
        ),
        (
            "rocky-9",
            "nvidia-container-toolkit",
            TOOLKIT,
            "/etc/yum.repos.d/nvidia-container-toolkit.repo",
            ["gpgcheck = 1", "repo_gpgcheck = 1", "priority = 1"],
        ),
        (
            "rocky-9",
            "cuda",
            CUDA,
            "/etc/yum.repos.d/cuda.repo",
            ["baseurl = https://c.example.com/rhel9/x86_64", "includepkgs = a b", "repo_gpgcheck = 0"],
        ),
        (
            "amazon-2023",
            "cuda",
            CUDA,
            "/etc/yum.repos.d/cuda.repo",
            ["baseurl = https://c.example.com/amzn2023/x86_64", "priority = 9"],
        ),
    ],
)
def test_how_a_repository_is_named(
    system: str, name: str, given: dict[str, Any], path: str, lines: list[str]
) -> None:
    role = repository(system, name, given)
    plan = repositories.decide(role, host())
    [file] = plan.files
    assert file.path == path
    assert set(lines) <= set(file.text.splitlines())
    assert plan.do["key"]
    assert plan.do["gpg"] == role.system.apt
    assert f"+{plan.do['keyring']}: {KEY}" in plan.lines
    after = repositories.decide(role, host(KEY, file=(path, file.text)))
    assert not after.acts
    assert (after.do["fetch"], after.do["known"]) == (False, True)
    assert repositories.decide(
        repository(system, name, given, refresh=True), host(KEY, file=(path, file.text))
    ).do["fetch"]
    # a keyring with one key more is not the trusted one
    assert repositories.decide(role, host(KEY, "B" * 40, file=(path, file.text))).do["key"]
    assert not repositories.decide(repository(system, name, given, check=True), host()).do["known"]


def test_the_rpm_file_is_as_ansible_s_own_module_writes_it() -> None:
    """So an update of these roles rewrites none."""
    plan = repositories.decide(repository("rocky-9"), host())
    assert plan.files[0].text == (
        "[toolkit]\nbaseurl = https://r.example.com/rpm/$basearch\nenabled = 1\ngpgcheck = 1\n"
        "gpgkey = file:///etc/pki/rpm-gpg/RPM-GPG-KEY-toolkit\nname = toolkit, managed by Ansible\n"
        "repo_gpgcheck = 1\n\n"
    )


def test_what_is_replaced() -> None:
    there = host(KEY, packages={"cuda-keyring": "1.1-1"})
    there["globs"]["/etc/apt/sources.list.d/cuda*.list"] = [
        "/etc/apt/sources.list.d/cuda.list",
        "/etc/apt/sources.list.d/cuda-ubuntu.list",
    ]
    role = repository(
        "debian-12", "cuda", CUDA, replaces=["cuda-keyring", "other", "/etc/apt/sources.list.d/cuda*.list"]
    )
    plan = repositories.decide(role, there)
    assert plan.do["replaced"] == ["cuda-keyring"]
    assert "-cuda-keyring" in plan.lines
    assert plan.absent == ["/etc/apt/sources.list.d/cuda-ubuntu.list"]


@pytest.mark.parametrize(
    ("name", "apt", "fingerprint", "found"),
    [
        ("", TOOLKIT["apt"], KEY, "Found the repository without a name at https://r.example.com"),
        ("No Name", TOOLKIT["apt"], KEY, "Found the repository No Name at"),
        ("a", {}, KEY, "Found the repository a at no address"),
        (
            "a",
            {"url": "https://me:secret@r.example.com/", "suite": "/"},
            KEY,
            "at https://***@r.example.com/ with",
        ),
        ("a", TOOLKIT["apt"], "", "with the key fingerprint none, wanted"),
        ("a", TOOLKIT["apt"], "abc", "with the key fingerprint abc, wanted"),
    ],
)
def test_what_is_refused(name: str, apt: dict[str, Any], fingerprint: str, found: str) -> None:
    role = asked("package_repository", name=name, apt=apt, key_fingerprint=fingerprint)
    plan = repositories.decide(role, host())
    assert found in plan.refusal
    assert "secret" not in plan.refusal
    assert not plan.acts


@pytest.mark.parametrize(
    ("suite", "url"),
    [
        ("/", "https://r.example.com/deb/amd64/InRelease"),
        ("stable", "https://r.example.com/deb/amd64/dists/stable/InRelease"),
    ],
)
def test_where_apt_s_lists_are_asked_for(suite: str, url: str) -> None:
    given = {"apt": {**TOOLKIT["apt"], "suite": suite}}
    assert repositories.decide(repository("debian-12", given=given), host()).do["release_file"] == url


@pytest.mark.parametrize("manager", ["apt", "rpm"])
def test_the_repositories_of_the_catalogue_are_well_described(manager: str) -> None:
    system = {"apt": "debian-12", "rpm": "rocky-9"}[manager]
    here = yaml.safe_load((ROOT / "components.yaml").read_text())["components"]
    described = {
        name.replace("_", "-"): component["repository"]
        for name, component in here.items()
        if (component.get("repository") or {}).get(manager)
    }
    assert described
    for name, given in described.items():
        role = repository(system, name, given, key_fingerprint="")
        assert not repositories.decide(role, host()).refusal, name
