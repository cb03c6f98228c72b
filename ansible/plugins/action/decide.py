"""Looks at a node and decides what a role has to do there: one task, one round trip.

    - name: Decide
      decide:               # step: NAME for look_NAME and decide_NAME; known: what an earlier one returned
      register: nvtop_plan
      diff: true            # in check mode the plan is what is shown

The role's roles/ROLE/decide.py has two functions of a `Role` (roles/plan.py): `look` says what the module
node_facts reads, `decide` makes a `Plan` of the answers. Where the plan asks for more, that is looked
at, and it is decided again. What is known counts as long as no role has done anything on the node since: each
plan that is acted on is counted in the fact `gpukiln_acted`.

Returned: the plan's fields (roles/plan.py), `act` (whether there is anything to do; never in check mode),
`node` (the answers, without the text of files), `looks` (how often the node was asked). A plan that refuses
fails the task with its message and `do` alone.
"""

import importlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleActionFail

from ansible.plugins.action import ActionBase

PACKAGE = __name__.partition(".plugins.")[0]
"""`ansible_collections.NAMESPACE.NAME`; `ansible` where ansible.cfg names the folder of this file."""
ROOT = Path(__file__).resolve().parents[3]
ACTED = "gpukiln_acted"
LOOKS = 8  # a plan that asks more often asks in a circle


class ActionModule(ActionBase):
    """The action; Ansible calls it."""

    _requires_connection = True
    _supports_check_mode = True
    _VALID_ARGS = frozenset(("step", "known"))

    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Look, decide, and look again as long as the plan asks."""
        super().run(tmp, task_vars)
        variables = task_vars or {}
        role = self._role(variables)
        module = _module_of(role.name, Path(self._task._role._role_path))
        step = f"_{self._task.args['step']}" if self._task.args.get("step") else ""
        look, decide = (getattr(module, f"{verb}{step}") for verb in ("look", "decide"))
        known = self._task.args.get("known") or {}
        # A fact, so that it counts across roles and plays of one run.
        acted = int(variables.get("ansible_facts", {}).get(ACTED, 0))
        # Answers of before a change are stale.
        seen = known.get("node") if known.get("acted") == acted else None
        node, looks = _plain(seen) if seen else {}, 0
        asked = {} if seen else look(role)
        while True:
            if asked:
                answer = self._execute_module(
                    module_name="node_facts", module_args=_plain(asked), task_vars=variables
                )
                if answer.get("failed"):
                    return answer
                _merge(node, _plain(answer))
                looks += 1
            plan = decide(role, node)
            if plan.refusal:
                return {"failed": True, "changed": False, "msg": plan.refusal, "do": plan.do}
            # Jinja reads plan.do.items as the method, not as the key.
            if clash := sorted(set(plan.do) & set(dir(dict))):
                raise AnsibleActionFail(
                    f"the role {role.name} has {clash} in do, which Jinja takes for methods"
                )
            asked = plan.ask
            if not asked:
                break
            if looks > LOOKS:
                raise AnsibleActionFail(f"the role {role.name} asks in a circle: {sorted(asked)}")
        act = plan.acts and not role.check
        return {
            "changed": role.check and plan.acts,
            **asdict(plan),
            "act": act,
            "acted": acted,
            "ansible_facts": {ACTED: acted + 1} if act else {},
            # Texts are large, may be private, and are registered and logged by Ansible.
            "node": _without_texts(node),
            "looks": looks,
            "diff": plan.diffs() if role.check else [],
        }

    def _role(self, variables: Mapping[str, Any]) -> Any:
        if self._task._role is None:
            raise AnsibleActionFail("decide belongs to a role's tasks")
        plan = _import("plan")
        name = self._task._role.get_name(include_role_fqcn=False)
        facts = self._template(variables.get("ansible_facts", {}))
        return plan.Role(
            name=name,
            variables=_Variables(self, name, variables),
            system=plan.System.of(facts),
            check=bool(self._task.check_mode),
            host=str(variables.get("inventory_hostname", "")),
        )

    def _template(self, value: Any) -> Any:
        return _plain(self._templar.template(value))


class _Variables(Mapping[str, Any]):
    """The variables of a role without its name before them, each templated when it is asked for."""

    def __init__(self, action: ActionModule, role: str, variables: Mapping[str, Any]) -> None:
        self._action, self._prefix, self._all = action, f"{role}_", variables
        self._done: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        # Lazily: a role's unused variable may refer to one that is not defined.
        if name not in self._done:
            self._done[name] = self._action._template(self._all[self._prefix + name])
        return self._done[name]

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(self._prefix) for name in self._all if name.startswith(self._prefix))

    def __len__(self) -> int:
        return sum(1 for name in self)


def _import(name: str, top: Path = ROOT) -> Any:
    """A module below roles/, of the collection, of the checkout or of a project.

    Args:
        top: The folder that has roles/. That of a project and the checkout's are one namespace package, so
            that a project's decide.py can `from ..plan import` too.
    """
    package = f"{PACKAGE}.roles"
    # Outside a collection the plug-in has Ansible's own package name.
    if PACKAGE == "ansible":
        package = "roles"
        for folder in (ROOT, top):  # a later one is searched first, as in roles_path
            if str(folder) not in sys.path:
                sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(f"{package}.{name}")
    # Ansible may run in an environment of its own, without gpukiln's dependencies.
    except ModuleNotFoundError as error:
        raise AnsibleActionFail(
            f"Found no Python module {error.name} where Ansible runs, wanted it for roles/{name}:"
            f" install it for {sys.executable}."
        ) from error


def _module_of(role: str, folder: Path) -> Any:
    return _import(f"{role}.decide", folder.parent.parent)


def _merge(node: dict[str, Any], answer: Mapping[str, Any]) -> None:
    """Add an answer; what is known per name is added to."""
    for name, value in answer.items():
        if isinstance(value, dict) and isinstance(node.get(name), dict):
            node[name].update(value)
        else:
            node[name] = value


def _without_texts(node: Mapping[str, Any]) -> dict[str, Any]:
    files = {
        path: {name: value for name, value in facts.items() if name != "text"} if facts else facts
        for path, facts in (node.get("files") or {}).items()
    }
    return {**node, "files": files}


def _plain(value: Any) -> Any:
    """Without Ansible's own types, which tag where a value comes from."""
    if isinstance(value, Mapping):
        return {_plain(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(item) for item in value]
    # bool before int, whose subclass it is.
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value
