"""The policy for a push has what skopeo really asks of the registry, and nothing else."""

import re
from pathlib import Path
from typing import Any

import pytest
from test_docker_push import built, cloud, found, layout, storage  # noqa: F401 - fixtures

from gpukiln.catalog import permissions
from gpukiln.clouds.embedded.server import Application
from gpukiln.docker.push import push

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


@pytest.mark.usefixtures("storage")
def test_a_push_asks_for_what_is_allowed(cloud: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811 - the fixture
    asked = set()
    answer = Application.__call__

    def recorded(application: Application, environ: Any, start_response: Any) -> Any:
        if kind := KIND.match(environ["PATH_INFO"]):
            asked.add(f"ecr:{ACTIONS[environ['REQUEST_METHOD'], kind[2] or kind[1]]}")
        return answer(application, environ, start_response)

    monkeypatch.setattr(Application, "__call__", recorded)
    for _ in range(2):  # the second finds everything there
        assert push(built(), found(cloud, "a/allowed"), log=tmp_path / "log", say=lambda _: None)
    calls = [call for statement in permissions.statements() for call in statement.calls]
    assert asked == {call.action for call in calls if call.by == "skopeo"}
