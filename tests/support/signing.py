"""Keys, channels that trust them, and images whose verdicts are signed by what signs them in the product."""

import json
from dataclasses import replace

from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from gpukiln.attest.signing import signer_of
from gpukiln.attest.statements import ROOT
from gpukiln.cli.main import command
from gpukiln.clouds import select
from gpukiln.images import channels
from gpukiln.images.subject import subject_from_tags
from gpukiln.instances.tags import tags_of
from gpukiln.pipeline.verdict_signing import sign_verdict
from gpukiln.release.find import LocatedImage
from gpukiln.release.images import LaunchPermissions
from gpukiln.release.needs import require_verified
from gpukiln.release.publish import ReleaseSpec
from tests.support.exit_codes import code_of
from tests.support.plans import BAKE
from tests.support.release_cloud import HOME, REGIONS, Cloud, tags, tell, verdict

READ_YAML = channels.read_yaml
AMI, JUDGED = BAKE.image_id, verdict()


def key_pair(folder, name):
    """A private key as PEM; its public key is in the same folder as .pub."""
    key = ed25519.Ed25519PrivateKey.generate()
    private = folder / f"{name}.pem"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    spki = PublicFormat.SubjectPublicKeyInfo
    private.with_suffix(".pub").write_bytes(key.public_key().public_bytes(Encoding.PEM, spki))
    return private


def kms_key(spec="ECC_NIST_P256", region="us-west-2", *, client=None, usage="SIGN_VERIFY"):
    """A new key of KMS, as `--sign-key` and `trust` name it; it has an alias, too."""
    kms = client or Cloud(region).client("kms")
    arn = kms.create_key(KeySpec=spec, KeyUsage=usage)["KeyMetadata"]["Arn"]
    kms.create_alias(AliasName=f"alias/{arn.rpartition('/')[2]}", TargetKeyId=arn)
    return f"awskms:{arn}"


def by_alias(reference):
    """The same key, named by its alias."""
    return f"awskms:alias/{reference.rpartition('/')[2]}"


def public_part(key):
    """What `trust` names: the public key of a private one, or the same key of KMS."""
    return key if isinstance(key, str) else str(key.with_suffix(".pub"))


def trusting(monkeypatch, *keys, **more):
    """Both channels trust the public keys of these private ones."""

    def read(path):
        document = READ_YAML(path)
        for rules in document["channels"].values():
            rules.update(trust=[public_part(key) for key in keys], **more)
        return document

    monkeypatch.setattr(channels, "read_yaml", read)


def sign(image_id, key, folder, *, judged=None, region="us-west-2", build=None, in_cluster=False):
    """Sign a verdict on an image, as `ami.verify` does after a machine was booted from it."""
    cloud = Cloud(region)
    [image] = cloud.client("ec2").describe_images(ImageIds=[image_id])["Images"]
    subject = subject_from_tags(image_id, tags_of(image))
    signer = signer_of(str(key), cloud)
    sign_verdict(cloud, subject, judged or verdict(), folder, signer, build, in_cluster=in_cluster)


def signed_wish(image_id, build, channel="candidate", *, key, regions=REGIONS, **more):
    """What a release of an image is asked for where the channel trusts keys."""
    rules = channels.load_channel(channel)
    verification = LocatedImage(image_id, Cloud(), None).verification(rules)
    assert verification.build == build
    excused = require_verified(channel, rules, verification, has_gpus=False)
    options = {"sharing": LaunchPermissions(), "keys": {}, "timeout_s": 5.0, **more}
    return ReleaseSpec(
        verification, channel, rules, regions, excused, **options, signer=signer_of(str(key), Cloud())
    )


def statements(image_id, region="us-west-2"):
    """The parameters on an image, by the end of their names."""
    ssm, root = Cloud(region).client("ssm"), f"{ROOT}/{image_id}/"
    pages = ssm.get_paginator("get_parameters_by_path").paginate(Path=root, Recursive=True)
    return {one["Name"].removeprefix(root): one["Value"] for page in pages for one in page["Parameters"]}


def put(image_id, name, value, region="us-west-2"):
    """Write a parameter as somebody who may, and has no key."""
    text = value if isinstance(value, str) else json.dumps(value)
    Cloud(region).client("ssm").put_parameter(
        Name=f"{ROOT}/{image_id}/{name}", Value=text, Type="String", Overwrite=True
    )


def typed_with_one_image(proven, monkeypatch, capsys, folder):
    """Runs a command of a module; the cloud has one image, of the one build, with a verdict that passed."""
    monkeypatch.setenv("GPUKILN_HOME", str(folder))
    monkeypatch.setattr(select, "make_cloud", lambda _name, region, **_: Cloud(region))
    [build] = proven.all()
    build.write(replace(build.read(), verdicts=(JUDGED,)))
    tell("image", {"region": HOME, "image_id": AMI, "name": "gpu-image", "tags": tags(build.id, JUDGED)})

    def run(name, *arguments, **options):
        code = code_of(command(f"ami.{name}"), *arguments, **options)
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    run.build = build
    return run
