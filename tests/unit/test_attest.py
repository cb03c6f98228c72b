"""SBOM and provenance: what they hold, and that each step of the verification fails once (moto is EC2)."""

import base64
import hashlib
import json
import shutil
from dataclasses import replace
from functools import cache

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from google.protobuf import json_format
from in_toto_attestation.predicates.provenance.v1 import provenance_pb2
from in_toto_attestation.v1 import statement_pb2
from in_toto_attestation.v1.statement import Statement

from gpukiln.attest import attestation
from gpukiln.attest.provenance import image_subject
from gpukiln.attest.signing import PASSWORD, load_public_key, load_signer
from gpukiln.clouds.tags import SBOM_TAG, SIGNING_KEY_TAG, STATEMENT_TAG
from gpukiln.commands import ami_attest
from gpukiln.errors import RefusedError, UnavailableError, UsageError
from gpukiln.images.builds import Bake, Builds, Record
from gpukiln.images.channels import load_channel
from gpukiln.images.subject import subject_of
from gpukiln.instances.tags import tag_list
from gpukiln.pipeline.verdict_tags import write_verdict_tags
from gpukiln.release.find import verification_of_build
from gpukiln.release.needs import require_verified
from tests.support.exit_codes import code_of
from tests.support.plans import VERDICT, MotoCloud, ec2_with_a_base, plan

PACKAGES = {"libc6": "2.36-9+b1", "nvidia-kernel-dkms": "535.309.01-0+deb12u1", "odd": "1:2~rc1-1"}
DETAILS = {
    "libc6": {
        "source": "glibc",
        "source_version": "2.36-9",
        "architecture": "amd64",
        "installed_kib": 12986,
        "licenses": ["GPL-2+", "apache-2.0"],
    }
}
COMPONENTS = {
    "nvidia_driver": {
        "status": "installed",
        "version": "535.309.01",
        "branch": 535,
        "source": "Debian archive: nvidia-kernel-dkms",
        "reason": "",
        "package": {"name": "nvidia-kernel-dkms", "version": "535.309.01-0+deb12u1"},
    },
    "nvidia_container_toolkit": {
        "status": "left_out",
        "version": "1.19.1",
        "branch": None,
        "source": "NVIDIA's repository",
        "reason": "no route",
    },
}


CLOUD = MotoCloud()


@pytest.fixture(scope="module")
def planned():
    """One EC2 and one plan for all tests: making them is the slow part."""
    with ec2_with_a_base(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(CLOUD, "client", cache(CLOUD.client))
        yield plan(CLOUD, tools={"packer": "1.6.6"})


@pytest.fixture
def bake(planned, tmp_path, monkeypatch):
    """Makes builds, each with an AMI and a snapshot of its own, and points the commands at them."""
    builds, cloud = Builds(tmp_path), CLOUD
    monkeypatch.setenv("GPUKILN_HOME", str(tmp_path))
    monkeypatch.setattr("gpukiln.clouds.select.make_cloud", lambda *_, **__: cloud)

    def make(components=COMPONENTS):
        ec2, build = cloud.client("ec2"), builds.create("eks-gpu")
        zone = f"{cloud.region}a"
        volume = ec2.create_volume(AvailabilityZone=zone, Size=1)["VolumeId"]
        disk = {
            "DeviceName": "/dev/xvda",
            "Ebs": {"SnapshotId": ec2.create_snapshot(VolumeId=volume)["SnapshotId"]},
        }
        image = ec2.register_image(Name=build.id, BlockDeviceMappings=[disk])["ImageId"]
        baked = Bake(image, build.id, cloud.region, "6.1.0-56-cloud-amd64", components, PACKAGES)
        record = Record(build.id, "verified", planned, baked, (VERDICT,))
        build.write(record)
        write_verdict_tags(cloud, subject_of(planned, image, build.id), VERDICT)
        written = {"package_details": DETAILS, "built_at": "2026-11-21T06:00:01+00:00"}
        (build.folder / "image.json").write_text(json.dumps(written))
        return build

    return make


@pytest.fixture
def keys(tmp_path):
    """Writes a key pair; returns both files."""

    def make(name, key=None, encryption=None):
        key = key or ed25519.Ed25519PrivateKey.generate()
        private, public = tmp_path / f"{name}.pem", tmp_path / f"{name}.pub"
        form = PrivateFormat.PKCS8
        private.write_bytes(key.private_bytes(Encoding.PEM, form, encryption or NoEncryption()))
        spki = PublicFormat.SubjectPublicKeyInfo
        public.write_bytes(key.public_key().public_bytes(Encoding.PEM, spki))
        return private, public

    return make


def write(build, signer=None):
    return attestation.write_attestation(build, build.read(), CLOUD, signer)


def outcomes(build, key=None):
    found = attestation.verify_attestation(build, build.read(), CLOUD, key)
    return {finding.id: finding.outcome for finding in found}


def failed(build, key=None):
    return {step for step, outcome in outcomes(build, key).items() if outcome == "failed"}


def test_the_sbom_is_valid_and_names_system_components_and_packages(bake):
    build = bake()
    text = write(build).sbom.read_text()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    sbom = json.loads(text)
    at = sbom["metadata"]["timestamp"]
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text.replace(at, at[:10])) is not None
    assert sbom["metadata"]["component"]["version"] == build.read().bake.image_id
    left_out = {"name": "gpukiln:left-out:nvidia_container_toolkit", "value": "no route"}
    assert left_out in sbom["metadata"]["component"]["properties"]
    found = {component["name"]: component for component in sbom["components"]}
    assert found.keys() == {*PACKAGES, "debian", "nvidia_driver", "cuda-driver-api"}
    assert found["nvidia_driver"]["type"] == "device-driver"
    assert found["cuda-driver-api"]["version"] == "12.2"
    libc = found["libc6"]
    assert (
        libc["purl"] == "pkg:deb/debian/libc6@2.36-9%2Bb1?arch=amd64&distro=debian-12&upstream=glibc%402.36-9"
    )
    assert [row["license"].get("id") or row["license"]["name"] for row in libc["licenses"]] == [
        "Apache-2.0",
        "GPL-2+",
    ]
    assert {"name": "gpukiln:source-package", "value": "glibc"} in libc["properties"]
    assert "licenses" not in found["odd"]
    driver = next(row for row in sbom["dependencies"] if row["ref"] == "component:nvidia_driver")
    assert driver["dependsOn"] == [found["nvidia-kernel-dkms"]["bom-ref"]]


def test_the_provenance_has_the_form_of_slsa_and_names_what_was_built_from_what(bake):
    build = bake()
    written = write(build)
    text = written.provenance.read_text()
    parsed = json_format.Parse(text, statement_pb2.Statement())  # refuses unknown fields
    Statement.copy_from_pb(parsed).validate()
    statement = json.loads(text)
    json_format.ParseDict(statement["predicate"], provenance_pb2.Provenance())
    names = [subject["name"] for subject in statement["subject"]]
    assert names[0] == written.image_id
    assert names[1].startswith("snap-")
    assert names[2] == "/etc/gpukiln/image.json"
    assert statement["subject"][0]["uri"] == f"arn:aws:ec2:us-west-2::image/{names[0]}"
    assert image_subject("us-gov-west-1", "ami-1")["uri"] == "arn:aws-us-gov:ec2:us-gov-west-1::image/ami-1"
    definition = statement["predicate"]["buildDefinition"]
    record = build.read()
    by_name = {row["name"]: row for row in definition["resolvedDependencies"]}
    assert by_name[record.plan.base.image_name]["digest"] == {"amiId": record.plan.base.id}
    assert by_name["inputs of the build"]["digest"] == {"sha256": record.plan.digest}
    inputs = by_name["inputs of the build"]["annotations"]["inputs"]  # as docs/attestation.md says it
    text = json.dumps(inputs, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert hashlib.sha256(text.encode()).hexdigest() == record.plan.digest
    assert by_name["nvidia_driver"]["uri"].startswith("pkg:deb/debian/nvidia-kernel-dkms@535.309.01-0")
    assert "nvidia_container_toolkit" not in by_name
    run = statement["predicate"]["runDetails"]
    assert run["builder"]["version"]["packer"] == "1.6.6"
    assert run["metadata"]["invocationId"] == build.id
    assert run["metadata"]["startedOn"] == "2026-11-21T06:00:00Z"


def test_a_vendors_repository_is_named_with_its_key(bake):
    url = "https://nvidia.github.io/libnvidia-container/stable/deb/$(ARCH)"
    installed = {"status": "installed", "version": "1.19.1", "branch": None, "source": url, "reason": ""}
    package = {"name": "nvidia-container-toolkit", "version": "1.19.1-1"}
    build = bake({**COMPONENTS, "nvidia_container_toolkit": {**installed, "package": package}})
    record = build.read()
    recipe = {
        "repository": {"apt": {"url": url, "key_fingerprint": "C95B"}, "rpm": {"key_fingerprint": "no"}}
    }
    inputs = {**record.plan.inputs, "recipe nvidia_container_toolkit": json.dumps(recipe)}
    build.write(replace(record, plan=replace(record.plan, inputs=inputs)))
    statement = json.loads(write(build).provenance.read_text())
    rows = statement["predicate"]["buildDefinition"]["resolvedDependencies"]
    [row] = [row for row in rows if row["name"] == "nvidia_container_toolkit"]
    assert row["annotations"] == {"source": url, "version": "1.19.1", "keyFingerprint": "C95B"}


@pytest.mark.parametrize(
    "key", [ed25519.Ed25519PrivateKey.generate(), ec.generate_private_key(ec.SECP256R1())]
)
def test_what_was_written_and_signed_is_verified(bake, keys, key):
    build = bake()
    private, public = keys("mine", key)
    written = write(build, load_signer(private))
    assert set(outcomes(build, load_public_key(public)).values()) == {"passed"}
    if isinstance(key, ed25519.Ed25519PrivateKey):  # by DSSE's own words, without the library that signed
        envelope, payload = json.loads(written.envelope.read_text()), written.provenance.read_bytes()
        signed = b"DSSEv1 28 application/vnd.in-toto+json %d %b" % (len(payload), payload)
        key.public_key().verify(base64.b64decode(envelope["signatures"][0]["sig"]), signed)
    assert outcomes(build)["provenance.signature"] == "not_run"
    before = {path: path.read_bytes() for path in (written.sbom, written.provenance, written.envelope)}
    assert write(build).tags == written.tags  # the same again, and the signature stays
    assert before == {path: path.read_bytes() for path in before}


def test_a_changed_sbom_is_found_by_tag_and_by_statement(bake):
    build = bake()
    sbom = write(build).sbom
    sbom.write_text(sbom.read_text().replace("2.36-9", "2.36-8"))
    assert failed(build) == {"sbom.tag", "sbom.content", "provenance.sbom"}


def test_an_emptied_sbom_is_refused_though_every_digest_was_made_anew(bake):
    build = bake()
    written = write(build)
    text = json.dumps({**json.loads(written.sbom.read_text()), "components": []})
    statement = written.provenance.read_text().replace(written.tags[SBOM_TAG], attestation._sha256(text))
    written.sbom.write_text(text)
    written.provenance.write_text(statement)
    tags = {SBOM_TAG: attestation._sha256(text), STATEMENT_TAG: attestation._sha256(statement)}
    CLOUD.client("ec2").create_tags(Resources=[written.image_id], Tags=tag_list(tags))
    assert failed(build) == {"sbom.content"}
    with pytest.raises(RefusedError, match="0 packages, the record has 3; wrong: libc6 missing"):
        require_verified("x", channel(), verification_of_build(CLOUD, build), has_gpus=False)


def test_what_was_written_and_not_touched_is_released(bake):
    build = bake()
    with pytest.raises(RefusedError, match="no SBOM was written"):
        require_verified("x", channel(), verification_of_build(CLOUD, build), has_gpus=False)
    write(build)
    assert verification_of_build(CLOUD, build).findings == ()
    assert require_verified("x", channel(), verification_of_build(CLOUD, build), has_gpus=False) == {}


def channel():
    """A channel that asks for SBOM and provenance alone."""
    return replace(load_channel("candidate"), gpus=(), suite="any")


def test_a_changed_provenance_is_found_by_tag_and_by_signature(bake, keys):
    build = bake()
    private, public = keys("mine")
    statement = write(build, load_signer(private)).provenance
    statement.write_text(statement.read_text().replace("m5.xlarge", "m6.xlarge"))
    assert failed(build, load_public_key(public)) == {"provenance.tag", "provenance.signature"}
    statement.write_text("{}")
    assert "provenance.form" in failed(build)


def test_a_changed_statement_with_changed_tags_is_found_by_the_signature_alone(bake, keys):
    build = bake()
    private, public = keys("mine")
    written = write(build, load_signer(private))
    text = written.provenance.read_text().replace("m5.xlarge", "m6.xlarge")
    written.provenance.write_text(text)
    digest = attestation._sha256(text)
    tag = {"Key": STATEMENT_TAG, "Value": digest}
    CLOUD.client("ec2").create_tags(Resources=[written.image_id], Tags=[tag])
    assert failed(build) == set()
    assert failed(build, load_public_key(public)) == {"provenance.signature"}
    envelope = json.loads(written.envelope.read_text())
    envelope["payload"] = base64.b64encode(text.encode()).decode()
    written.envelope.write_text(json.dumps(envelope))
    assert failed(build, load_public_key(public)) == {"provenance.signature"}


def test_another_key_and_no_signature_are_refused(bake, keys):
    build = bake()
    (private, _), (_, others) = keys("mine"), keys("others")
    envelope = write(build, load_signer(private)).envelope
    assert failed(build, load_public_key(others)) == {"provenance.signature"}
    envelope.unlink()
    assert failed(build, load_public_key(others)) == {"provenance.signature"}


def test_the_attestation_of_another_ami_is_refused(bake, keys):
    mine, other = bake(), bake()
    private, public = keys("mine")
    written = write(other, load_signer(private))
    for path in (written.sbom, written.provenance, written.envelope):
        shutil.copy(path, mine.folder)
    tags = [{"Key": key, "Value": value} for key, value in written.tags.items()]
    CLOUD.client("ec2").create_tags(Resources=[mine.read().bake.image_id], Tags=tags)
    assert failed(mine, load_public_key(public)) == {"sbom.content", "provenance.subject"}


def test_a_changed_image_record_is_found(bake):
    build = bake()
    write(build)
    (build.folder / "image.json").write_text("{}")
    assert failed(build) == {"provenance.image-record"}


def test_an_ami_without_tags_is_found_and_a_new_attestation_mends_it(bake):
    build = bake()
    written = write(build)
    names = [{"Key": key} for key in written.tags]
    CLOUD.client("ec2").delete_tags(Resources=[written.image_id], Tags=names)
    assert failed(build) == {"sbom.tag", "provenance.tag"}
    write(build)
    assert failed(build) == set()


def test_a_signature_of_an_earlier_statement_does_not_stay(bake, keys):
    build = bake()
    private, _ = keys("mine")
    assert write(build, load_signer(private)).tags[SIGNING_KEY_TAG] != "none"
    (build.folder / "image.json").write_text("{}")
    written = write(build)
    assert written.envelope is None
    assert written.tags[SIGNING_KEY_TAG] == "none"


def test_what_is_missing_is_named(bake, keys, monkeypatch):
    build = bake()
    with pytest.raises(UsageError, match=r"has no sbom\.cdx\.json"):
        outcomes(build)
    private, public = keys("locked", encryption=BestAvailableEncryption(b"secret"))
    with pytest.raises(UsageError, match="not a usable private key"):
        load_signer(private)
    monkeypatch.setenv(PASSWORD, "secret")
    write(build, load_signer(private))
    assert failed(build, load_public_key(public)) == set()
    with pytest.raises(UsageError, match="not a usable public key"):
        load_public_key(private)
    with pytest.raises(UsageError, match="can't read the key"):
        load_signer(private.with_name("absent"))
    record = build.read()
    CLOUD.client("ec2").deregister_image(ImageId=record.bake.image_id)
    with pytest.raises(UnavailableError, match="no longer"):
        outcomes(build)
    build.write(replace(record, bake=None, state="failed"))
    with pytest.raises(UsageError, match="has no image: it is failed"):
        outcomes(build)


def run(**options):
    return code_of(ami_attest.AmiAttest, **options)


def test_the_command_writes_verifies_and_fails_with_code_1(bake, keys, capsys):
    build = bake()
    private, public = keys("mine")
    assert run(build="last", sign_key=str(private), dry_run=True) == 0
    assert not (build.folder / attestation.SBOM).exists()
    assert run(build=build.id, sign_key=str(private), json=True) == 0
    assert json.loads(capsys.readouterr().out)["envelope"].endswith("provenance.dsse.json")
    assert run(build=build.id, verify=True, key=str(public)) == 0
    sbom = build.folder / attestation.SBOM
    sbom.write_text(sbom.read_text() + " ")
    capsys.readouterr()
    assert run(build=build.id, verify=True, key=str(public), json=True) == 1
    shown = capsys.readouterr()
    assert "sbom.tag: sbom.cdx.json, by the AMI's tag: found" in shown.err
    findings = {row["id"]: row["outcome"] for row in json.loads(shown.out)["findings"]}
    assert findings["sbom.tag"] == findings["provenance.sbom"] == "failed"
    assert findings["provenance.signature"] == "passed"
    assert run(build=build.id, verify=True, sign_key=str(private)) == 2
    assert run(build=build.id, key=str(public)) == 2
