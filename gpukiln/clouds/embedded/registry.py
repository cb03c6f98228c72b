"""The container registry API of ECR, for docker, podman, buildah and skopeo.

ECR has two protocols: its own API, which moto answers, and the registry API on the host of `repositoryUri`,
which moto lacks. Here that host is the embedded server. Manifests and tags are in moto's repositories, so
both protocols have the same images; blobs are files. The region, part of the host name in AWS, is the first
part of a repository's path. Source: opencontainers/distribution-spec, spec.md (Endpoints; Error Codes).
"""

import hashlib
import json
import re
import secrets
import shutil
from base64 import b64encode
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.core.responses import ActionResult
from moto.ecr.models import ECRBackend, Image, Repository, RepoTagMutability, ecr_backends
from moto.ecr.responses import ECRResponse
from werkzeug.exceptions import HTTPException
from werkzeug.routing import Map, Rule
from werkzeug.wrappers import Request, Response
from werkzeug.wsgi import FileWrapper

from gpukiln.clouds.embedded.layout import Layout
from gpukiln.clouds.embedded.regions import read_region
from gpukiln.parsing import parse_json

USER = "AWS"  # ECR's one user (ECR user guide, Private registry authentication)
# Texts that other calls set; moto stores them on the repository.
POLICIES = ("lifecycle_policy", "policy")  # attributes of moto's Repository
TOKEN_LIFE = timedelta(hours=12)
CHUNK = 1 << 20  # bytes
# Digests become file names, so nothing else may match.
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"


class RegistryError(Exception):
    """An error of the registry API.

    Args:
        status: The HTTP status.
        code: The specification's error code.
        message: The error's text.
    """

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


def install(layout: Layout) -> None:
    """Make moto's ECR return this registry and the stored repositories. Call once, before the first request.

    Args:
        layout: The cloud's files.
    """
    shutil.rmtree(layout.registry / "uploads", ignore_errors=True)  # unfinished uploads of a killed server
    init = ECRBackend.__init__

    def init_ecr(self: Any, region_name: str, account_id: str) -> None:
        init(self, region_name, account_id)
        load(self, read_region(layout, region_name).get("repositories", {}))

    def uri(self: Any) -> str:
        return f"127.0.0.1:{_port(layout)}/{self.region_name}/{self.name}"

    def get_authorization_token(self: Any) -> ActionResult:
        token = b64encode(f"{USER}:{layout.access_key}".encode()).decode()
        return ActionResult(
            {
                "authorizationData": [
                    {
                        "authorizationToken": token,
                        "expiresAt": datetime.now(UTC) + TOKEN_LIFE,
                        "proxyEndpoint": f"http://127.0.0.1:{_port(layout)}",
                    }
                    for _ in self._get_param("registryIds") or [DEFAULT_ACCOUNT_ID]
                ]
            }
        )

    replaced: dict[tuple[type, str], Any] = {
        (ECRBackend, "__init__"): init_ecr,
        (Repository, "uri"): property(uri, lambda _, __: None),
        (ECRResponse, "get_authorization_token"): get_authorization_token,
    }
    for (owner, name), member in replaced.items():
        setattr(owner, name, member)


def _port(layout: Layout) -> int:
    return int(parse_json(layout.endpoint.read_text())["port"])


def dump(ecr: Any) -> dict[str, Any]:
    """The stored part of a region's repositories.

    Args:
        ecr: moto's ECR backend of the region.

    Returns:
        A JSON document.
    """
    return {
        name: {
            "image_tag_mutability": RepoTagMutability(repository.image_tag_mutability).value,
            "image_tag_mutability_exclusion_filters": repository.image_tag_mutability_exclusion_filters,
            "image_scan_config": repository.image_scanning_configuration,
            "encryption_config": repository.encryption_configuration,
            "tags": ecr.tagger.list_tags_for_resource(repository.arn)["tags"],
            "policies": {field: getattr(repository, field) for field in POLICIES},
            "images": [
                {
                    "manifest": image.image_manifest,
                    "media_type": image.image_manifest_media_type,
                    "digest": image.get_image_digest(),
                    "tags": image.image_tags,
                    "pushed_at": image.image_pushed_at,
                }
                for image in repository.images
            ],
        }
        for name, repository in ecr.repositories.items()
    }


def load(ecr: Any, document: dict[str, Any]) -> None:
    """Create a region's repositories from their document.

    Args:
        ecr: moto's ECR backend of the region.
        document: What `dump` returned.
    """
    for name, fields in document.items():
        given = {field: value for field, value in fields.items() if field not in ("policies", "images")}
        repository = ecr.create_repository(repository_name=name, registry_id=None, **given)
        for field, text in fields["policies"].items():
            setattr(repository, field, text)
        for row in fields["images"]:
            image = Image(ecr.account_id, None, row["manifest"], name, row["media_type"], row["digest"])  # type: ignore[arg-type]  # it may have no tag
            image.image_tags = list(row["tags"])
            image.image_tag = row["tags"][-1] if row["tags"] else None  # type: ignore[assignment]  # it may have no tag
            image.image_pushed_at = row["pushed_at"]
            repository.images.append(image)


class Registry:
    """WSGI application: the registry API below /v2/.

    Args:
        layout: The cloud's files.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._routes = Map(
            [
                Rule("/v2/", endpoint=lambda _: Response("{}", content_type="application/json")),
                Rule("/v2/<path:name>/blobs/uploads/", methods=["POST"], endpoint=self._begin),
                Rule("/v2/<path:name>/blobs/uploads/<upload>", methods=["PATCH"], endpoint=self._append),
                Rule("/v2/<path:name>/blobs/uploads/<upload>", methods=["PUT"], endpoint=self._finish),
                Rule("/v2/<path:name>/blobs/<digest>", methods=["GET"], endpoint=self._blob),
                Rule("/v2/<path:name>/manifests/<reference>", methods=["GET"], endpoint=self._manifest),
                Rule("/v2/<path:name>/manifests/<reference>", methods=["PUT"], endpoint=self._put_manifest),
                Rule("/v2/<path:name>/tags/list", methods=["GET"], endpoint=self._tags),
            ]
        )

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """Answer one request."""
        request = Request(environ)
        try:
            login = request.authorization
            if login is None or (login.username, login.password) != (USER, self._layout.access_key):
                raise RegistryError(401, "UNAUTHORIZED", "log in with the token of GetAuthorizationToken")
            endpoint, arguments = self._routes.bind_to_environ(environ).match()
            response: Response = endpoint(request, **arguments)
        except RegistryError as error:
            body = json.dumps({"errors": [{"code": error.code, "message": str(error)}]})
            response = Response(body, status=error.status, content_type="application/json")
            if error.status == 401:
                response.headers["WWW-Authenticate"] = 'Basic realm="the embedded ECR"'
        except HTTPException as error:
            response = error.get_response()
        response.headers["Docker-Distribution-Api-Version"] = "registry/2.0"
        return response(environ, start_response)

    def _file(self, digest: str) -> Any:
        if not DIGEST.fullmatch(digest):
            raise RegistryError(400, "DIGEST_INVALID", f"{digest} is not a sha256 digest")
        return self._layout.registry / "blobs" / digest.removeprefix("sha256:")

    def _upload(self, upload: str) -> Any:
        file = self._layout.registry / "uploads" / upload
        if not re.fullmatch(r"[0-9a-f]{32}", upload) or not file.exists():
            raise RegistryError(404, "BLOB_UPLOAD_UNKNOWN", f"no upload {upload}")
        return file

    def _begin(self, request: Request, name: str) -> Response:
        _repository(name)
        mount = request.args.get("mount", "")
        # A blob that another repository has need not be sent again (distribution-spec, "Mounting a blob from
        # another repository").
        if mount and self._file(mount).exists():
            return _created(f"/v2/{name}/blobs/{mount}", mount)
        upload = secrets.token_hex(16)
        (self._layout.registry / "uploads").mkdir(parents=True, exist_ok=True)
        (self._layout.registry / "uploads" / upload).touch()
        return _accepted(name, upload, 0)

    def _append(self, request: Request, name: str, upload: str) -> Response:
        file = self._upload(upload)
        with file.open("ab") as opened:
            shutil.copyfileobj(request.stream, opened, CHUNK)
        return _accepted(name, upload, file.stat().st_size)

    def _finish(self, request: Request, name: str, upload: str) -> Response:
        file, digest = self._upload(upload), request.args.get("digest", "")
        blob = self._file(digest)
        with file.open("ab") as opened:
            shutil.copyfileobj(request.stream, opened, CHUNK)
        with file.open("rb") as opened:
            actual = "sha256:" + hashlib.file_digest(opened, "sha256").hexdigest()
        if actual != digest:
            file.unlink()
            raise RegistryError(400, "DIGEST_INVALID", f"the upload has the digest {actual}, not {digest}")
        blob.parent.mkdir(exist_ok=True)
        file.replace(blob)
        return _created(f"/v2/{name}/blobs/{digest}", digest)

    def _blob(self, request: Request, name: str, digest: str) -> Response:
        _repository(name)
        file = self._file(digest)
        if not file.exists():
            raise RegistryError(404, "BLOB_UNKNOWN", f"{name} has no blob {digest}")
        answer = Response(content_type="application/octet-stream")
        if request.method != "HEAD":
            answer = Response(FileWrapper(file.open("rb"), CHUNK), direct_passthrough=True)
        answer.headers["Content-Length"] = str(file.stat().st_size)
        answer.headers["Docker-Content-Digest"] = digest
        return answer

    def _manifest(self, _: Request, name: str, reference: str) -> Response:
        for image in _repository(name).images:
            if reference in (*image.image_tags, image.get_image_digest()):
                answer = Response(image.image_manifest, content_type=image.image_manifest_media_type)
                answer.headers["Docker-Content-Digest"] = image.get_image_digest()
                return answer
        raise RegistryError(404, "MANIFEST_UNKNOWN", "Requested image not found")

    def _put_manifest(self, request: Request, name: str, reference: str) -> Response:
        repository, text = _repository(name), request.get_data(as_text=True)
        digest = f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
        tag = None if DIGEST.fullmatch(reference) else reference
        if tag is None and reference != digest:
            raise RegistryError(400, "DIGEST_INVALID", f"the manifest is {digest}, not {reference}")
        try:
            manifest = parse_json(text)
            parts = [manifest["config"], *manifest["layers"]]
            missing = [part["digest"] for part in parts if not self._file(part["digest"]).exists()]
        except (ValueError, KeyError, TypeError) as error:
            raise RegistryError(
                400, "MANIFEST_INVALID", f"the manifest is not that of an image: {error!r}"
            ) from error
        if missing:
            raise RegistryError(404, "MANIFEST_BLOB_UNKNOWN", f"{name} has no {', '.join(missing)}")
        holder = next((image for image in repository.images if tag in image.image_tags), None)
        if holder and repository.is_tag_immutable():
            message = f"the tag {tag} exists in {repository.name}, whose tags are immutable"
            raise RegistryError(400, "TAG_INVALID", message)
        if holder is None or holder.get_image_digest() != digest:
            known = any(image.get_image_digest() == digest for image in repository.images)
            if tag or not known:
                media_type = request.content_type or OCI_MANIFEST
                region, _, short = name.partition("/")
                ecr_backends[DEFAULT_ACCOUNT_ID][region].put_image(short, text, tag, media_type, digest)  # type: ignore[arg-type]  # it may have no tag
        return _created(f"/v2/{name}/manifests/{reference}", digest)

    def _tags(self, _: Request, name: str) -> Response:
        tags = sorted(tag for image in _repository(name).images for tag in image.image_tags)
        return Response(json.dumps({"name": name, "tags": tags}), content_type="application/json")


def _repository(name: str) -> Any:
    region, _, short = name.partition("/")
    backends = ecr_backends[DEFAULT_ACCOUNT_ID]
    if region not in backends.regions or short not in backends[region].repositories:
        raise RegistryError(404, "NAME_UNKNOWN", f"there is no repository {name}")
    return backends[region].repositories[short]


def _created(location: str, digest: str) -> Response:
    return Response(status=201, headers={"Location": location, "Docker-Content-Digest": digest})


def _accepted(name: str, upload: str, size: int) -> Response:
    headers = {"Location": f"/v2/{name}/blobs/uploads/{upload}", "Docker-Upload-UUID": upload}
    return Response(status=202, headers={**headers, "Range": f"0-{max(size - 1, 0)}"})
