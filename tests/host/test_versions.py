"""What is installed is what the image's record says, and its parts agree with each other."""

import re
from typing import Any

from gpukiln.probe.base import NOT_REACHED, require_reached
from gpukiln.verify.checks import check
from gpukiln.verify.facts import Facts

ALL = ("image", "node", "eks-node", "workspace")
TOOLKIT = (
    "nvidia-container-toolkit",
    "nvidia-container-toolkit-base",
    "libnvidia-container-tools",
    "libnvidia-container1",
)
INSTALLED = ("versions.driver-installed",)
# Programs and libraries that must be of the driver's exact version (NVIDIA's user guides of Fabric Manager
# and IMEX), by their names in NVIDIA's repositories and Ubuntu's archive.
IN_STEP = re.compile(
    r"(nvidia-fabric-?manager|cuda-drivers-fabricmanager|libnvidia-nscq|libnvsdm|nvidia-imex)(-.*)?"
)
# GSP firmware: Debian's package, and Ubuntu's, which has the version in its name so that several stay.
FIRMWARE = re.compile(r"firmware-nvidia(-tesla)?(-\d{3})?-gsp|nvidia-firmware-\d{3}(-.*)?")
# Canonical's modules have the kernel's version, and the driver's branch in their name.
PRECOMPILED = re.compile(r"linux-(modules|objects|signatures)-nvidia-(\d{3})-.*")
OWN_VERSION = ("nvlsm",)  # NVLink's subnet manager goes with the fabric manager, and has versions of its own
RECORD_KEYS = ("schema", "image", "digest", "built_at", "base", "components", "kernel", "kernels", "packages")


def upstream(version: str) -> str:
    """Version without Debian's epoch and revision: 535.309.01 of 535.309.01-0+deb12u1."""
    return re.sub(r"^\d+:", "", version).split("-")[0]


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", upstream(version)))


def driver_packages(facts: Facts, version: str) -> list[str]:
    """Installed packages of the driver itself: those of NVIDIA that carry the driver's version."""
    return sorted(
        name
        for name, installed in facts["packages"]["installed"].items()
        if re.match(
            r"(lib)?(nvidia|cuda|nv)|xserver-xorg-video-nvidia|linux-modules-nvidia|kmod-nvidia", name
        )
        and upstream(installed) == version
    )


def upstreams(versions: str) -> set[str]:
    """Of one version of a package, or of several that are installed at once."""
    return {upstream(version) for version in versions.split(", ")}


def module_versions(facts: Facts) -> set[str]:
    """Those that the modules of all kernels name; one that names none is of an unknown version."""
    return {m["nvidia"]["version"] for m in facts["modules"].values() if m["nvidia"]} - {None}


def driver_version(facts: Facts) -> str | None:
    """Of what is installed, or of the loaded module where nvidia-smi is missing."""
    return smi_version(facts) or facts["gpus"]["module"] or next(iter(sorted(module_versions(facts))), None)


def smi_version(facts: Facts) -> str | None:
    version: str | None = require_reached(facts["driver"]["nvidia_smi"])["version"]
    return version


@check(
    id="versions.answers",
    title="Every tool that was asked answers",
    layer="versions",
    profiles=(*ALL, "runner", "pod"),
    causes=(
        "nvidia-smi, NVML: the driver waits for a GPU whose firmware hangs or that fell off the bus; D is "
        "a wait in the kernel, which no signal ends",
        "kmod, dkms: another process holds the module's or the package manager's lock",
        "docker, ctr: the daemon hangs; a file system (NFS) does not answer",
    ),
    fix="`dmesg | grep -e NVRM -e Xid -e blocked` and `cat /proc/PID/stack` on the machine show what it "
    "waits for. A GPU that hangs the driver: drain the node, reboot, and replace the GPU if it comes back.",
)
def test_answers(facts):
    """What a tool that hangs would have told is not reached; that it hangs is a finding of its own."""
    hung = facts["hung"]
    said = [f"{tool['tool']} hangs: `{tool['command']}`: {tool['reason']}" for tool in hung["tools"]]
    kernel = f"; the kernel last said: {' | '.join(hung['kernel'])}" if hung["kernel"] else ""
    assert not said, f"{'; '.join(said)}{kernel}"


@check(
    id="versions.driver-installed",
    title="The NVIDIA driver is installed",
    layer="versions",
    profiles=ALL,
    causes=("no driver was installed yet", "it was removed, or an upgrade of its packages broke off"),
    fix="`invoke node.apply --inventory FILE` installs it on a live node; an image gets it at its build.",
)
def test_driver_installed(facts):
    """A part of it is enough: whether its parts agree is the next question."""
    smi, libraries = facts["driver"]["nvidia_smi"], facts["driver"]["libraries"]
    if NOT_REACHED in smi or smi["version"] or any(libraries.values()):
        return
    assert facts["gpus"]["module"] or module_versions(facts), (
        "no driver is installed: nvidia-smi, libcuda.so.1, libnvidia-ml.so.1 and the module are missing"
    )


@check(
    id="versions.record",
    title="The image carries its record",
    layer="versions",
    profiles=ALL,
    needs=("record",),
    causes=(
        "the image was not built by gpukiln, or its last role did not run",
        "another version of gpukiln wrote it",
    ),
    fix="Bake with ansible/image.yml: its last role, image_record, writes /etc/gpukiln/image.json.",
)
def test_record(facts):
    record = facts.record
    missing = [k for k in RECORD_KEYS if k not in record]
    assert record.get("schema") == 1, f"the record has schema {record.get('schema')!r}, wanted 1"
    assert not missing, f"the record lacks {', '.join(missing)}"
    undecided = [n for n, c in record["components"].items() if c.get("status") == "install"]
    assert not undecided, f"the record says {', '.join(undecided)} should be installed, wanted that it is"


@check(
    id="versions.packages",
    title="Every recorded package is installed in the recorded version",
    layer="versions",
    profiles=ALL,
    needs=("record",),
    causes=(
        "unattended upgrades ran",
        "somebody installed or removed packages by hand",
    ),
    after=("versions.record",),
    fix="Something changed packages after the bake (unattended upgrades, user data): hold them or bake anew.",
)
def test_packages(facts):
    installed = facts["packages"]["installed"]
    recorded = facts.record.get("packages", {})
    missing = sorted(set(recorded) - set(installed))
    other = [
        f"{name} {installed[name]}, wanted {version}"
        for name, version in sorted(recorded.items())
        if name in installed and installed[name] != version
    ]
    said = [f"missing: {', '.join(missing[:10])}"] if missing else []
    said += [f"of another version: {'; '.join(other[:10])}"] if other else []
    assert recorded, "the record names no package, wanted all that are installed"
    assert not said, (
        f"{len(missing)} of {len(recorded)} recorded packages missing, {len(other)} of another version; "
        f"{'; '.join(said)}"
    )
    facts.note(f"{len(recorded)} packages")


@check(
    id="versions.driver-branch",
    title="The driver is of the branch that was asked for",
    layer="versions",
    profiles=ALL,
    needs=("record",),
    causes=(
        "the repository's package of this branch is a transitional one for a newer branch",
        "somebody installed another driver",
    ),
    after=INSTALLED,
    fix="A transitional package can pull in another branch: install the branch's versioned package name.",
)
def test_driver_branch(facts):
    branch = facts.component("nvidia_driver").get("branch")
    versions = (module_versions(facts) | {smi_version(facts)}) - {None}
    assert branch, "the record names no driver branch"
    other = sorted(v for v in versions if v.split(".")[0] != str(branch))
    assert not other, f"found driver {', '.join(other)}, wanted branch {branch}"


@check(
    id="versions.library-path",
    title="Programs load the driver's own libraries, and no stub or compat library in their place",
    layer="versions",
    profiles=ALL,
    causes=(
        "a file in /etc/ld.so.conf.d names CUDA's folder stubs or compat",
        "LD_LIBRARY_PATH is set for every login or service, and names such a folder",
    ),
    after=INSTALLED,
    fix="Take the folder named out of the file named, and run `ldconfig`. The driver is not to be changed.",
)
def test_library_path(facts):
    """CUDA Compatibility guide: compat libraries are for one application, on a driver that they support."""
    copies = [copy for files in facts["driver"]["library_files"].values() for copy in files]
    wrong = [copy for copy in copies if copy["stands_in"]]
    if wrong:
        facts.remedy(_out_of_the_path(wrong))
    assert not wrong, (
        f"found {'; '.join(_located(copy) for copy in wrong)}; wanted the driver's own libraries "
        "alone in the linker's path"
    )


def _located(copy: dict[str, Any]) -> str:
    """A copy of a library, for people."""
    link = "" if copy["path"] == copy["file"] else f" -> {copy['file']}"
    kind = f"a {copy['stands_in']} library, " if copy["stands_in"] else ""
    by = f", by {' and '.join(copy['named_in'])}" if copy["named_in"] else ""
    return f"{copy['path']}{link} ({kind}version {copy['version'] or 'unknown'}{by})"


def _out_of_the_path(copies: list[dict[str, Any]]) -> str:
    steps = []
    for folder in sorted({copy["path"].rpartition("/")[0] for copy in copies}):
        files = {by for copy in copies if copy["path"].startswith(f"{folder}/") for by in copy["named_in"]}
        if files:
            steps.append(f"take {folder} out of {' and '.join(sorted(files))}")
        else:
            steps.append(f"move the library out of {folder}, which the linker looks through by itself")
    said = "; ".join(steps)
    return f"{said[:1].upper()}{said[1:]}; then run `ldconfig`. The driver is not to be changed."


@check(
    id="versions.driver-complete",
    title="nvidia-smi, libcuda and libnvidia-ml are installed",
    layer="versions",
    profiles=ALL,
    causes=(
        "the package was removed, or left out at the installation",
        "the linker's cache is older than the library: `ldconfig` was not run",
    ),
    after=INSTALLED,
    fix="Run `ldconfig`; where that does not help, install the missing package in the version of the driver "
    "that is there, and of no other. That needs no reboot.",
)
def test_driver_complete(facts):
    """What is missing has no version that could differ."""
    missing = [] if smi_version(facts) else ["nvidia-smi"]
    missing += [
        f"{name}.1"
        for name, copies in facts["driver"]["library_files"].items()
        if all(copy["stands_in"] for copy in copies)
    ]
    assert not missing, (
        f"missing: {', '.join(missing)}; wanted them in version {driver_version(facts) or 'unknown'}, the "
        "driver's"
    )


@check(
    id="versions.driver-agrees",
    title="Kernel module, libraries and nvidia-smi have one version, the recorded one",
    layer="versions",
    profiles=ALL,
    causes=(
        "the user space was upgraded and the module was not, or the machine was not rebooted since",
        "two sources of the driver are mixed: distribution, NVIDIA's repository, .run file",
    ),
    after=INSTALLED,
    fix="Install user space and modules in one transaction in the same version. Reboot only when every "
    "installed kernel has the modules of that version.",
)
def test_driver_agrees(facts):
    """What is missing does not differ: versions.driver-complete and modules.present look for that."""
    disk = {
        f"module for {kernel}": modules["nvidia"]["version"]
        for kernel, modules in facts["modules"].items()
        if modules["nvidia"]
    }
    disk["nvidia-smi"] = smi_version(facts)
    for name, copies in facts["driver"]["library_files"].items():
        disk |= {f"{name} ({copy['path']})": copy["version"] for copy in copies if not copy["stands_in"]}
    disk = {what: version for what, version in disk.items() if version}
    loaded = facts["gpus"]["module"]
    recorded = facts.component("nvidia_driver").get("version")
    # Distributions add a revision to the version, in the record too.
    expected = upstream(recorded) if recorded else disk.get("nvidia-smi") or loaded
    versions = {**disk, **({"loaded module": loaded} if loaded else {})}
    wrong = [f"{what}: {version}" for what, version in versions.items() if version != expected]
    if set(disk.values()) == {expected} and wrong:
        facts.remedy(_load_what_is_installed(facts, expected))
    assert not wrong, f"found {', '.join(wrong)}; wanted {expected or 'one version'} everywhere"
    facts.note(str(expected))


def _load_what_is_installed(facts: Facts, version: str) -> str:
    """What to do where the loaded module alone is of another version than all that is on the disk."""
    lacking = [kernel for kernel, by_module in facts["modules"].items() if not by_module["nvidia"]]
    if lacking:
        return (
            f"Do not reboot yet: {' and '.join(lacking)} has no module of the driver (modules.present). When "
            f"every kernel that can boot has one, a reboot loads {version}."
        )
    return f"Everything on the disk is {version}: reboot when no job runs, and the kernel loads it."


@check(
    id="versions.persistenced",
    title="nvidia-persistenced is of the driver's branch",
    layer="versions",
    profiles=ALL,
    causes=(
        "it comes from another source than the driver",
        "it was left out by --no-install-recommends",
    ),
    after=INSTALLED,
    fix="Install nvidia-persistenced from the source that the driver comes from.",
)
def test_persistenced(facts):
    installed, driver = require_reached(facts["driver"]["persistenced"]), driver_version(facts)
    assert installed, "nvidia-persistenced is missing, wanted it installed"
    assert driver, "nothing of the driver names a version to compare with"
    # Debian packages 535.171.04 beside driver 535.309.01: the protocol is stable within a branch.
    assert installed.split(".")[0] == driver.split(".")[0], (
        f"found {installed}, wanted branch {driver.split('.')[0]}"
    )
    facts.note(installed)


@check(
    id="versions.companions",
    title="Fabric manager, IMEX, NSCQ, NVSDM, firmware and precompiled modules go with the driver",
    layer="versions",
    profiles=ALL,
    causes=(
        "the driver was upgraded and they were not, or the other way round",
        "they come from another source than the driver",
    ),
    after=INSTALLED,
    fix="Install the package named in the driver's version, from the source that the driver comes from, and "
    "hold it. Restart its service when no job runs: on machines with NVSwitches the fabric manager is what "
    "jobs depend on.",
)
def test_companions(facts):
    version = driver_version(facts)
    assert version, "nothing of the driver names a version to compare with"
    installed, branch = facts["packages"]["installed"], version.partition(".")[0]
    wrong = [
        f"{name} {has}, wanted {version}"
        for name, has in sorted(installed.items())
        if IN_STEP.fullmatch(name) and upstreams(has) != {version}
    ]
    firmware = {name: has for name, has in installed.items() if FIRMWARE.fullmatch(name)}
    if firmware and not any(version in upstreams(has) for has in firmware.values()):
        listed = ", ".join(f"{name} {has}" for name, has in sorted(firmware.items()))
        wrong.append(f"{listed}, wanted the firmware of {version}")
    for name in sorted(installed):
        built = PRECOMPILED.fullmatch(name)
        if built and built.group(2) != branch:
            wrong.append(f"{name}, wanted branch {branch}")
    assert not wrong, f"found {'; '.join(wrong)}, the driver's"


@check(
    id="versions.toolkit",
    title="The container toolkit's four packages have one version, at least the recorded one",
    layer="versions",
    profiles=ALL,
    needs=("component:nvidia_container_toolkit",),
    causes=(
        "one of its four packages was upgraded alone",
        "an old repository is first in the list",
    ),
    fix="Install the four packages of the toolkit in one transaction with the version pinned.",
)
def test_toolkit(facts):
    installed = facts["packages"]["installed"]
    versions = {name: installed.get(name) for name in TOOLKIT}
    missing = [n for n, v in versions.items() if not v]
    assert not missing, f"{', '.join(missing)} missing, wanted the toolkit's four packages"
    assert len(set(versions.values())) == 1, f"found {versions}, wanted one version"
    recorded = facts.component("nvidia_container_toolkit").get("version")
    version = str(versions[TOOLKIT[0]])
    assert not recorded or numbers(version) >= numbers(recorded), (
        f"found {version}, wanted {recorded} or newer"
    )
    facts.note(version)


@check(
    id="versions.holds",
    title="The kernel and the driver are on hold",
    layer="versions",
    profiles=ALL,
    needs=("apt",),
    causes=(
        "the packages were installed by hand",
        "somebody lifted the holds for an upgrade and did not set them again",
    ),
    after=INSTALLED,
    fix="`apt-mark hold` the packages named: an upgrade of one half of the driver breaks the node until it "
    "reboots. Update by baking a new image.",
)
def test_holds(facts):
    version = driver_version(facts)
    assert version, "nothing names a version by which the driver's packages are known"
    driver = driver_packages(facts, version)
    kernels = [f"linux-image-{k}" for k in facts["kernel"]["installed"]]
    beside = [
        name
        for name in sorted(facts["packages"]["installed"])
        if name not in driver and (IN_STEP.fullmatch(name) or name in OWN_VERSION)
    ]
    packages = driver + beside + [k for k in kernels if k in facts["packages"]["installed"]]
    free = [name for name in packages if name not in facts["packages"]["holds"]]
    assert driver, f"no installed package is of version {version}, the driver's"
    assert not free, f"{len(free)} of {len(packages)} packages not on hold: {', '.join(free)}"


@check(
    id="versions.nvidia-docker2",
    title="nvidia-docker2 is absent",
    layer="versions",
    profiles=ALL,
    causes=("an old playbook or user data installs it",),
    fix="Copy /etc/docker/daemon.json, which it owns and takes along, then purge it and put the settings "
    "back: nvidia-container-toolkit replaced it in 2023.",
)
def test_nvidia_docker2(facts):
    assert not facts.has_package("nvidia-docker2"), "found nvidia-docker2, wanted it purged"
