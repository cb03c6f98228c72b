"""Verifies an image as a node: one machine joins a cluster, is tested there, and is removed.

No other pod runs on it. Its Node registers with a taint that nothing tolerates. When it appears, one change
cordons it and removes that taint: pods of DaemonSets tolerate a cordon by themselves, and every other pod
would need a toleration for it. The machine has the tags and the deadline of every machine of a build, so that
`cloud.sweep` removes it if this process is killed; the next canary removes the Node.
"""

from __future__ import annotations

import email
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from email.message import Message
from email.mime.text import MIMEText
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from gpukiln.catalog.bases import base as find_base
from gpukiln.catalog.instance_types import instance_type
from gpukiln.clouds import ec2 as calls
from gpukiln.clouds.base import Cloud, explain_aws_errors
from gpukiln.clouds.tags import CANARY_TAG, CLUSTER_TAG, GPUS_TAG, MACHINE_TAG, SIMULATED
from gpukiln.errors import BusyError, GpukilnError, IncompatibleError, RefusedError, UsageError
from gpukiln.images.builds import Build
from gpukiln.images.subject import Subject
from gpukiln.instances.access import machine_request, resources_removed
from gpukiln.instances.console import console_text, find_stop, strip_control_characters
from gpukiln.instances.deadline import deadline_of, shutdown_user_data
from gpukiln.instances.launch import LaunchedMachine, capacity_loss, launch
from gpukiln.instances.tags import ENDED_STATES, build_tags
from gpukiln.kubernetes import cluster_verification, eks
from gpukiln.kubernetes.cluster import Cluster
from gpukiln.kubernetes.cluster_verification import GpuTestOptions, is_ready
from gpukiln.kubernetes.doctor import is_plugin, node_findings, read_state
from gpukiln.kubernetes.machines import GPU, GPU_PRESENT
from gpukiln.kubernetes.manifest import Manifest
from gpukiln.kubernetes.nodes import userdata
from gpukiln.kubernetes.nodes.group import TAINT, NodeGroup
from gpukiln.kubernetes.nodes.terraform import node_labels
from gpukiln.parsing import read_text
from gpukiln.pipeline.verdict_signing import sign_verdict
from gpukiln.pipeline.verdict_tags import require_tag_space, write_cluster_verdict_tag
from gpukiln.pipeline.verify import verification_run
from gpukiln.progress import Progress
from gpukiln.verify.report import LiveReport
from gpukiln.verify.suite import run_suite
from gpukiln.verify.target import Target
from gpukiln.verify.verdict import Verdict

if TYPE_CHECKING:
    from securesystemslib.signer import Signer

LABEL = "gpukiln.io/canary"  # of the Node, and the key of its taint
LABELS_WORD, TAINTS_WORD = "GPUKILN_NODE_LABELS", "GPUKILN_NODE_TAINTS"  # in the user's own user data
POLL_S = 2.0
CONSOLE_S = 20.0  # the console is a call of 64 KiB, so it is read less often than the Node
CONSOLE_LINES = 5
RETURN_S = 300.0  # for the pod of the device plugin after its eviction
RESTART_S = 1200.0  # for a reboot: a machine of bare metal needs up to 20 minutes
# Content types by the first characters of user data (cloud-init, "User data formats").
USER_DATA_TYPES = {
    "#!": "x-shellscript",
    "#cloud-config": "cloud-config",
    "#cloud-boothook": "cloud-boothook",
}


@dataclass(frozen=True)
class CanaryOptions:
    """Options of a canary.

    Args:
        pods: Options of the test pods; selector and cordoned are those of the canary.
        instance_types: The types to try, the best first; empty: the first that the image was built for.
        eks_cluster: The cluster's name; empty: by the context.
        node_profile: The instance profile of the cluster's nodes; empty: none.
        user_data: Joins a cluster that is not on EKS; None: the cluster is on EKS.
        ready_s: Seconds until the node has to be ready and offer its GPUs.
    """

    pods: GpuTestOptions
    instance_types: tuple[str, ...] = ()
    eks_cluster: str = ""
    node_profile: str = ""
    user_data: Path | None = None
    spot: bool = False
    simulated: bool = False
    ready_s: float = 900.0


@dataclass(frozen=True)
class JoinPlan:
    """How a machine becomes a node of the cluster.

    Args:
        parts: Parts of its user data.
        request: More arguments of RunInstances.
        subnets: Those of the cluster; empty: the cloud's own.
    """

    parts: tuple[Message, ...]
    request: Mapping[str, Any]
    subnets: tuple[str, ...] = ()


def verify_in_cluster(
    subject: Subject,
    cloud: Cloud,
    build: Build | None,
    cluster: Cluster,
    options: CanaryOptions,
    home: Path,
    *,
    signer: Signer | None = None,
) -> tuple[Verdict, LaunchedMachine, Path]:
    """Verify an image as a node of a cluster, and tag it with the verdict.

    Args:
        build: Its build, whose record gets the verdict; None: only tags and report have it.
        home: The state folder.
        signer: The key to sign the verdict with; None: it is not signed.

    Returns:
        The verdict, its machine, and the folder of its report.

    Raises:
        RefusedError: The image has too many tags.
        GpukilnError: The image could not be verified, see `verify_node`.
    """
    types = options.instance_types or subject.instance_types[:1]
    if not options.simulated:
        # Before a machine is started, whose verdict could not be written.
        require_tag_space(cloud, subject.image_id, types, "{}.{}".format(*cluster.version()))
    with verification_run(subject, cloud, build, home, in_cluster=True) as run:
        verdict, machine = verify_node(run.subject, cloud, cluster, options, run.folder, run.progress)
        if build and run.record:
            build.write(replace(run.record, cluster_verdicts=(*run.record.cluster_verdicts, verdict)))
        # After the record: if it fails, the record still has the verdict.
        write_cluster_verdict_tag(cloud, run.subject, verdict)
        sign_verdict(cloud, run.subject, verdict, run.folder, signer, build, in_cluster=True)
    return verdict, machine, run.folder


def verify_node(
    subject: Subject, cloud: Cloud, cluster: Cluster, options: CanaryOptions, folder: Path, progress: Progress
) -> tuple[Verdict, LaunchedMachine]:
    """Start a machine of an image as a node of a cluster, run the suite's layer on it, and remove both.

    Args:
        folder: For the report.

    Returns:
        The verdict and its machine. A node that does not become ready is a verdict with the reason.

    Raises:
        BusyError: There is no capacity now, or EC2 took the machine away.
        UsageError: The cluster is unknown, or the user data can't be used.
        IncompatibleError: The image's base can't join an EKS cluster.
        RefusedError: The Node registered without the taint that keeps other pods away.
        UnavailableError: A call of the cloud or of the cluster failed.
    """
    with progress.step(f"ask {cluster.context}"):
        mark = secrets.token_hex(4)
        types = options.instance_types or subject.instance_types[:1]
        plan = _join_plan(subject, cloud, cluster, replace(options, instance_types=types), mark)
        remove_orphaned_nodes(cluster, cloud, progress.say)
    with _canary_machine(subject, cloud, cluster, plan, types, mark, options, progress.say) as machine:
        with progress.step("join the cluster"):
            canary = _Canary(cluster, cloud, machine, mark, options, progress.say)
            node, reason = canary.wait_until_usable()
        pods = replace(options.pods, selector=f"{LABEL}={mark}", cordoned=True)
        with progress.step("run pods on the node"):
            if reason or node is None:
                facts = cluster_verification.unusable_facts(cluster, pods, reason)
            else:
                facts = cluster_verification.run_test_pods(cluster, pods, say=progress.say)
                facts["cluster"]["eviction"] = canary.evict_plugin(node)
                facts["cluster"]["restart"] = canary.restart(node)
        file = cluster_verification.write_facts(folder, facts)
        live = LiveReport(progress)
        with progress.step("verify"):
            verdict = run_suite(
                Target(f"{subject.image_id} in {cluster.context}", f"facts://{quote(str(file), safe='')}"),
                profile="pod",
                out_dir=folder,
                on_start=live.start,
                on_check=live.check,
                instance_type=machine.instance_type,
                simulated=options.simulated,
            )
            if not verdict.passed:
                progress.fail()
    return verdict, machine


def remove_orphaned_nodes(cluster: Cluster, cloud: Cloud, say: Callable[[str], None]) -> None:
    """Remove the Nodes of earlier canaries whose machines are gone.

    A machine that this account does not know may be another account's: its Node is removed only when it is
    not ready any more.
    """
    for node in cluster.list("Node", labels=LABEL):
        meta = node["metadata"]
        with explain_aws_errors("look for the machine of an earlier canary"):
            machines = list(
                calls.instances(cloud.client("ec2"), {f"tag:{CANARY_TAG}": [meta["labels"][LABEL]]})
            )
        if any(machine["State"]["Name"] not in ENDED_STATES for machine in machines):
            continue
        if machines or not is_ready(node):
            cluster.delete("Node", meta["name"])
            say(f"removed the Node {meta['name']} of an earlier canary: its machine is gone")


# --- the machine ------------------------------------------------------------------------------------------


@contextmanager
def _canary_machine(
    subject: Subject,
    cloud: Cloud,
    cluster: Cluster,
    plan: JoinPlan,
    types: tuple[str, ...],
    mark: str,
    options: CanaryOptions,
    say: Callable[[str], None],
) -> Iterator[LaunchedMachine]:
    """Start the machine; at the end drain and delete its Node, and terminate it, whatever happened."""
    deadline = deadline_of("verify")
    tags = {
        **build_tags(subject.build_id, "verify", deadline),
        CANARY_TAG: mark,
        CLUSTER_TAG: cluster.context,
        # A container of the embedded cloud would run this computer's kernel.
        MACHINE_TAG: "vm",
        **({GPUS_TAG: SIMULATED} if options.simulated else {}),
    }
    request = machine_request(subject.image_id, tags, shutdown_user_data(deadline, *plan.parts))
    try:
        with resources_removed(cloud, subject.build_id, deadline, say=say):
            try:
                yield launch(
                    cloud,
                    {**request, **plan.request},
                    instance_types=types,
                    spot=options.spot,
                    say=say,
                    subnet_ids=plan.subnets,
                )
            finally:
                # First: a pod that is evicted from a running node ends properly.
                _remove_node(cluster, mark, say)
    finally:
        # A kubelet that registered meanwhile, or that restarted, has made the Node again.
        _remove_node(cluster, mark, say)


def _remove_node(cluster: Cluster, mark: str, say: Callable[[str], None]) -> None:
    """Drain and delete the Node of a canary; a failure is reported and stops nothing."""
    try:
        for node in cluster.list("Node", labels=f"{LABEL}={mark}"):
            name = node["metadata"]["name"]
            for pod in cluster.list("Pod", everywhere=True, fields=f"spec.nodeName={name}"):
                owners = {owner["kind"] for owner in pod["metadata"].get("ownerReferences", ())}
                # As `kubectl drain`: a DaemonSet's pod would come back, a static pod (owner Node) is a file.
                if not owners & {"DaemonSet", "Node"}:
                    _evict(cluster, pod, say)
            cluster.delete("Node", name)
    except GpukilnError as error:
        say(f"the Node with {LABEL}={mark} could not be removed; the next canary removes it: {error.message}")


def _evict(cluster: Cluster, pod: Manifest, say: Callable[[str], None]) -> None:
    """Evict a pod; one that a PodDisruptionBudget keeps is reported, because its machine ends anyway."""
    name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
    try:
        cluster.evict(name, namespace)
    except BusyError as error:
        say(f"the pod {namespace}/{name} ends with its machine: {error.message}")


# --- joining ----------------------------------------------------------------------------------------------


def _join_plan(
    subject: Subject, cloud: Cloud, cluster: Cluster, options: CanaryOptions, mark: str
) -> JoinPlan:
    profile = {"IamInstanceProfile": {"Name": options.node_profile}} if options.node_profile else {}
    taints = ["=".join(TAINT[:2]) + f":{TAINT[2]}", f"{LABEL}={mark}:NoSchedule"]
    if options.user_data:
        labels = {GPU_PRESENT: "true", LABEL: mark}
        return JoinPlan(tuple(_own_parts(options.user_data, labels, taints)), profile)
    if not options.node_profile:
        raise UsageError(
            "--node-profile is missing: EKS lets only machines with the nodes' instance profile join",
            hint="`aws iam list-instance-profiles` lists them; its role needs an access entry of the cluster",
        )
    if not find_base(subject.base).has_kubernetes:
        raise IncompatibleError(
            f"the base {subject.base} has no kubelet of EKS, so its images can't join an EKS cluster",
            hint="build the image on an EKS base (`invoke ami.bases`); --user-data joins other clusters",
        )
    described = eks.describe(cloud, options.eks_cluster or eks.cluster_name(cluster.context, cloud.region))
    group = NodeGroup(
        provider="asg",
        cluster=described.join.name,
        name="canary",
        image=subject.image_id,
        base=subject.base,
        types=options.instance_types,
        labels={LABEL: mark},
    )
    text = userdata.user_data(group, described.join, node_labels(group), taints)
    request = {**profile, "SecurityGroupIds": [described.security_group]}
    return JoinPlan(tuple(_parts(text)), request, described.subnets)


def _own_parts(file: Path, labels: Mapping[str, str], taints: list[str]) -> list[Message]:
    """The user's own user data, with the labels and taints that the kubelet has to register with."""
    text = read_text(file)
    missing = [word for word in (LABELS_WORD, TAINTS_WORD) if word not in text]
    if missing:
        raise UsageError(
            f"{file} has no {' and no '.join(missing)}, which keep other pods away from the node",
            hint="write the words where the kubelet gets --node-labels and --register-with-taints",
        )
    text = text.replace(LABELS_WORD, ",".join(f"{key}={value}" for key, value in labels.items()))
    return _parts(text.replace(TAINTS_WORD, ",".join(taints)), str(file))


def _parts(text: str, name: str = "user data") -> list[Message]:
    r"""The parts of user data. They are not nested: nodeadm reads the outer message only.

    >>> [part.get_content_type() for part in _parts("#!/bin/sh\ntrue\n")]
    ['text/x-shellscript']
    >>> [part.get_content_type() for part in _parts(userdata.multipart(("text/cloud-config", "a: b")))]
    ['text/cloud-config']
    """
    if text.startswith(("MIME-Version:", "Content-Type:")):
        message = email.message_from_string(text)
        return [part for part in message.walk() if not part.is_multipart()]
    for start, kind in USER_DATA_TYPES.items():
        if text.startswith(start):
            return [MIMEText(text, kind)]
    raise UsageError(
        f"{name} is of no kind that cloud-init knows",
        hint=f"wanted: MIME, or {', '.join(USER_DATA_TYPES)} first",
    )


# --- the node ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Canary:
    """A machine that becomes a node, and what is done with it.

    Args:
        mark: Value of the Node's label.
    """

    cluster: Cluster
    cloud: Cloud
    machine: LaunchedMachine
    mark: str
    options: CanaryOptions
    say: Callable[[str], None]

    @property
    def gpus(self) -> int:
        """GPUs that the node has to offer; at least one of a resource that is no whole GPU."""
        return instance_type(self.machine.instance_type).gpus if self.options.pods.resource == GPU else 1

    def node(self) -> Manifest | None:
        nodes = self.cluster.list("Node", labels=f"{LABEL}={self.mark}")
        return nodes[0] if nodes else None

    def offered(self, node: Manifest) -> int:
        return int(node["status"].get("allocatable", {}).get(self.options.pods.resource, 0))

    def is_usable(self, node: Manifest) -> bool:
        return is_ready(node) and self.offered(node) >= self.gpus

    def wait_until_usable(self) -> tuple[Manifest | None, str]:
        """Wait until the node is ready and offers its GPUs.

        Returns:
            The node, None where it did not register; and why it is not usable, empty where it is.
        """
        isolated, node = False, None
        for _ in self._polls(self.options.ready_s):
            node = self.node()
            if node and not isolated:
                isolated = self._isolate(node)
            elif node and self.is_usable(node):
                return node, ""
            elif reason := self._stopped():
                return node, reason
        return node, self._why_unusable(node)

    def evict_plugin(self, node: Manifest) -> dict[str, Any]:
        """Evict the device plugin's pod and wait for its successor and for the GPUs; facts of the check."""
        before = self._plugin(node)
        if before is None:
            return {"pod": "", "offered": self.offered(node), "seconds": 0.0, "problem": ""}
        namespace, name = before["metadata"]["namespace"], before["metadata"]["name"]
        self.say(f"evict {namespace}/{name}")
        began, pod = time.monotonic(), None
        self.cluster.evict(name, namespace)
        for _ in self._polls(RETURN_S):
            pod, now = self._plugin(node), self.node()
            returned = (
                pod is not None and pod["metadata"]["uid"] != before["metadata"]["uid"] and is_ready(pod)
            )
            if returned and now and self.is_usable(now):
                return self._outcome(now, began, "") | {"pod": f"{namespace}/{name}"}
        problem = f"{namespace}/{name} was evicted, and after {RETURN_S:.0f} s " + (
            "no pod took its place" if pod is None else "its successor is not ready or offers no GPUs"
        )
        return self._outcome(self.node(), began, problem) | {"pod": f"{namespace}/{name}"}

    def restart(self, node: Manifest) -> dict[str, Any]:
        """Reboot the machine and wait until it is a usable node again; facts of the check."""
        self.say(f"reboot {self.machine.instance_id}")
        began, boot = time.monotonic(), _boot_id(node)
        with explain_aws_errors("reboot the machine"):
            self.cloud.client("ec2").reboot_instances(InstanceIds=[self.machine.instance_id])
        now: Manifest | None = node
        for _ in self._polls(RESTART_S):
            now = self.node()
            # Until the kubelet of the new boot reports, the Node shows the state of the old one.
            if now and _boot_id(now) != boot and self.is_usable(now):
                return self._outcome(now, began, "")
            if reason := self._stopped():
                return self._outcome(now, began, f"after its reboot: {reason}")
        rebooted = now is not None and _boot_id(now) != boot
        problem = (
            self._why_unusable(now) if rebooted else f"its kubelet reported no new boot in {RESTART_S:.0f} s"
        )
        return self._outcome(now, began, f"after its reboot: {problem}")

    def _outcome(self, node: Manifest | None, began: float, problem: str) -> dict[str, Any]:
        offered = self.offered(node) if node else 0
        return {"offered": offered, "seconds": time.monotonic() - began, "problem": problem}

    def _polls(self, seconds: float) -> Iterator[None]:
        """Polls within a time, at least one."""
        until = time.monotonic() + seconds
        while True:
            yield
            if time.monotonic() > until:
                return
            time.sleep(POLL_S)

    def _isolate(self, node: Manifest) -> bool:
        """Cordon the Node and take the canary's taint off; False where the Node has changed meanwhile.

        One change, so that at no moment the Node has neither.
        """
        meta, taints = node["metadata"], node["spec"].get("taints", [])
        others = [taint for taint in taints if taint["key"] != LABEL]
        if len(others) == len(taints):
            raise RefusedError(
                f"the Node {meta['name']} registered without the taint {LABEL}, so other pods may run there",
                hint=f"pass {TAINTS_WORD} of --user-data to the kubelet as --register-with-taints",
            )
        # With the version the server refuses the change where a controller has added a taint meanwhile:
        # a merge patch replaces the whole list.
        changes = {
            "metadata": {"resourceVersion": meta["resourceVersion"]},
            "spec": {"unschedulable": True, "taints": others},
        }
        try:
            self.cluster.patch("Node", meta["name"], changes)
        except RefusedError:
            return False
        self.say(f"{self.machine.instance_id} is the Node {meta['name']}, cordoned")
        return True

    def _plugin(self, node: Manifest) -> Manifest | None:
        fields = f"spec.nodeName={node['metadata']['name']}"
        pods = self.cluster.list("Pod", everywhere=True, fields=fields)
        return next(
            (pod for pod in pods if is_plugin(pod["spec"]) and "deletionTimestamp" not in pod["metadata"]),
            None,
        )

    def _stopped(self) -> str:
        """Why the machine can't become a node any more; empty while it can.

        Raises:
            BusyError: EC2 took it away, which is no fault of the image.
        """
        instance = calls.instance(self.cloud, self.machine.instance_id)
        state = instance["State"]["Name"]
        if state in (*ENDED_STATES, "stopped", "stopping"):
            if error := capacity_loss(instance):
                raise error
            message = instance.get("StateReason", {}).get("Message", "no reason given")
            return f"{self.machine.instance_id} is {state} instead of running: {message}"
        return ""

    def _why_unusable(self, node: Manifest | None) -> str:
        """The doctor's finding on a node; the end of the console of a machine that did not register."""
        if node is None:
            return (
                f"{self.machine.instance_id} did not register as a node within {self.options.ready_s:.0f} s; "
                + self._console()
            )
        errors = [
            finding
            for finding in node_findings(read_state(self.cluster), node)
            if finding.severity == "error"
        ]
        causes = "; ".join(f"{finding.message} ({finding.evidence['cause']})" for finding in errors)
        offers = f"it offers {self.offered(node)} of {self.gpus} {self.options.pods.resource}"
        return f"{node['metadata']['name']} is not usable: {causes or offers}"

    def _console(self) -> str:
        if stopped := find_stop(self.cloud, self.machine.instance_id):
            return f"its console shows {stopped.state}: {' | '.join(stopped.lines)}"
        try:
            text = strip_control_characters(console_text(self.cloud, self.machine.instance_id))
        except GpukilnError as error:
            return f"its console can't be read: {error.message}"
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return f"its console ends: {' | '.join(lines[-CONSOLE_LINES:]) or 'it is empty'}"


def _boot_id(node: Manifest) -> str:
    return str(node["status"].get("nodeInfo", {}).get("bootID", ""))
