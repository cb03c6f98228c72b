"""Builds a signed package repository of stand-ins. Runs on the machine that installs from it.

    python3 build.py apt|rpm FOLDER SPECIFICATION.json

Prints the fingerprint of the key, whose public half is FOLDER/gpgkey. The private half is thrown away.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

MODULE = """\
#define entry(number, text) \\
    static const char info##number[] __attribute__((section(".modinfo"), used)) = text;
entry(0, "name={name}") entry(1, "version={version}") entry(2, "license={license}")
entry(3, "vermagic={kernel} SMP mod_unload ")
"""


def run(*command, cwd=None):
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{command}: {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def place(tree, files):
    """Put the files of a package: text, a kernel module that modinfo and depmod read, a symbolic link, or a
    file that is on this machine."""
    for path, value in files.items():
        target = tree / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(value, str):
            target.write_text(value)
        elif "link" in value:
            target.symlink_to(value["link"])
            continue
        elif "copy" in value:
            shutil.copy2(value["copy"], target)
            continue
        else:
            source = target.with_suffix(".c")
            source.write_text(MODULE.format(**value))
            run("gcc", "-c", "-o", str(target), str(source))
            source.unlink()
        executable = "/bin/" in path or "/sbin/" in path
        target.chmod(0o755 if executable else 0o644)


def deb(folder, package):
    tree = folder / "tree"
    place(tree, package["files"])
    fields = {
        "Package": package["name"],
        "Version": package["version"],
        "Architecture": "amd64",
        "Maintainer": "gpukiln tests <tests@localhost>",
        **{
            name: ", ".join(package[name.lower()])
            for name in ("Depends", "Provides", "Conflicts", "Replaces")
            if package[name.lower()]
        },
        "Description": "stand-in for tests",
    }
    control = "".join(f"{name}: {value}\n" for name, value in fields.items())
    (tree / "DEBIAN").mkdir(parents=True)
    (tree / "DEBIAN/control").write_text(control)
    for script in ("postinst", "prerm"):
        if package[script]:
            (tree / f"DEBIAN/{script}").write_text(f"#!/bin/sh\nset -e\n{package[script]}\n")
            (tree / f"DEBIAN/{script}").chmod(0o755)
    pool = folder / "pool" / package["component"] if package["component"] else folder
    pool.mkdir(parents=True, exist_ok=True)
    file = pool / f"{package['name']}_{package['version'].replace(':', '%3a')}_amd64.deb"
    run("dpkg-deb", "-Znone", "--root-owner-group", "--build", str(tree), str(file))
    shutil.rmtree(tree)
    data = file.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    name = file.relative_to(folder) if package["component"] else f"./{file.name}"
    return f"{control}Filename: {name}\nSize: {len(data)}\nSHA256: {digest}\n"


def apt_index(folder, packages, release, sign):
    """A flat repository, or with components a suite of an archive."""
    components = sorted({package["component"] for package in packages})
    fields = {"Origin": "stand-in", "Label": "stand-in", "Suite": "stable", **release}
    lists = folder
    if components != [""]:
        fields["Components"] = " ".join(components)
        lists = folder / "dists" / fields["Suite"]
    sums = []
    for component in components:
        index = "\n".join(deb(folder, package) for package in packages if package["component"] == component)
        name = f"{component}/binary-amd64/Packages" if component else "Packages"
        (lists / name).parent.mkdir(parents=True, exist_ok=True)
        (lists / name).write_text(index)
        sums.append(f" {hashlib.sha256(index.encode()).hexdigest()} {len(index.encode())} {name}\n")
    fields |= {"Architectures": "amd64", "Date": "Thu, 01 Jan 2026 00:00:00 UTC"}
    text = "".join(f"{name}: {value}\n" for name, value in fields.items())
    (lists / "Release").write_text(f"{text}SHA256:\n{''.join(sums)}")
    (lists / "InRelease").unlink(missing_ok=True)
    sign("--clearsign", "--output", str(lists / "InRelease"), str(lists / "Release"))


SPEC = """\
Name: {name}
Epoch: {epoch}
Version: {version}
Release: {release}
Summary: stand-in for tests
License: none
BuildArch: {architecture}
AutoReqProv: no
{relations}
%description
stand-in for tests
%files
{files}
%post
{postinst}
%preun
if [ "$1" = 0 ]; then :
{prerm}
fi
"""


def rpm(folder, package):
    tree = folder / "tree"
    place(tree, package["files"])
    epoch, _, rest = package["version"].rpartition(":")
    version, release = rest.split("-", 1)
    tags = {"depends": "Requires", "provides": "Provides", "conflicts": "Conflicts", "replaces": "Obsoletes"}
    spec = SPEC.format(
        name=package["name"],
        epoch=epoch or 0,
        version=version,
        release=release,
        architecture="x86_64",
        relations="\n".join(f"{tag}: {one}" for key, tag in tags.items() for one in package[key]),
        files="\n".join(package["files"]),
        postinst=package["postinst"] or ":",
        prerm=package["prerm"] or ":",
    )
    tree.mkdir(exist_ok=True)
    (folder / "spec").write_text(spec)
    run(
        *("rpmbuild", "-bb", "--quiet", f"--buildroot={tree}", f"--define=_rpmdir {folder}"),
        *("--define=_build_name_fmt %{NAME}-%{VERSION}-%{RELEASE}.%{ARCH}.rpm", "--define=__brp_compress :"),
        *("--define=_binary_payload w0.gzdio", "--target=x86_64", str(folder / "spec")),
    )
    shutil.rmtree(tree, ignore_errors=True)


def rpm_index(folder, packages, modules, carried, sign, fingerprint):
    for package in packages:
        rpm(folder, package)
    files = [str(file) for file in folder.glob("*.rpm")]
    run("rpmsign", "--addsign", f"--define=_gpg_name {fingerprint}", "--define=__gpg /usr/bin/gpg", *files)
    # With the signatures that they have.
    for file in carried:
        shutil.copy2(file, folder)
    run("createrepo_c", "--quiet", str(folder))
    if modules:
        (folder / "modules.yaml").write_text(modules)
        run("modifyrepo_c", "--mdtype=modules", str(folder / "modules.yaml"), str(folder / "repodata"))
    (folder / "repodata/repomd.xml.asc").unlink(missing_ok=True)
    sign(
        "--armor",
        "--detach-sign",
        "--output",
        str(folder / "repodata/repomd.xml.asc"),
        str(folder / "repodata/repomd.xml"),
    )


def gone_already(_function, _path, failure):
    """The agent removes its sockets while it ends, and gpgconf does not wait for that."""
    if not issubclass(failure[0], FileNotFoundError):
        raise failure[1]


def main(kind, folder, specification):
    folder = Path(folder)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    home = folder / "gnupg"
    home.mkdir(mode=0o700)
    os.environ["GNUPGHOME"] = str(home)
    gpg = ("gpg", "--batch", "--quiet")
    run(*gpg, "--passphrase", "", "--quick-generate-key", "stand-in <tests@localhost>", "rsa2048", "sign")
    listing = run(*gpg, "--with-colons", "--list-keys")
    fingerprint = next(line.split(":")[9] for line in listing.splitlines() if line.startswith("fpr:"))
    (folder / "gpgkey").write_text(run(*gpg, "--armor", "--export", fingerprint))
    wanted = json.loads(Path(specification).read_text())

    def sign(*arguments):
        run(*gpg, "--local-user", fingerprint, *arguments)

    if kind == "apt":
        apt_index(folder, wanted["packages"], wanted["release"], sign)
    else:
        carried = [
            file for pattern in wanted["carried"] for file in sorted(Path("/").glob(pattern.lstrip("/")))
        ]
        rpm_index(folder, wanted["packages"], wanted["modules"], carried, sign, fingerprint)
    run("gpgconf", "--kill", "gpg-agent")
    shutil.rmtree(home, onerror=gone_already)
    print(fingerprint)


if __name__ == "__main__":
    main(*sys.argv[1:])
