"""Stand-ins of engines, container toolkit, persistence daemon and nvtop under their real names.

The engines read their configuration as far as the roles need it: containerd refuses what is no TOML.
"""

from collections.abc import Sequence
from typing import Any

from tests.support.standin.packages import UNIT, Package, daemon

CONTAINERD = """\
#!/usr/bin/python3
import pathlib, sys, time, tomllib
file = pathlib.Path("/etc/containerd/config.toml")
if "--config" in sys.argv:
    file = pathlib.Path(sys.argv[sys.argv.index("--config") + 1])
text = file.read_text() if file.exists() else ""
tomllib.loads(text)
if "dump" in sys.argv:
    print(text)
else:
    pathlib.Path("/run/containerd-runs-with.toml").write_text(text)
    time.sleep(10**9)
"""
# Who asks for its version, or whether its settings are right, gets an answer.
DOCKERD = """\
#!/bin/sh
case "$*" in *--version* | *--validate*) exit 0 ;; esac
exec sleep infinity
"""
# What the real one writes names the driver's libraries, and the device nodes that it finds.
NVIDIA_CTK = """\
#!/bin/sh
if [ "$1 $2" = "system create-device-nodes" ]; then exec touch /srv/nvidia-uvm; fi
for word; do file=${word#--output=}; done
echo "hostPath: /usr/lib/libcuda.so.$(cat /srv/loaded)" >"$file"
if [ -e /srv/nvidia-uvm ]; then echo "- path: /dev/nvidia-uvm" >>"$file"; fi
"""
# As Ubuntu's: started by udev alone, stopped when unneeded, with persistence off.
UBUNTU_UNIT = """\
[Unit]
Description=stand-in for nvidia-persistenced
StopWhenUnneeded=true
[Service]
ExecStart=/usr/bin/nvidia-persistenced --user nvidia-persistenced --no-persistence-mode --verbose
"""
SMI = """\
#!/bin/sh
if pgrep -f 'nvidia-persistenced.* --persistence-mode' >/dev/null; then echo Enabled; else echo Disabled; fi
"""
DAEMON_JSON = '{"runtimes": {"nvidia": {"path": "nvidia-container-runtime", "runtimeArgs": []}}}\n'
TOOLKIT = (
    "nvidia-container-toolkit",
    "nvidia-container-toolkit-base",
    "libnvidia-container-tools",
    "libnvidia-container1",
)


def engines(containerd: str, docker: str) -> list[Package]:
    """The engines under a platform's names; nothing is started by their installation."""
    return [
        Package(
            containerd,
            "2.1.5-1",
            files={**daemon("containerd"), "/usr/bin/containerd": CONTAINERD},
        ),
        Package(
            docker,
            "28.5.2-1",
            (containerd,),
            files={
                "/usr/bin/dockerd": DOCKERD,
                "/usr/bin/docker": '#!/bin/sh\necho docker "$@"\n',
                "/lib/systemd/system/docker.service": UNIT.format(name="dockerd"),
            },
        ),
    ]


def needs(names: Sequence[str], version: str, *, rpm: bool) -> tuple[str, ...]:
    """Relations to packages in one very version, in an rpm's words or in apt's."""
    return tuple(f"{name} = {version}" if rpm else f"{name} (= {version})" for name in names)


def toolkit(version: str, *, rpm: bool = False) -> list[Package]:
    """NVIDIA's four packages, each of one version with those after it, and what they replaced."""
    files: dict[str, Any] = {
        "nvidia-container-toolkit-base": {
            "/usr/bin/nvidia-ctk": NVIDIA_CTK,
            "/usr/bin/nvidia-container-runtime": "#!/bin/sh\n",
        },
    }
    full = f"{version}-1"
    return [
        *(
            Package(name, full, needs(TOOLKIT[place + 1 :], full, rpm=rpm), files=files.get(name, {}))
            for place, name in enumerate(TOOLKIT)
        ),
        # It owns the file: the file goes with it.
        Package(
            "nvidia-docker2",
            "2.13.0-1",
            files={"/etc/docker/daemon.json": DAEMON_JSON, "/usr/bin/nvidia-docker": "#!/bin/sh\n"},
        ),
    ]


# As the real one it keeps its arguments.
PERSISTENCED = '#!/bin/sh\n[ "$1" != --version ] || exit 0\nwhile :; do sleep 60; done\n'


def persistence(name: str, unit: str = "") -> Package:
    """The daemon's package, with the platform's unit and an nvidia-smi that looks at the daemon."""
    files = daemon("nvidia-persistenced") | {"/usr/bin/nvidia-persistenced": PERSISTENCED}
    if unit:
        files["/lib/systemd/system/nvidia-persistenced.service"] = unit
    return Package(name, "535.309.01-1", files={**files, "/usr/bin/nvidia-smi": SMI})
