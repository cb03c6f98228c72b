"""The image has no files of the build, and the machine made its own identities."""

from datetime import datetime

from gpukiln.probe.simulated import NOTE, UNIT
from gpukiln.verify.checks import check
from gpukiln.verify.facts import Facts

IMAGE = ("image",)
BOOTED_FROM_IMAGE = ("image", "eks-node")
CLOCK_SLACK_S = 10  # btime is computed from the clock and the uptime, and jitters by a second or two
FIRST_BOOT_S = 300  # cloud-init sees a new instance at most this long after its kernel started


def first_boot(facts: Facts) -> tuple[float, str]:
    """Earliest moment at which this machine's first boot can have begun, and what that is based on."""
    boot, born = facts["boot"]["boot_time"], facts["identity"]["born"]
    # On the first boot of an instance cloud-init's marks are newer than the kernel's start; on later boots
    # older.
    if born is None or born >= boot - CLOCK_SLACK_S:
        return boot - CLOCK_SLACK_S, "this boot"
    return born - FIRST_BOOT_S, "this instance's first boot"


def when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="seconds")


@check(
    id="hygiene.host-keys",
    title="This machine generated its own SSH host keys",
    layer="hygiene",
    profiles=BOOTED_FROM_IMAGE,
    causes=(
        "the build did not delete the keys of the build machine",
        "cloud-init is disabled, so that no new keys are generated",
    ),
    fix="Delete /etc/ssh/ssh_host_* at the end of the build (role image_hygiene). All machines of the image "
    "would share keys that are baked in.",
)
def test_host_keys(facts):
    keys = facts["identity"]["host_keys"]
    earliest, what = first_boot(facts)
    old = [f"{path} of {when(mtime)}" for path, mtime in keys.items() if mtime < earliest]
    # Without keys sshd does not start, and the image can't be reached.
    assert keys, "found no /etc/ssh/ssh_host_*_key, wanted keys generated at the first boot"
    assert not old, f"found {', '.join(old)}, wanted none older than {what} ({when(earliest)})"


@check(
    id="hygiene.identities",
    title="This machine generated its own names and ids (iSCSI, NVMe, container engines, agents)",
    layer="hygiene",
    profiles=BOOTED_FROM_IMAGE,
    causes=(
        "the build installed or started the program that generates them after its last role",
        "the image was captured without role image_hygiene",
    ),
    fix="Delete the files at the end of the build (role image_hygiene, files/machine-identities.txt). All "
    "machines of the image would share an iSCSI or NVMe name, an engine's id, or an agent's registration.",
)
def test_identities(facts):
    owned = facts["identity"]["owned"]
    earliest, what = first_boot(facts)
    old = [f"{path} of {when(mtime)}" for path, mtime in owned.items() if mtime < earliest]
    assert not old, f"found {', '.join(old)}, wanted none older than {what} ({when(earliest)})"


@check(
    id="hygiene.machine-id",
    title="This machine generated its own machine id",
    layer="hygiene",
    profiles=BOOTED_FROM_IMAGE,
    causes=(
        "the build machine's id stayed in the image, and systemd kept it",
        "D-Bus has a copy that was not removed",
    ),
    fix="Empty /etc/machine-id at the end of the build (role image_hygiene) and make "
    "/var/lib/dbus/machine-id a link to it. systemd fills it at the first boot.",
)
def test_machine_id(facts):
    machine_id = facts["identity"]["machine_id"]
    earliest, what = first_boot(facts)
    # machine-id(5): 32 hexadecimal characters; `uninitialized` or an empty file means that the first boot is
    # not over.
    assert machine_id["length"] == 32, f"/etc/machine-id has {machine_id['length']} characters, wanted 32"
    assert machine_id["mtime"] >= earliest, (
        f"/etc/machine-id was written {when(machine_id['mtime'])}, "
        f"before {what} ({when(earliest)}): it was baked in"
    )
    # D-Bus programs would identify all machines of the image as one.
    assert machine_id["dbus_agrees"], (
        "/var/lib/dbus/machine-id differs from /etc/machine-id, wanted a link to it"
    )


@check(
    id="hygiene.cloud-init",
    title="cloud-init finished on this machine without errors",
    layer="hygiene",
    profiles=BOOTED_FROM_IMAGE,
    causes=(
        "a module of cloud-init failed on this machine",
        "the build did not run `cloud-init clean`",
        "the metadata service does not answer",
    ),
    fix="Read /var/log/cloud-init-output.log on the machine; `cloud-init status --long` names the module.",
)
def test_cloud_init(facts):
    cloud_init = facts["identity"]["cloud_init"]
    assert cloud_init["installed"], "cloud-init is not installed, wanted it installed and done"
    assert cloud_init["status"] == "done", (
        f"cloud-init says {cloud_init['status']!r} ({cloud_init['detail']}), wanted 'done'"
    )
    assert not cloud_init["errors"], (
        f"cloud-init is done with errors: {'; '.join(map(str, cloud_init['errors']))}"
    )


@check(
    id="hygiene.package-cache",
    title="No downloaded packages are in the image",
    layer="hygiene",
    profiles=IMAGE,
    causes=("a role installed packages after the cache was cleaned",),
    fix="Run `apt-get clean` (or `dnf clean all`) at the end of the build.",
)
def test_package_cache(facts):
    files = facts["build_files"]["package_cache"]
    assert not files, f"found {len(files)} files in the package cache, wanted none: {', '.join(files[:3])}"


@check(
    id="hygiene.authorized-keys",
    title="Only SSH keys that were injected at launch may log in",
    layer="hygiene",
    profiles=IMAGE,
    causes=(
        "Packer's temporary key was left in the image",
        "another key was baked into the image",
    ),
    fix="Delete authorized_keys of every user at the end of the build: Packer's temporary key is in these "
    "files.",
)
def test_authorized_keys(facts):
    keys = facts["keys"]
    strange = [
        f"{k['fingerprint']} ({k['comment'] or 'no comment'}) in {k['path']}"
        for k in keys["authorized"]
        # By fingerprint: comment and options of a key may differ.
        if k["fingerprint"] not in keys["injected"]
    ]
    assert not strange, (
        f"found keys that this launch did not inject: {', '.join(strange)}; "
        f"injected: {', '.join(keys['injected']) or 'none'}"
    )


@check(
    id="hygiene.history",
    title="No shell history is in the image",
    layer="hygiene",
    profiles=IMAGE,
    causes=("commands were typed on the build machine",),
    fix="Delete the history files at the end of the build.",
)
def test_history(facts):
    files = facts["build_files"]["history"]
    assert not files, f"found {', '.join(files)}, wanted no shell history"


@check(
    id="hygiene.credentials",
    title="No credentials are in home folders, logs, settings or the image's record",
    layer="hygiene",
    profiles=BOOTED_FROM_IMAGE,
    causes=(
        "a build step wrote credentials into a home folder or a log",
        "commands were typed on the build machine",
    ),
    fix="Remove the file or the line from the build, and revoke the credential: everybody who can launch the "
    "image can read it. files/credential-files.txt of the role image_hygiene lists what the role removes.",
)
def test_credentials(facts):
    scan = facts["secrets"]
    hits = [f"{h['kind']} in {h['path']}:{h['line']}" for h in scan["found"]]
    assert not hits, f"found {', '.join(hits)}, wanted none"
    # A scan that stopped early has not shown that there is no secret.
    assert scan["complete"], (
        f"the scan stopped at its limit after {scan['files']} files, wanted every file in /root, /home, "
        "/etc/gpukiln and /var/log, and every file of settings, read"
    )
    facts.note(f"{scan['files']} files read")


@check(
    id="hygiene.dkms-trees",
    title="No DKMS build directories are in the image",
    layer="hygiene",
    profiles=IMAGE,
    causes=("the modules were built after the build directories were removed",),
    fix="Delete /var/lib/dkms/*/*/build after the modules are installed; DKMS creates them when it builds.",
)
def test_dkms_trees(facts):
    trees = facts["dkms"]["trees"]
    assert not trees, f"found {', '.join(trees)}, wanted no build directory"


@check(
    id="hygiene.build-tools",
    title="No files of Packer and Ansible are in the image, and services may start",
    layer="hygiene",
    profiles=IMAGE,
    causes=(
        "the build ended before its last role",
        "Ansible or Packer ran on the machine before it was captured",
    ),
    fix="Delete /tmp/packer*, ~/.ansible and policy-rc.d at the end of the build (role image_hygiene).",
)
def test_build_tools(facts):
    paths = facts["build_files"]["build_tools"]
    assert not paths, f"found {', '.join(paths)}, wanted nothing of the build"


@check(
    id="hygiene.simulated",
    title="No file of simulated GPUs is on the disk",
    layer="hygiene",
    profiles=("image", "node", "eks-node", "workspace", "runner", "pod"),
    causes=(
        "the image was baked on an instance with simulated GPUs (the tag gpukiln:gpus)",
        "the simulated NVML library or nvidia-smi was copied into the image",
    ),
    fix="Bake the image again on an instance without the tag gpukiln:gpus; on a node delete the files, and "
    "install the driver's packages again.",
)
def test_simulated(facts):
    """A machine with simulated GPUs has their note and unit on its disk.

    Both are expected where `--simulated` asks for such GPUs, and on a node, which is never released. The
    simulated library itself is mounted, so that on the disk it is always a fault.
    """
    simulated = facts["simulated"]
    # The note and the unit belong to the embedded cloud's instance, not to its image.
    expected = simulated["machine"] and (facts.allow_simulated or facts.profile == "node")
    left = [
        path for path in simulated["disk"] if not (expected and (path == NOTE or path.endswith(f"/{UNIT}")))
    ]
    asked = "; this machine's GPUs are simulated, without `--simulated`" if simulated["machine"] else ""
    assert not left, f"found {', '.join(left)}, wanted no file of simulated GPUs{'' if expected else asked}"
    if simulated["machine"]:
        facts.note("the GPUs are simulated; their library is not on the disk")
