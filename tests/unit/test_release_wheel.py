"""A release of gpukiln itself: SBOM, provenance and signature of its wheel, and the script that CI calls."""

import base64
import hashlib
import json
import os
import subprocess
import zipfile
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gpukiln import __version__
from gpukiln.attest import signing
from gpukiln.attest.wheel import attest, make_sbom, pins, read_wheel
from gpukiln.errors import CheckFailedError, UsageError

ROOT = Path(__file__).resolve().parents[2]
METADATA = """\
Metadata-Version: 2.4
Name: gpukiln
Version: 0.2.0
Requires-Dist: boto3>=1.35
Requires-Dist: jinja2>=3.1; extra == 'image'
Requires-Dist: jinja2>=3.1; extra == 'k8s'
Requires-Dist: gpukiln[image,k8s]; extra == 'all'
"""
LOCK = "boto3==1.40.1 \\\n    --hash=sha256:00\nJinja2==3.1.6 \\\n    --hash=sha256:01\n"


@pytest.fixture
def checkout(tmp_path):
    folder = tmp_path / "checkout"
    folder.mkdir()
    (folder / "requirements.lock").write_text(LOCK)
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *command], cwd=folder, check=True)
    return folder


@pytest.fixture
def wheel(tmp_path):
    file = tmp_path / "gpukiln-0.2.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("gpukiln-0.2.0.dist-info/METADATA", METADATA)
    return file


def test_provenance_names_the_wheel_the_commit_and_the_lock(wheel, checkout):
    sbom, provenance = attest(wheel, root=checkout)
    statement = json.loads(provenance.read_text())
    assert statement["subject"] == [
        {"name": wheel.name, "digest": {"sha256": hashlib.sha256(wheel.read_bytes()).hexdigest()}}
    ]
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=checkout, capture_output=True, text=True, check=True
    )
    source, lock = statement["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert source["digest"] == {"gitCommit": head.stdout.strip()}
    assert lock["digest"] == {"sha256": hashlib.sha256(LOCK.encode()).hexdigest()}
    [byproduct] = statement["predicate"]["runDetails"]["byproducts"]
    assert byproduct["digest"] == {"sha256": hashlib.sha256(sbom.read_bytes()).hexdigest()}


def test_sbom_has_each_requirement_once_with_its_pin(wheel):
    document = json.loads(make_sbom(read_wheel(wheel), pins(LOCK), datetime(2026, 1, 1, tzinfo=UTC)))
    assert [(row["name"], row["version"]) for row in document["components"]] == [
        ("boto3", "1.40.1"),
        ("jinja2", "3.1.6"),
    ]
    assert len(document["components"][1]["properties"]) == 2, "it is in two extras"
    assert document["metadata"]["component"]["purl"] == "pkg:pypi/gpukiln@0.2.0"


def test_a_signed_release_can_be_verified_and_another_key_refuses_it(wheel, checkout, tmp_path):
    keys = []
    for name in ("first", "second"):
        keys.append(tmp_path / f"{name}.pem")
        subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", keys[-1]], check=True)
        public = tmp_path / f"{name}.pub"
        subprocess.run(["openssl", "pkey", "-in", keys[-1], "-pubout", "-out", public], check=True)
    *_, provenance, envelope = attest(wheel, str(keys[0]), root=checkout)
    signing.check_signature(envelope.read_text(), signing.load_public_key(tmp_path / "first.pub"))
    assert base64.b64decode(json.loads(envelope.read_text())["payload"]) == provenance.read_bytes()
    with pytest.raises(CheckFailedError, match=r"signed by .*, wanted"):
        signing.check_signature(envelope.read_text(), signing.load_public_key(tmp_path / "second.pub"))


def test_a_changed_checkout_is_not_released(wheel, checkout):
    (checkout / "requirements.lock").write_text("")
    with pytest.raises(UsageError, match="changed since its last commit"):
        attest(wheel, root=checkout)
    assert not list(wheel.parent.glob("*.json"))


def test_a_file_that_is_no_wheel_is_named(tmp_path, checkout):
    (tmp_path / "a.whl").write_text("text")
    with pytest.raises(UsageError, match=r"a\.whl is no wheel"):
        attest(tmp_path / "a.whl", root=checkout)


def test_a_tag_that_is_not_the_version_is_refused(tmp_path):
    environment = {**os.environ, "GITHUB_REF_TYPE": "tag", "GITHUB_REF_NAME": "v9.9.9"}
    done = subprocess.run(
        [ROOT / "scripts/release", tmp_path / "dist"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert f"the tag is v9.9.9, gpukiln/__init__.py has {__version__}; wanted: v{__version__}" in done.stderr
    assert not (tmp_path / "dist").exists()


def test_the_changelog_has_a_section_of_the_version():
    """The release workflow publishes it."""
    assert f"\n## {__version__} - 20" in (ROOT / "CHANGELOG.md").read_text()
