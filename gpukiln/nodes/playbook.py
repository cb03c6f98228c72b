"""Runs a playbook on an inventory through Ansible Runner."""

import difflib
import json
import os
import re
import signal
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from gpukiln import programs
from gpukiln.catalog.load import ROOT
from gpukiln.catalog.roles import load_roles
from gpukiln.errors import UnavailableError, UsageError
from gpukiln.files import open_private
from gpukiln.nodes import apt_lock
from gpukiln.nodes.results import Collector, RunResult, task_name
from gpukiln.parsing import parse_json
from gpukiln.project import OwnRoles, roles_path
from gpukiln.redact import redact, redact_value

# A sentence with every host of a large inventory can't be read.
SHOWN_HOSTS = 20  # hosts that a sentence names
SIMILARITY = 0.9  # of difflib: one or two letters of a name of twenty
# Ansible Runner's stdout has colours, whatever the terminal.
ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class PlaybookRequest:
    """What to run, and on what.

    Args:
        playbook: File name in ansible/.
        inventory: An inventory: a file, a folder or a plug-in's configuration.
        limit: Ansible's pattern of hosts, or an empty string for all.
        check: Change nothing, report what would change.
        forks: Hosts that are worked on at the same time.
        variables: Extra variables.
        own_roles: Roles of the project that the playbook runs too.
    """

    playbook: str
    inventory: Path
    limit: str = ""
    check: bool = False
    forks: int = 20
    variables: dict[str, Any] = field(default_factory=dict)
    own_roles: OwnRoles = field(default_factory=OwnRoles)

    @property
    def environment(self) -> dict[str, str]:
        """What ansible is run with."""
        return {
            **roles_path(self.own_roles),
            # Without it Ansible reads the user's own ansible.cfg, which may name another inventory or
            # strategy.
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            # Runner adds its own to this variable, which takes precedence over ansible.cfg.
            "ANSIBLE_CALLBACK_PLUGINS": str(ROOT / "ansible/plugins/callback"),
            # The Ansible of this environment, not one of the system that is found first in PATH.
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        }


def list_hosts(request: PlaybookRequest) -> list[str]:
    """The hosts of an inventory that a limit leaves.

    Args:
        request: Its inventory and limit.

    Raises:
        UsageError: The inventory can't be read, or no host is left.
        UnavailableError: Ansible is not installed, or did not end in ten minutes.
    """
    if not request.inventory.exists():
        raise UsageError(
            f"there is no inventory {request.inventory}",
            hint="ansible/inventory/example.yml is one to copy",
        )
    command = ["ansible", request.limit or "all", "-i", str(request.inventory), "--list-hosts"]
    # an inventory that no parser understands would otherwise be an empty one
    environment = {**os.environ, **request.environment, "ANSIBLE_INVENTORY_ANY_UNPARSED_IS_FAILED": "True"}
    # with its own standard input: Ansible refuses one that does not block, as an ssh before may leave it
    done = programs.run(command, limit_s=programs.NETWORK_S, environment=environment)
    lines = [line.strip() for line in done.stdout.decode(errors="replace").splitlines()]
    hosts = [line for line in lines if line and not line.startswith("hosts (")]
    if done.returncode == 0 and hosts:
        return hosts
    if done.returncode == 0 and request.limit:
        known = list_hosts(PlaybookRequest(request.playbook, request.inventory))
        raise UsageError(
            f"--limit {request.limit} leaves no host of {request.inventory}",
            hint=f"it has {', '.join(known[:SHOWN_HOSTS])}{' ...' if len(known) > SHOWN_HOSTS else ''}",
        )
    if done.returncode == 0:
        raise UsageError(
            f"{request.inventory} has no host", hint="ansible/inventory/example.yml shows the form"
        )
    if slip := _yaml_slip(request.inventory):
        raise UsageError(f"the inventory {request.inventory} is no YAML: {slip}")
    raise UsageError(
        f"Ansible can't read the inventory {request.inventory}",
        details=tuple(line for line in done.stderr.decode(errors="replace").splitlines() if line.strip())[
            -6:
        ],
    )


def _yaml_slip(inventory: Path) -> str:
    """Where a file that is YAML by its name is none, and why; Ansible shows the INI parser's complaint."""
    if inventory.suffix not in (".yml", ".yaml") or not inventory.is_file():
        return ""
    try:
        # Without its tags, of which Ansible has its own (!vault): where the text can be parsed it is YAML.
        for _ in yaml.parse(inventory.read_text(encoding="utf-8", errors="replace"), Loader=yaml.SafeLoader):
            pass
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        return f"{where}{error.problem or error.context}"
    except yaml.YAMLError as error:
        return " ".join(str(error).split())
    return ""


def read_inventory(request: PlaybookRequest) -> dict[str, Any]:
    """What `ansible-inventory --list` prints: each group with its hosts, and each host's variables.

    Raises:
        UsageError: It can't be read.
        UnavailableError: Ansible is not installed, or did not end in ten minutes.
    """
    command = ["ansible-inventory", "-i", str(request.inventory), "--list"]
    done = programs.run(
        command, limit_s=programs.NETWORK_S, environment={**os.environ, **request.environment}
    )
    if done.returncode:
        raise UsageError(
            f"Ansible can't list the inventory {request.inventory}",
            details=tuple(done.stderr.decode(errors="replace").strip().splitlines()[-6:]),
        )
    document: dict[str, Any] = parse_json(done.stdout)
    return document


def ungrouped_warning(request: PlaybookRequest, inventory: dict[str, Any], hosts: list[str]) -> str:
    """Which hosts are targeted though they are in no group while others are, why, and how to leave them out.

    Args:
        inventory: What `read_inventory` gives.
        hosts: That the run is for.

    Returns:
        A sentence; empty where there are none, or where no host is in a group.
    """
    alone = set(inventory.get("ungrouped", {}).get("hosts", ()))
    grouped = {
        host
        for name, group in inventory.items()
        if name not in ("_meta", "all", "ungrouped")
        for host in group.get("hosts", ())
    }
    named = [host for host in hosts if host in alone]
    if not named or not grouped:
        return ""
    more = f" and {len(named) - SHOWN_HOSTS} more" if len(named) > SHOWN_HOSTS else ""
    why = f"--limit {request.limit} matches" if request.limit else f"{request.playbook} is for"
    return (
        f"in no group of {request.inventory.name}, and targeted too: {', '.join(named[:SHOWN_HOSTS])}{more}; "
        f"{why} {'them' if request.limit else 'every host of an inventory'} "
        f"(--limit '{request.limit or 'all'}:!ungrouped' leaves them out)"
    )


def require_known_variables(request: PlaybookRequest, inventory: dict[str, Any]) -> None:
    """Refuse a variable of the inventory that is a role's but for a slip: Ansible ignores it without a word.

    Args:
        inventory: What `read_inventory` gives.

    Raises:
        UsageError: One is not known, and nearly the name of one that is.
    """
    hosts = inventory.get("_meta", {}).get("hostvars", {})
    roles = load_roles()
    known = {variable.name for role in roles for variable in role.variables}
    # Only names that begin like a role's: an inventory has variables for other playbooks, too.
    begin = tuple(f"{role.name.partition('_')[0]}_" for role in roles)
    for host, values in hosts.items():
        for name in values:
            if name in known or not name.startswith(begin):
                continue
            if near := difflib.get_close_matches(name, known, 1, SIMILARITY):
                raise UsageError(
                    f"{request.inventory}: {host} has the variable {name}, which no role has",
                    hint=f"is {near[0]} meant? docs/roles.md has every variable",
                )


def run_playbook(
    request: PlaybookRequest,
    hosts: list[str],
    folder: Path,
    on_host: Callable[[str, str], None],
    on_task: Callable[[str, str], None] = lambda _host, _task: None,
) -> RunResult:
    """Run it to its end.

    Args:
        hosts: What `list_hosts` says of it.
        folder: For the logs: ansible.log, and one file a host in hosts/.
        on_host: Called with a host and what was said about it.
        on_task: Called with a host and the task that begins there.

    Returns:
        What happened on each host.

    Raises:
        UnavailableError: Ansible itself failed, before it came to a host.
    """
    import ansible_runner  # noqa: PLC0415 - slow to import

    collector = Collector(hosts)
    watch = apt_lock.LockWatch(
        lambda waiting: apt_lock.find_lock_holders(str(request.inventory), waiting, request.environment),
        on_host,
    )
    tail: deque[str] = deque(maxlen=8)

    def take(event: dict[str, Any]) -> bool:
        if event.get("stdout"):
            lines = redact(ANSI.sub("", event["stdout"])).splitlines()
            log.writelines(f"{line}\n" for line in lines)
            tail.extend(line for line in lines if line.strip())
        logs.write(event)
        watch.take(event)
        if event.get("event") == "runner_on_start":
            on_task(event["event_data"].get("host", ""), task_name(event["event_data"]))
        said = collector.take(event)
        if said:
            host = collector.result.hosts[said[0]]
            host.failure = watch.explain(host.name, host.failure)
            on_host(*said)
        return False  # Runner need not keep a file of each event

    # What Runner itself keeps, the environment and Ansible's whole output, goes with the temporary folder.
    with (
        tempfile.TemporaryDirectory(prefix="gpukiln-ansible-") as scratch,
        open_private(folder / "ansible.log", "w") as log,
        HostLogs(folder / "hosts") as logs,
        _signals_restored(),
        watch.running(),
    ):
        run = ansible_runner.run(
            private_data_dir=scratch,
            ident="run",
            playbook=str(ROOT / "ansible" / request.playbook),
            inventory=str(request.inventory),
            limit=request.limit or None,
            extravars=request.variables,
            cmdline=f"--forks {request.forks}{' --check' if request.check else ''} --diff",
            envvars=request.environment,
            event_handler=take,
            quiet=True,
        )
    result = collector.result
    result.stopped = run.status == "canceled"
    reached = any(host.state != "not_reached" for host in result.hosts.values())
    # Otherwise the failure is of a host, and its own result has it.
    if run.rc and not reached and not result.stopped:
        raise UnavailableError(
            "ansible-playbook failed before it came to a host",
            hint=f"full log: {folder / 'ansible.log'}",
            details=tuple(tail),
        )
    return result


@contextmanager
def _signals_restored() -> Iterator[None]:
    """Runner leaves handlers by which Ctrl-C does nothing for the rest of the process."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class HostLogs:
    """One file a host, written as its events come; without secrets, readable by its owner only.

    Args:
        folder: Where they go.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        self._folder = folder
        self._files: dict[str, Any] = {}

    def __enter__(self) -> "HostLogs":
        """Begin to write."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()

    def write(self, event: dict[str, Any]) -> None:
        """Append an event to its host's file.

        Args:
            event: One of Ansible Runner's.
        """
        kind, data = event.get("event", ""), event.get("event_data", {})
        if not data.get("host") or not kind.startswith("runner_on_") or kind == "runner_on_start":
            return
        host = str(data["host"]).replace("/", "_")
        if host not in self._files:
            self._files[host] = open_private(self._folder / f"{host}.log", "a")
        role = f"{data['role']} : " if data.get("role") else ""
        ending = kind.removeprefix("runner_on_")
        self._files[host].write(f"{data.get('end', '')} {ending} {role}{data.get('task', '')}\n")
        if ending != "skipped":
            answer = {k: v for k, v in (data.get("res") or {}).items() if not k.startswith("_ansible")}
            self._files[host].write(json.dumps(redact_value(answer), indent=1, default=str) + "\n")
        self._files[host].flush()
