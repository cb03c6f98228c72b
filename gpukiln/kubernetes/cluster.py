"""A cluster's API by the official client; objects are plain dicts, as the API server sends them.

The client reads the kubeconfig, signs in and does TLS. Its generated models are not used, so objects of other
versions and of custom kinds pass through unchanged, and gpukiln sends exactly what it rendered.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import urllib3
import yaml
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from kubernetes.config import ConfigException

from gpukiln.errors import (
    BusyError,
    GpukilnError,
    IncompatibleError,
    RefusedError,
    UnavailableError,
    UsageError,
)
from gpukiln.kubernetes.manifest import Manifest
from gpukiln.parsing import check_yaml, parse_json, read_text

CONNECT_S, ANSWER_S = 5.0, 30.0
LARGEST = 1 << 30  # bytes of an answer: a page has 500 objects, and etcd stores at most 1.5 MiB for each
CONTENT_TYPES = {"PATCH": "application/merge-patch+json"}  # of other methods: application/json
PAGE = 500  # as kubectl's --chunk-size
IN_CLUSTER = "in-cluster"
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

# Kinds that callers may name without their group; others are named with it: karpenter.sh/v1/NodePool.
API_VERSIONS = {
    **dict.fromkeys(
        (
            "ConfigMap",
            "Event",
            "Namespace",
            "Node",
            "PersistentVolumeClaim",
            "Pod",
            "ResourceQuota",
            "Secret",
            "Service",
            "ServiceAccount",
        ),
        "v1",
    ),
    **dict.fromkeys(("DaemonSet", "Deployment", "ReplicaSet", "StatefulSet"), "apps/v1"),
    **dict.fromkeys(("CronJob", "Job"), "batch/v1"),
    "RuntimeClass": "node.k8s.io/v1",
}
CLUSTER_WIDE = ("Namespace", "Node", "RuntimeClass")


class Cluster:
    """One context of a kubeconfig, or the cluster that this process runs in.

    Args:
        context: Of the kubeconfig; empty: its current one.
        kubeconfig: Path; empty: $KUBECONFIG, then ~/.kube/config, then the service account of this pod.

    Raises:
        UnavailableError: There is no kubeconfig, or signing in with it fails.
        UsageError: The kubeconfig has no such context.
    """

    def __init__(self, context: str = "", kubeconfig: str = "") -> None:
        settings = client.Configuration()
        # urllib3 would retry in silence; callers decide whether and how long to wait.
        settings.retries = False
        self.context, self.namespace = _load(settings, context, kubeconfig)
        # urllib3 warns at every request of a kubeconfig with insecure-skip-tls-verify
        warnings.simplefilter("once", urllib3.exceptions.InsecureRequestWarning)
        self.server = settings.host
        self._api = client.ApiClient(settings)
        self._resources: dict[str, dict[str, dict[str, Any]]] = {}

    def version(self) -> tuple[int, int]:
        """Major and minor version of the server, for example (1, 34)."""
        version = self._call("GET", "/version", "read the version")
        # EKS and GKE append a plus to the minor version: "34+".
        return int(version["major"]), int(version["minor"].rstrip("+"))

    def get(self, kind: str, name: str, namespace: str = "") -> Manifest | None:
        """The object, or None if there is none of that name."""
        what = f"get {kind} {name}"
        try:
            manifest: Manifest = self._call("GET", self._path(kind, namespace, name), what)
        except MissingError:
            return None
        return manifest

    def list(
        self, kind: str, namespace: str = "", *, labels: str = "", fields: str = "", everywhere: bool = False
    ) -> list[Manifest]:
        """The objects of a kind; none if the cluster does not have the custom kind.

        Args:
            labels: A label selector, fields: A field selector, both as kubectl takes them.
            everywhere: In all namespaces.
        """
        # In pages: a list of all pods of a large cluster would exceed the limit of one answer.
        query = {"labelSelector": labels, "fieldSelector": fields, "limit": str(PAGE), "continue": ""}
        what = f"list {kind}" + (" in all namespaces" if everywhere else "")
        objects: list[Manifest] = []
        try:
            path = self._path(kind, "" if everywhere else namespace, everywhere=everywhere)
            while True:
                answer = self._call("GET", path, what, query)
                objects += answer["items"]
                query["continue"] = answer["metadata"].get("continue", "")
                if not query["continue"]:
                    break
        except MissingError:
            return []
        plain = kind.rpartition("/")
        api_version = plain[0] or API_VERSIONS[plain[2]]
        # Items of a list lack both.
        return [{"apiVersion": api_version, "kind": plain[2], **item} for item in objects]

    def create(self, manifest: Manifest, *, dry_run: bool = False) -> Manifest:
        """Create an object in its own namespace, or in the context's if it names none.

        Args:
            dry_run: The server validates and admits the object, and does not store it.

        Raises:
            IncompatibleError: The server rejects the object.
            RefusedError: An object of that name exists.
        """
        kind = f"{manifest['apiVersion']}/{manifest['kind']}"
        name = manifest["metadata"].get("name") or manifest["metadata"].get("generateName", "")
        path = self._path(kind, str(manifest["metadata"].get("namespace") or ""))
        # Strict: the server rejects unknown and repeated fields instead of dropping them.
        query = {"fieldValidation": "Strict", "fieldManager": "gpukiln", "dryRun": "All" if dry_run else ""}
        created: Manifest = self._call("POST", path, f"create {manifest['kind']} {name}", query, manifest)
        return created

    def delete(self, kind: str, name: str, namespace: str = "") -> bool:
        """Delete an object and the objects that it owns; False if there was none."""
        # The garbage collector then deletes the pods of a Job as well.
        options = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        try:
            self._call("DELETE", self._path(kind, namespace, name), f"delete {kind} {name}", body=options)
        except MissingError:
            return False
        return True

    def patch(self, kind: str, name: str, changes: Manifest, namespace: str = "") -> Manifest:
        """Change fields of an object by a JSON merge patch (RFC 7396): lists are replaced, null removes.

        Raises:
            RefusedError: The changes name a resourceVersion, and the object has changed since.
        """
        patched: Manifest = self._call(
            "PATCH", self._path(kind, namespace, name), f"change {kind} {name}", body=changes
        )
        return patched

    def evict(self, pod: str, namespace: str) -> bool:
        """Evict a pod, as `kubectl drain` does; False if there was none.

        Raises:
            BusyError: A PodDisruptionBudget does not allow it now.
        """
        eviction = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod, "namespace": namespace},
        }
        try:
            path = self._path("Pod", namespace, pod) + "/eviction"
            self._call("POST", path, f"evict {namespace}/{pod}", body=eviction)
        except MissingError:
            return False
        return True

    def logs(
        self,
        pod: str,
        namespace: str = "",
        *,
        container: str = "",
        follow: bool = False,
        previous: bool = False,
        tail: int = 0,
    ) -> Iterator[str]:
        """Lines of a container's log; with `follow` until the container ends, with `tail` only the last ones.

        Raises:
            UnavailableError: There is no such pod, or the connection ended.
            BusyError: The container has not started.
        """
        query = {
            "container": container,
            "follow": "true" if follow else "",
            "previous": "true" if previous else "",
            "tailLines": str(tail) if tail else "",
        }
        what = f"read the log of {pod}"
        path = self._path("Pod", namespace, pod) + "/log"
        try:
            answer = self._send("GET", path, what, query, None, endless=follow)
        except IncompatibleError as error:  # 400: "container ... is waiting to start: ContainerCreating"
            raise BusyError(error.message, hint="ask again when it has started") from error
        except MissingError as error:
            raise UnavailableError(error.message) from error
        rest = b""
        with contextlib.closing(answer), self._translated(what):
            # Decoded line by line: a chunk may end within a character of UTF-8.
            for chunk in answer.stream(4096):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    yield line.decode(errors="replace")
        if rest:
            yield rest.decode(errors="replace")

    def close(self) -> None:
        self._api.close()

    def _path(self, kind: str, namespace: str, name: str = "", *, everywhere: bool = False) -> str:
        group_version, _, plain = kind.rpartition("/")
        resource = self._resource(group_version or API_VERSIONS[plain], plain)
        root = "api" if (group_version or API_VERSIONS[plain]) == "v1" else "apis"
        parts = [root, group_version or API_VERSIONS[plain]]
        if resource["namespaced"] and not everywhere:
            parts += ["namespaces", namespace or self.namespace]
        return "/" + "/".join([*parts, resource["name"], *([name] if name else [])])

    def _resource(self, api_version: str, kind: str) -> dict[str, Any]:
        """The discovery entry of a kind: its plural `name` and whether it is `namespaced`."""
        if api_version not in self._resources:
            root = "/api/v1" if api_version == "v1" else f"/apis/{api_version}"
            try:
                discovered = self._call("GET", root, f"list the kinds of {api_version}")
            except MissingError:  # the server's own answer is "404 page not found"
                raise MissingError(
                    f"{self.context} does not serve {api_version}",
                    hint="`kubectl api-versions` lists what it serves; a CRD or an add-on adds others",
                ) from None
            self._resources[api_version] = {
                resource["kind"]: resource
                for resource in discovered["resources"]
                # Names with a slash are subresources, such as pods/log.
                if "/" not in resource["name"]
            }
        known = self._resources[api_version]
        if kind not in known:
            raise MissingError(f"{self.context} has no kind {kind} of {api_version}")
        return known[kind]

    def _call(
        self,
        method: str,
        path: str,
        what: str,
        query: dict[str, str] | None = None,
        body: Manifest | None = None,
    ) -> Any:
        with (
            contextlib.closing(self._send(method, path, what, query, body)) as answer,
            self._translated(what),
        ):
            return parse_json(answer.data, largest=LARGEST)

    def _send(
        self,
        method: str,
        path: str,
        what: str,
        query: dict[str, str] | None = None,
        body: Manifest | None = None,
        *,
        endless: bool = False,
    ) -> urllib3.BaseHTTPResponse:
        with self._translated(what):
            answer: urllib3.BaseHTTPResponse = self._api.call_api(
                path,
                method,
                query_params=[(key, value) for key, value in (query or {}).items() if value],
                header_params={"Accept": "*/*" if path.endswith("/log") else "application/json"}
                # The API server refuses a PATCH whose type does not say which kind of patch it is.
                | ({"Content-Type": CONTENT_TYPES.get(method, "application/json")} if body else {}),
                body=body,
                # The only authentication scheme of the generated client; client certificates belong to the
                # connection.
                auth_settings=["BearerToken"],
                # The answer is streamed: logs have no end, and lists are read with a limit.
                _preload_content=False,
                _return_http_data_only=True,
                # A followed log may be silent for hours.
                _request_timeout=(CONNECT_S, None if endless else ANSWER_S),
            )
            return answer

    @contextlib.contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        """Raise the client's errors as errors of gpukiln."""
        try:
            yield
        except ApiException as error:
            raise _answer_error(error, what, self) from error
        except urllib3.exceptions.HTTPError as error:
            raise UnavailableError(
                f"can't {what}: {self.server} of context {self.context}: {_cause(error)}",
                hint=f"check the server and the VPN: `kubectl --context {self.context} version`",
            ) from error
        except ValueError as error:  # not JSON, for example a proxy's error page
            raise UnavailableError(
                f"can't {what}: {self.server} of context {self.context} gives no answer of a Kubernetes API "
                "server",
                hint="check `server` in the kubeconfig, and proxies between",
            ) from error


class AnswerError(UnavailableError):
    """The server answered with an error for this request; other requests may succeed."""


class MissingError(AnswerError):
    """404: the object, its namespace, or the kind."""


STATUSES: dict[int, tuple[type[GpukilnError], str]] = {
    400: (IncompatibleError, ""),
    403: (AnswerError, "`invoke k8s.rbac` prints the RBAC objects that each command needs"),
    404: (MissingError, ""),
    409: (RefusedError, "use another name, or remove the object first"),
    422: (IncompatibleError, ""),
    429: (BusyError, "the API server is busy: try again later"),
    503: (BusyError, "the API server is busy: try again later"),
}


def _answer_error(error: ApiException, what: str, cluster: Cluster) -> GpukilnError:
    """The error for an answer of the API server.

    Its body is a Status (apimachinery, meta/v1) with code, reason and a message.
    """
    try:
        message = parse_json(error.body)["message"]
    except (TypeError, ValueError, KeyError):
        message = f"{error.status} {error.reason}"
    if error.status == 401:
        return UnavailableError(
            f"can't {what}: {cluster.server} does not accept the credentials of context {cluster.context}",
            hint="sign in again; on EKS: `aws eks update-kubeconfig --name CLUSTER --region REGION`",
        )
    kind, hint = STATUSES.get(error.status or 0, (AnswerError, ""))
    return kind(f"can't {what}: {message}", hint=hint)


def _cause(error: BaseException) -> str:
    """Why a connection failed, without the messages that urllib3 puts around it."""
    while isinstance(error, urllib3.exceptions.MaxRetryError) and error.reason:
        error = error.reason
    text = str(error)
    return text.partition(": ")[2] if text.startswith("<") else text or type(error).__name__


def _load(settings: client.Configuration, context: str, kubeconfig: str) -> tuple[str, str]:
    """Fill in the client's settings; returns the name of the context and its namespace."""
    files = [
        Path(name).expanduser()
        for name in (kubeconfig or os.environ.get("KUBECONFIG", "")).split(":")
        if name
    ]
    files = files or [Path("~/.kube/config").expanduser()]
    if not any(file.is_file() for file in files):
        # The kubelet sets this variable in every pod. A named context is never replaced by the pod's account.
        if not kubeconfig and not context and "KUBERNETES_SERVICE_HOST" in os.environ:
            return _load_in_cluster(settings)
        raise UnavailableError(
            f"no kubeconfig: {', '.join(map(str, files))} does not exist",
            hint="name one by $KUBECONFIG or --kubeconfig; on EKS "
            "`aws eks update-kubeconfig --name CLUSTER --region REGION` writes it",
        )
    merged = ":".join(str(file) for file in files if file.is_file())
    current, contexts, users = _read_kubeconfigs(merged)
    name = context or current
    if name not in contexts:
        near = difflib.get_close_matches(name, contexts, 1)
        choices = f"wanted one of {', '.join(contexts)}" if contexts else "it has no context"
        raise UsageError(
            f"{merged} has no context {name}" if name else f"{merged} names no current context",
            hint=f"did you mean {near[0]}?" if near else choices,
        )
    chosen = contexts[name]
    plugin = users.get(chosen.get("user", ""), {}).get("exec")
    if plugin and not shutil.which(plugin["command"]):  # the client reports only an errno
        raise UnavailableError(
            f"context {name} signs in with {plugin['command']}, which is not on PATH",
            hint=plugin.get("installHint") or f"install {plugin['command']}, or name another --context",
        )
    heard = _LogCapture()
    logging.getLogger().addHandler(heard)  # the client only logs why signing in failed, and continues
    try:
        config.load_kube_config(merged, name, settings, persist_config=False)
    except ConfigException as error:
        raise UnavailableError(
            f"context {name} of {merged}: {error}", hint="`kubectl config view` shows the context"
        ) from error
    finally:
        logging.getLogger().removeHandler(heard)
    if heard.lines:
        raise UnavailableError(
            f"can't sign in with context {name}: {heard.lines[0]}",
            hint="sign in again (on AWS: `aws sso login`), then run the command once more",
        )
    return name, chosen.get("namespace") or "default"


def _load_in_cluster(settings: client.Configuration) -> tuple[str, str]:
    try:
        config.load_incluster_config(settings)
    except ConfigException as error:
        raise UnavailableError(f"this pod has no service account to sign in with: {error}") from error
    return IN_CLUSTER, SERVICE_ACCOUNT.read_text().strip() if SERVICE_ACCOUNT.is_file() else "default"


def _read_kubeconfigs(files: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """The merged kubeconfigs: the current context, contexts by name, users by name."""
    try:
        for file in map(Path, files.split(config.kube_config.ENV_KUBECONFIG_PATH_SEPARATOR)):
            if file.is_file():
                check_yaml(read_text(file))  # the client's parser has no limits on size and aliases
        merged = config.kube_config.KubeConfigMerger(files).config.value
        contexts, users = (
            {entry["name"]: entry.value.get(part) or {} for entry in merged.get(f"{part}s") or ()}
            for part in ("context", "user")
        )
        return merged.get("current-context") or "", contexts, users
    except (ConfigException, yaml.YAMLError, TypeError, AttributeError, KeyError, ValueError) as error:
        raise UnavailableError(
            f"{files} is no kubeconfig: {str(error).partition(chr(10))[0]}",
            hint="`kubectl config view` reports the same error",
        ) from error


class _LogCapture(logging.Handler):
    """Collects the errors that the client logs and does not raise."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage().strip().rpartition("\n")[2])
