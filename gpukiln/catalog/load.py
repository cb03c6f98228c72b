"""Reads the YAML files that people write, and says what is wrong with them."""

from functools import cache
from pathlib import Path
from typing import Any

import yaml

from gpukiln import recipes
from gpukiln.errors import UsageError
from gpukiln.parsing import LimitError, check_yaml, read_text
from gpukiln.typed import short

ROOT = recipes.root()
"""Where components.yaml and ami/ are."""

# libyaml's composer recurses: some ten thousand levels end the process with a segmentation fault.
MAX_DEPTH = 50  # levels of a document
LARGEST = 16 << 20  # bytes; the largest data file of the catalogue has less than one MiB

try:
    from yaml import CSafeLoader as _Loader
except ImportError:
    from yaml import SafeLoader as _Loader  # type: ignore[assignment]  # it reads the same, slower

DATA = Path(__file__).resolve().parent / "data"


class SafeLoader(_Loader):
    """Reads plain data; libyaml's where Python has it, which is ten times as fast.

    Of two equal keys PyYAML takes the last in silence, against YAML 1.2.2, 3.2.1.3; here they are a mistake.
    """

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._looked_at: set[int] = set()

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """A value; PyYAML lets what Python says of a day or a number pass as it is."""
        try:
            return super().construct_object(node, deep=deep)
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
            kind = str(node.tag).rpartition(":")[2]
            shown = repr(node.value) if isinstance(node, yaml.ScalarNode) else "this"
            why = f": {error}" if isinstance(error, ValueError) else ""
            raise yaml.constructor.ConstructorError(
                None, None, f"{short(shown, quote=False)} is no {kind}{why}", node.start_mark
            ) from error

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Called for every mapping, for some twice; merged keys (`<<`) may be overridden."""
        # PyYAML flattens a node again for each merge key that refers to it; its keys are then merged ones.
        if id(node) not in self._looked_at:
            self._looked_at.add(id(node))
            seen: set[Any] = set()
            for key, _ in node.value:
                if key.tag == "tag:yaml.org,2002:merge" or not isinstance(key, yaml.ScalarNode):
                    continue
                value = self.construct_object(key)
                if value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {short(value)} stands there twice", key.start_mark
                    )
                seen.add(value)
        super().flatten_mapping(node)


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file whose top is a mapping.

    Args:
        path: The file.

    Returns:
        The mapping.

    Raises:
        UsageError: The file is missing, is no YAML, or its top is no mapping.
    """
    try:
        text = read_text(path, largest=LARGEST)
        check_yaml(text, deepest=MAX_DEPTH, largest=LARGEST)
        # Limits of size and depth first: the parser has none of its own.
        document = yaml.load(text, Loader=SafeLoader)  # noqa: S506 - it is safe
    except OSError as error:
        raise UsageError(f"can't read {path}: {error.strerror}") from error
    except LimitError as error:
        raise UsageError(f"{path} is {error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
            kind = "" if isinstance(error, yaml.constructor.ConstructorError) else "no valid YAML: "
            raise UsageError(f"{path}, line {error.problem_mark.line + 1}: {kind}{error.problem}") from error
        raise UsageError(f"{path} is no valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(document, dict):
        content = "is empty" if document is None else f"holds {short(document)}"
        raise UsageError(f"{path} {content}; wanted: keys with values, KEY: VALUE")
    return document


@cache
def data(name: str) -> dict[str, Any]:
    """One of the catalogue's own data files.

    Args:
        name: The file name without `.yaml`.

    Returns:
        Its content; shared, not to be changed.
    """
    return read_yaml(DATA / f"{name}.yaml")


def version_key(version: str) -> tuple[int, ...]:
    """Order versions of numbers and dots, such as 535.309.01.

    Args:
        version: For example "12.1".

    Returns:
        Its numbers.

    Raises:
        UsageError: It has other parts.

    >>> version_key("535.309.01")
    (535, 309, 1)
    >>> version_key("12.1") < version_key("12.10")
    True
    """
    try:
        # Numbers, so that 535.54 is before 535.129.
        return tuple(int(part) for part in version.split("."))
    except ValueError as error:
        raise UsageError(
            f"{version!r} is no version; wanted: numbers and dots, such as 535.309.01"
        ) from error
