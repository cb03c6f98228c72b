"""What adds the runtime to containerd's configuration, whoever wrote it, before containerd starts."""

import os
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "roles/container_runtime/files/containerd-runtime.sh"
# Says what it read, as the real one does, or that it can't.
CONTAINERD = """\
#!/usr/bin/env python3
import sys, tomllib
path = sys.argv[sys.argv.index("--config") + 1]
tomllib.load(open(path, "rb"))
print(open(path).read())
"""
V2, V3 = "io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime"
JOINED = """\
version = {schema} # of the template
imports = ["/etc/containerd/config.d/*.toml"]
[plugins.{quote}{plugin}{quote}.containerd]
  default_runtime_name = "runc"
  discard_unpacked_layers = true
[plugins.{quote}{plugin}{quote}]
sandbox_image = "pause:3.5"
[ plugins.{quote}{plugin}{quote}.containerd.runtimes.runc ] # its own
runtime_type = "io.containerd.runc.v2"
[plugins.{quote}{plugin}{quote}.containerd.runtimes.runc.options]
SystemdCgroup = {systemd} # as the kubelet
[[other]]
BinaryName = "kept"
"""


def add(folder: Path, text: str | None, place: str = "default") -> subprocess.CompletedProcess[str]:
    """Run the script, as systemd does before each start of containerd."""
    command = folder / "bin/containerd"
    command.parent.mkdir(exist_ok=True)
    command.write_text(CONTAINERD)
    command.chmod(0o755)
    file = folder / "etc/config.toml"
    if text is not None:
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    return subprocess.run(
        ["sh", SCRIPT, "nvidia", "/usr/bin/nvidia-container-runtime", place, file],
        env={**os.environ, "PATH": f"{command.parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )


def added(folder: Path, text: str | None, place: str = "default") -> dict[str, Any]:
    """The configuration that it leaves, which a second start leaves alone."""
    done = add(folder, text, place)
    assert (done.returncode, done.stderr) == (0, "")
    file = folder / "etc/config.toml"
    assert [path.name for path in file.parent.iterdir()] == ["config.toml"]
    left, written = file.read_text(), file.stat().st_mtime_ns
    assert add(folder, None, place).returncode == 0
    assert (file.read_text(), file.stat().st_mtime_ns) == (left, written)
    return tomllib.loads(left)


@pytest.mark.parametrize(("schema", "plugin"), [(2, V2), (3, V3)])
@pytest.mark.parametrize("quote", ['"', "'"])
@pytest.mark.parametrize("systemd", ["true", "false"])
def test_what_a_join_script_wrote_stays(
    tmp_path: Path, schema: int, plugin: str, quote: str, systemd: str
) -> None:
    text = JOINED.format(schema=schema, plugin=plugin, quote=quote, systemd=systemd)
    found, wrote = added(tmp_path, text), tomllib.loads(text)
    table = found["plugins"][plugin]["containerd"]
    assert table.pop("default_runtime_name") == "nvidia"
    assert table["runtimes"].pop("nvidia") == {
        "runtime_type": "io.containerd.runc.v2",
        # runc's, which is the kubelet's
        "options": {"BinaryName": "/usr/bin/nvidia-container-runtime", "SystemdCgroup": systemd == "true"},
    }
    del wrote["plugins"][plugin]["containerd"]["default_runtime_name"]
    assert found == wrote


def test_another_default_runtime_stays_where_ours_is_extra(tmp_path: Path) -> None:
    text = JOINED.format(schema=2, plugin=V2, quote='"', systemd="true")
    table = added(tmp_path, text, "extra")["plugins"][V2]["containerd"]
    assert table["default_runtime_name"] == "runc"
    assert set(table["runtimes"]) == {"runc", "nvidia"}


@pytest.mark.parametrize(
    "text", [None, "", "version = 2\n", f'version = 2\n[plugins."{V2}".cni]\nbin_dir = "/x"']
)
def test_a_configuration_without_runtimes_keeps_runc(tmp_path: Path, text: str | None) -> None:
    """A table of runtimes takes the place of containerd's own."""
    table = added(tmp_path, text)["plugins"][V2]["containerd"]
    assert table["default_runtime_name"] == "nvidia"
    assert table["runtimes"]["runc"] == {"runtime_type": "io.containerd.runc.v2"}


def test_a_runtime_that_is_there_is_not_said_twice(tmp_path: Path) -> None:
    text = (
        f'version = 2\n[plugins."{V2}".containerd.runtimes.nvidia]\n'
        'runtime_type = "old"\npod_annotations = ["a"]\n'
        f'[plugins."{V2}".containerd.runtimes.nvidia.options]\nBinaryName = "/old"\nRoot = "/r"\n'
    )
    nvidia = added(tmp_path, text)["plugins"][V2]["containerd"]["runtimes"]["nvidia"]
    assert nvidia == {
        "runtime_type": "io.containerd.runc.v2",
        "pod_annotations": ["a"],
        "options": {"BinaryName": "/usr/bin/nvidia-container-runtime", "Root": "/r"},
    }


@pytest.mark.parametrize(
    "text",
    [
        f'version = 2\n[plugins]\n"{V2}" = {{containerd = {{default_runtime_name = "runc"}}}}\n',
        "version = = 2\n",
    ],
)
def test_what_can_not_be_added_is_told_and_the_file_stays(tmp_path: Path, text: str) -> None:
    done = add(tmp_path, text)
    assert done.returncode == 1
    assert "found that the runtime nvidia can't be added to" in done.stderr
    assert "containerd says: " in done.stderr
    assert [path.read_text() for path in (tmp_path / "etc").iterdir()] == [text]
