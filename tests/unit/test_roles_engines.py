"""The filters of the role container_runtime: files of containerd and Docker, merged and not overwritten."""

import json
import tomllib
from typing import Any

import pytest
import yaml
from ansible.errors import AnsibleFilterError

from gpukiln.catalog.load import ROOT
from tests.support.roles import load_filters

containerd = load_filters("container_runtime", "containerd")
engines = load_filters("container_runtime", "engines")

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
        ("[plugins]\n  a = 1\n", IMPORT + "[plugins]\n  a = 1\n"),
        ("version = 2\n" + IMPORT, "version = 2\n" + IMPORT),
        (
            'imports = ["/a.toml"]\n[plugins]\n',
            'imports = ["/a.toml", "/etc/containerd/conf.d/*.toml"]\n[plugins]\n',
        ),
        (
            'disabled_plugins = [\n  "x",\n]\n[plugins]\n',
            IMPORT + 'disabled_plugins = [\n  "x",\n]\n[plugins]\n',
        ),
    ],
)
def test_containerd_imports_the_drop_ins(text: str, wanted: str) -> None:
    assert containerd.containerd_with_imports(text, 2) == wanted
    assert containerd.containerd_with_imports(wanted, 2) == wanted


def changes(files: dict[str, str], version: str, **settings: Any) -> dict[str, str]:
    found = containerd.containerd_changes(files, version, "99-nvidia.toml", {**SETTINGS, **settings})
    return {item["path"]: item["text"] for item in found}


def test_files_are_taken_apart() -> None:
    text = f"{containerd.MAIN}:version = 2\n{containerd.MAIN}:\n/etc/containerd/a.toml:b = 1\n"
    assert containerd.containerd_files(text) == {
        containerd.MAIN: "version = 2\n\n",
        "/etc/containerd/a.toml": "b = 1\n",
    }
    assert containerd.containerd_files("") == {}


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
    assert main == f"{IMPORT}{wanted}\n[debug]\nlevel = 'info'\n"


def test_a_file_that_is_no_toml_is_named() -> None:
    with pytest.raises(
        AnsibleFilterError, match=r"Found /etc/containerd/config\.toml that is no TOML: .*line 1"
    ):
        changes({containerd.MAIN: "version = = 2\n"}, "1.7.24")


def test_who_brings_an_engine() -> None:
    providers = {"containerd": ["containerd", "containerd.io"], "docker": ["docker.io", "docker-ce"]}
    found = {
        "containerd.io": {"installed": True, "version": "2.2.1"},
        "docker.io": {"installed": False, "version": "20.10"},
    }
    assert engines.engine_versions(providers, found) == {"containerd": "2.2.1"}


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
    assert engines.daemon_json_merged(text, keys, {"default-runtime": "nvidia"}) == {
        "exec-opts": ["native.umask=normal", "native.cgroupdriver=systemd"],
        "log-opts": {"max-size": "100m", "tag": "x"},
        "hosts": ["unix://"],
    }
    assert engines.daemon_json_merged('{"default-runtime": "kata"}', {}, {"default-runtime": "nvidia"}) == {
        "default-runtime": "kata"
    }
    assert engines.daemon_json_merged(" \n", {"a": 1}, {}) == {"a": 1}


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
    found = engines.daemon_json_merged(json.dumps(site), {"runtimes": {"nvidia": {}}}, {}, DEFAULTS)
    assert found == {**site, "runtimes": {"nvidia": {}}, **added}


def test_an_option_of_a_list_is_there_once() -> None:
    """Docker refuses two cgroup drivers."""
    text = json.dumps({"exec-opts": ["native.cgroupdriver=cgroupfs", "native.umask=normal"]})
    found = engines.daemon_json_merged(text, {"exec-opts": ["native.cgroupdriver=systemd"]}, {})
    assert found == {"exec-opts": ["native.umask=normal", "native.cgroupdriver=systemd"]}


def test_the_role_prefers_and_needs_what_it_says() -> None:
    """What a preference is does not stand among what is needed."""
    role = ROOT / "roles/container_runtime"
    said = yaml.safe_load((role / "defaults/main.yml").read_text())
    assert said["container_runtime_docker_config"] == {"exec-opts": ["native.cgroupdriver=systemd"]}
    site = json.dumps({"log-opts": {"max-size": "10m"}})
    defaults = said["container_runtime_docker_defaults"]
    found = engines.daemon_json_merged(site, said["container_runtime_docker_config"], {}, defaults)
    assert found["log-opts"] == {"max-size": "10m"}


@pytest.mark.parametrize(("text", "why"), [('{"a": }', "line 1 column 7"), ("[1]", "its top is a list")])
def test_a_broken_daemon_json_is_named(text: str, why: str) -> None:
    with pytest.raises(AnsibleFilterError, match=why) as caught:
        engines.daemon_json(text)
    assert "json.tool" in str(caught.value)
