"""What this computer remembers of workspaces, and what their machines cost by owner."""

from dataclasses import replace
from decimal import Decimal

import pytest

from gpukiln.errors import UsageError
from gpukiln.workspaces import local_state
from gpukiln.workspaces.local_state import RunInterval
from gpukiln.workspaces.usage import usage

RAN = RunInterval(
    name="vision",
    owner="ann",
    cloud="aws",
    region="us-west-2",
    instance_id="i-1",
    instance_type="g4dn.2xlarge",
    usd_hour="0.752",
    started="2026-11-01T00:00:00+00:00",
    seen="2026-11-01T10:00:00+00:00",
    ended=True,
)


def test_hours_and_money_are_of_owners():
    again = replace(RAN, started="2026-11-02T00:00:00+00:00", seen="2026-11-02T00:30:00+00:00", ended=False)
    other = replace(RAN, name="text", instance_id="i-2")
    free = replace(RAN, owner="bob", usd_hour="", instance_id="i-3")
    found = usage([RAN, again, other, free])
    assert [(one.owner, one.name, one.hours, one.usd, one.running) for one in found.workspaces] == [
        ("ann", "text", Decimal("10.00"), Decimal("7.52"), False),
        ("ann", "vision", Decimal("10.50"), Decimal("7.90"), True),
        ("bob", "vision", Decimal("10.00"), None, False),
    ]
    assert [(one.owner, one.hours, one.usd) for one in found.owners] == [
        ("ann", Decimal("20.50"), Decimal("15.42")),
        ("bob", Decimal("10.00"), None),
    ]
    assert [one.owner for one in usage([RAN, free], owner="bob").owners] == ["bob"]


def test_what_ran_before_the_first_day_does_not_count():
    over = replace(RAN, started="2026-10-31T20:00:00+00:00", seen="2026-11-01T02:00:00+00:00")
    assert [one.hours for one in usage([over], since="2026-11-01").owners] == [Decimal("2.00")]
    assert usage([RAN], since="2026-11-02").owners == ()
    with pytest.raises(UsageError, match="is no day"):
        usage([], since="yesterday")


def test_a_machine_that_is_gone_ran_until_it_was_last_seen():
    class Aws:
        name, region = "aws", "us-west-2"

    [one] = local_state.merge([replace(RAN, ended=False)], Aws(), [], "2026-11-05T00:00:00+00:00")
    assert one.ended
    assert one.seen == RAN.seen
