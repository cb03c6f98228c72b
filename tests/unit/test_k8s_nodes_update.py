"""k8s.nodes --from-channel: the image of the channel, and what the rendering changes for a pool that runs."""

import json
import shlex

import pytest
import yaml

from gpukiln.catalog.load import ROOT
from gpukiln.cli.main import command
from gpukiln.clouds import select
from gpukiln.images.pointer import Pointer, PointerVersion, write
from gpukiln.kubernetes.rbac import COMMAND_RULES
from gpukiln.options import options_of, read
from tests.support import documents
from tests.support.api_server import ApiServer
from tests.support.release_cloud import HOME, Cloud, make_image, tell
from tests.support.signing import key_pair, trusting

STABLE = Pointer("eks-gpu", "1.34", "stable")
FIRST, SECOND = "ami-0000000000000001a", "ami-0000000000000001b"
CHANNEL = ["--from-channel", "stable", "--cloud", "aws", "--region", HOME]
HOURS = ["--hours", "mon-fri 08:00-18:00"]
STEPS = [
    shlex.split(line, comments=True)[1:]
    for line in (ROOT / "docs/rollout.md").read_text().splitlines()
    if line.startswith("    invoke ") and " > " not in line
]


def pool(provider, *argv, types="g4dn.xlarge"):
    return ["--provider", provider, "--cluster", "main", "--instance-type", types, *argv]


@pytest.fixture
def update(nodes):
    """The `update` of the document."""

    def run(*argv):
        code, out, err = nodes(*argv, "--json")
        assert code == 0, err
        document = json.loads(out)
        documents.check(document)
        return document["update"]

    return run


@pytest.fixture
def point(monkeypatch):
    """Points stable at a new image of the cloud's double; returns its id."""
    monkeypatch.setattr(select, "make_cloud", lambda _name, region, **_: Cloud(region))
    tell("reset")

    def release(build):
        image_id = make_image(build)
        version = PointerVersion(image_id, build, regions=(HOME,))
        write(Cloud().client("ssm"), STABLE, version, pause=lambda _: None)
        return image_id

    yield release
    tell("reset")


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A cluster with Karpenter, which allows only what k8s.rbac prints for k8s.nodes."""
    server = ApiServer()
    for api_version in ("karpenter.sh/v1", "karpenter.k8s.aws/v1"):
        server.add_kind(api_version)
    server.rules = [rule.rule() for rule in COMMAND_RULES["nodes"]]
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path)))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    yield server
    server.close()


def apply(server, text, images, claims):
    """What the cluster has after kubectl apply: the objects with the server's defaults, and the nodes."""
    for manifest in yaml.safe_load_all(text):
        if manifest["kind"] == "EC2NodeClass":
            # +kubebuilder:default of metadataOptions (karpenter-provider-aws:pkg/apis/v1/ec2nodeclass.go)
            manifest["spec"]["metadataOptions"] |= {
                "httpEndpoint": "enabled",
                "httpProtocolIPv6": "disabled",
            }
            manifest["status"] = {"amis": [{"id": image_id} for image_id in images]}
        manifest["metadata"]["generation"] = 1
        server.add(manifest)
    for number, image_id in enumerate(claims):
        metadata = {"name": f"gpu-{number}", "labels": {"karpenter.sh/nodepool": "gpu"}}
        server.add(
            {
                "apiVersion": "karpenter.sh/v1",
                "kind": "NodeClaim",
                "metadata": metadata,
                "status": {"imageID": image_id},
            }
        )


@pytest.mark.parametrize(
    ("provider", "consequence"),
    [
        ("karpenter", "disruption budgets of the NodePools: one at a time, and none mon-fri 08:00-18:00 UTC"),
        ("managed", "a new version of the launch template and updates the node group"),
        ("asg", "machines that run stay until an instance refresh"),
    ],
)
def test_a_release_changes_the_image_of_the_pool(nodes, point, provider, consequence, tmp_path):
    where = pool(provider, *CHANNEL, *HOURS, "--output", str(tmp_path / "pool"))
    first = point("b1")
    code, out, err = nodes(*where)
    assert code == 0, err
    assert "compared with" not in out
    rendered = "".join(path.read_text() for path in (tmp_path / "pool").iterdir())
    assert first in rendered
    assert "resolve:ssm" not in rendered
    assert "ssmParameter" not in rendered
    assert f"note: {STABLE.path} points at {first}" in err
    out = nodes(*where)[1]
    assert "nothing differs\nnothing changes for running nodes\n" in out
    second = point("b2")
    code, out, _ = nodes(*where)
    assert code == 0
    assert "1 field differs" in out
    assert f'"{first}"' in out
    assert f'"{second}"' in out
    assert consequence in out
    # Its definition still says on which architecture it runs.
    code, _, err = nodes(*pool(provider, *CHANNEL, types="g5g.xlarge"))
    assert (code, "an image for x86_64" in err) == (3, True)


def test_dry_run_writes_nothing(nodes, update, point, tmp_path):
    where = pool("karpenter", *CHANNEL, "--output", str(tmp_path / "pool"))
    point("b1")
    out = nodes(*where, "--dry-run")[1]
    assert "new " in out
    assert "dry run: nothing is written" in out
    assert not (tmp_path / "pool").exists()
    nodes(*where)
    before = (tmp_path / "pool/gpu.yaml").read_text()
    point("b2")
    [change] = update(*where, "--dry-run")["changes"]
    assert change["object"] == "EC2NodeClass gpu"
    assert change["field"] == "spec.amiSelectorTerms"
    assert change["effect"] == "every-node"
    assert (tmp_path / "pool/gpu.yaml").read_text() == before


def test_an_image_that_no_trusted_key_signed_is_not_rendered(nodes, point, monkeypatch, tmp_path):
    trusting(monkeypatch, key_pair(tmp_path, "sign"))
    point("b1")
    code, out, err = nodes(*pool("karpenter", *CHANNEL, "--output", str(tmp_path / "pool")))
    assert (code, out) == (6, "")
    assert f"{STABLE.path} points at" in err
    assert "no trusted key signed that release" in err
    assert not (tmp_path / "pool").exists()


@pytest.mark.usefixtures("point")
def test_a_channel_that_points_nowhere(nodes):
    code, _, err = nodes(*pool("karpenter", *CHANNEL))
    assert code == 2
    assert f"{STABLE.path} does not exist in {HOME}" in err
    assert f"ami.release BUILD --channel stable --regions {HOME}" in err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (pool("karpenter", "--from-channel", "stable"), "--from-channel stable without --cloud"),
        (pool("karpenter", *CHANNEL, "--ami", FIRST), "--ami and --from-channel exclude each other"),
        (pool("karpenter", "--from-channel", "stabel", "--cloud", "aws"), "did you mean stable?"),
        (pool("managed", "--context", "double"), "has no launch template to compare with"),
    ],
)
def test_options_that_exclude_each_other(nodes, argv, message):
    code, _, err = nodes(*argv)
    assert (code, message in err) == (2, True), err


@pytest.mark.parametrize(
    ("argv", "more", "changes"),
    [
        # Behavioral fields, and requirements that nodes still satisfy (Karpenter's documentation, Drift).
        ([], ["--max", "8"], {("NodePool gpu", "spec.limits.nvidia.com/gpu"): "no-node"}),
        ([], HOURS, {("NodePool gpu", "spec.disruption.budgets"): "no-node"}),
        (
            [],
            ["--capacity", "on-demand,spot"],
            {("NodePool gpu", "spec.template.spec.requirements"): "no-node"},
        ),
        (
            ["--capacity", "on-demand,spot"],
            [],
            {("NodePool gpu", "spec.template.spec.requirements"): "some-nodes"},
        ),
        (
            [],
            ["--zones", "us-west-2a"],
            {("NodePool gpu", "spec.template.spec.requirements"): "some-nodes"},
        ),
        ([], ["--label", "a=b"], {("NodePool gpu", "spec.template.metadata.labels.a"): "every-node"}),
        ([], ["--volume", "200"], {("EC2NodeClass gpu", "spec.blockDeviceMappings"): "every-node"}),
        (
            [],
            ["--no-local-storage"],
            {("EC2NodeClass gpu", "spec.instanceStorePolicy"): "every-node"},
        ),
        (
            [],
            ["--keep", "1"],
            {("PriorityClass gpu-waiting", ""): "no-node", ("CronJob gpu-waiting", ""): "no-node"},
        ),
    ],
)
@pytest.mark.parametrize("live", [False, True], ids=["files", "cluster"])
def test_what_drifts(nodes, update, server, argv, more, changes, live, tmp_path):
    where = pool("karpenter", "--ami", FIRST, *argv)
    if live:
        apply(server, nodes(*where)[1], [FIRST], [FIRST])
        compare = ["--context", "double"]
        # Placeholder pods run on nodes and replace none.
        changes = {key: effect for key, effect in changes.items() if "waiting" not in key[0]}
    else:
        compare = ["--output", str(tmp_path / "pool")]
        nodes(*where, *compare)
    document = update(*where, *compare)
    assert document["changes"] == []
    assert "nothing changes for running nodes" in document["consequences"]
    document = update(*pool("karpenter", "--ami", FIRST, *more), *compare)
    assert {
        (change["object"], change["field"]): change["effect"] for change in document["changes"]
    } == changes
    if live:
        assert document["nodes"] == 1
        assert document["replaced"] == int("every-node" in changes.values())


def test_a_pool_of_the_cluster(nodes, update, server):
    apply(server, nodes(*pool("karpenter", "--ami", FIRST))[1], [FIRST], [FIRST, FIRST, SECOND])
    code, out, err = nodes(*pool("karpenter", "--ami", SECOND), "--context", "double")
    assert code == 0
    assert [manifest["kind"] for manifest in yaml.safe_load_all(out)] == ["EC2NodeClass", "NodePool"]
    assert "compared with context double: 1 field differs" in err
    assert "2 of 3 nodes drift" in err
    # One node has another image than its pool: it drifts without any change.
    document = update(*pool("karpenter", "--ami", FIRST), "--context", "double")
    assert (document["changes"], document["nodes"], document["replaced"]) == ([], 3, 1)
    assert not [line for line in document["consequences"] if "nothing changes" in line]
    assert {verb for verb, *_ in server.calls} == {"get", "list"}


def test_a_pool_that_followed_the_channel(nodes, update, server, point):
    image_id = point("b1")
    following = nodes(*pool("karpenter", "--channel", "stable"))[1]
    apply(server, following, [image_id], [image_id])
    document = update(*pool("karpenter", *CHANNEL), "--context", "double")
    assert [change["effect"] for change in document["changes"]] == ["no-node"]
    assert document["replaced"] == 0
    assert any(f"the pool followed {STABLE.path}" in line for line in document["consequences"])


def test_a_pool_that_is_not_there_yet(update, server):
    assert server
    document = update(*pool("karpenter", "--ami", FIRST), "--context", "double")
    assert (document["nodes"], document["replaced"]) == (0, 0)
    assert (
        "there is no pool gpu yet: Karpenter starts its nodes when pods need them" in document["consequences"]
    )


def test_a_pool_that_is_not_rendered_any_more(nodes, update, tmp_path):
    where = ["--ami", FIRST, "--output", str(tmp_path)]
    nodes(*pool("karpenter", *where, types="g4dn.xlarge,g5.xlarge"))
    document = update(*pool("karpenter", *where))
    assert any("`kubectl delete nodepool gpu-a10g` removes it" in line for line in document["consequences"])


def test_a_pool_that_a_user_wrote_with_the_same_class(nodes, update, server):
    types = "g4dn.xlarge,g5.xlarge"
    apply(server, nodes(*pool("karpenter", "--ami", FIRST, types=types))[1], [FIRST], [])
    document = update(*pool("karpenter", "--ami", SECOND), "--context", "double")
    lines = document["consequences"]
    assert any(
        "NodePool gpu-a10g is not rendered here and has the same EC2NodeClass" in line for line in lines
    )
    assert not any("kubectl delete" in line for line in lines)


@pytest.mark.parametrize("resource", ["nodepools", "nodeclaims", "ec2nodeclasses"])
def test_every_permission_for_context_is_needed(nodes, server, resource):
    apply(server, nodes(*pool("karpenter", "--ami", FIRST))[1], [FIRST], [FIRST])
    argv = [*pool("karpenter", "--ami", FIRST), "--context", "double"]
    assert nodes(*argv)[0] == 0
    for rule in server.rules:
        rule["resources"] = [name for name in rule["resources"] if name != resource]
    code, _, err = nodes(*argv)
    assert (code, resource in err) == (4, True)


def test_rights_that_are_missing_name_the_next_step(nodes, server):
    server.rules = []
    code, _, err = nodes(*pool("karpenter", "--ami", FIRST), "--context", "double")
    assert code == 4
    assert "can't get" in err
    assert "invoke k8s.rbac" in err


@pytest.mark.parametrize(
    ("provider", "before", "after", "effects"),
    [
        ("managed", [], ["--max", "8"], {"aws_eks_node_group.gpu scaling_config": "no-node"}),
        ("managed", ["--max", "8"], [], {"aws_eks_node_group.gpu scaling_config": "some-nodes"}),
        ("asg", ["--max", "8"], [], {"aws_autoscaling_group.gpu max_size": "some-nodes"}),
        ("managed", [], ["--volume", "200"], {"var.volume_size_gib default": "every-node"}),
        ("asg", [], ["--volume", "200"], {"var.volume_size_gib default": "after-refresh"}),
        ("managed", [], ["--capacity", "spot"], {"aws_eks_node_group.gpu capacity_type": "new-group"}),
        (
            "asg",
            [],
            ["--zones", "us-west-2a"],
            {
                "data.aws_subnet.of for_each": "no-node",
                "data.aws_subnet.of id": "no-node",
                "local zones": "some-nodes",
                "local subnet_ids": "some-nodes",
            },
        ),
    ],
)
def test_what_terraform_changes(nodes, update, provider, before, after, effects, tmp_path):
    where = ["--ami", FIRST, "--output", str(tmp_path)]
    nodes(*pool(provider, *where, *before))
    document = update(*pool(provider, *where, *after))
    assert {
        f"{change['object']} {change['field']}": change["effect"] for change in document["changes"]
    } == effects


def test_a_group_that_followed_the_channel(nodes, point, tmp_path):
    image_id = point("b1")
    nodes(*pool("managed", "--channel", "stable", "--output", str(tmp_path)))
    out = nodes(*pool("managed", *CHANNEL, "--output", str(tmp_path)))[1]
    assert f"the earlier rendering follows {STABLE.path}, which points at {image_id}" in out
    nodes(*pool("managed", "--channel", "stable", "--output", str(tmp_path)))
    out = nodes(*pool("managed", "--channel", "stable", "--output", str(tmp_path)))[1]
    assert f"nothing changes for running nodes as long as {STABLE.path} points at the same image" in out


def test_a_comment_is_no_change(nodes, update, tmp_path):
    for provider, name in (("karpenter", "gpu.yaml"), ("managed", "main.tf")):
        where = pool(provider, "--ami", FIRST, "--output", str(tmp_path))
        nodes(*where)
        file = tmp_path / name
        file.write_text("# reviewed\n" + file.read_text())
        assert update(*where)["changes"] == []


def test_an_earlier_rendering_that_can_not_be_read(nodes, tmp_path):
    (tmp_path / "gpu.yaml").write_text("a: [\n")
    code, _, err = nodes(*pool("karpenter", "--ami", FIRST, "--output", str(tmp_path)))
    assert code == 2
    assert "gpu.yaml" in err
    assert "wanted: an earlier rendering" in err
    assert (tmp_path / "gpu.yaml").read_text() == "a: [\n"


@pytest.mark.parametrize("step", STEPS, ids=" ".join)
def test_a_step_of_a_rollout_can_be_typed(step):
    name, *words = step
    options = options_of(command(name))
    assert read(name, options, words)


def test_the_steps_of_a_rollout_have_their_order():
    names = ["ami.diff", "ami.verify", "ami.release", "k8s.nodes", "ami.rollback"]
    assert [*dict.fromkeys(step[0] for step in STEPS if step[0] in names)] == names
