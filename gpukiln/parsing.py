"""Parses JSON and YAML of other authors, with limits of size, depth and digits; sent to machines, Python 3.9.

Documents that are too large or nested too deeply are refused before any function recurses over them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpukiln.errors import UsageError
from gpukiln.units import Memory

if TYPE_CHECKING:
    import yaml

MAX_BYTES = 64 << 20  # bytes of one document; an SBOM of an image has less than 10 MiB
# Levels of lists and mappings; Grafana's dashboards and the API server's objects have about 20. libyaml's
# composer recurses, and ends the process with a segmentation fault at some ten thousand levels.
MAX_DEPTH = 100
MAX_VALUES = 1_000_000  # of a YAML document with its aliases expanded: "billion laughs" needs a few lines
MAX_NUMBER_CHARS = 400  # characters; the largest float in full has 309 digits


_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


class LimitError(ValueError):
    """A document exceeds the limits of size or depth."""


def read_text(path: Path, *, largest: int = MAX_BYTES) -> str:
    """Read a text file of limited size.

    Raises:
        OSError: It can't be read.
        UnicodeDecodeError: It is not UTF-8.
        LimitError: It is larger.
    """
    with path.open("rb") as file:
        data = file.read(largest + 1)
    if len(data) > largest:
        raise LimitError(f"larger than {Memory(largest).shown}")
    return data.decode("utf-8")


def parse_json(text: str | bytes | bytearray, *, largest: int = MAX_BYTES) -> Any:
    """The value of a JSON document.

    >>> parse_json('{"gpus": [1, 2]}')
    {'gpus': [1, 2]}
    >>> parse_json("NaN")
    Traceback (most recent call last):
    ...
    ValueError: NaN is not a number of JSON

    Raises:
        ValueError: It is not JSON, or exceeds the limits (LimitError).
    """
    if len(text) > largest:
        raise LimitError(f"larger than {Memory(largest).shown}")
    try:
        # Python's parser accepts NaN and Infinity, which RFC 8259 does not have.
        value = json.loads(text, parse_constant=_no_number)
    except RecursionError:
        raise LimitError(_too_deep(MAX_DEPTH)) from None
    check_depth(value)
    return value


def check_depth(value: Any, deepest: int = MAX_DEPTH) -> None:
    """Refuse plain data that is nested too deeply.

    Raises:
        LimitError: It has more levels than `deepest`.
    """
    level = [value] if isinstance(value, (list, dict)) else []
    for _ in range(deepest):
        if not level:
            return
        inner = (item for each in level for item in (each.values() if isinstance(each, dict) else each))
        level = [item for item in inner if isinstance(item, (list, dict))]
    if level:
        raise LimitError(_too_deep(deepest))


def check_yaml(text: str | bytes, *, deepest: int = MAX_DEPTH, largest: int = MAX_BYTES) -> None:
    """Refuse a stream of YAML that exceeds the limits, before the composer reads it.

    Raises:
        LimitError: It is too large.
        yaml.MarkedYAMLError: It is not YAML, or a part of it exceeds the limits; with line and column.
    """
    import yaml  # noqa: PLC0415 - few commands of gpukiln-gpu need it

    if len(text) > largest:
        raise LimitError(f"larger than {Memory(largest).shown}")
    sizes: list[int] = []  # of each open collection
    names: list[str | None] = []
    known: dict[str, int] = {}  # number of values below each anchor
    # The parser returns event after event, without recursion; only the composer recurses.
    for event in yaml.parse(text, Loader=_loader()):
        if isinstance(event, yaml.ScalarEvent):
            sizes[-1] += 1
            if len(event.value) > MAX_NUMBER_CHARS and _is_number(event):
                raise _at(event, f"a number of more than {MAX_NUMBER_CHARS} characters")
        elif isinstance(event, yaml.DocumentStartEvent):
            sizes, names, known = [0], [], {}
        elif isinstance(event, yaml.CollectionStartEvent):
            sizes.append(1)
            names.append(event.anchor)
            if len(names) > deepest:
                raise _at(event, _too_deep(deepest))
        elif isinstance(event, yaml.CollectionEndEvent):
            many, name = sizes.pop(), names.pop()
            if name is not None:
                known[name] = many
            sizes[-1] += many
        elif isinstance(event, yaml.AliasEvent):
            sizes[-1] += known.get(event.anchor or "", 1)
        if sizes and sizes[-1] > MAX_VALUES:
            raise _at(event, f"more than {MAX_VALUES:,} values with its aliases expanded")


def parse_yaml(text: str | bytes, *, deepest: int = MAX_DEPTH, largest: int = MAX_BYTES) -> Any:
    """The value of a YAML document.

    >>> parse_yaml("devices: [0, 1]")
    {'devices': [0, 1]}

    Raises:
        ValueError: It exceeds the limits, or a value does not have the type of its tag.
        yaml.YAMLError: It is not YAML.
    """
    import yaml  # noqa: PLC0415 - see above

    check_yaml(text, deepest=deepest, largest=largest)
    try:
        return yaml.load(text, Loader=_loader())  # noqa: S506 - a safe loader
    except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
        # `!!int ''`, `!!timestamp x`: PyYAML lets Python's exceptions through.
        raise ValueError(f"a value does not have the type of its tag: {error}") from error


def refuse_credentials(url: str, option: str, *, where: str) -> None:
    """Refuse a URL with a user or a password; the message shows neither.

    >>> refuse_credentials("https://mirror.example/debian", "--url", where="the boot file")

    Args:
        option: The option of the URL, for the message.
        where: Where gpukiln would write it, for example "the user data of the machine".

    Raises:
        UsageError: It has credentials.
    """
    if match := re.search(r"//[^/\s]*@", url):
        host = re.match(r"[^/\s]*", url[match.end() :])
        raise UsageError(
            f"{option} has credentials for {host[0] if host else 'a server'}, which would be in {where}",
            hint="pass a URL without user and password; allow reading on the server by network",
        )


def _is_number(event: yaml.ScalarEvent) -> bool:
    import yaml  # noqa: PLC0415 - see above

    tag = event.tag
    if tag is None and event.implicit[0]:
        resolver: Any = yaml.SafeLoader("")
        tag = resolver.resolve(yaml.ScalarNode, event.value, (True, False))
    return tag in _NUMBERS


def _at(event: yaml.Event, problem: str) -> yaml.MarkedYAMLError:
    import yaml  # noqa: PLC0415 - see above

    mark: Any = event.start_mark
    return yaml.constructor.ConstructorError(None, None, problem, mark)


def _loader() -> type[yaml.SafeLoader]:
    import yaml  # noqa: PLC0415 - see above

    fast: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return fast


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is not a number of JSON")


def _too_deep(deepest: int) -> str:
    return f"it is nested deeper than {deepest} levels"
