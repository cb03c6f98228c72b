"""Writes JUnit XML for CI systems.

junitparser 5.0 would need as much code around it (junitparser.py: TestCase, TestSuite.update_statistics): its
test cases have no properties, it replaces a suite's time by the sum of its cases', without the time for
gathering facts, and it writes control characters, which no XML parser accepts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree as ET

from gpukiln.files import write_atomic
from gpukiln.reports.sanitize import sanitize

Result = Literal["passed", "failure", "error", "skipped"]


@dataclass(frozen=True)
class Case:
    """A test case.

    Args:
        group: JUnit's classname, by which CI groups cases.
        kind: JUnit's type of a result that is not passed.
        message: One line about such a result.
        text: Details of a failure; the output of a passed case.
        seconds: None: not measured.
    """

    group: str
    name: str
    result: Result = "passed"
    kind: str = ""
    message: str = ""
    text: str = ""
    seconds: float | None = None
    properties: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Suite:
    """The test cases of one machine or file.

    Args:
        about: Further attributes, for example timestamp and hostname.
        seconds: None: not measured.
    """

    name: str
    cases: Sequence[Case]
    seconds: float | None = None
    about: Mapping[str, str] = field(default_factory=dict)
    properties: Mapping[str, str] = field(default_factory=dict)


def write_suites(name: str, suites: Sequence[Suite], path: Path, *, mode: int = 0o600) -> None:
    """Write suites with their counts.

    Args:
        path: The file; written completely or not at all.
        mode: Of the file.

    Raises:
        OSError: It can't be written.
    """
    root = ET.Element("testsuites", name=name)
    for item in suites:
        suite = ET.SubElement(root, "testsuite", _plain(name=item.name, **_counts(item), **item.about))
        if item.seconds is not None:
            suite.set("time", f"{item.seconds:.3f}")
        _properties(suite, item.properties)
        for case in item.cases:
            _case(suite, case)
    # Some readers of JUnit XML take the totals from the root element.
    for count in ("tests", "failures", "errors", "skipped"):
        root.set(count, str(sum(int(suite.get(count, "0")) for suite in root)))
    if measured := [item.seconds for item in suites if item.seconds is not None]:
        root.set("time", f"{sum(measured):.3f}")
    # One element on a line, so that the file can be read and compared.
    ET.indent(root)
    text = ET.tostring(root, encoding="utf-8", xml_declaration=True).decode() + "\n"
    write_atomic(path, text, mode=mode)


def _counts(suite: Suite) -> dict[str, int]:
    results = [case.result for case in suite.cases]
    return {
        "tests": len(results),
        "failures": results.count("failure"),
        "errors": results.count("error"),
        "skipped": results.count("skipped"),
    }


def _case(suite: ET.Element, data: Case) -> None:
    case = ET.SubElement(suite, "testcase", _plain(classname=data.group, name=data.name))
    if data.seconds is not None:
        case.set("time", f"{data.seconds:.3f}")
    _properties(case, data.properties)
    if data.result != "passed":
        about = {"type": data.kind, "message": data.message}
        said = ET.SubElement(
            case, data.result, _plain(**{key: value for key, value in about.items() if value})
        )
        # None keeps the element empty instead of writing a start and an end tag.
        said.text = sanitize(data.text) or None
    elif data.text:
        ET.SubElement(case, "system-out").text = sanitize(data.text)


def _properties(parent: ET.Element, values: Mapping[str, str]) -> None:
    if not values:
        return
    properties = ET.SubElement(parent, "properties")
    for name, value in values.items():
        ET.SubElement(properties, "property", _plain(name=name, value=value))


def _plain(**attributes: object) -> dict[str, str]:
    return {name: sanitize(str(value)) for name, value in attributes.items()}
