"""JSON and YAML that others wrote, with limits of size, depth and digits; sent to machines, Python 3.9.

What is too large or too deep is refused before anything recurses over it: Python's reader of JSON raises
RecursionError, which no reader expects, and libyaml's composer ends the process with a segmentation fault.
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
MAX_DEPTH = (
    100  # levels of lists and mappings; Grafana's dashboards and the API server's objects have about 20
)
MAX_VALUES = 1_000_000  # of a YAML document with its aliases written out
MAX_NUMBER_CHARS = 400  # characters; the largest float in full has 309 digits


_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


class LimitError(ValueError):
    """A document is larger or deeper than anything that gpukiln reads."""


def read_text(path: Path, *, largest: int = MAX_BYTES) -> str:
    """The text of a file, of which no more is read than its limit.

    Raises:
        OSError: It can't be read.
        UnicodeDecodeError: It is no UTF-8.
        LimitError: It is larger.
    """
    with path.open("rb") as file:
        data = file.read(largest + 1)
    if len(data) > largest:
        raise LimitError(f"larger than {Memory(largest).shown}")
    return data.decode("utf-8")


def parse_json(text: str | bytes | bytearray, *, largest: int = MAX_BYTES) -> Any:
    """The value of a JSON document; whatever is wrong with it is a ValueError.

    NaN and Infinity, which Python reads and RFC 8259 does not have, are refused.

    Raises:
        ValueError: It is no JSON, or beyond the limits (LimitError).
    """
    if len(text) > largest:
        raise LimitError(f"larger than {Memory(largest).shown}")
    try:
        value = json.loads(text, parse_constant=_no_number)
    except RecursionError:
        raise LimitError(_too_deep(MAX_DEPTH)) from None
    check_depth(value)
    return value


def check_depth(value: Any, deepest: int = MAX_DEPTH) -> None:
    """Refuse plain data that is nested too deeply for what walks it.

    Raises:
        LimitError: It is.
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
    """Refuse a stream of YAML that its composer could not bear.

    The events of libyaml's parser come one by one, without recursion.

    Raises:
        LimitError: It is too large.
        yaml.MarkedYAMLError: It is no YAML, or something in it is beyond the limits; with the place.
    """
    import yaml  # noqa: PLC0415 - few commands of gpukiln-gpu need it

    if len(text) > largest:
        raise LimitError(f"larger than {Memory(largest).shown}")
    sizes: list[int] = []  # of each open collection
    names: list[str | None] = []
    known: dict[str, int] = {}  # values of each anchor
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
            raise _at(event, f"more than {MAX_VALUES:,} values once its aliases are written out")


def parse_yaml(text: str | bytes, *, deepest: int = MAX_DEPTH, largest: int = MAX_BYTES) -> Any:
    """The value of a YAML document.

    Raises:
        ValueError: It is beyond the limits, or a value is not of its type.
        yaml.YAMLError: It is no YAML.
    """
    import yaml  # noqa: PLC0415 - see above

    check_yaml(text, deepest=deepest, largest=largest)
    try:
        return yaml.load(text, Loader=_loader())  # noqa: S506 - it makes plain data
    except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
        # `!!int ''`, `!!timestamp x`: PyYAML passes on what Python says of a value.
        raise ValueError(f"a value is not of its type: {error}") from error


def refuse_credentials(url: str, option: str, *, where: str) -> None:
    """Refuse an address that holds a user or a password; the message shows neither.

    Args:
        option: What it was given as.
        where: Where it would be written, for example "the user data of the machine".

    Raises:
        UsageError: It holds some.
    """
    if match := re.search(r"//[^/\s]*@", url):
        host = re.match(r"[^/\s]*", url[match.end() :])
        raise UsageError(
            f"{option} holds credentials for {host[0] if host else 'a server'}, which would lie in {where}",
            hint="an address without user and password; let the server allow reading by network",
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
    raise ValueError(f"{text} is no number of JSON")


def _too_deep(deepest: int) -> str:
    return f"it is nested deeper than {deepest} levels"
