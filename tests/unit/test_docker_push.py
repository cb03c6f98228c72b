"""An image is pushed with real skopeo to the embedded ECR: once, under tags that never move."""

import base64
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import boto3
import pytest
import requests
from moto.ec2.models import ec2_backends
from moto.ecr import models as ecr_models
from moto.ecr.models import ECRBackend, ecr_backends
from moto.ecr.responses import ECRResponse
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from moto.ssm.models import ssm_backends
from werkzeug.serving import make_server

from gpukiln.catalog import permissions
from gpukiln.clouds.embedded import registry
from gpukiln.clouds.embedded.layout import Layout
from gpukiln.clouds.embedded.regions import read_region
from gpukiln.clouds.embedded.server import MOTO_SETTINGS, Application
from gpukiln.commands import docker_push
from gpukiln.docker import repository as repositories
from gpukiln.docker.push import Built, PushedImage, push, tags_of
from gpukiln.docker.repository import Repository, parse
from gpukiln.errors import RefusedError, UnavailableError, UsageError
from tests.support.docker_records import a_build, a_verdict, as_json
from tests.support.exit_codes import code_of

REGION = "us-west-2"
ACCOUNT = "123456789012"  # moto's
IN_AWS = f"{ACCOUNT}.dkr.ecr.eu-west-1.amazonaws.com"
IN_CHINA = f"{ACCOUNT}.dkr.ecr.cn-north-1.amazonaws.com.cn"
# The registry's protocol in IAM's words: Amazon ECR API reference, where each call says when a push makes it
ACTIONS = {
    ("HEAD", "manifests"): "BatchGetImage",
    ("GET", "manifests"): "BatchGetImage",
    ("HEAD", "blobs"): "BatchCheckLayerAvailability",
    ("GET", "blobs"): "GetDownloadUrlForLayer",
    ("POST", "uploads"): "InitiateLayerUpload",
    ("PATCH", "uploads"): "UploadLayerPart",
    ("PUT", "uploads"): "CompleteLayerUpload",
    ("PUT", "manifests"): "PutImage",
}
KIND = re.compile(r"/v2/.+?/(manifests|blobs/(uploads)|blobs)/")


def digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def tiny_image(folder: Path, text: str) -> Path:
    """An OCI layout of one layer that holds one file."""
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def keep(content: bytes, media_type: str) -> dict[str, Any]:
        (blobs / digest(content).removeprefix("sha256:")).write_bytes(content)
        return {"mediaType": media_type, "digest": digest(content), "size": len(content)}

    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        member = tarfile.TarInfo("hello")
        member.size = len(text)
        tar.addfile(member, io.BytesIO(text.encode()))
    layer = keep(gzip.compress(packed.getvalue(), mtime=0), "application/vnd.oci.image.layer.v1.tar+gzip")
    rootfs = {"type": "layers", "diff_ids": [digest(packed.getvalue())]}
    config = {"architecture": "amd64", "os": "linux", "config": {}, "rootfs": rootfs}
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": keep(json.dumps(config).encode(), "application/vnd.oci.image.config.v1+json"),
        "layers": [layer],
    }
    entry = keep(json.dumps(manifest).encode(), manifest["mediaType"])
    (folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return folder


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The storage of buildah and podman, with three images."""
    if not shutil.which("skopeo"):
        pytest.skip("skopeo is not on PATH (scripts/run installs it)")
    if os.geteuid() != 0:
        pytest.skip("a container storage needs root, or user namespaces")
    folder = tmp_path_factory.mktemp("storage")
    file = folder / "storage.conf"
    file.write_text(f'[storage]\ndriver = "vfs"\ngraphroot = "{folder}/root"\nrunroot = "{folder}/run"\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONTAINERS_STORAGE_CONF", str(file))
        for name in ("one", "two", "three"):
            source = f"oci:{tiny_image(folder / name, name)}"
            subprocess.run(
                ["skopeo", "copy", "-q", source, f"containers-storage:localhost/t:{name}"], check=True
            )
        yield


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Layout]:
    """The embedded cloud's server in this process; without machines, which ECR has no need of."""
    layout = Layout(tmp_path_factory.mktemp("cloud"))
    layout.create()
    for backends in (ec2_backends, ssm_backends, ecr_backends):  # another module's may be half made
        backends.reset()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in MOTO_SETTINGS.items():
            patch.setenv(name, value)
        patch.setattr(ECRBackend, "__init__", ECRBackend.__init__)  # so that leaving puts it back
        patch.setattr(ecr_models.Repository, "uri", None, raising=False)
        patch.setattr(ECRResponse, "get_authorization_token", ECRResponse.get_authorization_token)
        registry.install(layout)
        moto = DomainDispatcherApplication(create_backend_app)
        machines = SimpleNamespace(all=list, ssh_port=0)
        application = Application(layout, machines, moto, registry.Registry(layout), lambda: None)
        server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=MotoRequestHandler)
        layout.endpoint.write_text(json.dumps({"port": server.port}))
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield layout
        server.shutdown()
        thread.join()


@pytest.fixture
def cloud(layout: Layout) -> Any:
    port = json.loads(layout.endpoint.read_text())["port"]
    ecr = boto3.client(
        "ecr",
        region_name=REGION,
        endpoint_url=f"http://127.0.0.1:{port}",
        aws_access_key_id=layout.access_key,
        aws_secret_access_key="embedded",  # noqa: S106 - the server looks at the key's id
    )
    return SimpleNamespace(name="embedded", region=REGION, client=lambda _: ecr)


def built(name: str = "one", version: str = "1", inputs: str = "sha256:" + "a" * 64) -> Built:
    return Built(f"localhost/t:{name}", "buildah", version, inputs)


def found(
    cloud: Any, name: str, *, create: bool = True, dry_run: bool = False, said: Any = None
) -> Repository:
    said = [] if said is None else said
    return repositories.find(parse(name), cloud, create=create, dry_run=dry_run, say=said.append)


def images(cloud: Any, name: str) -> dict[str, list[str]]:
    answer = cloud.client("ecr").describe_images(repositoryName=name)["imageDetails"]
    return {image["imageDigest"]: sorted(image["imageTags"]) for image in answer}


@pytest.mark.parametrize(
    ("text", "host", "path", "region", "is_ecr"),
    [
        ("runner-gpu", "", "runner-gpu", "", True),
        ("gpukiln/runner-gpu", "", "gpukiln/runner-gpu", "", True),
        (f"{IN_AWS}/a/b", IN_AWS, "a/b", "eu-west-1", True),
        (f"https://{IN_CHINA}/a", IN_CHINA, "a", "cn-north-1", True),
        ("registry.example:5000/a/b", "registry.example:5000", "a/b", "", False),
        ("localhost/a", "localhost", "a", "", False),
        ("[::1]:5000/a", "[::1]:5000", "a", "", False),
    ],
)
def test_a_repository_is_a_name_of_ecr_or_a_uri(
    text: str, host: str, path: str, region: str, is_ecr: bool
) -> None:
    address = parse(text)
    assert (address.host, address.path, address.region, address.is_ecr) == (host, path, region, is_ecr)


@pytest.mark.parametrize(
    "text", ["", "a:tag", "host.example/a:tag", "a@sha256:0", "Upper", "host.example/", "a b"]
)
def test_what_is_no_repository_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is no repository"):
        parse(text)


@pytest.mark.parametrize(
    ("host", "plain"),
    [
        ("127.0.0.1:5000", True),
        ("localhost:5000", True),
        ("[::1]:5000", True),
        ("127.example:80", False),
        ("10.0.0.1:5000", False),
        (IN_AWS, False),
    ],
)
def test_only_this_machine_is_reached_without_tls(host: str, plain: bool) -> None:
    assert Repository(f"{host}/a").plain_http is plain


def test_the_login_is_readable_by_nobody_else_and_goes_afterwards() -> None:
    repository = Repository("h.example/a", "c2VjcmV0")
    assert "c2VjcmV0" not in repr(repository)
    with repository.login() as file:
        assert file is not None
        assert json.loads(file.read_text()) == {"auths": {"h.example": {"auth": "c2VjcmV0"}}}
        assert file.parent.stat().st_mode & 0o777 == 0o700
    assert not file.parent.exists()


def test_tags_name_the_version_the_inputs_and_the_image() -> None:
    assert tags_of(built(), "sha256:" + "b" * 64) == ("1", "inputs-aaaaaaaaaaaa", "image-bbbbbbbbbbbb")
    with pytest.raises(UsageError, match="can't be a tag"):
        tags_of(built(version="1.0+x"), "sha256:b")


@pytest.mark.usefixtures("storage")
def test_create_and_push_and_push_again(cloud: Any, layout: Layout, tmp_path: Path) -> None:
    said: list[str] = []
    target, log = found(cloud, "a/new", said=said), tmp_path / "log"
    (facts,) = cloud.client("ecr").describe_repositories(repositoryNames=["a/new"])["repositories"]
    assert facts["imageTagMutability"] == "IMMUTABLE"
    assert facts["imageScanningConfiguration"] == {"scanOnPush": True}
    policy = cloud.client("ecr").get_lifecycle_policy(repositoryName="a/new")["lifecyclePolicyText"]
    assert json.loads(policy)["rules"][0]["selection"]["tagStatus"] == "untagged"

    pushed = push(built(), target, log=log, say=said.append)
    assert pushed is not None
    assert pushed.reference == f"{facts['repositoryUri']}@{pushed.manifest_digest}"
    assert images(cloud, "a/new") == {pushed.manifest_digest: sorted(pushed.tags)}
    assert any(line.startswith("pushed ") for line in said)

    said.clear()
    again = push(built(), found(cloud, "a/new", said=said), log=log, say=said.append)
    assert again is not None
    assert (again.manifest_digest, again.tags) == (pushed.manifest_digest, pushed.tags)
    assert [line.partition(":")[0] for line in said] == ["nothing to push"]
    for secret in (layout.access_key, base64.b64encode(f"AWS:{layout.access_key}".encode()).decode()):
        assert secret not in log.read_text()


@pytest.mark.usefixtures("storage")
def test_what_was_interrupted_is_completed_with_the_same_manifest(cloud: Any, tmp_path: Path) -> None:
    target = found(cloud, "a/interrupted")
    first = push(built(), target, log=tmp_path / "log", say=lambda _: None)
    assert first is not None
    gone = [{"imageTag": tag} for tag in first.tags[1:]]
    cloud.client("ecr").batch_delete_image(repositoryName="a/interrupted", imageIds=gone)
    second = push(built(), target, log=tmp_path / "log", say=lambda _: None)
    assert second is not None
    assert images(cloud, "a/interrupted") == {first.manifest_digest: sorted(first.tags)}


@pytest.mark.usefixtures("storage")
def test_a_tag_never_moves_to_another_image(cloud: Any, tmp_path: Path) -> None:
    target = found(cloud, "a/taken")
    push(built(), target, log=tmp_path / "log", say=lambda _: None)
    before = images(cloud, "a/taken")
    with pytest.raises(RefusedError, match="another image under 1 of the tags") as caught:
        push(built("two", inputs="c" * 64), target, log=tmp_path / "log", say=lambda _: None)
    assert caught.value.exit_code == 6
    assert caught.value.details == (f"1: {next(iter(before))}",)
    assert images(cloud, "a/taken") == before
    push(built("two", version="2", inputs="c" * 64), target, log=tmp_path / "log", say=lambda _: None)
    assert len(images(cloud, "a/taken")) == 2


@pytest.mark.usefixtures("storage")
def test_a_dry_run_changes_nothing(cloud: Any, tmp_path: Path) -> None:
    said: list[str] = []
    target = found(cloud, "a/dry", dry_run=True, said=said)
    assert push(built(), target, log=tmp_path / "log", say=said.append, dry_run=True) is None
    assert [line.split(" ")[1] for line in said] == ["create", "push"]
    with pytest.raises(UnavailableError, match="has no repository a/dry") as caught:
        found(cloud, "a/dry", create=False)
    assert caught.value.hint == "--create makes it"


def test_create_completes_a_repository_and_leaves_its_owners_policy(cloud: Any) -> None:
    ecr = cloud.client("ecr")
    ecr.create_repository(repositoryName="a/half")  # mutable, without a policy
    said: list[str] = []
    found(cloud, "a/half", said=said)
    policy = ecr.get_lifecycle_policy(repositoryName="a/half")["lifecyclePolicyText"]
    assert any("are mutable" in line for line in said)
    own = policy.replace("14", "30")
    ecr.put_lifecycle_policy(repositoryName="a/half", lifecyclePolicyText=own)
    found(cloud, "a/half")
    assert ecr.get_lifecycle_policy(repositoryName="a/half")["lifecyclePolicyText"] == own


@pytest.mark.parametrize(
    ("name", "create", "message"),
    [
        (f"{IN_AWS}/a", False, "belongs to AWS, and --cloud is embedded"),
        ("registry.example/a", True, "--create is for ECR"),
    ],
)
def test_a_repository_that_is_not_of_this_cloud(cloud: Any, name: str, create: bool, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        found(cloud, name, create=create)


@pytest.mark.usefixtures("storage")
def test_errors_say_what_to_do(cloud: Any, tmp_path: Path) -> None:
    target = found(cloud, "a/errors")
    with pytest.raises(UnavailableError, match=r"can't read .* \(log: ") as caught:
        push(built(), Repository(target.name), log=tmp_path / "log", say=lambda _: None)
    assert "skopeo login 127.0.0.1" in caught.value.hint
    with pytest.raises(
        UnavailableError, match="can't read the image localhost/t:absent in buildah's storage"
    ):
        push(built("absent"), target, log=tmp_path / "log", say=lambda _: None)
    with pytest.raises(UsageError, match="unknown engine 'lxc'"):
        push(Built("a", "lxc", "1", "2"), target, log=tmp_path / "log", say=lambda _: None)


@pytest.mark.usefixtures("storage")
def test_the_command_pushes_the_newest_build_to_any_registry_and_records_it_once(
    cloud: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = found(cloud, "a/command")
    with target.login() as file:
        assert file is not None
        monkeypatch.setenv("REGISTRY_AUTH_FILE", str(file))  # where `skopeo login --authfile` would leave it
        monkeypatch.setenv("GPUKILN_HOME", str(tmp_path))
        builds = tmp_path / "docker" / "builds"
        for folder, name in (("20260101-runner-gpu", "two"), ("20260102-runner-gpu", "one")):
            build = a_build(builds / folder, built(name).reference)
        for _ in range(2):
            docker_push.DockerPush(repository=target.name, json=True).run()
            answer = json.loads(capsys.readouterr().out)
    (row,) = as_json(build)["pushed"]
    assert PushedImage(**row).manifest_digest == answer["manifest_digest"]
    assert images(cloud, "a/command") == {row["manifest_digest"]: sorted(row["tags"])}
    assert code_of(docker_push.DockerPush, repository=target.name, build="20250101") == UsageError.exit_code


@pytest.mark.parametrize("verdict", [None, a_verdict(passed=False), replace(a_verdict(), simulated=True)])
def test_what_was_not_proven_is_not_pushed(
    verdict: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GPUKILN_HOME", str(tmp_path))
    a_build(tmp_path / "docker" / "builds" / "1", verdict=verdict)
    assert code_of(docker_push.DockerPush, repository="127.0.0.1:9/a") == RefusedError.exit_code
    assert "--unverified pushes it" in capsys.readouterr().err


@pytest.fixture
def session(cloud: Any, layout: Layout) -> tuple[requests.Session, str]:
    session = requests.Session()
    session.auth = ("AWS", layout.access_key)
    target = found(cloud, "a/http")
    host, _, path = target.name.partition("/")
    return session, f"http://{host}/v2/{path}"


def code(answer: requests.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["errors"][0]["code"]


def test_the_registry_refuses_what_the_specification_says(session: tuple[requests.Session, str]) -> None:
    http, url = session
    assert code(requests.get(f"{url}/tags/list", timeout=9)) == (401, "UNAUTHORIZED")
    assert code(http.get(f"{url}-absent/tags/list")) == (404, "NAME_UNKNOWN")
    assert code(http.get(f"{url}/manifests/absent")) == (404, "MANIFEST_UNKNOWN")
    assert code(http.get(f"{url}/blobs/{digest(b'absent')}")) == (404, "BLOB_UNKNOWN")
    assert code(http.get(f"{url}/blobs/access-key")) == (400, "DIGEST_INVALID")
    assert code(http.patch(f"{url}/blobs/uploads/access-key", data=b"x")) == (404, "BLOB_UPLOAD_UNKNOWN")
    host = url.partition("/v2/")[0]
    upload = host + http.post(f"{url}/blobs/uploads/").headers["Location"]
    assert code(http.put(upload, params={"digest": digest(b"other")}, data=b"x")) == (400, "DIGEST_INVALID")
    assert code(http.put(upload, params={"digest": digest(b"x")}, data=b"x")) == (404, "BLOB_UPLOAD_UNKNOWN")
    manifest = json.dumps({"config": {"digest": digest(b"no")}, "layers": []})
    assert code(http.put(f"{url}/manifests/t", data=manifest)) == (404, "MANIFEST_BLOB_UNKNOWN")
    assert code(http.put(f"{url}/manifests/t", data="[]")) == (400, "MANIFEST_INVALID")
    assert code(http.put(f"{url}/manifests/{digest(b'no')}", data=manifest)) == (400, "DIGEST_INVALID")


def test_the_registry_keeps_an_immutable_tag_and_everything_outlives_the_server(
    session: tuple[requests.Session, str], cloud: Any, layout: Layout
) -> None:
    http, url = session
    upload = url.partition("/v2/")[0] + http.post(f"{url}/blobs/uploads/").headers["Location"]
    assert http.patch(upload, data=iter([b"con", b"fig"])).status_code == 202
    assert http.put(upload, params={"digest": digest(b"config")}).status_code == 201
    manifest = json.dumps({"config": {"digest": digest(b"config")}, "layers": []})
    kind = {"Content-Type": "application/vnd.oci.image.manifest.v1+json"}
    assert http.put(f"{url}/manifests/t", data=manifest, headers=kind).status_code == 201
    assert http.get(f"{url}/blobs/{digest(b'config')}").content == b"config"
    other = manifest + " "
    assert code(http.put(f"{url}/manifests/t", data=other, headers=kind)) == (400, "TAG_INVALID")
    assert http.put(f"{url}/manifests/{digest(other.encode())}", data=other, headers=kind).status_code == 201
    assert http.get(f"{url}/tags/list").json()["tags"] == ["t"]
    assert http.get(f"{url}/manifests/{digest(other.encode())}").text == other

    cloud.client("ecr").create_repository(
        repositoryName="a/exclusion",
        imageTagMutability="IMMUTABLE_WITH_EXCLUSION",
        imageTagMutabilityExclusionFilters=[{"filter": "latest*", "filterType": "WILDCARD"}],
        tags=[{"Key": "colour", "Value": "blue"}],
    )
    kept = read_region(layout, REGION)["repositories"]
    assert kept == json.loads(json.dumps(registry.dump(ecr_backends[ACCOUNT][REGION])))
    assert kept["a/exclusion"]["tags"] == [{"Key": "colour", "Value": "blue"}]
    assert registry.dump(ECRBackend(REGION, ACCOUNT)) == kept


@pytest.mark.usefixtures("storage")
def test_a_push_asks_for_what_is_allowed(cloud: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy for a push has what skopeo really asks of the registry, and nothing else."""
    asked = set()
    answer = Application.__call__

    def recorded(application: Application, environ: Any, start_response: Any) -> Any:
        if kind := KIND.match(environ["PATH_INFO"]):
            asked.add(f"ecr:{ACTIONS[environ['REQUEST_METHOD'], kind[2] or kind[1]]}")
        return answer(application, environ, start_response)

    monkeypatch.setattr(Application, "__call__", recorded)
    for _ in range(2):  # of an image that no other test pushed; the second finds everything there
        assert push(built("three"), found(cloud, "a/allowed"), log=tmp_path / "log", say=lambda _: None)
    calls = [call for statement in permissions.statements() for call in statement.calls]
    assert asked == {call.action for call in calls if call.by == "skopeo"}
