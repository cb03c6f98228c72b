"""Interruption of spot instances on request: notices in instance metadata, then the end.

Paths and formats: AWS, "Spot Instance interruption notices" and "EC2 instance rebalance recommendations". The
codes of the reason: Amazon EC2 API reference, StateReason.
"""

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from moto.core.models import DEFAULT_ACCOUNT_ID
from moto.ec2.models import ec2_backends
from moto.ec2.models.instances import StateReason
from moto.ec2.responses.instances import InstanceResponse

from gpukiln.errors import IncompatibleError, UsageError
from gpukiln.typed import load, strict, unknown

NOTICE_S = 120  # seconds from the notice to the end, as on AWS
MOST_S = 86400
REASONS = {  # action -> code and text of the state reason
    "terminate": ("Server.SpotInstanceTermination", "Spot instance termination"),
    "stop": ("Server.SpotInstanceShutdown", "Spot instance shutdown"),
    "hibernate": ("Server.SpotInstanceShutdown", "Spot instance shutdown"),
}
ALIVE = ("pending", "running")
_lock = threading.Lock()


@strict
class Interruption:
    """A requested interruption.

    Args:
        seconds: From the notice to the end; a hibernation starts with its notice.
        rebalance_seconds: From the rebalance recommendation to the notice.
    """

    instance_id: str
    seconds: float = NOTICE_S
    rebalance_seconds: float = 0


@dataclass(frozen=True)
class InterruptionNotice:
    """The notice of an interruption.

    Args:
        action: One of REASONS.
        recommended: Time of the rebalance recommendation.
        noticed: Time of the interruption notice.
        ends: Time of the interruption.
    """

    action: str
    recommended: datetime
    noticed: datetime
    ends: datetime

    def tree(self, now: datetime) -> dict[str, Any]:
        """The categories of instance metadata at a moment.

        Args:
            now: The moment, in UTC.
        """
        categories: dict[str, Any] = {}
        if now >= self.recommended:
            rebalance = json.dumps({"noticeTime": _format_time(self.recommended)})
            categories["events"] = {"recommendations": {"rebalance": rebalance}}
        if now >= self.noticed:
            categories["spot"] = {
                "instance-action": json.dumps({"action": self.action, "time": _format_time(self.ends)})
            }
            if self.action == "terminate":
                categories["spot"]["termination-time"] = _format_time(self.ends)
        return categories


def interrupt(document: Mapping[str, Any]) -> dict[str, Any]:
    """Interrupt a spot instance, as EC2 does when it needs the capacity.

    Args:
        document: An Interruption.

    Returns:
        The notice; an earlier one where the instance has it already.

    Raises:
        UsageError: The document is malformed, or the instance does not exist.
        IncompatibleError: It is not a spot instance, or is not running.
    """
    interruption = load(Interruption, dict(document), where="interruption")
    for name, seconds in (
        ("seconds", interruption.seconds),
        ("rebalance_seconds", interruption.rebalance_seconds),
    ):
        if not 0 <= seconds <= MOST_S:
            raise UsageError(f"interruption: {name}: found {seconds:g}, wanted 0 to {MOST_S}")
    instance = _find_instance(interruption.instance_id)
    if instance.lifecycle != "spot":
        raise IncompatibleError(
            f"{instance.id} is an on-demand instance, and EC2 interrupts only spot instances",
            hint="launch one with the market type spot: `ami.verify --spot`, or run-instances "
            "--instance-market-options MarketType=spot",
        )
    with _lock:
        notice = _current_notice(instance)
        if notice is None:
            if instance.state not in ALIVE:
                raise IncompatibleError(
                    f"{instance.id} is {instance.state}, and only a running instance can be interrupted",
                    hint="`invoke cloud.status` lists running machines",
                )
            notice = _announce(instance, interruption)
    return {
        "instance_id": instance.id,
        "action": notice.action,
        "recommended": _format_time(notice.recommended),
        "noticed": _format_time(notice.noticed),
        "ends": _format_time(notice.ends),
    }


def metadata_of(instance: Any) -> dict[str, Any]:
    """The categories of instance metadata that an interruption adds.

    Args:
        instance: moto's instance.
    """
    notice = _current_notice(instance)
    return notice.tree(datetime.now(UTC)) if notice else {}


def extend_launches() -> None:
    """Store a launch's interruption behavior, which moto ignores. Call once."""
    run_instances = InstanceResponse.run_instances

    def keeps_behavior(self: Any) -> Any:
        answer: Any = run_instances(self)
        options = self._get_param("InstanceMarketOptions", {})
        if not options and (named := self._get_param("LaunchTemplate", {})):
            template = self.ec2_backend._get_template_from_args(named).data
            options = template.get("InstanceMarketOptions", {})
        behavior = (options.get("SpotOptions") or {}).get("InstanceInterruptionBehavior")
        for instance in answer.result.instances:
            instance.interruption_behavior = behavior or "terminate"
        return answer

    InstanceResponse.run_instances = keeps_behavior  # type: ignore[method-assign]


def keep_reason(terminate: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap Instance.terminate so that an interrupted instance has its reason; moto sets that of a user.

    Args:
        terminate: moto's Instance.terminate.
    """

    def terminated(instance: Any) -> Any:
        before = terminate(instance)
        if getattr(instance, "interrupted", "") == "terminate":
            _set_reason(instance, "terminate")
        return before

    return terminated


def _announce(instance: Any, interruption: Interruption) -> InterruptionNotice:
    action = getattr(instance, "interruption_behavior", "terminate")
    now = datetime.now(UTC)
    noticed = now + timedelta(seconds=interruption.rebalance_seconds)
    ends = noticed if action == "hibernate" else noticed + timedelta(seconds=interruption.seconds)
    notice = InterruptionNotice(action, now, noticed, ends)
    instance.interruption, instance.interrupted = notice, ""
    timer = threading.Timer((ends - now).total_seconds(), _carry_out, (instance, notice))
    # The server may stop before the interruption.
    timer.daemon = True
    timer.start()
    return notice


def _carry_out(instance: Any, notice: InterruptionNotice) -> None:
    with _lock:
        if instance.state not in ALIVE:  # it has ended meanwhile
            instance.interruption = None
            return
        instance.interrupted = notice.action
        _set_reason(instance, notice.action)
        if notice.action == "terminate":
            instance.terminate()
        else:
            instance.stop()  # machines here can't store their memory, so hibernate is a stop


def _current_notice(instance: Any) -> InterruptionNotice | None:
    """The present notice; one that was carried out is void after the next start."""
    notice: InterruptionNotice | None = getattr(instance, "interruption", None)
    return None if notice and instance.interrupted and instance.state in ALIVE else notice


def _set_reason(instance: Any, action: str) -> None:
    code, text = REASONS[action]
    instance._reason, instance.state_reason = code, StateReason(f"{code}: {text}", code)


def _find_instance(instance_id: str) -> Any:
    backends = ec2_backends[DEFAULT_ACCOUNT_ID]
    instances = {
        instance.id: instance
        for region in list(backends)
        for reservation in list(backends[region].reservations.values())
        for instance in reservation.instances
    }
    if instance_id not in instances:
        alive = [
            instance.id
            for instance in instances.values()
            if instance.lifecycle == "spot" and instance.state in ALIVE
        ]
        raise unknown("spot instance", instance_id, alive)
    return instances[instance_id]


def _format_time(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
