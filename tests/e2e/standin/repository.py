"""Builds a signed apt repository that stands in for NVIDIA's: four packages of the toolkit, one version."""

import hashlib
import shutil
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
PACKAGES = (
    "nvidia-container-toolkit",
    "nvidia-container-toolkit-base",
    "libnvidia-container-tools",
    "libnvidia-container1",
)


def build(folder: Path, *, version: str) -> str:
    """Make the repository.

    Args:
        folder: Where; gets Packages, Release, InRelease, gpgkey and the packages.
        version: The toolkit's version.

    Returns:
        Fingerprint of the key.
    """
    folder.mkdir(parents=True)
    entries = []
    for name in PACKAGES:
        tree = folder / "tree"
        control = (
            f"Package: {name}\nVersion: {version}-1\nArchitecture: amd64\n"
            "Section: utils\nPriority: optional\nMaintainer: gpukiln tests <tests@localhost>\n"
            "Description: stand-in for tests, not NVIDIA's package\n"
        )
        (tree / "DEBIAN").mkdir(parents=True)
        (tree / "DEBIAN/control").write_text(control)
        if name == "nvidia-container-toolkit-base":
            (tree / "usr/bin").mkdir(parents=True)
            shutil.copy(HERE / "nvidia-ctk", tree / "usr/bin/nvidia-ctk")
            (tree / "usr/bin/nvidia-ctk").chmod(0o755)
        package = folder / f"{name}_{version}-1_amd64.deb"
        run("dpkg-deb", "--root-owner-group", "--build", str(tree), str(package))
        shutil.rmtree(tree)
        data = package.read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        entries.append(f"{control}Filename: ./{package.name}\nSize: {len(data)}\nSHA256: {digest}\n")
    index = "\n".join(entries)
    (folder / "Packages").write_text(index)
    digest = hashlib.sha256(index.encode()).hexdigest()
    (folder / "Release").write_text(
        f"Origin: gpukiln stand-in\nLabel: stand-in\nSuite: stable\nArchitectures: amd64\n"
        f"Date: Thu, 01 Jan 2026 00:00:00 UTC\nSHA256:\n {digest} {len(index)} Packages\n"
    )
    return sign(folder)


def sign(folder: Path) -> str:
    """Sign the repository with a new key, whose private half is thrown away.

    Args:
        folder: The repository.

    Returns:
        The key's fingerprint.
    """
    home = folder / "gnupg"
    home.mkdir(mode=0o700)
    gpg = ("gpg", "--batch", "--homedir", str(home))
    run(*gpg, "--passphrase", "", "--quick-generate-key", "stand-in <tests@localhost>", "ed25519", "sign")
    listing = run(*gpg, "--with-colons", "--list-keys")
    fingerprint = next(line.split(":")[9] for line in listing.splitlines() if line.startswith("fpr:"))
    (folder / "gpgkey").write_text(run(*gpg, "--armor", "--export", fingerprint))
    run(*gpg, "--clearsign", "--output", str(folder / "InRelease"), str(folder / "Release"))
    run("gpgconf", "--homedir", str(home), "--kill", "gpg-agent")
    shutil.rmtree(home)
    return fingerprint


def run(*command: str) -> str:
    """Run a tool and return what it printed."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
