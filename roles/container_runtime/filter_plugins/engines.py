"""Filters of the role container_runtime: which engines there are, and Docker's daemon.json."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from ansible.errors import AnsibleFilterError


def engine_versions(providers: Mapping[str, list[str]], found: Mapping[str, Any]) -> dict[str, str]:
    """Tell which engines are installed.

    Args:
        providers: For each engine the packages that bring it, of any vendor.
        found: The role packages' `packages_found`.

    Returns:
        Version of each engine that is there, without epoch and revision.
    """
    return {
        engine: found[name]["version"]
        for engine, names in providers.items()
        for name in reversed(names)
        if found.get(name, {}).get("installed")
    }


def daemon_json(text: str) -> dict[str, Any]:
    """Read daemon.json.

    Args:
        text: The file; empty when there is none.

    Returns:
        Its keys.

    Raises:
        AnsibleFilterError: It is no JSON object.
    """
    try:
        document = json.loads(text) if text.strip() else {}
    except ValueError as error:
        raise AnsibleFilterError(_broken(str(error))) from error
    if not isinstance(document, dict):
        raise AnsibleFilterError(_broken(f"its top is a {type(document).__name__}"))
    return document


def _broken(why: str) -> str:
    return (
        f"Found /etc/docker/daemon.json that is no JSON object: {why}. Wanted one, to merge our keys into it "
        "without losing yours. Mend the file (`python3 -m json.tool /etc/docker/daemon.json` on the node "
        "names the place) or remove it; Docker does not start with it either."
    )


def daemon_json_merged(
    text: str,
    keys: Mapping[str, Any],
    without: Mapping[str, Any],
    defaults: Iterable[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Merge our keys into daemon.json.

    Args:
        text: The file; empty when there is none.
        keys: Ours: tables are merged, lists get what they lack, everything else is set. Of options
            `name=value` in a list there is one of a name.
        without: Keys that go where they have this value.
        defaults: For a file that says nothing of the matter: each is taken where the file has none of its
            keys. One that is None counts, and is not written.

    Returns:
        What the file should say.

    Raises:
        AnsibleFilterError: It is no JSON object.
    """
    kept = {
        key: value for key, value in daemon_json(text).items() if key not in without or value != without[key]
    }
    found = _merged(kept, keys)
    for default in defaults:
        if not set(default) & set(found):
            found |= {key: value for key, value in default.items() if value is not None}
    return found


def _merged(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(low)
    for key, value in high.items():
        before = result.get(key)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            result[key] = _merged(before, value)
        elif isinstance(value, list) and isinstance(before, list):
            names = {_option(item) for item in value}
            result[key] = [item for item in before if _option(item) not in names] + list(value)
        else:
            result[key] = value
    return result


def _option(item: Any) -> str:
    return str(item).partition("=")[0]


class FilterModule:
    """What Ansible looks for in this file."""

    def filters(self) -> dict[str, Any]:
        """The filters by name.

        Returns:
            Name to function.
        """
        return {
            "engine_versions": engine_versions,
            "daemon_json": daemon_json,
            "daemon_json_merged": daemon_json_merged,
        }
