"""The installed versions are those of the image's record, and they fit each other."""

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
# GSP firmware: Debian's package, and Ubuntu's, which has the version in its name so that several versions
# stay installed.
FIRMWARE = re.compile(r"firmware-nvidia(-tesla)?(-\d{3})?-gsp|nvidia-firmware-\d{3}(-.*)?")
# Canonical's modules have the kernel's version, and the driver's branch in their name.
PRECOMPILED = re.compile(r"linux-(modules|objects|signatures)-nvidia-(\d{3})-.*")
# NVLink's subnet manager, which the fabric manager needs, has its own version numbers
OWN_VERSION = ("nvlsm",)
RECORD_KEYS = ("schema", "image", "digest", "built_at", "base", "components", "kernel", "kernels", "packages")


def upstream(version: str) -> str:
    """Version without Debian's epoch and revision: 535.309.01 of 535.309.01-0+deb12u1.

    >>> upstream("535.309.01-0+deb12u1")
    '535.309.01'
    >>> upstream("1:1.2-3")
    '1.2'
    """
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
        # CUDA's toolkit has packages with the same prefixes and other versions.
        and upstream(installed) == version
    )


def upstreams(versions: str) -> set[str]:
    """The upstream versions in a package's entry: rpm lists several versions of a kernel package."""
    return {upstream(version) for version in versions.split(", ")}


def module_versions(facts: Facts) -> set[str]:
    """The versions of the nvidia module of all kernels, without modules that name none."""
    return {m["nvidia"]["version"] for m in facts["modules"].values() if m["nvidia"]} - {None}


def driver_version(facts: Facts) -> str | None:
    """The driver's version: of nvidia-smi, else of the loaded module, else of an installed one."""
    return smi_version(facts) or facts["gpus"]["module"] or next(iter(sorted(module_versions(facts))), None)


def smi_version(facts: Facts) -> str | None:
    # A driver whose tools hang is not reached; one without nvidia-smi has no version.
    version: str | None = require_reached(facts["driver"]["nvidia_smi"])["version"]
    return version


@check(
    id="versions.answers",
    title="Every tool that the probe ran gave an answer",
    layer="versions",
    profiles=(*ALL, "runner", "pod"),
    causes=(
        "nvidia-smi, NVML: the driver waits for a GPU whose firmware hangs or that fell off the bus; D is "
        "a wait in the kernel, which no signal ends",
        "kmod, dkms: another process holds the module's or the package manager's lock",
        "docker, ctr: the daemon hangs; a file system (NFS) does not answer",
    ),
    fix="`dmesg | grep -e NVRM -e Xid -e blocked` and `cat /proc/PID/stack` on the machine show what "
    "it waits for. If a GPU hangs the driver, drain the node, reboot, and replace the GPU if it hangs again.",
)
def test_answers(facts):
    """Checks that need the answer of a tool that hangs are not reached; this check reports the hang."""
    hung = facts["hung"]
    # The tool is named with the command that hung, so that it can be tried by hand.
    said = [f"{tool['tool']} hangs: `{tool['command']}`: {tool['reason']}" for tool in hung["tools"]]
    kernel = f"; the last kernel messages: {' | '.join(hung['kernel'])}" if hung["kernel"] else ""
    assert not said, f"{'; '.join(said)}{kernel}"


@check(
    id="versions.driver-installed",
    title="The NVIDIA driver is installed",
    layer="versions",
    profiles=ALL,
    causes=("no driver is installed yet", "it was removed, or an upgrade of its packages failed halfway"),
    fix="`invoke node.apply --inventory FILE` installs it on a live node; `invoke ami.build` builds images "
    "with it.",
)
def test_driver_installed(facts):
    """One part is enough here; versions.driver-complete and versions.driver-agrees compare the parts."""
    smi, libraries = facts["driver"]["nvidia_smi"], facts["driver"]["libraries"]
    if NOT_REACHED in smi or smi["version"] or any(libraries.values()):
        return
    assert facts["gpus"]["module"] or module_versions(facts), (
        "no driver is installed: nvidia-smi, libcuda.so.1, libnvidia-ml.so.1 and the module are missing"
    )


@check(
    id="versions.record",
    title="The image has its record",
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
    # `install` is the plan's status; the role changes it to `installed` when it is done.
    undecided = [n for n, c in record["components"].items() if c.get("status") == "install"]
    assert not undecided, f"the record says {', '.join(undecided)} should be installed, wanted installed"


@check(
    id="versions.packages",
    title="Every recorded package is installed in the recorded version",
    layer="versions",
    profiles=ALL,
    needs=("record",),
    causes=(
        "unattended upgrades ran",
        "packages were installed or removed manually",
    ),
    after=("versions.record",),
    fix="Find out what changed packages after the bake (unattended upgrades, user data). Hold them, or bake "
    "again.",
)
def test_packages(facts):
    installed = facts["packages"]["installed"]
    recorded = facts.record.get("packages", {})
    # Packages that were added are no fault: users install what they need.
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
    title="The driver is of the recorded branch",
    layer="versions",
    profiles=ALL,
    needs=("record",),
    causes=(
        "the repository's package of this branch is a transitional one for a newer branch",
        "another driver was installed",
    ),
    after=INSTALLED,
    fix="Install the package whose name has the branch: a transitional package can install another branch.",
)
def test_driver_branch(facts):
    branch = facts.component("nvidia_driver").get("branch")
    # Either may be missing on its own, which other checks report.
    versions = (module_versions(facts) | {smi_version(facts)}) - {None}
    assert branch, "the record names no driver branch"
    other = sorted(v for v in versions if v.split(".")[0] != str(branch))
    assert not other, f"found driver {', '.join(other)}, wanted branch {branch}"


@check(
    id="versions.library-path",
    title="Programs load the driver's own libraries, and no stub or compat library instead",
    layer="versions",
    profiles=ALL,
    causes=(
        "a file in /etc/ld.so.conf.d names CUDA's folder stubs or compat",
        "LD_LIBRARY_PATH is set for every login or service, and names such a folder",
    ),
    after=INSTALLED,
    fix="Remove the folder from the file, and run `ldconfig`. Do not change the driver.",
)
def test_library_path(facts):
    """CUDA Compatibility guide: compat libraries are for one application, on a driver that they support."""
    # ld.so takes the first match of its path, so that a stub in front hides the driver's library.
    copies = [copy for files in facts["driver"]["library_files"].values() for copy in files]
    wrong = [copy for copy in copies if copy["stands_in"]]
    if wrong:
        facts.remedy(_out_of_the_path(wrong))
    assert not wrong, (
        f"found {'; '.join(_located(copy) for copy in wrong)}; wanted only the driver's own libraries "
        "in the linker's path"
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
            steps.append(f"remove {folder} from {' and '.join(sorted(files))}")
        else:
            steps.append(f"move the library out of {folder}, which the linker searches by default")
    said = "; ".join(steps)
    return f"{said[:1].upper()}{said[1:]}; then run `ldconfig`. Do not change the driver."


@check(
    id="versions.driver-complete",
    title="nvidia-smi, libcuda and libnvidia-ml are installed",
    layer="versions",
    profiles=ALL,
    causes=(
        "the package was removed, or not installed",
        "the linker's cache is older than the library: `ldconfig` was not run",
    ),
    after=INSTALLED,
    fix="Run `ldconfig`. If that does not help, install the missing package in exactly the version of the "
    "installed driver. That needs no reboot.",
)
def test_driver_complete(facts):
    """Files that are missing; versions.driver-agrees compares the versions of the others."""
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
        "the driver comes from several sources: distribution, NVIDIA's repository, .run file",
    ),
    after=INSTALLED,
    fix="Install user space and modules of the same version in one transaction. Reboot only when every "
    "installed kernel has the modules of that version.",
)
def test_driver_agrees(facts):
    """Without missing files, which are findings of versions.driver-complete and modules.present."""
    disk = {
        f"module for {kernel}": modules["nvidia"]["version"]
        for kernel, modules in facts["modules"].items()
        if modules["nvidia"]
    }
    disk["nvidia-smi"] = smi_version(facts)
    for name, copies in facts["driver"]["library_files"].items():
        disk |= {f"{name} ({copy['path']})": copy["version"] for copy in copies if not copy["stands_in"]}
    # Files without a version in their name can't be compared.
    disk = {what: version for what, version in disk.items() if version}
    loaded = facts["gpus"]["module"]
    recorded = facts.component("nvidia_driver").get("version")
    # Distributions add a revision to the version, in the record too.
    expected = upstream(recorded) if recorded else disk.get("nvidia-smi") or loaded
    versions = {**disk, **({"loaded module": loaded} if loaded else {})}
    wrong = [f"{what}: {version}" for what, version in versions.items() if version != expected]
    # Only the loaded module differs: then reinstalling packages would help nothing.
    if set(disk.values()) == {expected} and wrong:
        facts.remedy(_load_what_is_installed(facts, expected))
    assert not wrong, f"found {', '.join(wrong)}; wanted {expected or 'one version'} everywhere"
    facts.note(str(expected))


def _load_what_is_installed(facts: Facts, version: str) -> str:
    """The remedy where only the loaded module has another version than the files on the disk."""
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
        "--no-install-recommends left it out",
    ),
    after=INSTALLED,
    fix="Install nvidia-persistenced from the source that the driver comes from.",
)
def test_persistenced(facts):
    installed, driver = require_reached(facts["driver"]["persistenced"]), driver_version(facts)
    assert installed, "nvidia-persistenced is missing, wanted it installed"
    assert driver, "no part of the driver has a version to compare with"
    # Debian has 535.171.04 together with driver 535.309.01: the protocol is stable within a branch.
    assert installed.split(".")[0] == driver.split(".")[0], (
        f"found {installed}, wanted branch {driver.split('.')[0]}"
    )
    facts.note(installed)


@check(
    id="versions.companions",
    title="Fabric manager, IMEX, NSCQ, NVSDM, firmware and precompiled modules have the driver's version",
    layer="versions",
    profiles=ALL,
    causes=(
        "the driver was upgraded without them, or they were upgraded without the driver",
        "they come from another source than the driver",
    ),
    after=INSTALLED,
    fix="Install the package in the driver's version, from the source that the driver comes from, and hold "
    "it. Restart its service when no job runs: on machines with NVSwitches all jobs depend on the fabric "
    "manager.",
)
def test_companions(facts):
    version = driver_version(facts)
    assert version, "no part of the driver has a version to compare with"
    installed, branch = facts["packages"]["installed"], version.partition(".")[0]
    wrong = [
        f"{name} {has}, wanted {version}"
        for name, has in sorted(installed.items())
        if IN_STEP.fullmatch(name) and upstreams(has) != {version}
    ]
    firmware = {name: has for name, has in installed.items() if FIRMWARE.fullmatch(name)}
    # Ubuntu keeps the firmware of several driver versions installed.
    if firmware and not any(version in upstreams(has) for has in firmware.values()):
        listed = ", ".join(f"{name} {has}" for name, has in sorted(firmware.items()))
        wrong.append(f"{listed}, wanted the firmware of {version}")
    for name in sorted(installed):
        # Their version is the kernel's, so that only the branch can be compared.
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
        "one of the four packages was upgraded without the others",
        "an old repository has precedence",
    ),
    fix="Install the four packages of the toolkit in one transaction, with a pinned version.",
)
def test_toolkit(facts):
    installed = facts["packages"]["installed"]
    versions = {name: installed.get(name) for name in TOOLKIT}
    missing = [n for n, v in versions.items() if not v]
    assert not missing, f"{', '.join(missing)} missing, wanted the toolkit's four packages"
    assert len(set(versions.values())) == 1, f"found {versions}, wanted one version"
    recorded = facts.component("nvidia_container_toolkit").get("version")
    version = str(versions[TOOLKIT[0]])
    # The toolkit is compatible with older configuration, and security updates raise its version.
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
        "the packages were installed manually",
        "the holds were removed for an upgrade and not set again",
    ),
    after=INSTALLED,
    fix="Run `apt-mark hold` for the packages: an upgrade of a part of the driver breaks the node until the "
    "next reboot. Bake a new image to update.",
)
def test_holds(facts):
    version = driver_version(facts)
    assert version, "no part of the driver has a version by which its packages are known"
    driver = driver_packages(facts, version)
    # A new kernel has no modules of the driver until DKMS or a package builds them.
    kernels = [f"linux-image-{k}" for k in facts["kernel"]["installed"]]
    companions = [
        name
        for name in sorted(facts["packages"]["installed"])
        if name not in driver and (IN_STEP.fullmatch(name) or name in OWN_VERSION)
    ]
    packages = driver + companions + [k for k in kernels if k in facts["packages"]["installed"]]
    free = [name for name in packages if name not in facts["packages"]["holds"]]
    assert driver, f"no installed package is of version {version}, the driver's"
    assert not free, f"{len(free)} of {len(packages)} packages not on hold: {', '.join(free)}"


@check(
    id="versions.nvidia-docker2",
    title="nvidia-docker2 is absent",
    layer="versions",
    profiles=ALL,
    causes=("an old playbook or user data installs it",),
    fix="Copy /etc/docker/daemon.json, which purging the package deletes, then purge it and restore the "
    "settings. nvidia-container-toolkit replaced it in 2023.",
)
def test_nvidia_docker2(facts):
    assert not facts.has_package("nvidia-docker2"), "found nvidia-docker2, wanted it purged"
