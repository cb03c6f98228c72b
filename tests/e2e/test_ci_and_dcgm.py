"""DCGM, CI runners and the boot unit on a booted machine, without a GPU and with one made of files.

What stands in: NVIDIA's CUDA repository and its packages, the PCI bus, the GPU's device file and nvidia-smi.
"""

import re

import pytest

from tests.support.harness import Node
from tests.support.pci import put_gpu
from tests.support.standin.dcgm import dcgm
from tests.support.standin.packages import Package
from tests.support.standin.platforms import publish

pytestmark = pytest.mark.e2e

PLAYBOOK = """\
- name: A role
  hosts: all
  become: true
  gather_subset: [min]
  tasks:
    - name: What an image gets
      ansible.builtin.include_role: {name: "{{ role }}", tasks_from: install}
    - name: What a live node gets
      ansible.builtin.include_role: {name: "{{ role }}", tasks_from: runtime}
      when: live | default(true)
"""
UNIT = "actions.runner.test.service"
RUNNER_UNIT = """\
[Service]
Type=oneshot
User=runner
Environment=GPUKILN_DEVICES=/srv/dev/nvidia RUNNER_TRACKING_ID=github_1 RUNNER_TEMP=/srv/temp
ExecStart=/opt/actions-runner/job.sh
"""
# What a job is to the runner: a hook, the steps, a hook. This one leaves a process on the GPU.
JOB = """\
#!/bin/bash -e
bash -e "$ACTIONS_RUNNER_HOOK_JOB_STARTED"
RUNNER_TRACKING_ID= setsid sleep 1000 9</srv/dev/nvidia0 &
until [ -e /srv/temp/go ]; do sleep 0.1; done
bash -e "$ACTIONS_RUNNER_HOOK_JOB_COMPLETED"
"""
SMI = "#!/bin/sh\ncase $* in *query-gpu*) cat /srv/gpus ;; esac\n"
OLD_REPOSITORY = "deb [trusted=yes] file:/srv/cuda /\n"


def apply(node, role, **variables):
    return node.apply(PLAYBOOK, role=role, **variables)


def states(node, *units):
    names = " ".join(units)
    lines = node.ssh(f"systemctl is-enabled {names}; systemctl is-active {names}").stdout.split()
    return list(zip(lines[: len(units)], lines[len(units) :], strict=True))


@pytest.fixture(scope="module")
def node(here, key, tmp_path_factory):
    with Node(here, key, tmp_path_factory.mktemp("extras")) as made:
        made.read("sudo apt-get -q update && sudo apt-get -qy install gcc gpg gpg-agent")
        packages = [
            *dcgm("1:4.6.1-1", "4.8.4-1"),
            # What must not come from there, and version 3, which has to go.
            Package("nvtop", "99.0-1"),
            Package("datacenter-gpu-manager", "1:3.3.9"),
        ]
        repository = {
            "url": "file:///srv/cuda",
            "suite": "/",
            "key_url": "file:///srv/cuda/gpgkey",
            "key_fingerprint": publish(made, "/srv/cuda", packages),
        }
        made.dcgm = {"dcgm_repository": {"apt": repository}}
        yield made


@pytest.fixture(scope="module")
def gpu(node):
    """From now on the machine has a GPU on its PCI bus, and none that a driver could find."""
    apply(node, "gpu_presence")
    put_gpu(node)


# --- DCGM -----------------------------------------------------------------------------------------------


def test_dcgm_tells_what_it_would_do(node):
    before = node.read("dpkg -l | wc -l; ls /etc/systemd/system /etc/apt/sources.list.d")
    done = node.play(PLAYBOOK, "--check", role="dcgm", **node.dcgm)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "+datacenter-gpu-manager-4-cuda12" in done.stdout
    assert "+datacenter-gpu-manager-exporter" in done.stdout
    assert node.read("dpkg -l | wc -l; ls /etc/systemd/system /etc/apt/sources.list.d") == before


def test_dcgm_is_installed_and_waits_for_a_gpu(node):
    node.write("/etc/apt/sources.list.d/cuda-debian12.list", OLD_REPOSITORY)
    node.read("sudo apt-get -q update && sudo apt-get -qy install datacenter-gpu-manager")
    node.converge(PLAYBOOK, role="dcgm", **node.dcgm)
    held = node.read("apt-mark showhold").split()
    assert "datacenter-gpu-manager-exporter" in held
    assert len([name for name in held if name.startswith("datacenter-gpu-manager-4")]) == 4
    assert node.ssh("dpkg -s datacenter-gpu-manager").returncode != 0, "version 3 is still there"
    assert "cuda-debian12.list" not in node.read("ls /etc/apt/sources.list.d")
    assert states(node, "nvidia-dcgm", "nvidia-dcgm-exporter") == [("enabled", "inactive")] * 2
    assert node.ssh("systemctl --failed --no-legend").stdout == ""


def test_nothing_else_comes_from_that_repository(node):
    assert "99.0" not in node.read("apt-cache policy nvtop | grep Candidate")
    apply(node, "dcgm", live=False, dcgm_driver_source="nvidia", **node.dcgm)
    assert "99.0" in node.read("apt-cache policy nvtop | grep Candidate")


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"dcgm_exporter_version": "4.8.5"}, "Wanted: datacenter-gpu-manager-exporter in version 4.8.5"),
        ({"dcgm_cuda": 13}, "Wanted: datacenter-gpu-manager-4-core, datacenter-gpu-manager-4-cuda13"),
        ({"dcgm_exporter_address": "9400"}, "Found dcgm_exporter_address 9400, wanted HOST:PORT"),
    ],
)
def test_dcgm_says_what_is_wrong(node, variables, reason):
    assert reason in node.refused(PLAYBOOK, role="dcgm", **node.dcgm, **variables)


@pytest.mark.usefixtures("gpu")
def test_dcgm_runs_where_there_is_a_gpu(node):
    node.write("/srv/discovery", "1 GPU found.\n")
    apply(node, "dcgm", **node.dcgm)
    assert states(node, "nvidia-dcgm", "nvidia-dcgm-exporter") == [("enabled", "active")] * 2
    assert "127.0.0.1:9400" in node.read("ss -ltn")

    counters = node.folder / "counters.csv"
    counters.write_text("DCGM_FI_DEV_SM_CLOCK 1000\n")
    address = "0.0.0.0:9401"
    variables = {"dcgm_exporter_counters": str(counters), "dcgm_exporter_address": address}
    node.converge(PLAYBOOK, role="dcgm", **node.dcgm, **variables)
    listening = node.read("ss -ltn")
    assert address in listening
    assert ":9400" not in listening


@pytest.mark.usefixtures("gpu")
def test_a_gpu_that_dcgm_does_not_see_is_an_error(node):
    node.write("/srv/discovery", "0 GPUs found.\n")
    assert "Found 0 GPUs by DCGM (0 GPUs found.), wanted the 1 on the PCI bus" in node.refused(
        PLAYBOOK, role="dcgm", **node.dcgm
    )


# --- the unit that readies a node -----------------------------------------------------------------------


@pytest.mark.usefixtures("gpu")
def test_a_node_that_is_not_ready_says_so_on_its_console(here, node):
    apply(node, "gpu_bootstrap", live=False, gpu_bootstrap_wait_s=2)
    assert node.ssh("sudo systemctl start gpukiln-bootstrap").returncode == 1
    assert "failed" in node.ssh("systemctl is-failed gpukiln-bootstrap").stdout
    said = here.invoke("cloud.console", node.instance["InstanceId"]).stdout
    assert "gpukiln-bootstrap: FAILED: the driver is not ready after" in said
    order = node.read("systemctl show --property=After --value cloud-final.service docker.service")
    assert "gpukiln-bootstrap.service" in order
    assert "cycle" not in node.read("sudo systemd-analyze verify default.target 2>&1; true")


# --- CI runners -----------------------------------------------------------------------------------------

RUNNERS = [{"user": "runner", "folder": "/opt/actions-runner", "unit": UNIT, "gpus": ["0"]}]
CI = {"ci_runner_runners": RUNNERS, "ci_runner_ccache_members": ["alice"]}


def as_user(node, user, command):
    return node.ssh(f"sudo -u {user} env CCACHE_DIR=/var/cache/ccache HOME=/tmp/{user} sh -c '{command}'")


@pytest.fixture(scope="module")
def runner(node, gpu):
    """A machine with a runner; alice may use its cache, bob may not."""
    del gpu
    node.read("sudo useradd -m alice && sudo useradd -m bob && sudo usermod -s /bin/sh alice")
    node.read("sudo mkdir -p /opt/actions-runner /srv/dev /srv/temp && sudo touch /srv/dev/nvidia0")
    node.write("/opt/actions-runner/.env", "LANG=C\n")
    node.write(f"/etc/systemd/system/{UNIT}", RUNNER_UNIT)
    node.write("/opt/actions-runner/job.sh", JOB)
    node.write("/usr/local/bin/nvidia-smi", SMI)
    node.write("/srv/gpus", "0, GPU-aaaa, 3, 0, No, No\n")
    node.read("sudo chmod +x /opt/actions-runner/job.sh /usr/local/bin/nvidia-smi")
    node.converge(PLAYBOOK, role="ci_runner", **CI)
    node.read("sudo chown runner /srv/temp && sudo systemctl daemon-reload")


def test_a_wrong_runner_is_refused(node):
    assert "Found the runner {'user': 'x'}" in node.refused(
        PLAYBOOK, role="ci_runner", ci_runner_runners=[{"user": "x"}]
    )
    assert "Found no users carol" in node.refused(
        PLAYBOOK, role="ci_runner", ci_runner_ccache_members=["carol"]
    )
    assert "Found no group docker" in node.refused(PLAYBOOK, role="ci_runner", ci_runner_docker=True)


@pytest.mark.usefixtures("runner")
def test_the_runner_gets_its_environment(node):
    lines = node.read("sudo cat /opt/actions-runner/.env").splitlines()
    assert lines[0] == "LANG=C", "somebody else's line was lost"
    hooks = "/usr/local/lib/gpukiln/hooks/gpu-job-"
    assert f"ACTIONS_RUNNER_HOOK_JOB_STARTED={hooks}started.sh" in lines
    assert f"ACTIONS_RUNNER_HOOK_JOB_COMPLETED={hooks}completed.sh" in lines
    assert {"CCACHE_DIR=/var/cache/ccache", "CUDA_VISIBLE_DEVICES=0"} < set(lines)
    assert node.read("stat -c '%U %a' /opt/actions-runner/.env") == "runner 600\n"
    assert "KillMode=mixed" in node.read(f"systemctl show {UNIT} --property=KillMode")
    assert node.read("getent passwd alice").strip().endswith(":/bin/sh"), "somebody's shell was changed"
    assert "docker" not in node.read("id runner")


@pytest.mark.usefixtures("runner")
def test_the_cache_is_shared_by_its_group_and_by_nobody_else(node):
    assert node.read("stat -c '%U %G %a' /var/cache/ccache") == "root ccache 3770\n"
    compile_it = 'mkdir -p $HOME && cd $HOME && echo "int f(void) { return 7; }" >a.c && ccache gcc -c a.c'
    for user in ("runner", "alice"):
        done = as_user(node, user, compile_it)
        assert done.returncode == 0, done.stderr
    figures = as_user(node, "runner", "ccache --print-stats").stdout
    counted = dict(line.split("\t") for line in figures.splitlines())
    hits = int(counted["direct_cache_hit"]) + int(counted["preprocessed_cache_hit"])
    assert (hits, int(counted["cache_miss"])) == (1, 1), "alice did not get what the runner had compiled"
    assert "20" in as_user(node, "runner", "ccache --get-config max_size").stdout
    for command in ("ls /var/cache/ccache", "touch /var/cache/ccache/x", compile_it):
        assert as_user(node, "bob", command).returncode != 0
    open_to_others = node.read("sudo find /var/cache/ccache ! -type l -perm /o+rwx")
    assert open_to_others == ""
    assert as_user(node, "alice", "rm -f /var/cache/ccache/ccache.conf").returncode != 0


@pytest.mark.usefixtures("runner")
def test_a_job_leaves_nothing_on_the_gpu(node):
    node.read(f"sudo systemctl start --no-block {UNIT}")
    node.read("until [ -e /srv/temp/gpukiln-job-started ]; do sleep 0.2; done; sleep 1")
    others = {"of-alice": "alice", "of-the-runner-elsewhere": "runner"}
    for unit, user in others.items():
        hold = "sh -c 'exec sleep 1000 9</srv/dev/nvidia0'"
        node.read(f"sudo systemd-run --quiet --unit {unit} --uid {user} {hold}")
    node.read("sudo touch /srv/temp/go")
    node.read(f"while systemctl is-active {UNIT} | grep -q activating; do sleep 0.2; done")
    said = node.read(f"sudo journalctl -o cat -u {UNIT}")
    assert states(node, UNIT)[0][1] == "inactive", said
    assert re.search(r"::warning title=GPU::Ended \d+ sleep with SIGTERM: the job left it on the GPU", said)
    assert re.search(r"left alone, not the job's: \d+ sleep \(user runner\)", said)
    assert [state for _, state in states(node, *others)] == ["active"] * 2
    assert "Ended" in node.read("sudo journalctl -o cat -t gpukiln-ci")
    assert node.read("pgrep -c -u runner sleep").strip() == "1"


@pytest.mark.usefixtures("runner")
def test_a_job_is_refused_on_a_gpu_in_use(node):
    node.write("/srv/gpus", "0, GPU-aaaa, 20480, 0, No, No\n")
    assert node.ssh(f"sudo systemctl start {UNIT}").returncode == 1
    said = node.read(f"sudo journalctl -o cat -u {UNIT}")
    assert "::error title=GPU::Found GPU 0 with 20480 MiB in use by" in said
