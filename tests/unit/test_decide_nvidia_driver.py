"""What the driver's role decides: tables, without any machine."""

import hashlib
from pathlib import Path
from typing import Any

import pytest

from roles.nvidia_driver import choice
from roles.nvidia_driver import decide as driver
from roles.plan import Node, Plan, Role
from tests.support.roles import asked, node

OLD, NEW, KERNEL = "535.309.01", "580.178.04", "6.1.0-56-cloud-amd64"
T4, H100, B200, B300, SWITCH = "0x1eb8", "0x2330", "0x2901", "0x3182", "0x22a3"
RUNS = {"there": True, "enabled": "enabled", "active": "active", "reload": False}
RELEASE = "-0+deb12u1"
DEBIANS = (
    "nvidia-kernel-dkms",
    "nvidia-kernel-support",
    "nvidia-alternative",
    "nvidia-smi",
    "libcuda1",
    "libnvidia-ml1",
    "libnvidia-cfg1",
    "libnvidia-ptxjitcompiler1",
    "firmware-nvidia-gsp",
    "nvidia-modprobe",
)


def request(system: str = "debian-12", **given: Any) -> Role:
    return asked("nvidia_driver", system, **given)


def kernel(
    version: str = "", *, module: str = "nvidia-current", sig_key: str = "", **more: Any
) -> dict[str, Any]:
    there = (
        {module: {"filename": f"/lib/{module}.ko", "version": version, "sig_key": sig_key}} if version else {}
    )
    return {"initramfs": 10.0, "headers": True, "modules": there, **more}


def bus(*ids: str) -> dict[str, Any]:
    devices = [{"address": str(number), "id": one} for number, one in enumerate(ids)]
    return {
        "gpus": [one for one in devices if one["id"] != SWITCH],
        "switches": [one for one in devices if one["id"] == SWITCH],
    }


def installed(role: Role, packages: dict[str, str] | None = None, **more: Any) -> Node:
    """A Debian machine with the driver as the role leaves it."""
    names = dict.fromkeys(DEBIANS, f"={OLD}{RELEASE}")
    image = {f"linux-image-{KERNEL}": "=6.1.1-1", f"linux-headers-{KERNEL}": "=6.1.1-1"}
    there = node(names | image | (packages or {}), kernels={KERNEL: kernel(OLD)}, **more)
    plan = Plan()
    there["dkms"] = [{"module": "nvidia-current", "version": OLD, "kernel": KERNEL, "state": "installed"}]
    choice.write_settings(plan, driver.Case.of(role, there))
    for file in plan.files:
        there["files"][file.path] = {"text": file.text, "mode": "0644", "uid": 0, "gid": 0, "mtime": 5.0}
    return there


BARE = {"kernels": {KERNEL: kernel()}}


def test_an_unchanged_node_is_left_alone_and_no_archive_is_asked() -> None:
    plan = driver.decide(request(), installed(request()))
    assert (plan.do["way"], plan.acts, plan.ask) == ("keep", False, {})


@pytest.mark.parametrize(
    ("given", "change", "lines"),
    [
        ({"hold": True}, {"packages": {"nvidia-smi": OLD + RELEASE}}, ["hold nvidia-smi"]),
        ({"hold": False}, {"packages": {"nvidia-smi": OLD + RELEASE}}, []),
        ({"hold": True}, {"packages": {"nvlsm": "2025.03.1-1"}}, ["hold nvlsm"]),
        ({"module_options": {"NVreg_X": 0}}, {}, [f"rebuild the initramfs of {KERNEL}"]),
        ({"keep_build_tools": False}, {"compilers": ["gcc-12"]}, ["-gcc-12"]),
    ],
)
def test_what_keeps_a_driver_as_it_should_be(
    given: dict[str, Any], change: dict[str, Any], lines: list[str]
) -> None:
    role = request(**given)
    plan = driver.decide(role, installed(request(), **change))
    assert (plan.do["way"], plan.lines) == ("keep", lines)
    assert [file.path for file in plan.files] == ([driver.MODPROBE] if "module_options" in given else [])
    if plan.files:
        assert "\noptions nvidia-current NVreg_X=0\n" in plan.files[0].text


@pytest.mark.parametrize(
    ("given", "change"),
    [
        ({"upgrade_kernel": True}, {}),
        ({"branch": 580, "version": NEW}, {}),
        ({"version": "535.288.01"}, {}),
        ({"extra_packages": ["libnvidia-encode1"]}, {}),
        ({"sign": True}, {}),
        ({}, {"kernels": {KERNEL: kernel("535.288.01")}}),
        ({}, {"kernels": {KERNEL: kernel(OLD, headers=False)}}),
        ({}, {"packages": {"libcuda1": "=535.288.01-1"}}),
        ({}, {"packages": {"gpukiln-no-compiler": "1"}}),
    ],
)
def test_what_needs_an_installation(given: dict[str, Any], change: dict[str, Any]) -> None:
    there = installed(request(), change.pop("packages", None)) | change
    assert driver.decide(request(**given), there).do["way"] == "install"


@pytest.mark.parametrize(
    ("system", "given", "said"),
    [
        (
            "debian-12",
            {"branch": 536, "version": ""},
            "Found nvidia_driver_branch 536, wanted one of 470, 515",
        ),
        (
            "debian-12",
            {"branch": 550, "version": OLD},
            f"nvidia_driver_version '{OLD}' and nvidia_driver_branch 550",
        ),
        ("debian-12", {"source": "runfile"}, "Found nvidia_driver_runfile '' with SHA-256 ''"),
        ("debian-12", {"signing_key": "/k"}, "wanted both, or neither for a generated pair"),
        (
            "rocky-9",
            {"source": "distribution"},
            "Found Rocky 9.4 and nvidia_driver_source distribution; wanted Debian",
        ),
        ("rocky-9", {"keep_build_tools": False}, "nvidia_driver_keep_build_tools false on Rocky with"),
    ],
)
def test_wrong_requests_are_refused(system: str, given: dict[str, Any], said: str) -> None:
    assert said in driver.decide(request(system, **given), node(**BARE)).refusal


def test_a_branch_of_its_own_takes_its_last_release() -> None:
    assert driver.Case(request(branch=580), {}).version == NEW


def test_the_driver_is_not_replaced_under_running_work() -> None:
    there = node(**BARE, loaded={"nvidia": "550.163.01"})
    question = driver.decide(request(), there)
    assert "nvidia_driver" not in question.refusal
    assert "users" in question.ask["commands"]
    there["answers"]["users"] = {"stdout": "4711 python3\n"}
    assert driver.decide(request(), there).refusal == (
        f"Found driver 550.163.01 in use by 4711 python3; wanted to install {OLD}. Drain the node first"
        " (kubectl drain, or stop these processes), and run this again."
    )
    assert "wanted to remove it" in driver.decide(request(state="absent"), there).refusal
    there["answers"]["users"] = {"stdout": ""}
    assert not driver.decide(request(), there).refusal


@pytest.mark.parametrize("loaded", [{"nvidia": OLD}, {}, {"nouveau": ""}])
def test_the_same_driver_and_none_disturb_nobody(loaded: dict[str, str]) -> None:
    assert not driver.decide(request(), node(**BARE, loaded=loaded)).ask


@pytest.mark.parametrize(
    ("given", "change", "said"),
    [
        ({}, {"kernels": {}}, "Found no kernel in /boot"),
        (
            {},
            {"pci": bus(B200)},
            f"driver {OLD} does not know the B200 (Blackwell), wanted 570.133.20 or later",
        ),
        (
            {},
            {"pci": bus(T4, SWITCH)},
            "Found NVSwitch, and no fabric manager from the source 'distribution' on Debian",
        ),
        (
            {"branch": 580, "version": NEW, "modules": "open", "source": "nvidia"},
            {"pci": bus(H100)},
            "",
        ),
        ({"source": "preinstalled"}, {}, f"Found driver none for kernel {KERNEL}; wanted {OLD}"),
        (
            {"source": "runfile", "runfile": "/d.run", "runfile_sha256": "0" * 64},
            {"packages": {"libcuda1": f"{OLD}-1"}},
            "Found the driver installed as packages (libcuda1), wanted none next to NVIDIA's installer",
        ),
    ],
)
def test_what_cannot_work_is_refused(given: dict[str, Any], change: dict[str, Any], said: str) -> None:
    there = node(change.pop("packages", {}), **{**BARE, **change})
    refusal = driver.decide(request(**given), there).refusal
    assert said in refusal
    assert bool(refusal) is bool(said)


def test_debians_rule_for_a_module_without_a_gpu_gives_way_to_ours() -> None:
    [file] = choice.decide_packages(request(sources_known=False), node(**BARE)).files
    assert (
        "\ninstall nvidia-drm grep -qs 0x10de /sys/bus/pci/devices/*/vendor || exit 0; modprobe" in file.text
    )
    role = request("ubuntu-22.04", sources_known=False)
    assert "install nvidia-drm" not in choice.decide_packages(role, node(**BARE)).files[0].text


def test_ubuntus_archive_has_no_subnet_manager() -> None:
    role = request("ubuntu-22.04", branch=580, version=NEW, modules="open")
    said = driver.decide(role, node(**BARE, pci=bus(B200))).refusal
    assert (
        "no package of NVLink's subnet manager (NVLSM) from the source 'distribution' on Ubuntu; wanted"
        in said
    )


NVIDIAS = {"branch": 580, "version": NEW, "modules": "auto", "source": "nvidia"}


@pytest.mark.parametrize(
    ("ids", "given", "wanted", "infiniband"),
    [
        ((B200, B200), {}, True, True),
        ((B300,), {}, True, True),
        ((H100, SWITCH), {}, True, False),
        ((H100,), {}, False, False),
        # a virtual machine with one of the GPUs, whose fabric somebody else manages
        ((B200,), {"fabric_manager": "never"}, False, False),
        ((), {"fabric_manager": "always"}, True, False),
    ],
)
def test_who_gets_a_fabric_manager(
    ids: tuple[str, ...], given: dict[str, Any], *, wanted: bool, infiniband: bool
) -> None:
    role = request("ubuntu-22.04", **NVIDIAS, **given)
    module = {"version": NEW, "sig_key": "", "filename": "x"}
    there = node(kernels={KERNEL: kernel(modules={"nvidia": module, "ib_umad": module})}, pci=bus(*ids))
    case = driver.Case.of(role, there)
    assert ("nvidia-fabricmanager" in case.wanted) is wanted
    assert case.nvlink5 is infiniband
    plan = driver.decide_finish(role, there)
    text = next((file.text for file in plan.files if file.path == driver.FABRIC_DROPIN), "")
    assert (
        "ExecCondition=/usr/local/sbin/nvidia-gpu-present --nvswitch --or-gpus 0x2901,0x3182\n" in text
    ) is wanted
    assert ("Wants=modprobe@mlx5_ib.service modprobe@ib_umad.service\n" in text) is infiniband
    assert (driver.FABRIC in plan.enable) is wanted


def test_a_kernel_without_what_reaches_the_switches_is_refused() -> None:
    role = request("ubuntu-22.04", **NVIDIAS)
    there = node(kernels={KERNEL: kernel(NEW, module="nvidia")}, pci=bus(B200))
    assert f"Found no module ib_umad for kernel {KERNEL}" in driver.decide_finish(role, there).refusal


def madison(*names: str, version: str = OLD + RELEASE) -> str:
    return "".join(f"{name} | {version} | http://mirror.example.com\n" for name in names)


def answers(**texts: Any) -> dict[str, Any]:
    return {
        name: text if isinstance(text, dict) else {"rc": 0, "stdout": text, "stderr": ""}
        for name, text in texts.items()
    }


ARCHIVE = madison(*DEBIANS) + madison(f"linux-headers-{KERNEL}", version="6.1.1-1")


def test_debians_packages_come_in_one_version_with_the_headers() -> None:
    role = request(sources_known=True)
    there = node({f"linux-image-{KERNEL}": "6.1.1-1"}, **BARE)
    question = choice.decide_packages(role, there)
    assert {*DEBIANS, f"linux-headers-{KERNEL}"} <= {*question.ask["commands"]["archive"]}
    there["answers"] = answers(archive=ARCHIVE)
    rehearsal = choice.decide_packages(role, there).ask["commands"]["rehearsal"]
    assert rehearsal[-1] == "--simulate"
    there["answers"] |= answers(rehearsal="Inst libcuda1 (535.309.01-0+deb12u1 Debian)\n")
    there["files"][choice.INITRAMFS_SETTINGS] = {"text": "# Debian's\nupdate_initramfs=yes\n", "mode": "0644"}
    plan = choice.decide_packages(role, there)
    assert plan.do["install"] == [*(f"{name}={OLD}{RELEASE}" for name in DEBIANS), f"linux-headers-{KERNEL}"]
    assert plan.lines[0] == f"+NVIDIA driver {OLD}"
    assert plan.lines[-1] == f"+kernel modules for {KERNEL}"
    written = {file.path: file.text for file in plan.files}
    assert written[choice.INITRAMFS_SETTINGS] == f"# Debian's\nupdate_initramfs=no {choice.MARK}\n"
    assert written[choice.NO_AUTOINSTALL] == f"{choice.MARK}\n"
    [restored] = plan.do["after"]["files"]
    assert restored.text == "# Debian's\nupdate_initramfs=yes\n"
    assert plan.do["after"]["absent"] == [choice.NO_AUTOINSTALL]


def test_what_an_interrupted_run_put_off_is_allowed_again() -> None:
    there = installed(request())
    there["files"][choice.INITRAMFS_SETTINGS] = {
        "text": f"\nupdate_initramfs=no {choice.MARK}\n",
        "mode": "0644",
    }
    there["files"][choice.NO_AUTOINSTALL] = {"text": f"{choice.MARK}\n", "mode": "0644"}
    plan = driver.decide(request(), there)
    assert [file.text for file in plan.files] == ["\nupdate_initramfs=yes\n"]
    assert plan.absent == [choice.NO_AUTOINSTALL]
    there["files"][choice.NO_AUTOINSTALL]["text"] = "ours\n"
    assert driver.decide(request(), there).absent == []


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (
            {"archive": madison("nvidia-smi", version="535.261.03-1")},
            "Found nvidia-kernel-dkms in no version in the sources of apt, wanted 535.309.01.",
        ),
        (
            {"archive": ARCHIVE, "rehearsal": "Inst libcuda1 (580.1.1-1 Debian:12)\n"},
            "Found that apt would install libcuda1 580.1.1-1 for branch 535: on Debian 12.8 its packages",
        ),
        (
            {
                "archive": ARCHIVE,
                "rehearsal": {"rc": 100, "stdout": "", "stderr": "E: you have held broken packages."},
            },
            "apt-mark showhold",
        ),
    ],
)
def test_what_cannot_be_had_is_refused_before_anything_is_changed(texts: dict[str, Any], said: str) -> None:
    plan = choice.decide_packages(request(sources_known=True), node(**BARE, answers=answers(**texts)))
    assert said in plan.refusal
    assert not plan.acts


def test_without_sources_it_says_what_would_be_done() -> None:
    plan = choice.decide_packages(request(sources_known=False), node(**BARE))
    assert plan.lines == [f"+NVIDIA driver {OLD}", f"+kernel modules for {KERNEL}"]
    assert [file.path for file in plan.files] == [driver.MODPROBE]


@pytest.mark.parametrize(
    ("given", "rules"),
    [
        (
            {},
            [
                "install nvidia-drm grep -qs 0x10de /sys/bus/pci/devices/*/vendor || exit 0;"
                " modprobe nvidia-modeset; modprobe -i nvidia-current-drm $CMDLINE_OPTS"
            ],
        ),
        ({"source": "nvidia"}, []),
    ],
)
def test_debians_own_rule_is_for_machines_with_a_gpu(given: dict[str, Any], rules: list[str]) -> None:
    plan = Plan()
    choice.write_settings(plan, driver.Case.of(request(**given), node(**BARE)))
    text = next(file.text for file in plan.files if file.path == driver.MODPROBE)
    assert [line for line in text.splitlines() if line.startswith("install ")] == rules


UBUNTUS = (
    "nvidia-headless-no-dkms-535-server",
    "nvidia-headless-535-server",
    "nvidia-kernel-common-535-server",
    "nvidia-utils-535-server",
    "nvidia-compute-utils-535-server",
    "libnvidia-compute-535-server",
    "libnvidia-cfg1-535-server",
)
AWS = "6.8.0-41-aws"
SIGNED = "linux-modules-nvidia-535-server-aws"


@pytest.mark.parametrize(
    ("trial", "said", "first", "modules"),
    [
        (f"Inst linux-modules-nvidia-535-server-{AWS} (1)\n", "", UBUNTUS[0], SIGNED),
        (
            "",
            f"{SIGNED} does not go with driver {OLD}: it has none for kernel {AWS}.",
            UBUNTUS[1],
            f"linux-headers-{AWS}",
        ),
    ],
)
def test_canonicals_modules_where_they_can_be_had(trial: str, said: str, first: str, modules: str) -> None:
    archive = madison(*UBUNTUS) + madison(SIGNED, f"linux-headers-{AWS}", version="6.8.0-41.1")
    there = node(
        {"linux-image-aws": "6.8"}, kernels={AWS: kernel()}, answers=answers(archive=archive, rehearsal="")
    )
    role = request("ubuntu-22.04", sources_known=True)
    asking = choice.decide_packages(role, there)
    assert SIGNED in asking.ask["commands"]["trial"]
    there["answers"] |= answers(trial=trial)
    plan = choice.decide_packages(role, there)
    assert (plan.do["install"][0], plan.do["install"][-1]) == (f"{first}={OLD}{RELEASE}", modules)
    assert [one.startswith(said) for one in plan.do["said"]] == ([True] if said else [])


def test_another_branch_gives_way_in_the_same_transaction() -> None:
    there = node({"libcuda1": "=550.163.01-1", "nvidia-smi": "=550.163.01-1"}, **BARE)
    there["answers"] = answers(archive=ARCHIVE, rehearsal="")
    plan = choice.decide_packages(request(sources_known=True), there)
    assert plan.do["transaction"][-3:] == ["libcuda1-", "nvidia-smi-", "--yes"]
    assert "-libcuda1" in plan.lines


def test_nvidias_metapackages_are_rehearsed_with_preferences_that_are_not_written_yet() -> None:
    role = request("ubuntu-22.04", **{**NVIDIAS, "modules": "open"}, sources_known=True)
    there = node(**BARE, answers=answers(archive=madison("nvidia-open-580", version=f"{NEW}-1ubuntu1")))
    command = choice.decide_packages(role, there).ask["commands"]["rehearsal"]
    assert command[:2] == ["sh", "-c"]
    assert f"Pin: version {NEW}-*" in command[4]
    there["answers"] |= answers(rehearsal="")
    assert choice.PREFERENCES in [file.path for file in choice.decide_packages(role, there).files]


EL = "5.14.0-427.el9.x86_64"
STREAM = ("kmod-nvidia-latest-dkms", "nvidia-driver-cuda", "nvidia-driver-cuda-libs", "nvidia-kmod-common")
ROWS = "".join(
    f"{name} | 3:{version}-1.el9 | x86_64\n"
    for name in (*STREAM, "nvidia-persistenced")
    for version in ("535.288.01", OLD)
)
DEVEL = "kernel-devel | 0:5.14.0-427.el9 | x86_64\n"


def test_dnf_takes_exact_versions_and_unlocks_what_moves() -> None:
    packages = {"nvidia-driver-cuda": "=3:535.288.01-1.el9", "kernel-core": "=5.14.0-427.el9"}
    there = node(packages, kernels={EL: kernel()}, answers=answers(archive=ROWS + DEVEL))
    plan = choice.decide_packages(request("rocky-9", sources_known=True), there)
    assert plan.do["install"][:2] == [
        f"kmod-nvidia-latest-dkms-3:{OLD}-1.el9",
        f"nvidia-driver-cuda-3:{OLD}-1.el9",
    ]
    assert plan.do["install"][-1] == f"kernel-devel-{EL}"
    assert plan.do["unlock"] == ["dnf", "--quiet", "versionlock", "delete", "nvidia-driver-cuda"]
    assert choice.DRACUT in [file.path for file in plan.files]


@pytest.mark.parametrize(
    ("newer", "held_at", "update", "stays"),
    [
        ("", None, [], "2023.6.20241010"),
        ("", "2023.5", [], "2023.5"),
        ("kernel | 0:6.1.150-1 | x86_64\n", "latest\n", ["kernel", "kernel-devel"], ""),
        ("", "latest\n", [], ""),
    ],
)
def test_amazon_linux_has_newer_kernels_where_it_follows_its_releases(
    newer: str, held_at: str | None, update: list[str], stays: str
) -> None:
    packages = {"kernel": "=6.1.112-1", "system-release": "2023.6.20241010-0.amzn2023"}
    files = {choice.RELEASE_VARIABLE: held_at} if held_at else {}
    there = node(packages, files, kernels={EL: kernel()}, answers=answers(archive=ROWS + DEVEL, newer=newer))
    role = request("amazon-2023", upgrade_kernel=True, sources_known=True)
    plan = choice.decide_packages(role, there)
    assert plan.do["newer"] == update
    assert plan.do["unlock"][-1:] == (["kernel"] if update else [])
    assert [stays in one for one in plan.do["said"]] == ([True] if stays else [])


def test_a_stream_that_the_repository_does_not_have_is_refused() -> None:
    said = "Name Stream Profiles\nnvidia-driver 580-dkms default Driver\nnvidia-driver 580-open default\n"
    there = node(**BARE, answers=answers(streams=said))
    plan = choice.decide_stream(request("amazon-2023"), there)
    assert "Found the streams 580-dkms, 580-open of the module nvidia-driver" in plan.refusal
    assert "wanted 535-dkms" in plan.refusal
    taken = choice.decide_stream(request("amazon-2023", branch=580, modules="open"), there)
    assert taken.do == {"stream": "nvidia-driver:580-open"}


def test_dkms_builds_for_kernels_that_have_headers(tmp_path: Path) -> None:
    kernels = {KERNEL: kernel(), "6.1.0-9-cloud-amd64": kernel(headers=False)}
    there = node(dict.fromkeys(DEBIANS, OLD + RELEASE), kernels=kernels, sources={"nvidia-current": False})
    plan = driver.decide_modules(request(), there)
    assert (plan.do["module"], plan.do["registered"], plan.do["kernels"]) == (
        "nvidia-current",
        False,
        [KERNEL],
    )
    role = request(module_cache_dir=str(tmp_path))
    question = driver.decide_modules(role, there).ask["commands"]
    assert list(question) == [KERNEL]
    there["answers"] = answers(**{KERNEL: "module=nvidia-current\n"})
    [entry] = driver.decide_modules(role, there).do["entries"]
    assert not entry["there"]
    (tmp_path / f"{entry['id']}.tar.gz").touch()
    [entry] = driver.decide_modules(role, there).do["entries"]
    assert (entry["there"], entry["key"]) == (True, "module=nvidia-current\n")
    # a pair that the node generates signs nothing that another one could use
    assert not driver.decide_modules(request(module_cache_dir=str(tmp_path), sign=True), there).do["entries"]
    there["answers"][KERNEL] = {"rc": 1, "stdout": "", "stderr": "module-key: found no dkms.conf"}
    assert "module-key: found no dkms.conf" in driver.decide_modules(role, there).refusal


def test_two_releases_of_one_driver_are_refused() -> None:
    there = installed(request(), {"libcuda1": "=535.288.01-1", "libcuda2": "1"})
    assert f"Found libcuda1 535.288.01-1 installed; wanted {OLD} of everything" in (
        driver.decide_modules(request(), there).refusal
    )
    there = installed(request(), {"libcuda1": "=580.288.01-1"})
    assert driver.decide_modules(request(), there).do["remove"] == ["libcuda1"]


OLDER = "6.1.0-9-cloud-amd64"


def test_a_kernel_without_a_module_is_named_or_goes() -> None:
    kernels = {KERNEL: kernel(OLD), OLDER: kernel(headers=False)}
    there = installed(request(), {f"linux-image-{OLDER}": "6"}) | {"kernels": kernels}
    assert (
        f"Kernel {OLDER}: found module nvidia-current in version none, wanted {OLD}. Install the kernel's"
        " headers (linux-headers-RELEASE)" in driver.decide_finish(request(), there).refusal
    )
    role = request(purge_other_kernels=True)
    assert driver.decide_finish(role, there).ask["commands"]["purge"][-1] == f"linux-image-{OLDER}"
    there["answers"] = answers(purge=f"Remv linux-image-{OLDER} [6]\n")
    plan = driver.decide_finish(role, there)
    assert plan.do["purge"]["apt"][0] == f"linux-image-{OLDER}"
    assert (plan.lines, plan.do["hold"]) == ([f"-kernel {OLDER}"], [])
    there["answers"] = answers(purge="Remv linux-cloud-amd64 [6]\n")
    assert "is not purged: linux-cloud-amd64 would go" in driver.decide_finish(role, there).refusal
    there["kernels"] = {KERNEL: kernel(), OLDER: kernel(OLD)}
    assert f"Kernel {KERNEL}: found" in driver.decide_finish(role, there).refusal


def test_dnf_lifts_the_protection_of_the_running_kernel() -> None:
    newest = "5.14.0-503.el9.x86_64"
    there = node(kernels={EL: kernel(), newest: kernel(OLD, module="nvidia")})
    plan = driver.decide_finish(request("rocky-9", purge_other_kernels=True), there)
    assert plan.do["purge"]["command"][-2:] == ["remove", f"kernel*-{EL}"]
    assert plan.do["initramfs"] == [["dracut", "--force", f"/boot/initramfs-{newest}.img", newest]]


def test_what_another_key_signed_is_built_again() -> None:
    role = request(sign=True)
    serial = answers(serial="serial=3A0B\n")
    there = installed(role) | {"kernels": {KERNEL: kernel(OLD, sig_key="11:22")}, "answers": serial}
    [command] = driver.decide_finish(role, there).do["sign"]
    assert command[-2:] == [f"nvidia-current/{OLD}", KERNEL]
    assert "signed by the key 11:22, wanted 3A:0B" in driver.decide_signed(role, there).refusal
    there["kernels"] = {KERNEL: kernel(OLD, sig_key="3a:0b")}
    assert not driver.decide_finish(role, there).do["sign"]
    assert not driver.decide_signed(role, there).refusal


def test_a_given_pair_that_is_there_is_left_alone(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("a key")
    role = request(sign=True, signing_key=str(key), signing_certificate=str(key), private_key="/run/key")
    there = installed(role, {"openssl": "3", "mokutil": "1"}, answers=answers(serial="serial=3A0B\n"))
    there["kernels"] = {KERNEL: kernel(OLD, sig_key="3A:0B")}
    case = driver.Case.of(role, there)
    for path in ("/run/key", case.certificate):
        there["files"][path] = {"sha256": "another"}
    assert driver.decide(role, there).do["way"] == "install"
    for path in ("/run/key", case.certificate):
        there["files"][path] = {"sha256": hashlib.sha256(b"a key").hexdigest()}
    assert driver.decide(role, there).do["way"] == "keep"


def test_the_removal_takes_all_of_the_driver_and_what_this_role_wrote() -> None:
    there = installed(request(), {"nvidia-support": "1", "nvidia-container-toolkit": "=1.19-1"})
    plan = driver.decide(request(state="absent"), there)
    assert {*DEBIANS, "nvidia-support"} == set(plan.do["packages"])
    assert plan.absent == [driver.MODPROBE]
    assert plan.do["release"][:3] == ["apt-mark", "unhold", f"linux-image-{KERNEL}"]
    assert plan.do["initramfs"] == [["update-initramfs", "-u", "-k", KERNEL]]
    assert not driver.decide(request(state="absent"), node(**BARE)).acts
    by_hand = node(kernels={KERNEL: kernel(OLD, module="nvidia")})
    said = driver.decide(request(state="absent"), by_hand).refusal
    assert "Found /lib/nvidia.ko after the removal, wanted no module" in said


@pytest.mark.parametrize(
    ("loaded", "allowed", "signature", "load", "reboot", "said"),
    [
        ({"nvidia": OLD}, False, None, False, False, ""),
        (
            {"nvidia": "550.163.01"},
            False,
            None,
            None,
            None,
            f"Found 550.163.01 loaded, wanted {OLD}. Reboot the machine",
        ),
        ({"nvidia": "550.163.01"}, True, None, False, True, ""),
        ({"nouveau": ""}, False, None, None, None, "Found no NVIDIA driver loaded, wanted"),
        ({}, False, (0, ""), True, False, ""),
        ({}, False, (1, "Found no signature on nvidia"), None, None, "Found no signature on nvidia"),
    ],
)
def test_the_driver_is_loaded_where_there_is_a_gpu(
    loaded: dict[str, str],
    signature: tuple[int, str] | None,
    load: bool | None,
    reboot: bool | None,
    said: str,
    *,
    allowed: bool,
) -> None:
    role = request(reboot_allowed=allowed)
    there = installed(role, loaded=loaded, pci=bus(T4))
    if signature:
        assert "signature" in driver.decide_runtime(role, there).ask["commands"]
        there["answers"]["signature"] = {"rc": signature[0], "stdout": signature[1], "stderr": ""}
    plan = driver.decide_runtime(role, there)
    assert said in plan.refusal
    assert bool(plan.refusal) is bool(said)
    assert (plan.do.get("load"), plan.do.get("reboot")) == (load, reboot)
    assert not driver.decide_runtime(role, installed(role, loaded=loaded)).acts


def test_another_driver_after_the_reboot_is_refused() -> None:
    role = request(reboot_allowed=True)
    assert not driver.decide_rebooted(role, node(loaded={"nvidia": OLD})).refusal
    said = driver.decide_rebooted(role, node(loaded={"nvidia": "550.163.01"})).refusal
    assert "Found 550.163.01 loaded" in said
    assert "another driver came up" in said


def test_a_driver_that_came_with_the_base_is_only_compared() -> None:
    role = request(source="preinstalled")
    plan = driver.decide(role, node(kernels={KERNEL: kernel(OLD, module="nvidia")}))
    assert (plan.do, plan.acts, plan.refusal) == ({"way": "none"}, False, "")
