"""Statements signed as an identity of OIDC: by a double of Sigstore, and what the public one once signed."""

import base64
import json
import sys
from pathlib import Path

import pytest

from gpukiln.attest import newest_release, signing, statements
from gpukiln.attest.keyless import IdentityKey
from gpukiln.errors import CheckFailedError, UnavailableError, UsageError
from gpukiln.images import channels
from gpukiln.images.channels import load_channels
from gpukiln.kubernetes.nodes.image_trust import require_trusted
from tests.support import signing as support
from tests.support.release_cloud import HOME, REGIONS, ROOT, Cloud, make_image, pointed, tell
from tests.support.signing import AMI, JUDGED, key_pair, put, sign, typed_with_one_image

pytest.importorskip("sigstore", reason="missing packages: sigstore (scripts/run installs it)")

from tests.support.sigstore_double import serve  # needs what sigstore installs

GITHUB = "https://token.actions.githubusercontent.com"
STABLE = "/gpukiln/eks-gpu/1.34/stable/image_id"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    """The library copies its root into the user's folders."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


@pytest.fixture
def job(monkeypatch, tmp_path):
    """This is a job on GitHub Actions with an identity, and an instance of Sigstore believes it."""
    with serve() as double:
        monkeypatch.setenv("GITHUB_ACTIONS", "true")
        monkeypatch.setenv("ACTIONS_ID_TOKEN_REQUEST_TOKEN", "t")
        monkeypatch.setenv("ACTIONS_ID_TOKEN_REQUEST_URL", f"{double.url}/token?v=1")
        double.file = tmp_path / "instance.json"
        double.file.write_text(double.trust_config())
        double.option = f"sigstore:{double.file}"
        double.entry = {
            "identity": f"https://github.com/{double.workflow}",
            "issuer": GITHUB,
            "trust_config": str(double.file),
        }
        yield double


def key_of(entry, **other):
    wanted = {**entry, **other}
    config = wanted["trust_config"]
    return IdentityKey(wanted["identity"], wanted["issuer"], Path(config) if config else None)


def trusting(monkeypatch, *entries, **more):
    """Both channels trust these identities."""

    def read(path):
        document = support.READ_YAML(path)
        for rules in document["channels"].values():
            rules.update(trust=list(entries), **more)
        return document

    monkeypatch.setattr(channels, "read_yaml", read)


def test_a_statement_of_this_job_is_verified_by_its_identity(job):
    signer = signing.signer_of(job.option, Cloud())
    envelope = signing.sign(b'{"a": 1}', signer)
    payload, key = signing.trusted_payload(envelope, [key_of(job.entry)])
    assert (payload, str(key)) == (b'{"a": 1}', f"{job.entry['identity']} of {GITHUB}")
    assert signing.trusted_payload(envelope, [key_of(job.entry)])[1].keyid == signer.public_key.keyid


@pytest.mark.parametrize(
    "other",
    [
        {"identity": "https://github.com/example/gpukiln/.github/workflows/images.yml@refs/heads/other"},
        {"identity": "https://github.com/example/gpukiln/.github/workflows/images.yml@refs/heads/main2"},
        {"identity": "https://github.com/example/gpukiln/.github/workflows/images.yml@refs/heads/mai"},
        {"issuer": "https://accounts.google.com"},
        {"issuer": f"{GITHUB}/"},
    ],
)
def test_another_identity_and_another_issuer_are_refused(job, other):
    """Also where the envelope says that it is of the trusted one: who wrote it chooses its keyid."""
    envelope = signing.sign(b"{}", signing.signer_of(job.option, Cloud()))
    wanted = key_of(job.entry, **other)
    with pytest.raises(CheckFailedError, match=f"signed by {job.entry['identity']} of {GITHUB}, trusted"):
        signing.trusted_payload(envelope, [wanted])
    claimed = json.loads(envelope)
    claimed["signatures"][0]["keyid"] = wanted.keyid
    with pytest.raises(CheckFailedError, match=r"is wrong: Certificate's (SANs|OIDCIssuer) do"):
        signing.trusted_payload(json.dumps(claimed), [wanted])


def test_what_was_changed_is_refused(job):
    trusted = [key_of(job.entry)]
    envelope = json.loads(signing.sign(b"{}", signing.signer_of(job.option, Cloud())))
    for change in (
        {"payload": base64.b64encode(b"[]").decode()},
        {"signatures": [{**envelope["signatures"][0], "bundle": {}}]},
        {"signatures": [{name: envelope["signatures"][0][name] for name in ("keyid", "sig")}]},
    ):
        with pytest.raises(CheckFailedError, match="is wrong"):
            signing.trusted_payload(json.dumps({**envelope, **change}), trusted)


def test_another_instance_of_sigstore_is_refused(job, tmp_path):
    """Who runs one can certify any identity; the public root is the default."""
    envelope = signing.sign(b"{}", signing.signer_of(job.option, Cloud()))
    with serve() as other:
        file = tmp_path / "other.json"
        file.write_text(other.trust_config())
        for config in ("", str(file)):
            with pytest.raises(CheckFailedError, match="is wrong: "):
                signing.trusted_payload(envelope, [key_of(job.entry, trust_config=config)])


def bundle():
    return json.loads((ROOT / "tests/support/sigstore/github-actions.json").read_text())


def wheel(document):
    """SHA-256 of the wheel, as its bundle names it; the signature is over that."""
    return base64.b64decode(document["messageSignature"]["messageDigest"]["digest"])


RELEASE = "https://github.com/trailofbits/rfc8785.py/.github/workflows/release.yml@refs/tags/v0.1.2"


def test_what_the_public_instance_signed_is_verified_by_the_root_of_the_library():
    document = bundle()
    # sha256sum of bundle_v3_github.whl, which lies beside the bundle in its source
    assert wheel(document).hex() == "c4e92e9ecc828bef2aa7dba1de8ac983511f7532a0df11c770d39099a25cf201"
    IdentityKey(RELEASE, GITHUB).verify_digest(document, wheel(document))


@pytest.mark.parametrize(
    ("identity", "issuer", "why"),
    [
        (RELEASE.replace("v0.1.2", "v0.1.3"), GITHUB, "SANs do not match"),
        (RELEASE.replace("release.yml", "ci.yml"), GITHUB, "SANs do not match"),
        (RELEASE, "https://gitlab.com", "OIDCIssuer does not match"),
    ],
)
def test_what_the_public_instance_signed_for_another_is_refused(identity, issuer, why):
    document = bundle()
    with pytest.raises(signing.UnverifiedSignatureError, match=why):
        IdentityKey(identity, issuer).verify_digest(document, wheel(document))


def test_a_changed_bundle_of_the_public_instance_is_refused():
    document, digest = bundle(), wheel(bundle())
    key = IdentityKey(RELEASE, GITHUB)
    with pytest.raises(signing.UnverifiedSignatureError, match="digest mismatch"):
        key.verify_digest(document, bytes(32))
    entry = document["verificationMaterial"]["tlogEntries"][0]
    for name, value in (("integratedTime", "1710887000"), ("logIndex", "1"), ("inclusionPromise", {})):
        changed = json.loads(json.dumps(document))
        changed["verificationMaterial"]["tlogEntries"][0] = {**entry, name: value}
        with pytest.raises(signing.UnverifiedSignatureError):
            key.verify_digest(changed, digest)


@pytest.fixture
def typed(proven, monkeypatch, capsys, tmp_path):
    """Runs a command; the cloud has one image, of the one build."""
    tell("reset")
    yield typed_with_one_image(proven, monkeypatch, capsys, tmp_path)
    tell("reset")


@pytest.mark.parametrize(
    "largest", [8192, 1024]
)  # one of GitHub's certificates is twice as long as the double's
def test_a_release_is_signed_by_a_job_and_trusted_wherever_it_is_used(
    typed, job, monkeypatch, tmp_path, largest
):
    monkeypatch.setattr(statements, "MAX_PARAMETER_CHARS", largest)
    trusting(monkeypatch, job.entry)
    options = {"channel": "stable", "regions": ",".join(REGIONS)}
    sign(AMI, job.option, tmp_path, judged=JUDGED, build=typed.build)
    assert (len(support.statements(AMI)) > 1) == (largest == 1024)
    code, _, err = typed("release", "last", **options)
    assert code == 6
    assert f"channel stable trusts only {job.entry['identity']} of {GITHUB}, and --sign-key is missing" in err
    code, _, err = typed("release", "last", **options, sign_key=str(key_pair(tmp_path, "other")))
    assert code == 6
    assert f"wanted: {job.entry['identity']} of {GITHUB}" in err
    code, _, err = typed("release", "last", **options, sign_key=job.option)
    assert code == 0, err
    assert typed("release", "last", **options, sign_key=job.option)[0] == 0
    code, out, _ = typed("channels", json=True)
    assert code == 0
    words = f"signed: trusts {job.entry['identity']} of {GITHUB}"
    assert {row["trust"] for row in json.loads(out)["channels"]} == {words}
    assert require_trusted(STABLE, Cloud(REGIONS[1])) == words
    second = make_image("b2", judged=JUDGED)
    sign(second, job.option, tmp_path, judged=JUDGED)
    if largest == 1024:
        part = f"/gpukiln-attestations/{AMI}/release/stable/2"
        Cloud().client("ssm").delete_parameter(Name=part)
        code, _, err = typed("channels")
        assert code == 1
        assert "release stable: the text is not a DSSE envelope" in err
    only = {"channel": "candidate", "image_region": HOME, "sign_key": job.option}
    assert typed("release", second, **only)[0] == 0


def test_a_statement_of_another_image_and_of_another_workflow_are_refused(typed, job, monkeypatch, tmp_path):
    trusting(monkeypatch, job.entry)
    second = make_image("b2", judged=JUDGED)
    sign(second, job.option, tmp_path, judged=JUDGED)
    put(AMI, "verdict/g4dn.xlarge", support.statements(second)["verdict/g4dn.xlarge"])
    options = {"channel": "stable", "sign_key": job.option}
    code, _, err = typed("release", "last", **options)
    assert code == 6
    assert f"found a statement on arn:aws:ec2:{HOME}::image/{second}" in err
    job.workflow = "example/gpukiln/.github/workflows/images.yml@refs/pull/7/merge"
    sign(AMI, job.option, tmp_path, judged=JUDGED, build=typed.build)
    code, _, err = typed("release", "last", **options)
    assert code == 6
    assert f"signed by https://github.com/{job.workflow} of {GITHUB}" in err
    job.workflow = job.entry["identity"].removeprefix("https://github.com/")
    sign(AMI, job.option, tmp_path, judged=JUDGED, build=typed.build)
    job.workflow = "example/other/.github/workflows/images.yml@refs/heads/main"
    code, _, err = typed("release", "last", **options)
    assert code == 6
    assert f"found: https://github.com/{job.workflow} of {GITHUB}" in err
    assert pointed("stable")[HOME] is None


def test_keys_and_identities_are_trusted_together(typed, job, monkeypatch, tmp_path):
    """As while a team moves from one to the other; the number goes on."""
    key = key_pair(tmp_path, "sign")
    trusting(monkeypatch, support.public_part(key), job.entry)
    sign(AMI, key, tmp_path, judged=JUDGED, build=typed.build)
    assert typed("release", "last", channel="stable", sign_key=job.option)[0] == 0
    second = make_image("b2", judged=JUDGED)
    sign(second, job.option, tmp_path, judged=JUDGED)
    options = {"channel": "stable", "image_region": HOME}
    assert typed("release", second, **options, sign_key=str(key))[0] == 0
    seen = newest_release._read(newest_release._file(Cloud()))[STABLE]
    assert (seen.number, seen.image_id) == (2, second)


def test_provenance_is_signed_by_a_job(typed, job):
    code, _, err = typed("attest", "last", sign_key=job.option)
    assert code == 0, err
    named = {"identity": job.entry["identity"], "issuer": GITHUB}
    code, _, err = typed("attest", "last", verify=True, **named)
    assert code == 1  # of the double, which the public root does not know
    assert "provenance.signature: the signature of https://github.com/example" in err
    assert typed("attest", "last", verify=True, identity="x")[0] == 2
    assert typed("attest", "last", **named)[0] == 2


def test_without_an_identity_nobody_signs(monkeypatch):
    for name in ("GITHUB_ACTIONS", "GITLAB_CI", "BUILDKITE", "CIRCLECI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sigstore.oidc.detect_credential", lambda: None)
    with pytest.raises(UnavailableError, match="found no identity of a CI job") as caught:
        signing.signer_of("sigstore:", Cloud())
    assert "id-token: write" in caught.value.hint


def test_a_job_that_may_ask_for_no_token_is_said_so(monkeypatch):
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.delenv("ACTIONS_ID_TOKEN_REQUEST_TOKEN", raising=False)
    with pytest.raises(UnavailableError, match="CI gives this job no identity"):
        signing.signer_of("sigstore:", Cloud())


def test_what_the_instance_refuses_is_named(job):
    signer = signing.signer_of(job.option, Cloud())
    job.answer = lambda path, *_: {"value": job.token()} if path.startswith("/token") else {}
    with pytest.raises(UnavailableError, match=f"can't sign as {job.entry['identity']} of {GITHUB}: Fulcio"):
        signing.sign(b"{}", signer)


def test_without_the_library_the_command_that_installs_it_is_named(job, monkeypatch):
    envelope = signing.sign(b"{}", signing.signer_of(job.option, Cloud()))
    monkeypatch.setitem(sys.modules, "sigstore", None)
    for work in (
        lambda: signing.trusted_payload(envelope, [key_of(job.entry)]),
        lambda: signing.signer_of("sigstore:", Cloud()),
    ):
        with pytest.raises(UnavailableError, match="found no Python package sigstore") as caught:
            work()
        assert (caught.value.exit_code, caught.value.hint) == (4, "pip install 'gpukiln[sigstore]'")


def test_a_channel_names_identity_and_issuer(tmp_path):
    (tmp_path / "ami").mkdir()
    file, text = tmp_path / "ami/channels.yaml", (ROOT / "ami/channels.yaml").read_text()

    def trust(entry):
        file.write_text(text.replace("trust: []", f"trust: [{json.dumps(entry)}]", 1))
        return load_channels(tmp_path)["candidate"].trust

    entry = {"identity": RELEASE, "issuer": GITHUB}
    assert [str(one) for one in trust(entry)] == [f"{RELEASE} of {GITHUB}"]
    for wrong in (
        {**entry, "issuer": "github"},
        {**entry, "identity": ""},
        {**entry, "trust_config": "none.json"},
    ):
        with pytest.raises(UsageError, match=r"trust: "):
            trust(wrong)
    for wrong in ({"identity": RELEASE}, {**entry, "regexp": ".*"}):
        with pytest.raises(UsageError) as caught:
            trust(wrong)
        assert any("Identity" in line for line in caught.value.details)


def test_a_file_that_names_no_instance_is_refused(job):
    envelope = signing.sign(b"{}", signing.signer_of(job.option, Cloud()))
    for damage in ("{", "{}"):
        job.file.write_text(damage)
        with pytest.raises(UsageError, match="names no instance of Sigstore"):
            signing.trusted_payload(envelope, [key_of(job.entry)])
    job.file.unlink()
    with pytest.raises(UsageError, match="can't read"):
        signing.trusted_payload(envelope, [key_of(job.entry)])
