"""A vendor's package repository: its key, pinned by fingerprint, and the file that names it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..apt_sources import decide as apt_sources
from ..plan import MANAGED, Looks, Node, Plan, Role, System

PRIORITIES = {"nvidia-container-toolkit": 1}
"""Where another repository has packages of the same names, dnf takes them only from the one with the smaller
number; without one it is 99. NVIDIA's CUDA repository has the container toolkit too, signed with another key
than the one that its own file names (NVIDIA/nvidia-container-toolkit, issue 116, on 2025-09-17), and is often
there under a name that gpukiln did not choose."""
AMAZONS = {"cuda": 9}
"""Amazon Linux has a dkms that is older than what the driver wants (awslabs/amazon-eks-ami, pull request
2284: theirs is taken from the CUDA repository alone), and its own repository comes before others."""
CUDA_ARCHITECTURES = {"x86_64": "x86_64", "aarch64": "sbsa"}
APT_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True)
class Repository:
    """A repository for the package manager of one system.

    Args:
        given: `repository` in the form of components.yaml.
    """

    name: str
    given: Mapping[str, Any]
    system: System

    @classmethod
    def of(cls, system: System, name: str, given: Mapping[str, Any], **more: str) -> "Repository":
        """One of what is given for each package manager, {apt, rpm}; `more` where that does not say it."""
        here = given.get("apt" if system.apt else "rpm") or {}
        added = {key: value for key, value in more.items() if value}
        filled = {key: _filled(value, system) for key, value in {**here, **added}.items()}
        return cls(name, filled, system)

    @property
    def url(self) -> str:
        return str(self.given.get("url", ""))

    @property
    def fingerprint(self) -> str:
        return str(self.given.get("key_fingerprint", ""))

    @property
    def keyring(self) -> str:
        if self.system.apt:
            return f"/usr/share/keyrings/{self.name}.gpg"
        return f"/etc/pki/rpm-gpg/RPM-GPG-KEY-{self.name}"

    @property
    def path(self) -> str:
        """The file that names it. Vendors' own name, so that it replaces one that was written by hand."""
        if self.system.apt:
            return f"/etc/apt/sources.list.d/{self.name}.list"
        return f"/etc/yum.repos.d/{self.name}.repo"

    @property
    def text(self) -> str:
        if self.system.apt:
            # A suite that ends with a slash has no component (sources.list(5)).
            suite = " ".join(filter(None, (self.given["suite"], self.given.get("component"))))
            return f"# {MANAGED}\ndeb [signed-by={self.keyring}] {self.url} {suite}\n"
        amazons = AMAZONS if self.system.distribution == "Amazon" else {}
        values = {
            "baseurl": self.url,
            "enabled": 1,
            "gpgcheck": 1,
            "gpgkey": f"file://{self.keyring}",
            "includepkgs": " ".join(self.given.get("includepkgs") or []),
            "name": f"{self.name}, managed by Ansible",
            "priority": {**PRIORITIES, **amazons}.get(self.name, ""),
            "repo_gpgcheck": int(self.given.get("repo_gpgcheck", False)),
        }
        lines = "".join(f"{key} = {value}\n" for key, value in values.items() if value != "")
        return f"[{self.name}]\n{lines}\n"

    @property
    def release_file(self) -> str:
        """Where apt's signed list of its lists is."""
        root = self.url.replace("$(ARCH)", APT_ARCHITECTURES.get(self.system.architecture, "")).rstrip("/")
        suite = str(self.given.get("suite", ""))
        return f"{root}/InRelease" if suite.endswith("/") else f"{root}/dists/{suite}/InRelease"

    @property
    def looks(self) -> Looks:
        return {
            "files": [self.path],
            "keyrings": [self.keyring],
            "globs": list(apt_sources.RETIRED) if self.system.apt else [],
            "packages": ["gpg"] if self.system.apt else [],
        }

    def trusted(self, node: Node) -> bool:
        """Whether the installed keyring holds the trusted key and no other."""
        return bool(node["keyrings"][self.keyring] == [self.fingerprint])

    def have(self, node: Node) -> Plan:
        """What is missing of it on a node that was looked at; refused where it is not well described."""
        plan = Plan()
        if not (
            re.fullmatch(r"[a-z0-9][a-z0-9.-]*", self.name)
            and self.url
            and not re.search("//[^/]*@", self.url)
            and re.fullmatch("[0-9A-F]{40}", self.fingerprint)
        ):
            shown = re.sub("//[^/]*@", "//***@", self.url)
            return plan.refuse(
                f"Found the repository {self.name or 'without a name'} at {shown or 'no address'} with the"
                f" key fingerprint {self.fingerprint or 'none'}, wanted a name of small letters, digits and"
                f" dashes, an address for {self.system.manager} without a password, and 40 hexadecimal"
                " digits. Correct the component's `repository` in components.yaml or the inventory; a"
                " password belongs into /etc/apt/auth.conf.d or a proxy."
            )
        if self.system.apt:
            plan.remove(apt_sources.retired_lists(node))
        plan.do["key"] = not self.trusted(node)
        plan.do["gpg"] = plan.do["key"] and self.system.apt and "gpg" not in node["packages"]
        if plan.do["key"]:
            plan.lines.append(f"+{self.keyring}: {self.fingerprint}")
        plan.do["added"] = plan.write(node, self.path, self.text)
        return plan


def look(role: Role) -> Looks:
    looks = _asked(role).looks
    paths, names = _replaced(role)
    looks["globs"] += paths
    looks["packages"] += names
    return looks


def decide(role: Role, node: Node) -> Plan:
    """`do`: what the repository is (`url`, `path`, ...), and what is to be done: `key`, `gpg`, `fetch`.

    `replaced` are packages that go, `added` says that its file is new, `known` that the package manager can
    name its packages.
    """
    repository = _asked(role)
    plan = repository.have(node)
    if plan.refusal:
        return plan
    paths, names = _replaced(role)
    gone = {path for pattern in paths for path in node["globs"][pattern]} - {repository.path}
    plan.remove(sorted(gone - set(plan.absent)))
    replaced = [name for name in names if name in node["packages"]]
    plan.lines += [f"-{name}" for name in replaced]
    plan.do |= {
        "replaced": replaced,
        "fetch": role["refresh"] or plan.do["added"] or plan.do["key"],
        "url": repository.url,
        "path": repository.path,
        "release_file": repository.release_file,
        "keyring": repository.keyring,
        "key_url": repository.given.get("key_url", ""),
        "fingerprint": repository.fingerprint,
        "known": not (role.check and (plan.do["added"] or plan.do["key"])),
    }
    return plan


def _asked(role: Role) -> Repository:
    given = {"apt": role["apt"], "rpm": role["rpm"]}
    more = {"key_url": role["key_url"], "key_fingerprint": role["key_fingerprint"]}
    return Repository.of(role.system, role["name"], given, **more)


def _replaced(role: Role) -> tuple[list[str], list[str]]:
    """Patterns of files, and packages, that it replaces."""
    return (
        [name for name in role["replaces"] if name.startswith("/")],
        [name for name in role["replaces"] if not name.startswith("/")],
    )


def _filled(value: Any, system: System) -> Any:
    """What NVIDIA's CUDA repository calls distribution and architecture, filled in."""
    if not isinstance(value, str):
        return value
    # NVIDIA's names of distributions: amzn2023, ubuntu2204, debian12, rhel9.
    names = {
        "Amazon": f"amzn{system.major}",
        "Ubuntu": f"ubuntu{system.version.replace('.', '')}",
        "Debian": f"debian{system.major}",
    }
    distribution = names.get(system.distribution, f"rhel{system.major}")
    return value.replace("{cuda_distribution}", distribution).replace(
        "{cuda_arch}", CUDA_ARCHITECTURES.get(system.architecture, system.architecture)
    )
