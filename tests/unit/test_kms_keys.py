"""Statements signed by keys of AWS KMS, whose API is moto's."""

import base64
import json

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, padding
from cryptography.hazmat.primitives.hashes import SHA256, SHA384
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_der_public_key

from gpukiln.attest import signing
from gpukiln.errors import CheckFailedError, UnavailableError, UsageError
from gpukiln.images import keys
from gpukiln.images.channels import load_channels
from gpukiln.instances.tags import tag_list
from tests.support.release_cloud import REGIONS, ROOT, Cloud, fault, pointed, tell
from tests.support.signing import (
    AMI,
    JUDGED,
    by_alias,
    key_pair,
    kms_key,
    sign,
    trusting,
    typed_with_one_image,
)

ARN = "arn:aws:kms:us-west-2:111122223333:key/1234abcd-12ab-34cd-56ef-1234567890ab"  # KMS developer guide
SPECS = {
    "ECC_NIST_P256": ec.ECDSA(SHA256()),
    "ECC_NIST_P384": ec.ECDSA(SHA384()),
    "RSA_2048": (padding.PSS(padding.MGF1(SHA256()), SHA256.digest_size), SHA256()),
}


@pytest.fixture
def cloud():
    tell("reset")
    yield Cloud()
    tell("reset")


@pytest.fixture
def typed(cloud, proven, monkeypatch, capsys, tmp_path):
    """Runs a command; the cloud has one image, of the one build."""
    assert cloud
    return typed_with_one_image(proven, monkeypatch, capsys, tmp_path)


@pytest.mark.parametrize(
    ("reference", "wanted"),
    [
        ("awskms:alias/gpukiln-release", keys.KmsKey("alias/gpukiln-release")),
        (f"awskms:{ARN}", keys.KmsKey(ARN, "us-west-2")),
        (f"awskms:{ARN.split('/')[1]}", keys.KmsKey(ARN.split("/")[1])),
        (
            "awskms:arn:aws-us-gov:kms:us-gov-west-1:111122223333:alias/a",
            keys.KmsKey("arn:aws-us-gov:kms:us-gov-west-1:111122223333:alias/a", "us-gov-west-1"),
        ),
        ("sign.pem", None),
    ],
)
def test_a_reference_names_a_file_or_a_key_of_kms(reference, wanted):
    assert keys.kms_key(reference) == wanted


@pytest.mark.parametrize("name", ["", "release", "alias/", "arn:aws:kms:us-west-2:1:key/x", f"{ARN} x"])
def test_a_reference_that_names_no_key_of_kms_is_no_file_either(name, cloud):
    with pytest.raises(UsageError, match="names no key of AWS KMS"):
        signing.signer_of(f"awskms:{name}", cloud)


@pytest.mark.parametrize("spec", SPECS)
def test_kms_signs_what_its_public_key_verifies(spec, cloud, tmp_path):
    reference = kms_key(spec)
    envelope = signing.sign(b"{}", signing.signer_of(by_alias(reference), cloud))
    der = cloud.client("kms").get_public_key(KeyId=reference[7:])["PublicKey"]
    exported = tmp_path / "release.pub"
    exported.write_bytes(
        load_der_public_key(der).public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    )
    for named in (reference, by_alias(reference), str(exported)):
        assert signing.trusted_payload(envelope, [signing.public_key_of(named, cloud)])[0] == b"{}"
    # by the words of DSSE's protocol, without the library that signed
    text, how = b"DSSEv1 28 application/vnd.in-toto+json 2 {}", SPECS[spec]
    signature = base64.b64decode(json.loads(envelope)["signatures"][0]["sig"])
    load_der_public_key(der).verify(signature, text, *(how if isinstance(how, tuple) else (how,)))
    other = signing.public_key_of(kms_key(spec), cloud)
    with pytest.raises(CheckFailedError, match="signed by the key"):
        signing.trusted_payload(envelope, [other])
    changed = {**json.loads(envelope), "payload": base64.b64encode(b"[]").decode()}
    with pytest.raises(CheckFailedError, match="is wrong"):
        signing.trusted_payload(json.dumps(changed), [signing.public_key_of(reference, cloud)])


def test_a_key_is_asked_for_in_the_region_of_its_arn(cloud):
    reference = kms_key(region=REGIONS[1])
    signer = signing.signer_of(reference, cloud)
    assert signer.client.meta.region_name == REGIONS[1] != cloud.region
    assert signing.sign(b"{}", signer)
    with pytest.raises(UnavailableError, match="NotFoundException"):
        signing.signer_of(f"awskms:{reference.rpartition('/')[2]}", cloud)


@pytest.mark.parametrize(
    ("spec", "usage", "found"),
    [
        ("ECC_SECG_P256K1", "SIGN_VERIFY", "ECDSA_SHA_256"),
        ("ECC_NIST_P521", "SIGN_VERIFY", "ECDSA_SHA_512"),
        ("RSA_2048", "ENCRYPT_DECRYPT", "none"),
    ],
)
def test_a_key_that_signs_no_statement_is_refused(spec, usage, found, cloud):
    with pytest.raises(UsageError, match=f"found the signing algorithms {found} of KMS"):
        signing.signer_of(kms_key(spec, usage=usage), cloud)


def test_the_embedded_cloud_takes_what_kms_takes(cloud):
    """KMS API reference, Sign: 4,096 bytes of a message; a digest has the length of its algorithm."""
    kms, asked = cloud.client("kms"), {"KeyId": kms_key()[7:], "SigningAlgorithm": "ECDSA_SHA_256"}
    assert kms.sign(**asked, Message=b"x" * 4096)["Signature"]
    for more in ({"Message": b"x" * 4097}, {"Message": b"x" * 31, "MessageType": "DIGEST"}):
        with pytest.raises(kms.exceptions.ClientError, match="ValidationException"):
            kms.sign(**asked, **more)


def test_what_kms_refuses_is_named_with_the_call(cloud):
    reference = kms_key()
    signer = signing.signer_of(reference, cloud)
    tell("faults", [fault("Sign", "denied"), fault("GetPublicKey", "denied")])
    with pytest.raises(
        UnavailableError, match=f"can't sign with the key {reference[7:]}: Sign answered"
    ) as caught:
        signing.sign(b"{}", signer)
    assert "let the role call Sign" in caught.value.hint
    with pytest.raises(UnavailableError, match=r"can't get the public key of .*: GetPublicKey answered"):
        signing.public_key_of(reference, cloud)


@pytest.mark.parametrize("named", ["arn", "alias"])
def test_a_release_is_signed_by_kms_and_trusted_wherever_it_is_used(named, typed, monkeypatch, tmp_path):
    arn = kms_key()
    key = arn if named == "arn" else by_alias(arn)
    trusting(monkeypatch, arn)
    sign(AMI, key, tmp_path, judged=JUDGED, build=typed.build)
    options = {"channel": "stable", "regions": ",".join(REGIONS)}
    code, _, err = typed("release", "last", **options)
    assert code == 6
    assert f"channel stable trusts only {arn}, and --sign-key is missing" in err
    code, _, err = typed("release", "last", **options, sign_key=str(key_pair(tmp_path, "other")))
    assert code == 6
    assert "--sign-key is another key" in err
    code, _, err = typed("release", "last", **options, sign_key=key)
    assert code == 0, err
    assert set(pointed("stable")) == set(REGIONS)
    code, out, _ = typed("channels", json=True)
    assert code == 0
    assert all(row["trust"].startswith("signed") for row in json.loads(out)["channels"])
    trusting(monkeypatch, kms_key())
    code, _, err = typed("channels")
    assert code == 1
    assert "verdict g4dn.xlarge: signed by the key" in err


def test_provenance_is_signed_and_verified_by_kms(typed):
    key = kms_key()
    digest = {"gpukiln:digest": typed.build.read().plan.digest}
    Cloud().client("ec2").create_tags(Resources=[AMI], Tags=tag_list(digest))
    assert typed("attest", "last", sign_key=by_alias(key))[0] == 0
    code, _, err = typed("attest", "last", verify=True, key=key)
    assert code == 0, err
    code, _, err = typed("attest", "last", verify=True, key=kms_key())
    assert code == 1
    assert "provenance.signature: signed by the key" in err
    assert typed("attest", "last", sign_key="awskms:alias/none")[0] == 4
    assert typed("attest", "last", sign_key="awskms:none")[0] == 2


def test_a_channel_trusts_the_arn_of_a_key_and_no_alias(tmp_path):
    """Who may call kms:UpdateAlias lets an alias mean another key."""
    (tmp_path / "ami").mkdir()
    file, text = tmp_path / "ami/channels.yaml", (ROOT / "ami/channels.yaml").read_text()

    def trust(entry):
        file.write_text(text.replace("trust: []", f"trust: ['{entry}']", 1))
        return load_channels(tmp_path)["candidate"].trust

    assert trust(f"awskms:{ARN}") == (f"awskms:{ARN}",)
    alias = "arn:aws:kms:us-west-2:111122223333:alias/release"
    for entry in (f"awskms:{alias}", "awskms:alias/release", f"awskms:{ARN.split('/')[1]}"):
        with pytest.raises(UsageError, match="is no ARN of a key"):
            trust(entry)
    with pytest.raises(UsageError, match="names no key of AWS KMS"):
        trust("awskms:release")
    with pytest.raises(UsageError, match="is no file of") as caught:
        trust(ARN)
    assert "a key of AWS KMS is awskms:ARN" in caught.value.hint
