"""What the role container_runtime decides: packages, and files of the engines, merged and not overwritten."""

import json
import tomllib
from collections.abc import Mapping
from typing import Any

import pytest

from roles.container_runtime import containerd
from roles.container_runtime import decide as engines
from roles.container_runtime.containerd import BrokenFileError
from roles.plan import Node, Plan
from tests.support.roles import asked, node

IMPORT = 'imports = ["/etc/containerd/conf.d/*.toml"]\n'
SETTINGS = {
    "cni_bin_dir": "/opt/cni/bin",
    "cni_conf_dir": "/etc/cni/net.d",
    "sandbox_image": "",
    "default_runtime": "nvidia",
    "runtimes": {"nvidia": "/usr/bin/nvidia-container-runtime"},
}
V2, V3 = "io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime"
DROP_IN = "/etc/containerd/conf.d/99-nvidia.toml"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", "version = 2\n" + IMPORT),
        ("version = 2\n\n[plugins]\n", "version = 2\n" + IMPORT + "\n[plugins]\n"),
        ("[plugins]\n  a = 1\n", IMPORT + "\n[plugins]\n  a = 1\n"),
        ("version = 2\n" + IMPORT, "version = 2\n" + IMPORT),
        (
            'imports = ["/a.toml"]\n[plugins]\n',
            'imports = ["/a.toml", "/etc/containerd/conf.d/*.toml"]\n[plugins]\n',
        ),
        (
            'disabled_plugins = [\n  "x",\n]\n[plugins]\n',
            'disabled_plugins = [\n  "x",\n]\n' + IMPORT + "\n[plugins]\n",
        ),
    ],
)
def test_containerd_imports_the_drop_ins(text: str, wanted: str) -> None:
    assert containerd.main_file(text, 2) == wanted
    assert containerd.main_file(wanted, 2) == wanted


def changes(files: dict[str, str], version: str, **settings: Any) -> dict[str, str]:
    wanted = containerd.files(
        files, version, "99-nvidia.toml", containerd.Settings(**{**SETTINGS, **settings})
    )
    return {path: text for path, text in wanted.items() if files.get(path) != text}


@pytest.mark.parametrize(
    ("version", "main", "schema", "plugin"),
    [
        ("1.6.20~ds1", "", 2, V2),
        ("1.7.24", "version = 2\n", 2, V2),
        ("2.1.9", "", 3, V3),
        ("2.1.9", "version = 2\n", 2, V2),
        ("2.3.0", "version = 4\n", 4, V3),
        ("", "", 2, V2),
    ],
)
def test_the_schema_is_that_of_the_main_file(version: str, main: str, schema: int, plugin: str) -> None:
    files = {containerd.MAIN: main} if main else {}
    found = changes(files, version)
    drop_in = tomllib.loads(found[DROP_IN])
    assert drop_in["version"] == schema
    assert tomllib.loads(found[containerd.MAIN])["version"] == schema
    table = drop_in["plugins"][plugin]
    assert table["containerd"]["default_runtime_name"] == "nvidia"
    runtimes = table["containerd"]["runtimes"]
    assert runtimes["nvidia"]["options"] == {
        "BinaryName": "/usr/bin/nvidia-container-runtime",
        "SystemdCgroup": True,
    }
    assert runtimes["runc"]["options"] == {"SystemdCgroup": True}
    # 1.6 does not know it
    assert table.get("enable_cdi") == (None if version[:3] in ("", "1.6") else True)
    assert changes({**files, **found}, version) == {}, "written once, it stays"


USERS = f"""\
version = 2
imports = ["/etc/containerd/conf.d/*.toml"]
[plugins."{V2}".registry]
config_path = "/etc/containerd/certs.d"
[plugins."{V2}".containerd.runtimes.kata]
runtime_type = "io.containerd.kata.v2"
pod_annotations = ["a", 'b"c']
[plugins."io.containerd.internal.v1.opt"]
path = "/opt"
"""


def test_old_containerd_keeps_what_others_say_of_the_plugin() -> None:
    """A drop-in replaces the whole table there."""
    files = {
        containerd.MAIN: USERS,
        "/etc/containerd/conf.d/50-site.toml": f'[plugins."{V2}"]\nmax_concurrent_downloads = 7\n',
        "/etc/containerd/conf.d/10-gpukiln.toml": f'[plugins."{V2}"]\nstale = true\n',
        "/etc/containerd/unread.toml": f'[plugins."{V2}"]\nunread = true\n',
    }
    [table] = tomllib.loads(changes(files, "1.7.24")[DROP_IN])["plugins"].values()
    assert table["registry"] == {"config_path": "/etc/containerd/certs.d"}
    assert table["containerd"]["runtimes"]["kata"]["pod_annotations"] == ["a", 'b"c']
    assert table["max_concurrent_downloads"] == 7
    assert not {"stale", "unread"} & set(table)
    assert containerd.MAIN not in changes(files, "1.7.24")
    [merging] = tomllib.loads(changes(files, "2.1.9")[DROP_IN])["plugins"].values()
    assert "registry" not in merging


@pytest.mark.parametrize(
    ("version", "default", "wanted"),
    [("1.7.24", "", "kata"), ("2.1.9", "", "kata"), ("2.1.9", "nvidia", "nvidia")],
)
def test_a_sites_default_runtime_wins_unless_ours_was_chosen(version: str, default: str, wanted: str) -> None:
    main = f'version = 2\n[plugins."{V2}".containerd]\ndefault_runtime_name = "%s"\n'
    found = tomllib.loads(
        changes({containerd.MAIN: main % "kata"}, version, default_runtime=default)[DROP_IN]
    )
    assert found["plugins"][V2]["containerd"]["default_runtime_name"] == wanted
    if not default:  # ours is not wanted as the default any more
        found = tomllib.loads(
            changes({containerd.MAIN: main % "nvidia"}, version, default_runtime="")[DROP_IN]
        )
        assert found["plugins"][V2]["containerd"]["default_runtime_name"] == "runc"


def test_the_pause_image() -> None:
    found = changes({}, "2.1.9", sandbox_image="example.com/pause:3.9")[DROP_IN]
    images = tomllib.loads(found)["plugins"]["io.containerd.cri.v1.images"]
    assert images == {"pinned_images": {"sandbox": "example.com/pause:3.9"}}
    found = changes({}, "1.7.24", sandbox_image="example.com/pause:3.9")[DROP_IN]
    assert tomllib.loads(found)["plugins"][V2]["sandbox_image"] == "example.com/pause:3.9"


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ('disabled_plugins = ["cri"]', "disabled_plugins = []"),
        (f'disabled_plugins = ["{V2}", "zfs"]', 'disabled_plugins = ["zfs"]'),
        (f"disabled_plugins = ['{V3}']", "disabled_plugins = []"),
        ('disabled_plugins = [ "zfs",  ]', 'disabled_plugins = [ "zfs",  ]'),
    ],
)
def test_the_plugin_for_kubernetes_is_switched_on(line: str, wanted: str) -> None:
    """Docker's packages come with it switched off."""
    main = changes({containerd.MAIN: f"{line}\n[debug]\nlevel = 'info'\n"}, "1.7.24")[containerd.MAIN]
    assert main == f"{wanted}\n{IMPORT}\n[debug]\nlevel = 'info'\n"


def test_a_file_that_is_no_toml_is_named() -> None:
    with pytest.raises(
        BrokenFileError, match=r"Found /etc/containerd/config\.toml that is no TOML: .*line 1"
    ):
        changes({containerd.MAIN: "version = = 2\n"}, "1.7.24")


def test_daemon_json_gets_our_keys_and_keeps_the_others() -> None:
    text = json.dumps(
        {
            "exec-opts": ["native.umask=normal"],
            "log-opts": {"max-size": "1m", "tag": "x"},
            "default-runtime": "nvidia",
            "hosts": ["unix://"],
        }
    )
    keys = {"exec-opts": ["native.cgroupdriver=systemd"], "log-opts": {"max-size": "100m"}}
    assert engines.daemon_json(text, keys, {"default-runtime": "nvidia"}) == {
        "exec-opts": ["native.umask=normal", "native.cgroupdriver=systemd"],
        "log-opts": {"max-size": "100m", "tag": "x"},
        "hosts": ["unix://"],
    }
    assert engines.daemon_json('{"default-runtime": "kata"}', {}, {"default-runtime": "nvidia"}) == {
        "default-runtime": "kata"
    }
    assert engines.daemon_json(" \n", {"a": 1}, {}) == {"a": 1}


DEFAULTS = [{"log-driver": "json-file", "log-opts": {"max-size": "100m"}}, {"bridge": "none", "bip": None}]


@pytest.mark.parametrize(
    ("site", "added"),
    [
        ({}, {**DEFAULTS[0], "bridge": "none"}),
        ({"log-opts": {"max-size": "10m"}}, {"bridge": "none"}),
        # its options would keep Docker from starting with another driver
        ({"log-driver": "journald"}, {"bridge": "none"}),
        ({"bip": "192.168.99.1/24"}, DEFAULTS[0]),
        ({"bridge": "docker0"}, DEFAULTS[0]),
    ],
)
def test_a_sites_own_values_win_over_preferences(site: dict[str, Any], added: dict[str, Any]) -> None:
    found = engines.daemon_json(json.dumps(site), {"runtimes": {"nvidia": {}}}, {}, DEFAULTS)
    assert found == {**site, "runtimes": {"nvidia": {}}, **added}


def test_an_option_of_a_list_is_there_once() -> None:
    """Docker refuses two cgroup drivers."""
    text = json.dumps({"exec-opts": ["native.cgroupdriver=cgroupfs", "native.umask=normal"]})
    found = engines.daemon_json(text, {"exec-opts": ["native.cgroupdriver=systemd"]}, {})
    assert found == {"exec-opts": ["native.umask=normal", "native.cgroupdriver=systemd"]}


@pytest.mark.parametrize(("text", "why"), [('{"a": }', "line 1 column 7"), ("[1]", "its top is a list")])
def test_a_broken_daemon_json_is_named(text: str, why: str) -> None:
    with pytest.raises(BrokenFileError, match=why) as caught:
        engines.daemon_json(text, {}, {})
    assert "json.tool" in str(caught.value)


RUNS = {"there": True, "enabled": "enabled", "active": "active", "reload": False}
NVIDIA = {
    "name": "nvidia",
    "path": "/usr/bin/nvidia-container-runtime",
    "docker_default": True,
    "containerd_default": True,
}
PAIR = {"containerd": "1.6.20~ds1-1", "docker.io": "20.10.24+dfsg1-1"}


def machine(packages: Mapping[str, str] = PAIR, joins: str = "", **files: str) -> Node:
    globs = {path: [path] * (path == joins) for path in (engines.NODEADM, engines.BOOTSTRAP)}
    return node(packages, files, globs=globs)


def done(plan: Plan, before: Node) -> Node:
    """The node after the plan."""
    there = node(files={file.path: file.text for file in plan.files})["files"]
    for file in plan.files:
        there[file.path]["mode"] = file.mode
    before["files"].update(there)
    before["units"].update(dict.fromkeys(plan.enable, RUNS))
    return before


@pytest.mark.parametrize(
    ("system", "there", "install", "repository"),
    [
        ("debian-12", {}, ["docker.io", "iptables", "containerd"], False),
        ("debian-12", PAIR, [], False),
        # who has another vendor's engine keeps it
        ("ubuntu-22.04", {"docker-ce": "5:27.1", "containerd.io": "1.7.24-1"}, [], False),
        ("ubuntu-22.04", {"moby-containerd": "1.7.24-1"}, ["docker.io", "iptables"], False),
        ("amazon-2023", {"containerd": "2.1.9-1.amzn2023"}, ["docker"], False),
        ("rocky-9", {}, ["docker-ce", "containerd.io"], True),
        ("rocky-9", {"docker": "20.10-1", "containerd.io": "2.1-1"}, [], True),
    ],
)
def test_which_packages_bring_the_engines(
    system: str, there: dict[str, str], install: list[str], *, repository: bool
) -> None:
    plan = engines.decide(asked("container_runtime", system), machine(there))
    assert sorted(plan.packages) == sorted(install)
    assert plan.do["repository"] is repository


def test_the_second_time_nothing_is_done() -> None:
    role, there = asked("container_runtime"), machine()
    plan = engines.decide(role, there)
    assert [file.path for file in plan.files] == [
        "/etc/containerd/conf.d/10-gpukiln.toml",
        containerd.MAIN,
        engines.DAEMON_JSON,
    ]
    assert all(file.validate[0] == "containerd" for file in plan.files[:2])
    assert plan.notify == [], "nothing runs that would have to be restarted"
    there["units"] |= {"containerd.service": RUNS, "docker.service": RUNS}
    assert engines.decide(role, there).notify == ["Restart containerd", "Restart Docker"]
    assert sorted(plan.enable) == ["containerd.service", "docker.service"]
    daemon = json.loads(plan.files[2].text)
    assert daemon["exec-opts"] == ["native.cgroupdriver=systemd"]
    assert daemon["log-driver"] == "json-file"
    there = done(plan, there)
    assert not engines.decide(role, there).acts
    assert not engines.decide_runtime(role, there).acts
    registered = engines.decide_register(asked("container_runtime", runtime=NVIDIA), there)
    assert json.loads(registered.files[-1].text)["default-runtime"] == "nvidia"
    there = done(registered, there)
    assert not engines.decide_register(asked("container_runtime", runtime=NVIDIA), there).acts
    assert not engines.decide(role, there).acts, "what is registered stays"
    other = asked("container_runtime", runtime={**NVIDIA, "docker_default": False})
    assert "default-runtime" not in json.loads(engines.decide_register(other, there).files[-1].text)


def test_a_layout_that_is_not_ours_stays() -> None:
    there = machine()
    there = done(engines.decide(asked("container_runtime"), there), there)
    there["files"][engines.DAEMON_JSON]["text"] = json.dumps(
        json.loads(there["files"][engines.DAEMON_JSON]["text"])
    )
    assert not engines.decide(asked("container_runtime"), there).acts


@pytest.mark.parametrize(
    ("joins", "given", "paths"),
    [
        (engines.NODEADM, {}, [engines.AFTER_NODEADM, engines.DAEMON_JSON]),
        (engines.BOOTSTRAP, {}, [engines.DAEMON_JSON]),
        ("", {"containerd_managed": False}, [engines.DAEMON_JSON]),
        ("", {"engines": ["docker"]}, [engines.DAEMON_JSON]),
        (engines.NODEADM, {"engines": ["containerd"]}, [engines.AFTER_NODEADM]),
    ],
)
def test_what_configures_containerd_itself_is_left_to_it(
    joins: str, given: dict[str, Any], paths: list[str]
) -> None:
    plan = engines.decide(asked("container_runtime", **given), machine(joins=joins))
    assert [file.path for file in plan.files] == paths
    if engines.DAEMON_JSON in paths:
        assert (json.loads(plan.files[-1].text).get("bridge") == "none") == bool(joins)


@pytest.mark.parametrize(("default", "word"), [(True, "default"), (False, "extra")])
def test_a_join_script_s_file_gets_the_runtime_before_each_start(*, default: bool, word: str) -> None:
    role = asked("container_runtime", "ubuntu-22.04", runtime={**NVIDIA, "containerd_default": default})
    plan = engines.decide_register(role, machine(joins=engines.BOOTSTRAP))
    texts = {file.path: file.text for file in plan.files}
    line = f"ExecStartPre={engines.ADDER} nvidia /usr/bin/nvidia-container-runtime {word}"
    assert texts[engines.ADDS_RUNTIME].splitlines()[-1] == line
    assert texts[engines.ADDER].startswith("#!/bin/sh")


def test_before_they_are_there_check_mode_tells_what_it_can() -> None:
    role = asked("container_runtime", check=True)
    plan = engines.decide(role, machine({}))
    assert plan.packages
    assert [file.validate for file in plan.files] == [[], [], []]
    assert plan.enable == []
    assert not engines.decide_runtime(role, machine({})).acts
    assert engines.decide_runtime(asked("container_runtime"), machine({})).start


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({engines.DAEMON_JSON: "{"}, "Found /etc/docker/daemon.json that is no JSON object: "),
        ({containerd.MAIN: "version = = 2\n"}, "Found /etc/containerd/config.toml that is no TOML: "),
    ],
)
def test_a_file_that_can_t_be_read_is_refused(files: dict[str, str], found: str) -> None:
    for role, decide in (
        (asked("container_runtime"), engines.decide),
        (asked("container_runtime", runtime=NVIDIA), engines.decide_register),
    ):
        plan = decide(role, machine(**files))
        assert plan.refusal.startswith(found)
        assert not plan.acts
