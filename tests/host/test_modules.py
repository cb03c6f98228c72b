"""Every installed kernel has the driver's modules, and nouveau can't claim the GPU first."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from gpukiln.verify.checks import check

ALL = ("image", "node", "eks-node", "workspace")


@check(
    id="modules.running-kernel",
    title="The machine runs the kernel that the image was built for",
    layer="modules",
    profiles=ALL,
    needs=("record", "own-kernel"),
    causes=(
        "a newer kernel was installed, and the boot loader starts the newest",
        "another kernel was chosen in the boot loader",
    ),
    fix="Check that the recorded kernel is installed and has the driver's modules (modules.present). Then "
    "make "
    "it the boot loader's default, hold its package and reboot.",
)
def test_running_kernel(facts):
    running, recorded = facts["kernel"]["running"], facts.record.get("kernel")
    assert running == recorded, f"running {running}, wanted {recorded}"


@check(
    id="modules.installed-kernels",
    title="The installed kernels are the recorded ones",
    layer="modules",
    profiles=ALL,
    needs=("record",),
    causes=(
        "unattended upgrades installed a kernel",
        "an old kernel was not removed",
    ),
    fix="Bake the image again with the added kernel, or remove that kernel if another one runs: its modules "
    "were never checked.",
)
def test_installed_kernels(facts):
    installed, recorded = facts["kernel"]["installed"], sorted(facts.record.get("kernels", []))
    # A remedy must never remove the kernel that is running.
    if facts["kernel"]["running"] in set(installed) - set(recorded):
        facts.remedy(
            f"{facts['kernel']['running']} was added after the build and is running: do not remove it. Boot "
            "a recorded kernel first, or bake the image again with this one."
        )
    assert installed == recorded, (
        f"found {', '.join(installed) or 'none'}, wanted {', '.join(recorded) or 'none'}"
    )


@check(
    id="modules.present",
    title="Every installed kernel has nvidia, nvidia-uvm and nvidia-modeset",
    layer="modules",
    profiles=ALL,
    causes=(
        "the kernel's headers were missing when DKMS built the modules",
        "the build failed: make.log has the error",
        "a new kernel was installed without its precompiled modules",
    ),
    after=("versions.driver-installed",),
    fix="Install the kernel's headers and run `dkms autoinstall -k KERNEL`. Do not reboot into a kernel "
    "without "
    "the modules, and do not remove the running kernel.",
)
def test_present(facts):
    missing = {
        kernel: [module for module, info in by_module.items() if not info]
        for kernel, by_module in facts["modules"].items()
        if not all(by_module.values())
    }
    images = facts["kernel"]["images"]
    said = [
        f"{', '.join(f'{module} for {kernel}' for module in modules)}{'' if images.get(kernel) else NO_IMAGE}"
        for kernel, modules in missing.items()
    ]
    if missing:
        # The fix depends on the kernel: running, bootable, or a tree that nothing boots.
        facts.remedy(_with_modules(missing, facts["kernel"]["running"], images))
    assert facts["modules"], "found no kernel in /lib/modules, wanted the running one: is this a container?"
    assert not said, f"missing: {'; '.join(said)}; wanted three modules for every installed kernel"


NO_IMAGE = " (no image of this kernel was found: a tree that nothing boots?)"


def _with_modules(missing: Iterable[str], running: str, images: Mapping[str, str | None]) -> str:
    """The steps that give kernels the driver's modules, without a reboot into a kernel that has none."""
    steps = []
    for kernel in missing:
        build = (
            f"install the headers of {kernel} and run `dkms autoinstall -k {kernel}`, or install its "
            "precompiled modules"
        )
        if kernel == running:
            steps.append(f"{kernel} is running: {build}; do not remove it")
        elif images.get(kernel):
            steps.append(
                f"do not reboot into {kernel}, which has no driver: {build}, or remove that kernel's packages"
            )
        else:
            steps.append(
                f"/lib/modules/{kernel} belongs to no kernel that was found: when `dpkg -S` or `rpm -qf` "
                f"names no package of it, remove the folder; else {build}"
            )
    said = ". ".join(f"{step[:1].upper()}{step[1:]}" for step in steps)
    return f"{said}. Do not change the driver's packages for this."


@check(
    id="modules.version",
    title="All modules of all kernels have one version",
    layer="modules",
    profiles=ALL,
    causes=("a module of an older driver is still in the kernel's tree",),
    after=("modules.present",),
    fix="Build the wanted version for every kernel first (`dkms install nvidia/VERSION -k KERNEL`), and only "
    "then remove the other one (`dkms remove`).",
)
def test_version(facts):
    versions = {
        f"{module} for {kernel}": info["version"]
        for kernel, modules in facts["modules"].items()
        for module, info in modules.items()
        if info
    }
    # A module may have no version field (modinfo -F version).
    known = {what: version for what, version in versions.items() if version}
    recorded = facts.component("nvidia_driver").get("version")
    # The record has the package's version with epoch and revision: 1:535.309.01-0+deb12u1.
    expected = recorded.split("-")[0].rpartition(":")[2] if recorded else next(iter(known.values()), None)
    wrong = [f"{what} {version}" for what, version in known.items() if version != expected]
    assert versions, "found no module of the driver"
    assert not wrong, f"found {', '.join(wrong)}, wanted {expected}"
    if unknown := sorted(set(versions) - set(known)):
        facts.note(f"version unknown: {', '.join(unknown)}")


@check(
    id="modules.loads",
    title="modprobe loads the driver's modules on every installed kernel",
    layer="modules",
    profiles=ALL,
    causes=(
        "a file in /etc/modprobe.d has `install nvidia /bin/false`, `alias nvidia off` or `blacklist nvidia`",
        "the kernel's command line has module_blacklist=nvidia or modprobe.blacklist=nvidia",
        "the GPUs were once passed through to a virtual machine, and the host's driver was blocked",
    ),
    after=("modules.present",),
    fix="`modprobe --showconfig | grep nvidia` shows the line and `grep -r nvidia /etc/modprobe.d "
    "/lib/modprobe.d` its file: remove that line. Remove a kernel option from the boot loader's "
    "configuration. Then run `update-initramfs -u -k all` or `dracut -f --regenerate-all`.",
)
def test_loads(facts):
    """modprobe.d(5), modprobe(8), and kernel-parameters.txt of the kernel for module_blacklist."""
    loading, modules = facts["loading"], facts["modules"]
    wrong = [
        f"{name} for {kernel}: {why}"
        for kernel, asked in modules.items()
        for name, info in asked.items()
        # A module that is missing is the finding of modules.present.
        if info and (why := _not_loaded(loading["kernels"][kernel][name], info["file"]))
    ]
    for source, options in loading["boot_options"].items():
        wrong += [
            f"{source} has module_blacklist={name}: the kernel refuses it"
            for name in options.get("module_blacklist", ())
            if _is_driver(name)
        ]
        wrong += [
            f"{source} has modprobe.blacklist={name}"
            for name in options.get("modprobe.blacklist", ())
            if _is_driver(name) and source != "/proc/cmdline"  # modprobe's configuration has that one
        ]
    blocked = [name for name in loading["blacklist"] if _is_driver(name)]
    said = f"blacklist {', '.join(blocked)}: it is not loaded for a GPU that is found at boot"
    # A blacklist (modprobe.d(5)) concerns aliases only: nvidia-modprobe loads the module by its name.
    if blocked and not facts["gpus"]["module"]:
        wrong.append(said)
    assert modules, "found no kernel in /lib/modules, wanted one to ask modprobe about"
    assert not wrong, "; ".join(wrong)
    own = {
        command
        for asked in loading["kernels"].values()
        for answer in asked.values()
        for command in answer["commands"]
    }
    notes = [f"{said}; it is loaded now"] if blocked else []
    facts.note(
        "; ".join(
            notes
            + [f"an `install` command of its own, not examined further: {command}" for command in sorted(own)]
        )
    )


# Commands that succeed without loading anything, as `install nvidia /bin/false` or `... /bin/true`.
NOTHING = re.compile(r"^(\S*/)?(true|false|:|exit|echo|logger)\b")


def _is_driver(name: str) -> bool:
    """Whether a name is of NVIDIA's modules; nvidiafb is the kernel's own.

    >>> _is_driver("nvidia_uvm"), _is_driver("nvidiafb")
    (True, False)
    """
    return re.fullmatch(r"nvidia([-_].*)?", name) is not None


def _not_loaded(answer: Mapping[str, Any], file: str) -> str:
    """The reason why modprobe would not load a module; empty where it would, or where a command decides."""
    if answer["error"]:
        return str(answer["error"])
    if file in answer["files"]:
        return ""
    if idle := [command for command in answer["commands"] if NOTHING.match(command)]:
        return f"`{idle[0]}` is run instead of loading it"
    # What another command does is unknown; a note shows it.
    if answer["commands"]:
        return ""
    if not answer["files"]:
        return "modprobe loads nothing and reports success, as after `alias ... off`"
    return f"modprobe loads {answer['files'][-1]}, wanted {file}"


@check(
    id="modules.firmware",
    title="The GSP firmware of the driver's module is installed, in the module's version",
    layer="modules",
    profiles=ALL,
    causes=(
        "the firmware's package is not installed: the module's package only recommends it, or does not "
        "name it",
        "the driver was upgraded without the firmware, or the disk was full during the upgrade",
    ),
    after=("modules.present",),
    fix="Install the firmware in the module's version: firmware-nvidia-gsp on Debian, nvidia-firmware-BRANCH "
    "on Ubuntu, nvidia-kmod-common on RHEL and Amazon Linux; if it is installed, install the same "
    "version again. The module reads it when it is loaded: reload the module or reboot when no job runs.",
)
def test_firmware(facts):
    """NVIDIA's driver README, "GSP Firmware". Without it GPUs with a GSP do not start (Turing and later)."""
    wrong, named = [], 0
    for kernel, modules in facts["modules"].items():
        # Only this module loads GSP firmware.
        module = modules["nvidia"]
        for file in module["firmware"] if module else ():
            named += 1
            if why := _not_usable(file, module["version"]):
                wrong.append(f"{file['name']}, which the module of {kernel} needs, {why}")
    # Without GSP the driver does not read the files.
    if wrong and facts["loading"]["gsp_off"]:
        facts.note(f"GSP is off (NVreg_EnableGpuFirmware=0): {'; '.join(wrong)}")
        return
    assert not wrong, "; ".join(wrong)
    facts.note(f"{named} files" if named else "the module names no firmware")


def _not_usable(file: Mapping[str, Any], version: str | None) -> str:
    """What is wrong with a firmware file; empty where nothing is."""
    if not file["path"]:
        others = f" (there is one for {', '.join(file['others'])})" if file["others"] else ""
        return f"is missing{others}"
    if not file["size"]:
        return f"is empty: {file['path']}"
    # Compressed firmware files do not show their version.
    if file["version"] and version and file["version"] != version:
        return f"is of version {file['version']}, wanted {version}: {file['path']}"
    return ""


@check(
    id="modules.rivals",
    title="No other driver claims the GPUs first",
    layer="modules",
    profiles=ALL,
    causes=(
        "the GPUs were prepared for virtual machines: `options vfio-pci ids=`, `softdep nvidia pre:`",
        "a newer kernel has nova_core, its own driver for GPUs with a GSP",
    ),
    fix="Blacklist the module in /etc/modprobe.d, or remove the line that gives it the GPU; then run "
    "`update-initramfs -u -k all` or `dracut -f --regenerate-all`. If a virtual machine uses the GPU, "
    "change nothing.",
)
def test_rivals(facts):
    """Without nouveau: modules.nouveau-blocked and modules.nouveau-initramfs are about it."""
    loading = facts["loading"]
    wrong = [
        f"{kernel} would load {name} for a GPU"
        for kernel, asked in loading["kernels"].items()
        # modprobe is asked with the GPU's modalias, as udev asks it.
        for name in map(_module_of, asked["gpu"]["files"])
        if name in RIVALS
    ]
    if loading["nova"]:
        wrong.append("nova_core is loaded")
    ids = {
        source: options.get("vfio-pci.ids", []) + options.get("vfio_pci.ids", [])
        for source, options in loading["boot_options"].items()
    }
    ids["modprobe's configuration"] = loading["vfio_ids"]
    for gpu in facts["gpus"]["pci"]:
        # vfio-pci takes every device of that vendor and device id.
        mine = f"10de:{gpu['device'].lower().removeprefix('0x')}"
        wrong += [
            f"{source} gives {mine}, {gpu['address']}, to vfio-pci"
            for source, pairs in ids.items()
            if any(_same_device(pair, mine) for pair in pairs)
        ]
    for softdep in loading["softdeps"]:
        # modprobe.d(5), softdep: modules after `pre:` are loaded before nvidia.
        before = softdep.partition(" pre:")[2].partition(" post:")[0].split()
        wrong += [
            f"`softdep {softdep}` loads {name} first"
            for name in before
            if name.replace("-", "_") in {*RIVALS, "nouveau", "vfio_pci", "pci_stub"}
        ]
    assert not wrong, "; ".join(wrong)


# The kernel's own drivers for NVIDIA's display controllers: its drivers/gpu/nova-core, drivers/video/fbdev.
RIVALS = ("nova_core", "nova_drm", "nvidiafb", "rivafb")


def _module_of(path: str) -> str:
    return path.rpartition("/")[2].partition(".ko")[0].replace("-", "_")


def _same_device(pair: str, mine: str) -> bool:
    """Whether an entry of vfio-pci's ids, `vendor:device[:...]` in hexadecimal, is of that device.

    >>> _same_device("10de:20b0", "10de:20b0")
    True
    >>> _same_device("10de:20b5:10de:134f", "10de:20b0")
    False
    """
    parts = pair.lower().split(":")
    return len(parts) > 1 and [part.zfill(4) for part in parts[:2]] == mine.split(":")


@check(
    id="modules.copies",
    title="No kernel has copies of a module in other versions",
    layer="modules",
    profiles=ALL,
    causes=(
        "the .run installer's module is still installed next to the package's",
        "DKMS and a package of precompiled modules were both used",
    ),
    after=("modules.present",),
    fix="`modinfo -k KERNEL nvidia` names the copy that is loaded. If that is the right one, remove the "
    "other "
    "copy's package, or its file if no package owns it, and run `depmod -a KERNEL`; else give the right "
    "copy precedence with `override` in depmod.d(5).",
)
def test_copies(facts):
    wrong = [
        f"{module} for {kernel}: "
        + " and ".join(f"{copy['file']} {copy['version'] or 'unknown'}" for copy in copies)
        for kernel, by_module in facts["loading"]["copies"].items()
        for module, copies in by_module.items()
        # Two copies of one version, for example of DKMS and a kernel package, do no harm.
        if len({copy["version"] for copy in copies if copy["version"]}) > 1
    ]
    assert not wrong, f"{'; '.join(wrong)}; wanted one version of each"


@check(
    id="modules.initramfs",
    title="An initramfs that has the driver's modules has them in its kernel's version",
    layer="modules",
    profiles=ALL,
    causes=("the driver was upgraded, and the initramfs was not rebuilt",),
    after=("modules.present",),
    fix="`update-initramfs -u -k KERNEL` (or `dracut -f --kver KERNEL`) for the kernel, when all of its "
    "modules have the wanted version; the initramfs is used from the next boot on.",
)
def test_initramfs(facts):
    """The kernel loads the modules of the initramfs before the root file system is mounted."""
    wrong = [
        f"{image['path']} carries {file} of version {version}, wanted {expected}, the version for {kernel}"
        for kernel, image in facts["nouveau"]["initramfs"].items()
        for file, version in image.get("driver", {}).items()
        if version
        and (expected := ((facts["modules"].get(kernel) or {}).get("nvidia") or {}).get("version"))
        and version != expected
    ]
    assert not wrong, "; ".join(wrong)


@check(
    id="modules.vermagic",
    title="Every module was built for the kernel whose tree it is in",
    layer="modules",
    profiles=ALL,
    causes=("the module was copied from another kernel, or built with other headers",),
    after=("modules.present",),
    fix="Rebuild with the kernel's own headers: `dkms build --force -k KERNEL`, then `dkms install --force`.",
)
def test_vermagic(facts):
    wrong = [
        f"{info['file']} was built for {info['vermagic'] or 'an unknown kernel'}, wanted {kernel}"
        for kernel, modules in facts["modules"].items()
        for info in modules.values()
        # The kernel refuses a module with another vermagic (modprobe: Exec format error).
        if info and info["vermagic"] != kernel
    ]
    assert any(info for by_module in facts["modules"].values() for info in by_module.values()), (
        "found no module"
    )
    assert not wrong, "; ".join(wrong)


@check(
    id="modules.signature",
    title="Every kernel accepts the signature of the driver's module",
    layer="modules",
    profiles=ALL,
    causes=(
        "Secure Boot is on, and the module was built without a key",
        "the certificate was not enrolled, or not confirmed on the console at the reboot",
    ),
    after=("modules.present",),
    fix="Set nvidia_driver_sign, enrol the certificate (`mokutil --import CERTIFICATE.der`) and reboot; or "
    "take the distribution's signed modules.",
)
def test_signature(facts):
    signatures = facts["signatures"]
    # Kernels without the module are in neither list; modules.present names them.
    missing = [kernel for kernel in facts["kernel"]["installed"] if kernel not in signatures]
    assert signatures, (
        f"found no module whose signature could be checked, on {', '.join(missing) or 'any kernel'}"
    )
    assert not missing, f"found no module whose signature could be checked, on {', '.join(missing)}"
    refused = [said["out"] for said in signatures.values() if said["rc"] != 0]
    assert not refused, "; ".join(refused)
    facts.note("; ".join(said["out"] for said in signatures.values()))


@check(
    id="modules.dkms",
    title="DKMS reports the driver as installed for every kernel",
    layer="modules",
    profiles=ALL,
    needs=("dkms",),
    causes=(
        "the headers were missing at the build",
        "the kernel's package has a newer module than DKMS",
    ),
    fix="`dkms status` and make.log below /var/lib/dkms show the reason; then run `dkms autoinstall -k "
    "KERNEL`.",
)
def test_dkms(facts):
    dkms = facts["dkms"]
    assert dkms["rc"] == 0, f"`dkms status` exits {dkms['rc']}: {dkms['error']}"
    # Debian registers the driver as nvidia-current, NVIDIA as nvidia or nvidia-open.
    rows = [r for r in dkms["rows"] if r["module"].startswith("nvidia")]
    assert rows, "`dkms status` lists no nvidia module, wanted the driver"
    for kernel in facts["kernel"]["installed"]:
        states = [r["state"] for r in rows if r["kernel"] == kernel]
        assert any(s.split(" ")[0] == "installed" for s in states), (
            f"DKMS says {', '.join(states) or 'nothing'} for {kernel}, wanted installed"
        )
    # "installed (WARNING! Diff between built and installed module!)": the loaded module is not the built one.
    # DKMS also builds for kernels of which only the headers are installed
    installed = facts["kernel"]["installed"]
    odd = [
        f"{r['kernel']}: {r['state']}" for r in rows if r["kernel"] in installed and r["state"] != "installed"
    ]
    assert not odd, f"DKMS says {'; '.join(odd)}, wanted installed"


@check(
    id="modules.build-tools",
    title="Compilers are installed or removed as the record says",
    layer="modules",
    profiles=ALL,
    needs=("record", "dkms", "build-tools"),
    causes=(
        "a compiler was installed or removed; the headers of a Debian kernel depend on one",
        "the base image has a compiler outside of its packages",
    ),
    fix="With keep_build_tools: `apt-get install gcc make`, so that DKMS can build for a later kernel. "
    "Without: "
    "remove the compilers with roles/nvidia_driver/files/remove-compilers.sh, which keeps DKMS.",
)
def test_build_tools(facts):
    tools, keep = facts["dkms"]["tools"], facts.component("nvidia_driver")["keep_build_tools"]
    compilers = ", ".join(tools["compilers"])
    if not keep:
        assert not compilers, f"found {compilers}, wanted no compiler: keep_build_tools is off"
        return
    assert compilers, "found no compiler, wanted one: keep_build_tools is on"
    assert tools["make"], "found no make, wanted one: keep_build_tools is on"


@check(
    id="modules.nouveau-blocked",
    title="nouveau is blacklisted and not loaded",
    layer="modules",
    profiles=ALL,
    causes=(
        "the blacklist file was removed with the driver's package",
        "nouveau is in the initramfs and was loaded before the blacklist was read",
    ),
    fix="Write `blacklist nouveau` and `options nouveau modeset=0` to /etc/modprobe.d, then "
    "rebuild the initramfs and reboot.",
)
def test_nouveau_blocked(facts):
    nouveau = facts["nouveau"]
    assert nouveau["blacklisted"], "`modprobe --showconfig` has no `blacklist nouveau`"
    assert not nouveau["loaded"], "nouveau is loaded, wanted it blocked"


@check(
    id="modules.nouveau-initramfs",
    title="Every kernel's initramfs blacklists nouveau too",
    layer="modules",
    profiles=ALL,
    causes=("the initramfs was not rebuilt after the blacklist was written",),
    fix="`update-initramfs -u -k all` (or `dracut -f --regenerate-all`) after writing the blacklist.",
)
def test_nouveau_initramfs(facts):
    nouveau = facts["nouveau"]
    assert nouveau["initramfs"], "found no kernel in /lib/modules, wanted one whose initramfs can be read"
    for kernel, image in nouveau["initramfs"].items():
        assert image["rc"] == 0, f"the initramfs of {kernel} can't be listed: {image['error']}"
        # The initramfs is used before the root file system is mounted, so that its own copy of the blacklist
        # counts.
        carried = image["files"]
        driver = ", and it carries nouveau.ko" if image["module"] else ""
        assert carried, f"{image['path']} has no modprobe.d file with `blacklist nouveau`{driver}"
        assert any(nouveau["files"][f] <= image["mtime"] for f in carried), (
            f"{image['path']} is older than {', '.join(carried)}: its blacklist may differ"
        )
