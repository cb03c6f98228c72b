"""Finds answers of a real GPU that the doubles of NVML and CUDA never give.

`answers` reduces results to their kinds; tests/doubles/answers.json has those of the doubles.
Runs on the machine that is examined, with Python 3.9 or newer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Answers = dict[str, dict[str, list[str]]]
# Calls whose arguments are left out, because machines differ in the number of GPUs, links and processes.
VARIABLE_CALLS = ("NvLink", "HandleByIndex", "Processes")
MISSING = "13"  # NVML_ERROR_FUNCTION_NOT_FOUND


def answers(nvml: Any, calls: list[dict[str, Any]], runs: list[Any], cuda: list[dict[str, Any]]) -> Answers:
    """The kinds of all answers: {part: {what: [kind]}}.

    The parts are nvml and beyond (calls with their codes: the suite's, and further ones), cuda
    (calls with their codes), and facts (paths with the types of what stands there).

    Args:
        nvml: The section of the facts, or None.
        calls: Of NVML, as `contact_calls.ask_nvml` reports them.
        runs: Sections `cuda` of the facts.
        cuda: Calls, as `contact_calls.summarize_cuda_calls` makes them.
    """
    kinds_by_part: dict[str, dict[str, set[str]]] = {"facts": {}, "nvml": {}, "cuda": {}, "beyond": {}}
    for call in calls:
        given = [] if any(word in call["call"] for word in VARIABLE_CALLS) else call["args"]
        name = f"{call['call']}({', '.join(map(str, given))})"
        kinds = "" if call["code"] else " ".join(_kind(out) for out in call["out"])
        part = kinds_by_part["nvml" if call["suite"] else "beyond"]
        part.setdefault(name, set()).add(f"{call['code']} {kinds}".strip())
    for call in cuda:
        kinds_by_part["cuda"].setdefault(call["call"], set()).add(str(call["code"]))
    for section, documents in (("nvml", [nvml] if nvml else []), ("cuda", runs)):
        for document in documents:
            for path, kind in _kinds(section, document):
                kinds_by_part["facts"].setdefault(path, set()).add(kind)
    return {
        part: {name: sorted(kinds) for name, kinds in sorted(rows.items())}
        for part, rows in kinds_by_part.items()
    }


def _kind(value: Any) -> str:
    if isinstance(value, dict):
        return f"field {value['code']}" if "field" in value else "struct"
    if isinstance(value, list):
        return " ".join(sorted({_kind(item) for item in value}))
    return value.replace(" ", "-") if isinstance(value, str) else "number"


def _kinds(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and "_error" in value:
        yield path, f"error {value.get('code', '')}".strip()
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _kinds(f"{path}.{key}", inner)
    elif isinstance(value, list):
        yield path, "list" if value else "empty list"
        for inner in value:
            yield from _kinds(f"{path}.*", inner)
    elif value is None or isinstance(value, (bool, str)):
        yield path, {"NoneType": "null", "bool": "true or false", "str": "text"}[type(value).__name__]
    else:
        yield path, "number"


def merge(*several: Answers) -> Answers:
    """The kinds of several documents together."""
    merged: Answers = {}
    for document in several:
        for part, rows in document.items():
            place = merged.setdefault(part, {})
            for name, kinds in rows.items():
                place[name] = sorted({*place.get(name, []), *kinds})
    return {part: dict(sorted(rows.items())) for part, rows in merged.items()}


def contradictions(seen: Answers, doubles: Answers) -> list[str]:
    """The answers of this machine that the doubles never give, as lines for messages.

    Args:
        seen: On this machine.
    """
    lines = []
    for part, rows in seen.items():
        known = doubles.get(part, {})
        for name, kinds in rows.items():
            whole = name.partition("(")[0]
            there = known.get(name) or known.get(f"{whole}()") or []
            new = [kind for kind in kinds if kind not in there]
            if there in ([], [MISSING]) and new:
                lines.append(f"{part}: {name}: here {', '.join(new)}; the double does not have this call")
            elif new:
                lines.append(f"{part}: {name}: here {', '.join(new)}; the double {', '.join(there)}")
    return lines
