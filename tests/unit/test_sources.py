"""What happens to each component, by what the network answers."""

import http.server
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from gpukiln.catalog.bases import base
from gpukiln.catalog.components import apply_overrides, load_components
from gpukiln.catalog.images import load_image
from gpukiln.errors import IncompatibleError, UnavailableError, UsageError
from gpukiln.sources.decisions import Decision, Probes, decide_sources, http_unreachable, with_resolved_driver
from gpukiln.sources.rpm import RpmMetadata

MIRROR = {
    "nvidia-kernel-dkms": "535.309.01-0+deb12u1",
    "nvidia-open-kernel-dkms": "535.261.03-1",
    "nvidia-persistenced": "535.171.04-1~deb12u1",
    "nvtop": "3.0.1-1",
    "docker.io": "20.10.24+dfsg1-1+deb12u1+b6",
    "containerd": "1.6.20~ds1-1+deb12u3",
}


def decisions(
    base_name: str = "debian-12",
    *,
    strict: bool = False,
    why: str | None = None,
    mirror: Mapping[str, str] = MIRROR,
    overrides: Sequence[str] = (),
    asked: list[str] | None = None,
    more: Sequence[str] = (),
    rpm: RpmMetadata | None = None,
) -> dict[str, Decision]:
    def unreachable(url: str) -> str | None:
        if asked is not None:
            asked.append(url)
        return why

    def candidates(packages: Sequence[str]) -> Mapping[str, str]:
        assert not strict, "a cloud's machines do not use this machine's mirror"
        return {name: mirror[name] for name in packages if name in mirror}

    found = decide_sources(
        (*load_image("eks-gpu").components, *more),
        apply_overrides(load_components(), overrides),
        base(base_name),
        architecture="x86_64",
        strict=strict,
        probes=Probes(unreachable, candidates, lambda _: rpm),
    )
    return {decision.name: decision for decision in found}


def test_everything_from_the_mirror_and_the_repository() -> None:
    asked: list[str] = []
    found = decisions(asked=asked)
    driver = found["nvidia_driver"]
    assert (driver.status, driver.version, driver.package_version, driver.branch) == (
        "install",
        "535.309.01",
        "535.309.01-0+deb12u1",
        535,
    )
    assert (found["nvtop"].version, found["nvtop"].package_version) == ("3.0.1", "3.0.1-1")
    assert found["nvidia_container_toolkit"].status == "install"
    assert asked == ["https://nvidia.github.io/libnvidia-container/stable/deb/amd64/InRelease"]


@pytest.mark.parametrize(
    ("base_name", "file"),
    [
        ("debian-12", "debian12/x86_64/InRelease"),
        ("eks-ubuntu-22.04", "ubuntu2204/x86_64/InRelease"),
        ("eks-al2023-nvidia", "amzn2023/x86_64/repodata/repomd.xml"),
    ],
)
def test_an_optional_component_is_decided_where_an_image_lists_it(base_name: str, file: str) -> None:
    asked: list[str] = []
    strict = base_name != "debian-12"
    assert "dcgm" not in decisions(base_name, strict=strict)
    found = decisions(base_name, strict=strict, asked=asked, more=["dcgm", "dcgm_exporter"])
    assert [found[name].status for name in ("dcgm", "dcgm_exporter")] == ["install"] * 2
    address = f"https://developer.download.nvidia.com/compute/cuda/repos/{file}"
    assert asked[-2:] == [address] * 2


def test_a_repository_with_a_suite_is_asked_below_dists() -> None:
    asked: list[str] = []
    url, suite = (
        "nvidia_container_toolkit.repository.apt.url=http://x.test/",
        "nvidia_container_toolkit.repository.apt.suite=a",
    )
    decisions(asked=asked, overrides=[url, suite])
    assert asked == ["http://x.test/dists/a/InRelease"]


def test_a_folder_of_a_flat_repository_is_asked_itself() -> None:
    asked: list[str] = []
    name = "nvidia_container_toolkit.repository.apt"
    decisions(asked=asked, overrides=[f"{name}.url=http://x.test/", f"{name}.suite=ubuntu/"])
    assert asked == ["http://x.test/ubuntu/InRelease"]


def test_amazon_linux_takes_the_rpm_repository_and_has_no_nvtop() -> None:
    asked: list[str] = []
    found = decisions("eks-al2023-nvidia", strict=True, asked=asked)
    assert asked == ["https://nvidia.github.io/libnvidia-container/stable/rpm/x86_64/repodata/repomd.xml"]
    assert found["nvidia_container_toolkit"].status == "install"
    assert (found["nvtop"].status, "no package of it" in found["nvtop"].reason) == ("left_out", True)
    assert found["docker"].source.endswith("docker, its version is resolved at build time")


def test_an_unreachable_repository_is_left_out_with_the_reason() -> None:
    toolkit = decisions(why="no route")["nvidia_container_toolkit"]
    assert (toolkit.status, toolkit.reason, toolkit.version) == ("left_out", "no route", "1.19.1")


def test_an_unreachable_repository_is_an_error_on_a_strict_cloud() -> None:
    with pytest.raises(
        UnavailableError, match="the source of nvidia_container_toolkit can't be used: no route"
    ):
        decisions("eks-ubuntu-22.04", strict=True, why="no route")


def test_another_driver_in_the_mirror_is_an_error_that_names_it() -> None:
    with pytest.raises(IncompatibleError, match=r"has nvidia-kernel-dkms 535\.261\.03-1") as caught:
        decisions(mirror=MIRROR | {"nvidia-kernel-dkms": "535.261.03-1"})
    assert "--set nvidia_driver.version=535.261.03" in caught.value.hint


def test_a_branch_is_the_newest_version_of_it_that_the_mirror_has() -> None:
    mirror = MIRROR | {"nvidia-kernel-dkms": "580.82.07-1"}
    driver = decisions(mirror=mirror, overrides=["nvidia_driver.branch=580"])["nvidia_driver"]
    assert (driver.version, driver.package_version) == ("580.82.07", "580.82.07-1")


def test_a_branch_that_the_base_can_not_have_is_refused_with_the_bases_that_can() -> None:
    with pytest.raises(
        IncompatibleError, match=r"has .* 535\..*, wanted branch 580 of nvidia_driver"
    ) as caught:
        decisions(overrides=["nvidia_driver.branch=580"])
    for name in ("eks-ubuntu-22.04", "eks-al2023", "eks-al2023-nvidia", "dlami-ubuntu-22.04"):
        assert name in caught.value.hint.split()
    assert "debian-12" not in caught.value.hint


def test_a_branch_is_the_newest_version_of_it_that_an_rpm_repository_has() -> None:
    kmod = frozenset({"580.65.06-1.el9", "580.105.08-1.el9", "580.99.01-1.el9", "595.45.04-1.el9"})
    found = RpmMetadata({"kmod-nvidia-latest-dkms": kmod, "nvidia-container-toolkit": {"1.19.1-1"}}, {})
    probes = Probes(lambda _: None, lambda _: {}, lambda _: found)
    components = apply_overrides(load_components(), ["nvidia_driver.branch=580"])
    [driver] = decide_sources(
        ["nvidia_driver"], components, base("eks-al2023"), architecture="x86_64", strict=True, probes=probes
    )
    assert (driver.version, driver.package_version) == ("580.105.08", "580.105.08-1.el9")
    assert with_resolved_driver(components, [driver])["nvidia_driver"].version == "580.105.08"


def test_open_modules_are_another_package() -> None:
    with pytest.raises(IncompatibleError, match=r"has nvidia-open-kernel-dkms 535\.261\.03-1"):
        decisions(overrides=["nvidia_driver.modules=open"])


def test_a_mirror_without_a_package() -> None:
    without = {name: version for name, version in MIRROR.items() if name != "nvtop"}
    assert decisions(mirror=without)["nvtop"].status == "left_out"
    without = {name: version for name, version in MIRROR.items() if name != "nvidia-kernel-dkms"}
    with pytest.raises(UnavailableError, match="no package nvidia-kernel-dkms"):
        decisions(mirror=without)


def test_kubernetes_comes_with_the_base_or_not_at_all() -> None:
    assert decisions()["kubernetes"].status == "left_out"
    found = decisions("eks-ubuntu-22.04", strict=True)["kubernetes"]
    assert (found.status, found.version) == ("preinstalled", "1.34")


def test_versions_on_a_strict_cloud_are_resolved_at_build_time() -> None:
    found = decisions("eks-ubuntu-22.04", strict=True, overrides=["nvidia_driver.branch=580"])
    driver = found["nvidia_driver"]
    assert (driver.status, driver.version, driver.package_version) == ("install", "580.178.04", None)
    assert "nvidia-dkms-580-server, its version is resolved at build time" in driver.source
    assert "nvidia-compute-utils-580-server" in found["nvidia_persistenced"].source
    assert found["docker"].version is None


def test_a_preinstalled_driver_brings_its_daemon() -> None:
    found = decisions("dlami-ubuntu-22.04", strict=True, overrides=["nvidia_driver.branch=580"])
    assert found["nvidia_driver"].status == found["nvidia_persistenced"].status == "preinstalled"
    assert found["nvidia_driver"].version is None
    assert found["nvtop"].status == "install"


def test_a_distribution_without_a_named_package_is_an_error() -> None:
    components = load_components()
    docker = replace(components["docker"], packages={"debian": "docker.io"})
    probes = Probes(lambda _: None, lambda _: {}, lambda _: None)
    with pytest.raises(IncompatibleError, match="no package of docker for amazon"):
        decide_sources(
            ["docker"],
            {**components, "docker": docker},
            base("eks-al2023"),
            architecture="x86_64",
            strict=True,
            probes=probes,
        )


def test_amazon_linux_gets_the_driver_from_nvidias_repository() -> None:
    asked: list[str] = []
    found = decisions("eks-al2023", strict=True, asked=asked)
    assert found["nvidia_driver"].status == "install"
    assert found["nvidia_driver"].source.endswith("/compute/cuda/repos/amzn2023/x86_64")
    assert f"{found['nvidia_driver'].source}/repodata/repomd.xml" in asked


NVIDIAS = RpmMetadata(
    versions={
        "kmod-nvidia-latest-dkms": frozenset({"580.178.04-1.amzn2023", "580.178.04-2.amzn2023", "595.91-1"}),
        "nvidia-container-toolkit": frozenset({"1.19.1-1", "1.20.0-1"}),
    },
    streams={"nvidia-driver": frozenset({"580-dkms", "580-open", "595-open"})},
)


def test_an_rpm_repository_has_the_version_or_it_is_an_error_that_names_what_it_has() -> None:
    branch = ("nvidia_driver.branch=580",)
    found = decisions("eks-al2023", strict=True, rpm=NVIDIAS, overrides=branch)
    assert found["nvidia_driver"].package_version == "580.178.04-2.amzn2023"
    assert found["nvidia_container_toolkit"].package_version == "1.19.1-1"
    with pytest.raises(
        IncompatibleError, match="580-dkms, 580-open, 595-open of nvidia-driver; wanted: 535-dkms"
    ):
        decisions("eks-al2023", strict=True, rpm=NVIDIAS)
    with pytest.raises(IncompatibleError, match="wanted: 595-dkms"):
        decisions("eks-al2023", strict=True, rpm=NVIDIAS, overrides=["nvidia_driver.branch=595"])
    version = "nvidia_driver.version=580.1.1"
    with pytest.raises(
        IncompatibleError, match=r"has kmod-nvidia-latest-dkms 580.*, wanted nvidia_driver 580\.1\.1"
    ):
        decisions("eks-al2023", strict=True, rpm=NVIDIAS, overrides=[version])
    with pytest.raises(IncompatibleError, match="has no package kmod-nvidia-open-dkms"):
        decisions("eks-al2023", strict=True, rpm=NVIDIAS, overrides=[*branch, "nvidia_driver.modules=open"])


def test_an_unknown_component_of_an_image_is_an_error() -> None:
    probes = Probes(lambda _: None, lambda _: {}, lambda _: None)
    with pytest.raises(UsageError, match="unknown component 'nvtpo'"):
        decide_sources(
            ["nvtpo"],
            load_components(),
            base("debian-12"),
            architecture="x86_64",
            strict=False,
            probes=probes,
        )


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    (tmp_path / "InRelease").write_text("x")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=tmp_path)) as http_server:
        threading.Thread(target=http_server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http_server.server_address[1]}"
        http_server.shutdown()


def test_the_probe_really_asks(server: str, tmp_path: Path) -> None:
    assert http_unreachable(f"{server}/InRelease") is None
    assert http_unreachable(f"file://{tmp_path}/InRelease") is None
    assert "answered 404" in (http_unreachable(f"{server}/nothing") or "")
    assert "Connection refused" in (http_unreachable("http://127.0.0.1:9/x") or "")
    assert "not an http, https or file address" in (http_unreachable("ftp://x.test/") or "")


def test_the_probe_hides_credentials() -> None:
    assert "secret" not in (http_unreachable("http://me:secret@127.0.0.1:9/x") or "")
