"""The desktop for the browser, where the image has one, starts and is reached from loopback alone."""

import ipaddress

import pytest

from gpukiln.probe.base import require_reached
from gpukiln.verify.checks import check

UNAUTHORIZED = 401


@check(
    id="desktop.kasmvnc",
    title="KasmVNC of the recorded version starts, and answers on loopback alone, by password",
    layer="desktop",
    profiles=("image", "node", "eks-node", "workspace"),
    needs=("component:kasmvnc", "systemd"),
    causes=(
        "The package was removed or upgraded by hand, or belongs to another release of the distribution.",
        "A session holds display :1 or the port already.",
        "Somebody changed the unit: its address and its port stand there.",
    ),
    fix="`journalctl -u 'kasmvnc@*'` and ~/.vnc/*.log of the user; the role kasmvnc writes the unit.",
)
def test_kasmvnc(facts):
    installed = facts["packages"]["installed"].get("kasmvncserver")
    wanted = facts.component("kasmvnc").get("version")
    assert installed, "kasmvncserver is not installed"
    has = installed.partition("-")[0]
    assert not wanted or has == wanted, f"found KasmVNC {has}, wanted {wanted}"
    found = require_reached(facts["desktop"])
    assert found["unit"], "found no unit kasmvnc@.service with a port, wanted the role's"
    if found["unit_of"] is None:
        pytest.skip("no person is on this machine whose desktop could be started")
    told = f": {found['log']}" if found["log"] else ""
    assert found["listens"], f"{found['unit_of']} does not listen on port {found['port']}{told}"
    open_to = [one for one in found["listens"] if not _loopback(one)]
    assert not open_to, f"port {found['port']} is open on {', '.join(open_to)}, wanted loopback alone"
    http = found["http"]
    assert http.get("status") == UNAUTHORIZED, (
        f"without a password {found['unit_of']} answers {http.get('status') or http}, wanted {UNAUTHORIZED}"
    )
    facts.note(f"{has}, 127.0.0.1:{found['port']}")


def _loopback(address: str) -> bool:
    return address != "*" and ipaddress.ip_address(address.partition("%")[0]).is_loopback
