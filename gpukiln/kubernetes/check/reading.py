"""Reads manifests, values, scripts, documents with code blocks, Prometheus rules and dashboards."""

from __future__ import annotations

import gc
import itertools
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path as File
from typing import Any, TypeVar

from gpukiln.errors import UnavailableError, UsageError
from gpukiln.kubernetes.check import yaml_tree
from gpukiln.kubernetes.check.values import chart_of
from gpukiln.kubernetes.check.workload import (
    CONTAINER_KEYS,
    POD_KEYS,
    CommandLine,
    Path,
    PodContainer,
    Prose,
    Query,
    Rejection,
    Resource,
    Role,
    UncheckedItem,
    Workload,
    mapping,
    sequence,
    workloads,
)
from gpukiln.kubernetes.pools import Pool
from gpukiln.parsing import parse_json
from gpukiln.units import Memory

T = TypeVar("T")
YAML, SCRIPTS, DOCUMENTS = (".yaml", ".yml", ".json"), (".sh", ".bash"), (".md", ".markdown", ".txt", ".rst")
LARGEST_FILE = 16 << 20  # bytes of a file; a completely rendered chart has less than 1 MiB
SHELLS = ("bash", "sh", "shell", "console", "shell-session", "zsh")
# Syntax of Helm templates that no manifest has: a template must be rendered before it can be checked.
TEMPLATE = re.compile(
    r"\{\{-?\s*(?:\.(?:Values|Release|Chart|Capabilities|Files)\b|include |if |range |with |toYaml |tpl )"
)
UNKNOWN_DOCUMENT = "neither an object nor values of a known chart"
FENCE = re.compile(r"^(?P<indent>[ \t]*)(?P<mark>```+|~~~+)[ \t]*\{?\.?(?P<language>[\w+-]*)")
LONGEST_COMMAND = 32 << 10  # characters of a command that are checked; nobody types longer ones
MOST_LINES = 200  # of a command: a quote that stays open for longer is an apostrophe in prose
HEREDOC = re.compile(r"<<-?\s*(['\"]?)(?P<end>\w+)\1")
_QUOTE_ENDS = {  # open quote -> what ends it; without one, what begins a quote or a comment
    "": re.compile(r"\\.|['\"#]"),
    "'": re.compile("'"),
    '"': re.compile(r'\\.|"'),
}
TOOLS = re.compile(r"^\s*(?:\$ |sudo |kubectl |helm |docker |eksctl |aws |apt(?:-get)? |curl |nvidia-)")


@dataclass
class Reading:
    """Everything that was read from files or a cluster.

    Args:
        unchecked: Items that can't be checked.
        pools: Node pools of a cluster.
    """

    files: list[str] = field(default_factory=list)
    resources: list[Resource] = field(default_factory=list)
    workloads: list[Workload] = field(default_factory=list)
    commands: list[CommandLine] = field(default_factory=list)
    queries: list[Query] = field(default_factory=list)
    prose: list[Prose] = field(default_factory=list)
    rejections: list[Rejection] = field(default_factory=list)
    unchecked: list[UncheckedItem] = field(default_factory=list)
    pools: tuple[Pool, ...] = ()

    def text(self, text: str, name: str) -> None:
        """Read the text of a file.

        Args:
            name: Of the file; its suffix decides the format, if it has one.
        """
        # A byte order mark and Windows line ends, as editors on Windows write them.
        text = text.removeprefix("\ufeff").replace("\r\n", "\n")
        self.files.append(name)
        with unchecked_on_error(self.unchecked, name, 1, "the reader"):
            self._text(text, name)

    def _text(self, text: str, name: str) -> None:
        kind = _kind(text, File(name).suffix.lower())
        if kind == "yaml":
            self._yaml(text, name, 0, whole=True)
        elif kind == "script":
            self._script(text, name, 0)
            self.prose.append(Prose(name, tuple(text.splitlines())))
        else:
            self._document(text, name)

    def objects(self, objects: Iterable[dict[str, Any]], name: str) -> None:
        """Add objects of an API server."""
        self.files.append(name)
        for item in objects:
            with unchecked_on_error(self.unchecked, name, 1, "the reader"):
                self._resource(Resource(name, item))

    def _document(self, text: str, name: str) -> None:
        lines, blocks = _blocks(text)
        self.prose.append(Prose(name, tuple(lines), tuple(blocks)))
        for line, language, block in blocks:
            if language in ("yaml", "yml", "json"):
                self._yaml(block, name, line, whole=False)
            elif language in SHELLS:
                self._script(block, name, line)
            elif language == "promql":
                self._promql(block, name, line)
            elif not language:
                self._unnamed(block, name, line)
        # A plain text, for example exported from a wiki.
        if not blocks:  # without code blocks, read here-documents and command lines in the text
            self._script(text, name, 0, strict=False)

    def _unnamed(self, block: str, name: str, line: int) -> None:
        if re.search(r"^[ \t]*(?:apiVersion|kind|resources|nodeSelector|tolerations):", block, re.MULTILINE):
            self._yaml(block, name, line, whole=False)
        elif any(TOOLS.match(row) for row in block.splitlines()):
            self._script(block, name, line, strict=False)

    def _promql(self, block: str, name: str, above: int) -> None:
        for number, line in enumerate(block.splitlines(), above + 1):
            if line.strip() and not line.lstrip().startswith("#"):
                self.queries.append(Query(name, number, line.strip()))

    def _script(self, text: str, name: str, above: int, *, strict: bool = True) -> None:
        """Read command lines and here-documents.

        Args:
            strict: Every line is a command; otherwise only lines that begin with the name of a known tool.
        """
        lines = text.splitlines()
        number = 0
        while number < len(lines):
            start, line = number, lines[number]
            number += 1
            # A command may go on in the next line after a backslash or within quotes.
            parts, length, quote = [line], len(line), _open_quote(line, "")
            while number < min(len(lines), start + MOST_LINES) and (line.endswith("\\") or quote):
                if length > LONGEST_COMMAND:
                    break
                if line.endswith("\\"):
                    parts[-1] = line[:-1] + " "
                else:
                    # A newline within quotes is part of the word.
                    parts.append("\n")
                line = lines[number]
                quote = _open_quote(line, quote)
                parts.append(line)
                length += len(line) + 1
                number += 1
            line = "".join(parts)
            is_command = strict or TOOLS.match(line) is not None
            if length > LONGEST_COMMAND:
                line = line[:LONGEST_COMMAND]
                if is_command:
                    what = f"longer than {Memory(LONGEST_COMMAND).shown}: the rest is not checked"
                    self.unchecked.append(UncheckedItem(name, above + start + 1, what))
            if is_command:
                self._commands(line.lstrip().removeprefix("$ "), name, above + start + 1)
            # A here-document in a comment is text.
            if not line.lstrip().startswith("#") and (heredoc := HEREDOC.search(line)):
                body = number
                while number < len(lines) and lines[number].strip() != heredoc["end"]:
                    number += 1
                block = "\n".join(lines[body:number]) + "\n"
                if re.search(r"^[ \t]*(?:apiVersion|kind):", block, re.MULTILINE):
                    self._yaml(block, name, above + body, whole=False)
                number += 1

    def _commands(self, line: str, name: str, number: int) -> None:
        for words in _split(line):
            command = CommandLine(name, number, tuple(words))
            self.commands.append(command)
            if (resource := _pod_of_kubectl_run(command)) is not None:
                self._resource(resource)

    def _yaml(self, text: str, name: str, above: int, *, whole: bool) -> None:
        if match := TEMPLATE.search(text):
            line = above + text.count("\n", 0, match.start()) + 1
            self.unchecked.append(
                UncheckedItem(name, line, "a chart's template: check the output of `helm template` instead")
            )
            return
        for document in yaml_tree.documents(text, above):
            if isinstance(document, yaml_tree.BrokenError):
                if "{{" in text:
                    self.unchecked.append(
                        UncheckedItem(name, document.line, "a template: check its rendered output instead")
                    )
                else:
                    self.rejections.append(Rejection(name, document.line, document.text))
            elif not isinstance(document.value, dict):
                if whole:
                    self.unchecked.append(
                        UncheckedItem(
                            name, document.line_of(()), "not a mapping, so neither an object nor values"
                        )
                    )
            else:
                with unchecked_on_error(self.unchecked, name, document.above + 1, "the reader"):
                    self._value(document, name, whole=whole)

    def _value(self, document: yaml_tree.Document, name: str, *, whole: bool) -> None:
        value = document.value
        # kubectl get -o yaml prints a List of objects.
        if sequence(value.get("items")) and str(value.get("kind", "")).endswith("List"):
            for number, item in enumerate(value["items"]):
                if isinstance(item, dict):
                    line_of = _relative_to(document.line_of, ("items", number))
                    written = _relative_to(document.written, ("items", number))
                    self._resource(Resource(name, item, line_of=line_of, written=written))
            return
        role, chart = _role(value, whole=whole)
        if role == "unknown":  # code blocks may show settings of any program
            if whole:
                self.unchecked.append(UncheckedItem(name, document.line_of(()), UNKNOWN_DOCUMENT))
            return
        self._resource(
            Resource(name, value, role, chart, document.line_of, document.repeated, document.written)
        )

    def _resource(self, resource: Resource) -> None:
        self.resources.append(resource)
        for workload in workloads(resource):
            self.workloads.append(workload)
            for container in workload.containers:
                self._container(workload, container)
        for path, text in _expressions(resource):
            self.queries.append(Query(resource.file, resource.line_of(path), text))

    def _container(self, workload: Workload, container: PodContainer) -> None:
        path = workload.at(*container.where, "command" if "command" in container.spec else "args")
        words = [str(word) for key in ("command", "args") for word in sequence(container.spec.get(key))]
        if not words:
            return
        resource = workload.resource
        line = resource.line_of(path)
        texts = [words[index + 1] for index, word in enumerate(words[:-1]) if re.fullmatch(r"-[a-z]*c", word)]
        # sh -c TEXT: the commands are in the text.
        if texts and File(words[0]).name in ("sh", "bash", "ash", "dash"):
            for line_words in (words for text in texts for row in text.splitlines() for words in _split(row)):
                self.commands.append(CommandLine(resource.file, line, tuple(line_words), resource, path))
        else:
            self.commands.append(CommandLine(resource.file, line, tuple(words), resource, path))


@contextmanager
def unchecked_on_error(gaps: list[UncheckedItem], file: str, line: int, what: str) -> Iterator[None]:
    """Report an unexpected error as unchecked, so that one document does not hide findings in others.

    Args:
        what: What processes the document, for example "rule schema".
    """
    try:
        yield
    except Exception as error:
        add_gap(gaps, file, line, what, error)


def add_gap(gaps: list[UncheckedItem], file: str, line: int, what: str, error: Exception) -> None:
    """Add an unexpected error to the unchecked items."""
    why = f"{type(error).__name__}: {error}"
    gap = UncheckedItem(
        file, line, f"{what} failed on this document; please report that with the document ({why})"
    )
    if gap not in gaps:
        gaps.append(gap)


def read(names: Iterable[str]) -> Reading:
    """Read files, folders and standard input.

    Args:
        names: Paths; `-` is standard input. Of a folder, files with the suffix of manifests, scripts or
            documents.

    Raises:
        UsageError: A path does not exist, or a folder has no such file.
        UnavailableError: A file can't be read.
    """
    reading = Reading()
    paths = [source for name in names for source in ([name] if name == "-" else _files(File(name)))]
    collects = gc.isenabled()
    gc.disable()  # YAML nodes are many and have no cycles: the collector took two thirds of the time
    try:
        for path in paths:
            if isinstance(path, File):
                _file(reading, path)
            else:
                reading.text(sys.stdin.read(), path)
    finally:
        if collects:
            gc.enable()
    return reading


def _files(path: File) -> list[File]:
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if _is_read(file, path))
        if not files:
            kinds = ", ".join((*YAML, *SCRIPTS, *DOCUMENTS))
            raise UsageError(f"{path}: no file in it ends in {kinds}", hint="name the files themselves")
        return files
    if path.exists():
        return [path]
    near = [str(file) for file in path.parent.glob(f"{path.stem[:3]}*")][:3] if path.stem else []
    hint = f"did you mean {' or '.join(near)}?" if near else ""
    raise UsageError(f"{path}: no such file or folder", hint=hint)


def _is_read(path: File, below: File) -> bool:
    parts = path.relative_to(below).parts
    # .git, .venv and caches; workflows are in .github.
    hidden = any((part.startswith(".") and part != ".github") or part == "node_modules" for part in parts)
    return path.is_file() and not hidden and path.suffix.lower() in (*YAML, *SCRIPTS, *DOCUMENTS)


def _file(reading: Reading, path: File) -> None:
    name = str(path)
    try:
        # A file that is too large must not stop the check of the others.
        if path.stat().st_size > LARGEST_FILE:
            reading.files.append(name)
            reading.unchecked.append(UncheckedItem(name, 1, f"larger than {Memory(LARGEST_FILE).shown}"))
            return
        data = path.read_bytes()
    except OSError as error:
        raise UnavailableError(f"{name} can't be read: {error.strerror}") from error
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        reading.files.append(name)
        line = data.count(b"\n", 0, error.start) + 1
        reading.rejections.append(Rejection(name, line, "not UTF-8 text"))
        return
    reading.text(text, name)


def _kind(text: str, suffix: str) -> str:
    if suffix in YAML:
        return "yaml"
    # A script needs no suffix.
    if suffix in SCRIPTS or text.startswith("#!"):
        return "script"
    if suffix in DOCUMENTS or re.search(r"^[ \t]*(?:```|~~~)", text, re.MULTILINE):
        return "document"
    return "yaml" if re.search(r"^(?:[\w.-]+:(?:\s|$)|\{|---)", text, re.MULTILINE) else "document"


def _blocks(text: str) -> tuple[list[str], list[tuple[int, str, str]]]:
    """The lines of a document outside code blocks; line above, language and text of each block."""
    lines: list[str] = []
    blocks: list[tuple[int, str, str]] = []
    end, language, indent, start = "", "", "", 0
    body: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not end and (fence := FENCE.match(line)):
            end, language, indent = fence["mark"], fence["language"].lower(), fence["indent"]
            start, body = number, []
            lines.append("")
        elif end and line.strip().startswith(end) and not line.strip().strip(end[0]):
            blocks.append((start, language, "\n".join(body) + "\n"))
            end = ""
            lines.append("")
        elif end:
            body.append(line.removeprefix(indent))
            lines.append("")
        else:
            lines.append(line)
    if end:  # never closed: as in CommonMark, the block extends to the end
        blocks.append((start, language, "\n".join(body) + "\n"))
    return lines, blocks


def _open_quote(line: str, quote: str) -> str:
    """The quote that is open at the end of a line.

    >>> _open_quote("echo 'a", ""), _open_quote("b'", "'")
    ("'", '')

    Args:
        quote: The quote that is open at its beginning, or empty.
    """
    at = 0
    while match := (_QUOTE_ENDS[quote].search(line, at) if at < len(line) else None):
        at = match.end()
        if match[0] == "#" and not quote:  # a comment, to the end of the line
            break
        if not match[0].startswith("\\"):
            quote = "" if quote else match[0]
    return quote


def _split(line: str) -> Iterator[list[str]]:
    """The commands of a command line, without operators.

    >>> list(_split("sudo apt update && kubectl get pods"))
    [['apt', 'update'], ['kubectl', 'get', 'pods']]
    """
    try:
        if len(line) > LONGEST_COMMAND:  # shlex takes quadratic time for a long word
            raise ValueError
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";|&()")
        lexer.whitespace_split = True
        words = list(lexer)
    except ValueError:
        words = line.split()
    command: list[str] = []
    for word in [*words, ";"]:
        # An operator of the shell ends a command.
        if word and not word.strip(";|&()"):
            if command := list(itertools.dropwhile(_is_prefix, command)):
                yield command
            command = []
        else:
            command.append(word)


def _is_prefix(word: str) -> bool:
    """Whether a word may precede the name of a command."""
    return word in ("sudo", "time", "exec") or re.fullmatch(r"\w+=\S*", word) is not None


def _pod_of_kubectl_run(command: CommandLine) -> Resource | None:
    """The pod that `kubectl run` would create."""
    words = command.words
    if words[:1] != ("kubectl",) or "run" not in words[1:3]:
        return None
    options = options_of(words)
    spec: dict[str, Any] = {}
    # kubectl merges this JSON into the pod that it generates.
    if text := options.get("overrides"):
        try:
            spec = dict(mapping(mapping(parse_json(text)).get("spec")))
        except ValueError:
            spec = {}
    if "containers" not in spec:
        spec["containers"] = [{"name": "run", **({"image": options["image"]} if "image" in options else {})}]
    return Resource(command.file, spec, "fragment", line_of=lambda _: command.line)


def options_of(words: Iterable[str]) -> dict[str, str]:
    """Options of a command line with their values; an option without a value is empty.

    >>> options_of("kubectl run a --image=b -n ml --rm".split())
    {'image': 'b', 'n': 'ml', 'rm': ''}
    """
    options: dict[str, str] = {}
    last = ""
    for word in words:
        if word == "--":
            break
        if word.startswith("-"):
            name, _, value = word.lstrip("-").partition("=")
            options[name] = value
            last = "" if "=" in word else name
        elif last:
            options[last], last = word, ""
    return options


def _relative_to(of: Callable[[Path], T], where: Path) -> Callable[[Path], T]:
    return lambda path: of((*where, *path))


def _role(value: dict[str, Any], *, whole: bool) -> tuple[Role, str]:
    """The role of a mapping, and for values the chart.

    Args:
        whole: It is a whole file, not a code block: a mapping with keys of pods is then values of a chart,
            whose other keys may have any form.
    """
    of_pods = (CONTAINER_KEYS | POD_KEYS) & value.keys()
    pod_keys = {"resources", "nodeSelector", "tolerations", "affinity", "containers"} & value.keys()
    chart = "" if "kind" in value or "apiVersion" in value else chart_of(value)
    if "kind" in value or ("apiVersion" in value and "metadata" in value):
        role: Role = "object"
    elif isinstance(value.get("jobs"), dict) and {"true", "name"} & value.keys():
        # the key `on` of a workflow, which YAML 1.1 readers take for true
        role = "workflow"
    elif "panels" in value or "panels" in mapping(value.get("dashboard")):
        role = "dashboard"
    elif any("rules" in mapping(group) for group in sequence(value.get("groups"))):
        role = "rules"
    elif chart or (whole and pod_keys):
        role = "values"
    elif not whole and (pod_keys or {"limits", "requests"} >= value.keys() or of_pods == value.keys()):
        role = "fragment"
    else:
        role = "unknown"
    return role, chart


def _expressions(resource: Resource) -> Iterator[tuple[Path, str]]:
    """PromQL expressions in rules, dashboards, and ConfigMaps with either."""
    if resource.role in ("rules", "dashboard") or resource.kind in ("PrometheusRule", "GrafanaDashboard"):
        yield from _expr(resource.object, ())
    elif resource.kind == "ConfigMap":
        for key, text in mapping(resource.object.get("data")).items():
            if isinstance(text, str) and "expr" in text:
                for document in yaml_tree.documents(text):
                    if isinstance(document, yaml_tree.Document):
                        yield from (
                            (("data", key), expression) for _, expression in _expr(document.value, ())
                        )


def _expr(value: Any, path: Path) -> Iterator[tuple[Path, str]]:
    if isinstance(value, dict):
        for key, below in value.items():
            # Rules have expr, Grafana panels expr, its variables query or definition.
            if key in ("expr", "query", "definition") and isinstance(below, str):
                yield (*path, key), below
            else:
                yield from _expr(below, (*path, key))
    elif isinstance(value, list):
        for index, below in enumerate(value):
            yield from _expr(below, (*path, index))
