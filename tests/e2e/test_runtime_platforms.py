"""Engines, toolkit, persistence and nvtop on systems whose packages stand in.

What is real and what stands in is said in standin/platforms.py and standin/runtime.py; on Ubuntu Docker and
containerd are Debian's.
"""

import json
import re
import tomllib

import pytest

from gpukiln.instances.deadline import deadline_of, shutdown_user_data
from gpukiln.instances.rehearsal import node_config
from gpukiln.verify.catalog import load_checks
from tests.support.harness import Node
from tests.support.joined import gathered, join_script_is_outlived
from tests.support.pci import put_gpu, take_gpu
from tests.support.standin import image, nodeadm, runtime
from tests.support.standin.dcgm import dcgm
from tests.support.standin.packages import Package
from tests.support.standin.platforms import KERNELS, publish
from tests.support.standin.site import ENGINES, ONLY_TOOLKIT, VERSION, Site

pytestmark = pytest.mark.e2e

CHECKS = load_checks()

ONLY_ENGINES = {"these": ["container_runtime"]}
EXTRAS = """\
- name: DCGM and a CI runner
  hosts: all
  become: true
  gather_subset: [min]
  tasks:
    - name: Have both
      ansible.builtin.include_role: {name: "{{ item }}"}
      loop: [dcgm, ci_runner]
"""
# What does not differ between two systems with dnf is shown on one of them.
ONE_OF_EACH_KIND = pytest.mark.parametrize("site", ["ubuntu-24.04", "rocky-9"], indirect=True, scope="module")
KATA = {"kata": {"path": "/usr/bin/kata"}}


@pytest.fixture(scope="module", params=["ubuntu-24.04", "rocky-9", "amazon-2023"])
def site(here, key, tmp_path_factory, request):
    image = request.getfixturevalue("rpm_base") if request.param in KERNELS else ""
    with Node(here, key, tmp_path_factory.mktemp(request.param), image) as node:
        yield Site(node, request.param)


def test_a_fresh_node_tells_what_would_change(site):
    before = site.node.read("ls -R /etc | md5sum"), site.installed()
    done = site.apply("--check", "--diff")
    said = done.stdout
    assert f"+nvidia-container-toolkit {VERSION}" in said
    assert "+nvtop" in said if site.platform != "amazon-2023" else "nvtop is left out" in said
    assert '+    "default-runtime": "nvidia",' in said
    assert (site.node.read("ls -R /etc | md5sum"), site.installed()) == before


@ONE_OF_EACH_KIND
def test_an_untrusted_key_is_refused(site):
    said = site.refused_from(key_fingerprint="0" * 40)
    assert f"Found keys with the fingerprints {site.fingerprint}" in said
    assert "wanted " + "0" * 40 in said
    assert not set(runtime.TOOLKIT) & set(site.installed())
    said = site.refused_from(key_url="http://127.0.0.1:1/k")
    assert "Found no key for the repository nvidia-container-toolkit at http://127.0.0.1:1/k" in said
    assert "Check its network" in said


@ONE_OF_EACH_KIND
def test_an_unreachable_repository_is_taken_away_again(site):
    said = site.refused_from(url="http://127.0.0.1:1/x")
    assert "at http://127.0.0.1:1/x for nvidia-container-toolkit" in said
    assert re.search("refused|Cannot download", said)
    assert "was taken away again" in said
    listed = site.node.read("ls /etc/apt/sources.list.d /etc/yum.repos.d 2>&1 || true")
    assert "nvidia-container-toolkit" not in listed


def test_nvidia_docker2_is_replaced_and_everybodys_keys_stay(site):
    node = site.node
    if site.is_apt:
        node.read("cd /srv/vendor && sudo dpkg -i ./nvidia-docker2_*.deb")
        node.write("/etc/apt/sources.list.d/nvidia-docker.list", "deb http://127.0.0.1:1 /\n")
    else:
        node.read("sudo rpm -i --nodeps /srv/vendor/nvidia-docker2-*.rpm")
        text = "[nvidia-docker]\nname=x\nbaseurl=http://127.0.0.1:1\nenabled=1\n"
        node.write("/etc/yum.repos.d/nvidia-docker.repo", text)
        node.read("sudo sed -i s/enabled=1/enabled=0/ /etc/yum.repos.d/nvidia-docker.repo")
    runtimes = {**KATA, **json.loads(runtime.DAEMON_JSON)["runtimes"]}
    node.write("/etc/docker/daemon.json", json.dumps({"log-level": "warn", "runtimes": runtimes}))
    site.apply(nvidia_docker2=True)  # that all of it rests is shown below
    found = site.installed()
    assert "nvidia-docker2" not in found
    assert {found[name] for name in runtime.TOOLKIT} == {f"{VERSION}-1"}
    assert site.held() == set(runtime.TOOLKIT)
    if not site.is_apt:
        origins = "dnf -q repoquery --installed --qf '%{from_repo}' " + " ".join(runtime.TOOLKIT)
        assert set(node.read(origins).split()) == {"nvidia-container-toolkit"}
    assert "nvidia-docker" not in node.read("ls /etc/apt/sources.list.d /etc/yum.repos.d 2>&1 || true")
    assert "gpukiln" not in node.read("ls /etc/docker")

    daemon = site.daemon_json()
    assert (daemon["log-level"], daemon["default-runtime"]) == ("warn", "nvidia")
    assert set(daemon["runtimes"]) == {"kata", "nvidia"}
    assert daemon["exec-opts"] == ["native.cgroupdriver=systemd"]
    if not site.is_apt:  # Docker stands in, and says how it was called
        assert node.read("nvidia-docker ps") == "docker ps\n"
        said = node.read("NV_GPU=0,1 nvidia-docker run --rm x")
        assert said == "docker run --runtime=nvidia --env NVIDIA_VISIBLE_DEVICES=0,1 --rm x\n"


def test_the_engines_run_with_the_runtime(site):
    node = site.node
    assert node.read("systemctl is-active docker containerd") == "active\nactive\n"
    assert node.read("systemctl is-enabled docker containerd") == "enabled\nenabled\n"
    drop_in = tomllib.loads(node.read("cat /etc/containerd/conf.d/99-nvidia.toml"))
    schema, plugin = (2, "io.containerd.grpc.v1.cri") if site.is_apt else (3, "io.containerd.cri.v1.runtime")
    assert drop_in["version"] == schema
    table = drop_in["plugins"][plugin]["containerd"]
    assert table["default_runtime_name"] == "nvidia"
    assert table["runtimes"]["nvidia"]["options"]["SystemdCgroup"] is True
    if site.is_apt:  # the real one
        dump = node.read("sudo containerd config dump")
        assert 'default_runtime_name = "nvidia"' in dump
        assert "containerd.runtimes.nvidia]" in dump
        assert 'BinaryName = "/usr/bin/nvidia-container-runtime"' in dump
    found = site.installed()
    assert set(ENGINES.get(site.platform, ("containerd", "docker.io"))) <= set(found)
    assert ("nvtop" in found) == (site.platform != "amazon-2023")
    if site.platform == "rocky-9":
        assert "includepkgs = nvtop" in node.read("cat /etc/yum.repos.d/epel-nvtop.repo")
    if site.is_apt:
        text = node.read("cat /etc/apt/sources.list.d/nvidia-container-toolkit.*")
        assert re.search("(?i)signed-by[=:]", text)
    else:
        text = node.read("cat /etc/yum.repos.d/nvidia-container-toolkit.repo")
        assert "\ngpgcheck = 1" in text
        assert "\nrepo_gpgcheck = 1" in text


@ONE_OF_EACH_KIND
def test_the_default_runtime_is_a_choice_for_each_engine(site):
    choice = {"nvidia_container_toolkit_docker_default": False}
    site.apply(**ONLY_TOOLKIT, **choice, nvidia_container_toolkit_containerd_default=False)
    daemon = site.daemon_json()
    assert "default-runtime" not in daemon
    assert "nvidia" in daemon["runtimes"]
    assert 'default_runtime_name = "runc"' in site.node.read("cat /etc/containerd/conf.d/99-nvidia.toml")
    assert site.node.ssh("test -e /usr/local/bin/nvidia-docker").returncode != 0


@ONE_OF_EACH_KIND
def test_another_version_takes_the_place_of_the_held_one(site):
    site.apply(**ONLY_TOOLKIT, nvidia_container_toolkit_version="1.19.0")
    assert {site.installed()[name] for name in runtime.TOOLKIT} == {"1.19.0-1"}
    assert site.held() == set(runtime.TOOLKIT)
    said = site.refused(**ONLY_TOOLKIT, nvidia_container_toolkit_version="1.18.9")
    assert "in version 1.18.9. The node's repositories don't have it" in said
    site.apply(**ONLY_TOOLKIT)
    assert {site.installed()[name] for name in runtime.TOOLKIT} == {f"{VERSION}-1"}


@ONE_OF_EACH_KIND
def test_a_broken_daemon_json_is_named_and_kept(site):
    node = site.node
    kept = node.read("cat /etc/docker/daemon.json")
    node.write("/etc/docker/daemon.json", '{"log-level": }')
    said = site.refused(**ONLY_TOOLKIT)
    assert "Found /etc/docker/daemon.json that is no JSON object: Expecting value: line 1 column 15" in said
    assert node.read("cat /etc/docker/daemon.json") == '{"log-level": }'
    node.write("/etc/docker/daemon.json", kept)


@ONE_OF_EACH_KIND
def test_persistence_is_on_where_there_is_a_gpu(site):
    """A daemon that runs without it, as udev may start it before the role has been there, is started anew.

    Here every one of these roles rests in a second run, nvidia-docker2's command too; on Amazon Linux they do
    in test_containerd_is_nodeadms.
    """
    node = site.node
    node.read("sudo rm -r /etc/systemd/system/nvidia-persistenced.service.d; sudo systemctl daemon-reload")
    put_gpu(node)
    node.read("sudo systemctl start nvidia-persistenced || true")
    site.converge(nvidia_docker2=True, **cdi(node, "535.309.01"))
    assert "--persistence-mode" in node.read("systemctl show -p ExecStart nvidia-persistenced")
    assert node.read("systemctl is-active nvidia-persistenced") == "active\n"
    assert node.read("systemctl is-enabled nvidia-persistenced") == "enabled\n"


def cdi(node, version):
    """Variables for a driver that is loaded."""
    node.write("/srv/loaded", f"{version}\n")
    return {
        "nvidia_container_toolkit_loaded_file": "/srv/loaded",
        "nvidia_container_toolkit_cdi_file": "/srv/nvidia.yaml",
    }


@ONE_OF_EACH_KIND
def test_the_cdi_specification_follows_the_driver(site):
    node = site.node
    assert "libcuda.so.535.309.01" in node.read("cat /srv/nvidia.yaml")
    site.apply(**ONLY_TOOLKIT, **cdi(node, "580.178.04"))
    assert "libcuda.so.580.178.04" in node.read("cat /srv/nvidia.yaml")
    assert "path: /dev/nvidia-uvm" in node.read("cat /srv/nvidia.yaml")
    node.write("/srv/loaded", "")
    said = site.refused(**ONLY_TOOLKIT, **cdi(node, ""))
    assert "Found a GPU and no loaded driver" in said
    take_gpu(node)


def outcome(check, facts):
    """What comes of a check, and why."""
    try:
        CHECKS[check][1](facts)
    except pytest.skip.Exception as reason:
        return "not_run", str(reason)
    return "passed", facts.take_note()


def test_containerd_is_nodeadms(site):
    """Judged without a cluster, and with the NodeConfig that a verification rehearses."""
    if site.platform != "amazon-2023":
        pytest.skip("nodeadm is of EKS's Amazon Linux")
    node = site.node
    node.read("sudo rm -rf /etc/containerd")
    nodeadm.install(node)
    site.converge()
    assert node.ssh("test -e /etc/containerd").returncode != 0

    nodeadm.boot(node, shutdown_user_data(deadline_of("verify")))
    facts = gathered(node, "image")
    assert facts["boot"]["failed"] == ["nodeadm-config.service"]
    for check in ("boot.state", "boot.failed-units", "runtime.containerd-nvidia"):
        assert outcome(check, facts)[0] == "not_run"
    said = outcome("runtime.containerd-nvidia", facts)[1]
    assert "had no NodeConfig: config provider at index 0 failed: could not find NodeConfig" in said

    nodeadm.boot(node, shutdown_user_data(deadline_of("verify"), node_config()))
    facts = gathered(node, "image")
    assert facts["nodeadm"] == {"installed": True, "config": "rehearsed", "configured": True, "error": ""}
    for check in ("boot.state", "boot.failed-units", "runtime.containerd", "runtime.containerd-nvidia"):
        assert outcome(check, facts)[0] == "passed"
    # It was not running before its configuration was there.
    assert "runtimes.nvidia" in node.read("cat /run/containerd-runs-with.toml")


def test_the_runtime_outlives_ubuntus_join_script(site):
    if site.platform != "ubuntu-24.04":
        pytest.skip("bootstrap.sh is of Ubuntu's EKS images")
    join_script_is_outlived(site)


def test_dcgm_and_a_ci_runner(site):
    """From NVIDIA's repository nothing but DCGM; ccache from where the platform has it."""
    if site.is_apt:
        pytest.skip("with apt both are shown in test_ci_and_dcgm.py")
    node = site.node
    node.read("sudo rm -f /run/nvidia-gpu-present")
    packages = [*dcgm("1:4.6.1-1", "4.8.4-1"), *dcgm("1:4.6.2-1", "4.8.5-1"), Package("nvtop", "99.0-1")]
    cuda = {
        "url": "file:///srv/cuda",
        "key_url": "file:///srv/cuda/gpgkey",
        "key_fingerprint": publish(node, "/srv/cuda", packages, kind="rpm"),
    }
    ccache = {"url": "file:///srv/ccache", "key_url": "file:///srv/ccache/gpgkey", "repo_gpgcheck": True}
    variables = {
        "dcgm_repository": {"rpm": cuda},
        "dcgm_driver_source": "distribution",
        "ci_runner_runners": [{"user": "runner", "folder": "/opt/actions-runner"}],
    }
    packages = [Package("ccache", "4.9-1", files={"/usr/bin/ccache": "#!/bin/sh\n"})]
    packages += [Package("spal-release", "1-1")]
    ccache["key_fingerprint"] = publish(node, "/srv/ccache", packages, kind="rpm")
    if site.platform == "amazon-2023":  # there the package spal-release brings the repository
        text = "[spal]\nname=spal\nbaseurl=file:///srv/ccache\ngpgcheck=0\n"
        node.write("/etc/yum.repos.d/spal.repo", text)
        node.apply(EXTRAS, **variables)
    else:
        variables["ci_runner_epel"] = ccache
        node.converge(EXTRAS, **variables)

    found = site.installed()
    versions = {name: found[name].removeprefix("1:") for name in found if "datacenter-gpu-manager" in name}
    exporter = versions.pop("datacenter-gpu-manager-exporter")
    assert (len(versions), set(versions.values()), exporter) == (4, {"4.6.1-1"}, "4.8.4-1")
    assert "ccache" in found
    assert "99.0" not in node.ssh("dnf --showduplicates list nvtop").stdout
    assert node.read("systemctl is-enabled nvidia-dcgm nvidia-dcgm-exporter") == "enabled\nenabled\n"
    assert "CCACHE_DIR=/var/cache/ccache" in node.read("sudo cat /opt/actions-runner/.env")
    assert node.read("stat -c '%U %G %a' /var/cache/ccache") == "root ccache 3770\n"


def test_a_full_disk_and_a_held_package_are_named(site):
    if not site.is_apt:
        pytest.skip("dnf reads these packages where they are, and calls a lock a missing package")
    node = site.node
    node.read("sudo apt-get -qy remove docker.io && sudo apt-get clean")
    node.read("sudo mount -t tmpfs -o size=16k tmpfs /var/cache/apt/archives")
    assert "Wanted: docker.io, iptables. Free space on the node" in site.refused(**ONLY_ENGINES)
    node.read("sudo umount /var/cache/apt/archives && sudo apt-mark hold docker.io")
    assert "`apt-mark unhold NAME` lets it move" in site.refused(**ONLY_ENGINES)
    node.read("sudo apt-mark unhold docker.io")


def test_an_image_carries_its_record_and_nothing_of_its_build(site):
    """The last of these tests: what it removes, the others would need."""
    if site.is_apt:
        pytest.skip("with apt a whole image is baked, in test_build.py")
    node = site.node
    components = image.components(VERSION, nvtop=site.platform != "amazon-2023")
    for path, text in {**image.LEFTOVERS, **image.KEPT}.items():
        node.write(path, text)
    installed = site.installed()
    done = node.apply(
        image.PLAYBOOK,
        gpukiln_image={"schema": 1, "image": "eks-gpu", "components": components},
        gpukiln_fetch_dir=str(node.folder),
        gpu_bootstrap_mig="any",
        image_hygiene_authorized_keys=False,
    )
    drift = done.stdout.partition("Report which packages differ")[2].partition("\nTASK ")[0]
    assert drift.strip(" ]*\n").startswith("ok:"), drift

    record = json.loads((node.folder / "image.json").read_text())
    states = {name: said["status"] for name, said in record["components"].items()}
    assert states == {
        name: said["status"].replace("install", "installed") for name, said in components.items()
    }
    engine = ENGINES[site.platform][1]
    assert record["components"]["docker"]["package"] == {"name": engine, "version": installed[engine]}
    several = [name for name, version in record["packages"].items() if ", " in version]
    assert {**record["packages"], **{name: installed[name] for name in several}} == installed
    assert record["kernel"] == node.read("ls /lib/modules").strip()
    assert json.loads(node.read("cat /etc/gpukiln/expected.json"))["mig"] == "any"

    gone = [*image.LEFTOVERS, "/var/lib/cloud/instance", "/root/.ansible"]
    # `ls` fails for each that is gone, as all of them should be.
    assert node.read(f"sudo ls -d {' '.join(gone)} 2>/dev/null || true") == ""
    assert node.read(f"ls {' '.join(image.KEPT)}").split() == list(image.KEPT)
    assert node.read("sudo ls -A /var/cache/dnf") == ""
    assert node.read("cat /etc/machine-id") == ""
