"""EKS's nodeadm as far as containerd has to do with it: without a NodeConfig it fails, with one it writes
containerd's configuration, and starts containerd afterwards, where it does not run yet.

The units and the words are awslabs/amazon-eks-ami's: templates/al2023/runtime/rootfs/etc/systemd/system,
nodeadm/internal/configprovider and nodeadm/internal/containerd. The real one asks the metadata service for
user data; this one reads what cloud-init kept of it.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.support.harness import Node

USER_DATA = "/var/lib/cloud/instance/user-data.txt"
PROGRAM = """\
#!/usr/bin/python3
import pathlib, subprocess, sys, time
phase = {"run": "config", "config": "run"}[sys.argv[sys.argv.index("--skip") + 1]]
if "application/node.eks.aws" not in pathlib.Path("USER_DATA").read_text():
    sys.exit("config provider at index 0 failed: could not find NodeConfig within UserData")
if phase == "run":
    sys.exit(subprocess.run(["systemctl", "start", "containerd"]).returncode)
time.sleep(5)  # the metadata service takes its time
nvidia = pathlib.Path("/usr/bin/nvidia-container-runtime").exists()
name, binary = ("nvidia", "/usr/bin/nvidia-container-runtime") if nvidia else ("runc", "/usr/sbin/runc")
folder = pathlib.Path("/etc/containerd")
folder.mkdir(exist_ok=True)
(folder / "config.toml").write_text(f'''version = 3
[plugins.'io.containerd.cri.v1.runtime'.containerd]
default_runtime_name = "{name}"
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.{name}]
runtime_type = "io.containerd.runc.v2"
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.{name}.options]
BinaryName = "{binary}"
SystemdCgroup = true
''')
""".replace("USER_DATA", USER_DATA)
CONFIG = """\
[Unit]
Description=stand-in for EKS Nodeadm Config
Before=cloud-init.service
[Service]
Type=oneshot
ExecStart=/usr/bin/nodeadm init --skip run
[Install]
WantedBy=multi-user.target
"""
RUN = """\
[Unit]
Description=stand-in for EKS Nodeadm Run
After=nodeadm-config.service cloud-final.service
Requires=nodeadm-config.service
[Service]
Type=oneshot
ExecStart=/usr/bin/nodeadm init --skip config
[Install]
WantedBy=multi-user.target
"""
UNITS = ("nodeadm-config.service", "nodeadm-run.service")


def install(node: "Node") -> None:
    """Put it onto a machine, as the base image brings it."""
    node.write("/usr/bin/nodeadm", PROGRAM)
    node.write("/etc/systemd/system/nodeadm-config.service", CONFIG)
    node.write("/etc/systemd/system/nodeadm-run.service", RUN)
    node.read(f"sudo chmod +x /usr/bin/nodeadm && sudo systemctl enable {' '.join(UNITS)}")


def boot(node: "Node", user_data: str) -> None:
    """What of a boot has to do with it: the services that start at boot are started at once.

    Args:
        node: The machine.
        user_data: What it was launched with.
    """
    services = f"{' '.join(UNITS)} containerd.service docker.service"
    node.write(USER_DATA, user_data)
    node.read(f"sudo systemctl stop {services}; sudo systemctl reset-failed; sudo systemctl daemon-reload")
    # The dependencies that can't be had are told by the units that fail.
    node.ssh(f"sudo systemctl start {services}")
