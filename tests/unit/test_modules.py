"""The cache of kernel modules: what an entry is named after, and every reason to refuse one."""

import hashlib
import io
import json
import lzma
import os
import subprocess
import tarfile
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer
from rich.console import Console

from gpukiln.catalog.load import ROOT
from gpukiln.errors import CheckFailedError, UnavailableError, UsageError
from gpukiln.images.bake import BakeResources, ansible_variables, collecting_modules, module_cache
from gpukiln.images.builds import Builds
from gpukiln.images.module_store import FolderStore, S3Store, open_store
from gpukiln.images.modules import (
    OFFERED,
    SIGNATURE_MARKER,
    ModuleCache,
    find_entry_fault,
    module_line,
    read_key,
    signing_pair,
)
from gpukiln.progress import Progress
from tests.support.plans import plan

KERNEL, VERSION = "6.1.0-56-cloud-amd64", "535.309.01"
SCRIPT = ROOT / "roles/nvidia_driver/files/module-key.sh"


def a_key(kernel=KERNEL, signer="none"):
    parts = {"module": "nvidia-current", "version": VERSION, "kernel": kernel, "compiler": "gcc 12"}
    return "".join(f"{name}={value}\n" for name, value in {**parts, "signer": signer}.items())


def a_module(kernel=KERNEL, version=VERSION):
    """What is looked at of a module: strings between zero bytes."""
    return f"\x7fELF\0version={version}\0vermagic={kernel} SMP mod_unload modversions \0".encode()


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def pack(file: Path, members):
    with tarfile.open(file, "w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            if content is None:
                info.type, info.linkname = tarfile.SYMTYPE, "/etc/shadow"
            info.size = len(content or b"")
            tar.addfile(info, io.BytesIO(content or b""))
    return file


def in_tree(name="nvidia.ko", kernel=KERNEL):
    return f"./dkms_main_tree/{kernel}/x86_64/module/{name}"


GOOD = {"./dkms_binaries_only/dkms.conf": b"", in_tree(): a_module(), in_tree("uvm.ko"): a_module()}


def verdict(file, *, key=None, checksum="", certificate=None):
    return find_entry_fault(file, key or a_key(), checksum or sha256(file.read_bytes()), certificate)


def test_a_good_entry_has_nothing_against_it(tmp_path):
    assert verdict(pack(tmp_path / "a", GOOD)) == ""
    compressed = {in_tree("nvidia.ko.xz"): lzma.compress(a_module())}
    assert verdict(pack(tmp_path / "b", compressed)) == ""


@pytest.mark.parametrize(
    ("members", "why"),
    [
        ({**GOOD, in_tree("uvm.ko"): a_module("6.1.0-55-cloud-amd64")}, "vermagic names the kernel 6.1.0-55"),
        ({in_tree(): b"\x7fELF"}, "vermagic names the kernel (none), wanted 6.1.0-56"),
        ({in_tree(): a_module(version="535.1")}, "its version is 535.1, wanted 535.309.01"),
        ({in_tree(kernel="6.1.0-9"): a_module()}, "it lies in 6.1.0-9/x86_64, wanted 6.1.0-56"),
        ({in_tree("nvidia.ko.zst"): b"x"}, "it is compressed as .zst"),
        ({in_tree("nvidia.ko.xz"): b"x"}, "it can't be read: LZMAError"),
        ({"./dkms_binaries_only/dkms.conf": b""}, "it has no module"),
        ({**GOOD, "./a": None}, "./a is no plain file"),
        ({**GOOD, "./../a": b""}, "./../a is no plain file"),
        ({**GOOD, "/a": b""}, "/a is no plain file"),
    ],
)
def test_an_entry_with_something_else_in_it_is_refused(tmp_path, members, why):
    assert why in verdict(pack(tmp_path / "a", members))


def test_a_damaged_entry_is_refused(tmp_path):
    file = pack(tmp_path / "a", GOOD)
    assert verdict(file, checksum="0" * 64).endswith("wanted 000000000000...")
    file.write_bytes(file.read_bytes()[:200])
    assert verdict(file).startswith("it can't be read: ")
    file.write_bytes(b"no archive")
    assert verdict(file).startswith("it can't be read: ReadError")


def openssl(*arguments, stdin=b""):
    return subprocess.run(["openssl", *arguments], input=stdin, capture_output=True, check=True).stdout


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Makes a key and a certificate (DER)."""
    folder = tmp_path_factory.mktemp("pairs")

    def make(name):
        key, certificate = folder / f"{name}.key", folder / f"{name}.der"
        openssl(
            *("req", "-new", "-x509", "-nodes", "-newkey", "rsa:2048", "-subj", f"/CN={name}"),
            *("-outform", "DER", "-keyout", key, "-out", certificate),
        )
        return key, certificate

    return make


def signed(module, key, certificate):
    """As the kernel's scripts/sign-file does it."""
    pem = certificate.with_suffix(".pem")
    openssl("x509", "-inform", "DER", "-in", certificate, "-out", pem)
    signature = openssl(
        *("cms", "-sign", "-binary", "-noattr", "-nocerts", "-outform", "DER", "-md", "sha256"),
        *("-signer", pem, "-inkey", key),
        stdin=module,
    )
    return (
        module
        + signature
        + bytes((0, 0, 2))
        + bytes(5)
        + len(signature).to_bytes(4, "big")
        + SIGNATURE_MARKER
    )


def test_signatures(tmp_path, pair):
    key, certificate = pair("mine")
    _, other = pair("another")
    name = a_key(signer=sha256(certificate.read_bytes()))

    def with_module(content, certificate=certificate):
        file = pack(tmp_path / "a", {in_tree(): content})
        return verdict(file, key=name, certificate=certificate)

    module = signed(a_module(), key, certificate)
    assert with_module(module) == ""
    assert with_module(module, other).endswith("it is signed with another key pair than this build's")
    assert with_module(module, None).endswith("it is signed with another key pair than this build's")
    assert with_module(a_module()).endswith("it is not signed")
    assert with_module(module.replace(b"\x7fELF", b"\x7fELG")).endswith(
        "its signature is not the certificate's"
    )
    assert with_module(signed(a_module(), *pair("third"))).endswith("its signature is not the certificate's")
    assert with_module(a_module() + bytes(12) + SIGNATURE_MARKER).endswith("its signature is damaged")


@pytest.fixture(params=["folder", "s3"])
def store(request, tmp_path, monkeypatch):
    if request.param == "folder":
        yield FolderStore(tmp_path / "store")
        return
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    client = boto3.client("s3", region_name="us-east-1", endpoint_url=f"http://{host}:{port}")
    client.create_bucket(Bucket="modules")
    yield S3Store(client, "modules", "gpu")
    server.stop()


def run(store, folder, compiled=GOOD, key=None):
    """A build: what it is offered, and what it leaves when it has to compile."""
    told: list[str] = []
    cache = ModuleCache(store, folder, VERSION)
    cache.offer(told.append)
    key = key or a_key()
    entry = folder / sha256(key.encode())
    offered = entry.with_suffix(".tar.gz").exists()
    entry.with_suffix(".key").write_text(key)
    if not offered and compiled:
        pack(entry.with_suffix(".tar.gz"), compiled)
    [use] = cache.collect("a-build", told.append)
    assert not folder.exists()
    assert use.cached is offered
    assert told[-1] == module_line(use)
    return use, told


def test_what_is_compiled_once_is_there_the_next_time(store, tmp_path):
    first, _ = run(store, tmp_path / "one")
    assert not first.cached
    assert first.reason == "the cache had no entry; they are kept"
    second, told = run(store, tmp_path / "two")
    assert second.cached
    which = f"modules nvidia-current/{VERSION} for {KERNEL}"
    assert told == [f"{which}: from the cache (compiled before with gcc 12, verified)"]
    another, _ = run(store, tmp_path / "three", key=a_key(signer="0" * 64), compiled=None)
    assert another.reason.startswith("the cache had no entry; they were not kept")


def test_a_refused_entry_is_compiled_again_and_replaced(tmp_path):
    store = FolderStore(tmp_path / "store")
    run(store, tmp_path / "one")
    [archive] = (tmp_path / "store" / VERSION).glob("*.tar.gz")
    archive.write_bytes(archive.read_bytes() + b"x")
    use, told = run(store, tmp_path / "two")
    assert told[0].startswith(f"refused the modules {archive.name[:12]} of the cache: its checksum is ")
    assert use.reason.startswith("the cache's entry was refused: its checksum is ")
    assert use.reason.endswith("they are kept")
    assert run(store, tmp_path / "three")[0].cached


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda about: about | {"key": a_key("6.1.0-9")}, "its name is not its key's checksum"),
        (lambda _: {}, "its description can't be read: KeyError('created_at')"),
        (lambda about: about | {"sha256": "0"}, "its checksum is"),
    ],
)
def test_a_description_that_does_not_fit_is_refused(tmp_path, change, why):
    store = FolderStore(tmp_path / "store")
    run(store, tmp_path / "one")
    [file] = (tmp_path / "store" / VERSION).glob("*.json")
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    assert why in run(store, tmp_path / "two")[0].reason


def test_what_was_compiled_wrong_is_not_kept(tmp_path):
    store = FolderStore(tmp_path / "store")
    use, _ = run(store, tmp_path / "one", compiled={in_tree(): a_module("6.1.0-9")})
    assert "they were not kept: nvidia.ko: its vermagic names the kernel 6.1.0-9" in use.reason
    assert store.names(VERSION) == []


def test_only_the_newest_are_offered(tmp_path):
    store = FolderStore(tmp_path / "store")
    kernels = [f"6.1.0-{number}" for number in range(OFFERED + 2)]
    for kernel in kernels:
        run(store, tmp_path / "one", {in_tree(kernel=kernel): a_module(kernel)}, a_key(kernel))
    ModuleCache(store, tmp_path / "offered", VERSION).offer(print)
    assert len(list((tmp_path / "offered").iterdir())) == OFFERED


def test_a_store_that_can_not_be_reached_is_an_error_before_and_a_note_after(tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    client = boto3.client("s3", region_name="us-east-1", endpoint_url="http://127.0.0.1:9")
    with pytest.raises(UnavailableError, match="can't list the modules in s3://gone"):
        run(S3Store(client, "gone", ""), tmp_path / "one")
    store = FolderStore(tmp_path / "store")
    (tmp_path / "store").write_text("in the way")
    assert "they were not kept: " in run(store, tmp_path / "two")[0].reason


def test_where_the_store_is(tmp_path):
    class Cloud:
        def client(self, service):
            return service

    assert open_store("none", tmp_path, Cloud()) is None
    FolderStore.put(open_store("", tmp_path, Cloud()), SCRIPT, "1/a")
    assert (tmp_path / "modules/1/a").exists()
    assert open_store(str(tmp_path / "modules"), tmp_path, Cloud()).names("1") == ["1/a"]
    assert vars(open_store("s3://b/p/q/", tmp_path, Cloud())) == {
        "_s3": "s3",
        "_bucket": "b",
        "_prefix": "p/q/",
    }
    with pytest.raises(UsageError, match="names no bucket"):
        open_store("s3://", tmp_path, Cloud())


def test_a_pair_is_two_files(pair):
    key, certificate = pair("mine")
    assert signing_pair("", "") is None
    assert signing_pair(str(key), str(certificate)).sha256 == sha256(certificate.read_bytes())
    with pytest.raises(UsageError, match="--module-certificate is missing"):
        signing_pair(str(key), "")
    with pytest.raises(UsageError, match="--module-key nothing is no file"):
        signing_pair("nothing", str(certificate))
    with pytest.raises(UsageError, match="is not the certificate of"):
        signing_pair(str(key), str(pair("other")[1]))
    with pytest.raises(UsageError, match=f"--module-key {certificate} can't be used"):
        signing_pair(str(certificate), str(certificate))
    with pytest.raises(UsageError, match=f"--module-certificate {key} can't be used"):
        signing_pair(str(key), str(key))


@pytest.fixture
def machine(tmp_path):
    """Asks a machine with the driver's source and the headers of one kernel for a key."""
    root = tmp_path / "machine"
    source, headers = root / f"usr/src/nvidia-current-{VERSION}", root / f"lib/modules/{KERNEL}/build"
    for file, text in {
        source / "dkms.conf": "PACKAGE_NAME=nvidia-current",
        source / "nvidia/a.c": "int a;",
        headers / "Module.symvers": "0x1 a",
        headers / "include/generated/autoconf.h": "#define CONFIG_A 1",
        headers
        / "include/config/auto.conf": "CONFIG_CC_VERSION_TEXT=cc-of-the-kernel (Debian 12.2.0-14) 12.2.0",
        root / "bin/cc-of-the-kernel": "#!/bin/sh\necho cc 12.2.0; echo Copyright",
    }.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (root / "bin/cc-of-the-kernel").chmod(0o755)

    def ask(kind="proprietary", certificate=""):
        environment = {"GPUKILN_ROOT": str(root), "PATH": f"{root}/bin:{os.environ['PATH']}"}
        command = [SCRIPT, VERSION, kind, KERNEL, certificate]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    return root, ask


def test_a_key_names_what_the_modules_are_made_of(machine):
    _, ask = machine
    parts = read_key(ask().stdout)
    assert {name: parts[name] for name in ("module", "version", "kind", "kernel", "compiler", "signer")} == {
        "module": "nvidia-current",
        "version": VERSION,
        "kind": "proprietary",
        "kernel": KERNEL,
        "compiler": "cc 12.2.0",
        "signer": "none",
    }
    assert len(parts["source"]) == len(parts["headers"]) == 64
    assert parts["architecture"] == os.uname().machine


def test_a_key_changes_with_each_of_it_and_with_nothing_else(machine):
    root, ask = machine
    keys = [ask().stdout]
    os.utime(root / f"usr/src/nvidia-current-{VERSION}/nvidia/a.c", (0, 0))
    assert ask().stdout == keys[0]
    keys.append(ask("open").stdout)
    keys.append(ask(certificate=str(SCRIPT)).stdout)
    for file in (
        f"usr/src/nvidia-current-{VERSION}/nvidia/a.c",
        f"lib/modules/{KERNEL}/build/Module.symvers",
        f"lib/modules/{KERNEL}/build/include/generated/autoconf.h",
    ):
        (root / file).write_text("other")
        keys.append(ask().stdout)
    (root / "bin/cc-of-the-kernel").write_text("#!/bin/sh\necho cc 12.2.1")
    keys.append(ask().stdout)
    assert len(set(keys)) == len(keys)
    (root / f"usr/src/nvidia-current-{VERSION}/dkms.conf").unlink()
    assert "wanted the source that the driver's packages bring" in ask().stderr


@pytest.mark.usefixtures("debian")
def test_modules_are_kept_of_a_build_that_fails_later(tmp_path):
    build = Builds(tmp_path).create("eks-gpu")
    store = FolderStore(tmp_path / "store")
    progress = Progress(console=Console(file=io.StringIO()))
    cache = module_cache(plan(), build, BakeResources(store))
    cache.offer(print)
    key = a_key()

    def compile_and_fail():
        with collecting_modules(cache, build, progress):
            (cache.folder / f"{sha256(key.encode())}.key").write_text(key)
            pack(cache.folder / f"{sha256(key.encode())}.tar.gz", GOOD)
            raise CheckFailedError("a task failed")

    with pytest.raises(CheckFailedError):
        compile_and_fail()
    assert len(store.names(VERSION)) == 2
    assert "the cache had no entry; they are kept" in progress.console.file.getvalue().replace("\n", " ")


@pytest.mark.usefixtures("debian")
def test_what_ansible_is_told(tmp_path, pair):
    build = Builds(tmp_path).create("eks-gpu")
    cache = module_cache(plan(), build, BakeResources(FolderStore(tmp_path)))
    key, certificate = pair("mine")
    told = ansible_variables(plan(), build, cache, signing_pair(str(key), str(certificate)))
    assert told["nvidia_driver_module_cache_dir"] == str(build.folder / "modules")
    assert (told["nvidia_driver_signing_key"], told["nvidia_driver_sign"]) == (str(key), True)
    assert not [name for name in ansible_variables(plan(), build) if name.startswith("nvidia_driver")]
    assert module_cache(plan(), build, BakeResources()) is None
    assert plan(signer="0" * 64).digest != plan().digest
