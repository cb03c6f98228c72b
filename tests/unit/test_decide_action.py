"""The action `decide`: what it looks at, when it looks again, and what becomes of a plan."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from ansible.plugins.loader import action_loader

from gpukiln.catalog.load import ROOT
from roles.plan import Looks, Node, Plan, Role

FIRST: Looks = {"packages": ["a"]}
MORE: Looks = {"commands": {"b": ["true"]}}


@pytest.fixture
def act(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Runs the action for a role `sample` whose functions are given; `asked` has what the node was asked."""
    action_loader.add_directory(str(ROOT / "ansible/plugins/action"))
    action = action_loader.get("decide", class_only=True)
    asked: list[Any] = []

    def run(
        decide: Callable[[Role, Node], Plan], *, check: bool = False, facts: Any = None, **args: Any
    ) -> dict[str, Any]:
        module = ModuleType("sample")
        step = f"_{args['step']}" if "step" in args else ""
        setattr(module, f"look{step}", lambda _: FIRST)
        setattr(module, f"decide{step}", decide)
        monkeypatch.setattr(sys.modules[action.__module__], "_module_of", lambda *_: module)
        one = action.__new__(action)
        role = SimpleNamespace(get_name=lambda **_: "sample", _role_path="/roles/sample")
        one._task = SimpleNamespace(args=args, check_mode=check, _role=role, async_val=0)
        one._templar = SimpleNamespace(template=lambda value: value)
        monkeypatch.setattr(action.__mro__[1], "run", lambda *_: {})
        one._execute_module = lambda module_name, module_args, task_vars: (  # noqa: ARG005
            asked.append(module_args)
            or {"packages": {}, "answers": dict.fromkeys(module_args.get("commands", ()), 1)}
        )
        result: dict[str, Any] = one.run(task_vars={"sample_names": ["x"], "ansible_facts": facts or {}})
        result["asked"] = list(asked)
        asked.clear()
        return result

    return run


def something(role: Role, _node: Node) -> Plan:
    return Plan(lines=[f"+{name}" for name in role["names"]])


def test_a_plan_is_told_and_carried_out_by_others(act: Callable[..., dict[str, Any]]) -> None:
    done = act(something)
    assert (done["act"], done["changed"], done["lines"], done["looks"]) == (True, False, ["+x"], 1)
    assert (done["diff"], done["asked"]) == ([], [FIRST])
    assert act(lambda *_: Plan())["act"] is False


def test_check_mode_shows_it_and_has_nothing_done(act: Callable[..., dict[str, Any]]) -> None:
    done = act(something, check=True)
    assert (done["act"], done["changed"], done["diff"]) == (False, True, [{"prepared": "+x\n"}])
    assert act(lambda *_: Plan(), check=True)["changed"] is False


def test_a_refusal_fails_with_its_reason_alone(act: Callable[..., dict[str, Any]]) -> None:
    done = act(lambda *_: Plan().refuse("Found this."))
    assert {name: done[name] for name in ("failed", "msg")} == {"failed": True, "msg": "Found this."}
    assert "act" not in done


def test_it_looks_again_where_the_plan_asks(act: Callable[..., dict[str, Any]]) -> None:
    done = act(lambda _, node: Plan(lines=["+y"]) if node["answers"] else Plan(ask=MORE), step="late")
    assert (done["looks"], done["lines"]) == (2, ["+y"])
    assert done["asked"] == [FIRST, MORE]
    with pytest.raises(Exception, match="sample asks in a circle"):
        act(lambda *_: Plan(ask=MORE))


def test_a_name_that_jinja_takes_for_a_method_is_told(act: Callable[..., dict[str, Any]]) -> None:
    with pytest.raises(Exception, match=r"sample has \['copy'\] in do"):
        act(lambda *_: Plan(do={"copy": ["a"]}))


def test_what_was_seen_is_known_while_nothing_was_done(act: Callable[..., dict[str, Any]]) -> None:
    before = act(lambda *_: Plan())
    assert before["ansible_facts"] == {}
    assert act(something, known=before)["looks"] == 0
    assert act(something, known={})["looks"] == 1
    skipped = {"skipped": True}
    assert act(something, known=skipped)["looks"] == 1


def test_what_was_seen_before_anybody_acted_is_not_known(act: Callable[..., dict[str, Any]]) -> None:
    before, done = act(lambda *_: Plan()), act(something)
    for known in (before, done):
        assert act(something, known=known, facts=done["ansible_facts"])["looks"] == 1
    again = act(something, facts=done["ansible_facts"])
    assert again["acted"] == 1
    assert again["ansible_facts"] != done["ansible_facts"]
    assert act(something, check=True)["ansible_facts"] == {}


def test_texts_of_files_are_not_kept(act: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    def decide(_role: Role, node: Node) -> Plan:
        node["files"] = {str(tmp_path): {"text": "a password", "mode": "0600"}, "/none": None}
        return Plan()

    assert act(decide)["node"]["files"] == {str(tmp_path): {"mode": "0600"}, "/none": None}
