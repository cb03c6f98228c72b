"""The language of the product: words that are not used, names that say nothing, comments per line.

    python -m tests.prose [PATH...]

prints each use with the word to write instead; docs/glossary.md says what each noun of the product means.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# What users read: the tests of the product itself are not in it, the suite that verifies machines is.
READ_BY_USERS = (
    *("gpukiln", "tests/host", "roles", "ansible", "ami", "docker", "services", "scripts", "actions"),
    *("examples", "docs", ".github", "tasks.py", "README.md", "CONTRIBUTING.md", "components.yaml"),
)
# Written by others or generated from what is checked where it stands.
LEFT_OUT = re.compile(r"\.(png|json|lock|svg|sha256)$|^docs/schemas/|^gpukiln/catalog/data/.*(crd|schema)")
# Each word that is not used, and what to write.
WORDS = {
    r"told|tells?|telling": "report, print, pass, say which",
    r"mend(s|ed|ing)?": "fix, repair",
    r"judge?(s|d|ing|ment|ments)?": "verify (an image, a machine), check (a file), evaluate (facts)",
    r"papers?": "document, record",
    r"puts? away|putting away": "remove, store",
    r"besides?": "next to, in addition to, alongside",
    r"ours": "created by gpukiln",
    r"houses?": "the field's term",
    r"rooms?": "space, capacity, free memory",
    r"wish(es|ed)?": "option, request",
    r"rais(e|es|ed|ing) up": "provision, start",
    r"prov(e|es|ed|en|ing)|proofs?": "verify, verdict, show",
    r"leftovers?|left overs?": "orphan",
    r"presentable": "sanitized",
    r"needless(ly)?": "unnecessary",
    r"the way of": "procedure, workflow",
}
ANY_WORD = re.compile(rf"\b(?:{'|'.join(WORDS)})\b", re.IGNORECASE)
# Exact texts whose words stay, because they are read back from what exists already.
EXCEPTIONS = (
    "not-proven",  # value of the tag gpukiln:image, on existing accounts' images and in their IAM conditions
    '"proven"',  # field of the records of exports before 0.2.0, on users' disks
    "file.tell()",  # method of Python's file objects
)
EXCEPTION = re.compile("|".join(map(re.escape, EXCEPTIONS)))
# Names of variables and parameters that do not say what the value is.
EMPTY_NAMES = frozenset({"one", "found", "wanted", "made", "again", "thing", "things"})
EMPTY_FUNCTIONS = frozenset(
    {"_good", "_again", "_next", "_placed", "_one", "_found", "_wanted", "_made", "_said", "_look", "_ask"}
)
# Comments that only speak to a tool.
FOR_TOOLS = re.compile(r"#\s*(noqa|type:|pragma|fmt:|ruff:|mypy:|!|-\*-|SPDX|doctest:)")
MIN_COMMENTS = 4.0  # lines in 100


@dataclass(frozen=True)
class Use:
    """A word or a name that is not used, where it stands.

    Attributes:
        path: Relative to the checkout.
        line: From 1.
        text: The word as it stands there.
        instead: What to write.
    """

    path: str
    line: int
    text: str
    instead: str


def split_words(text: str) -> str:
    """Text whose identifiers are words: of snake_case and of CamelCase.

    >>> split_words("class NodeRoom: free_room = 1")
    'class Node Room: free room = 1'
    """
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|_+", " ", text)


def words(path: str, text: str) -> Iterator[Use]:
    """Each use of a word of `WORDS` in a text."""
    plain = split_words(EXCEPTION.sub("", text))
    if not ANY_WORD.search(plain):
        return
    for number, line in enumerate(plain.splitlines(), 1):
        for pattern, instead in WORDS.items():
            for match in re.finditer(rf"\b(?:{pattern})\b", line, re.IGNORECASE):
                yield Use(path, number, match[0], instead)


def names(path: str, source: str) -> Iterator[Use]:
    """Each variable, parameter and function of a Python source whose name says nothing about it.

    A field of a class may be called found or wanted: errors have what was found and what was wanted.
    """
    tree = ast.parse(source)
    fields = {
        id(statement.target)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for statement in node.body
        if isinstance(statement, ast.AnnAssign)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in fields:
            name = node.id
        elif isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.FunctionDef) and node.name in EMPTY_FUNCTIONS:
            yield Use(path, node.lineno, node.name, "what the function does")
            continue
        else:
            continue
        if name in EMPTY_NAMES:
            yield Use(path, node.lineno, name, "what the value is: gpu, pod, instance")


@dataclass(frozen=True)
class Comments:
    """How much of a source is comments.

    Attributes:
        lines: All lines of the source.
        comments: Lines with a comment that a person reads.
        repeated: Numbers of the lines whose comment has only words of the line that it is about.
    """

    lines: int
    comments: int
    repeated: tuple[int, ...]


def comments(source: str) -> Comments:
    """Count the comments of a Python source.

    >>> comments("a = 1  # seconds, as EC2 counts\\n")
    Comments(lines=1, comments=1, repeated=())
    >>> comments("# open file\\nfile = open(path)\\n").repeated
    (1,)
    """
    lines = source.splitlines()
    counted: list[int] = []
    repeated: list[int] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or FOR_TOOLS.match(token.string):
            continue
        row, column = token.start
        counted.append(row)
        before = lines[row - 1][:column].strip()
        about = before or next((line for line in lines[row:] if line.strip()), "")
        if not about.lstrip().startswith("#") and _word_set(token.string) <= _word_set(about):
            repeated.append(row)
    return Comments(len(lines), len(counted), tuple(repeated))


def _word_set(text: str) -> set[str]:
    return set(re.findall(r"[a-z]{3,}", split_words(text).lower()))


def files(roots: tuple[str, ...] = READ_BY_USERS) -> Iterator[tuple[str, str]]:
    """Path and text of every committed file that users read."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *roots],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    for path in listed:
        if not LEFT_OUT.search(path) and (ROOT / path).is_file():
            yield path, (ROOT / path).read_text(encoding="utf-8")


def main(roots: tuple[str, ...]) -> int:
    """Print every use, and the comments of the product; 1 where there is a use."""
    uses: list[Use] = []
    lines = commented = 0
    for path, text in files(roots or READ_BY_USERS):
        uses += words(path, text)
        if path.endswith(".py"):
            uses += names(path, text)
            counts = comments(text)
            lines, commented = lines + counts.lines, commented + counts.comments
            uses += (Use(path, row, "comment", "why, not what the line says") for row in counts.repeated)
    for use in uses:
        print(f"{use.path}:{use.line}: {use.text}: write {use.instead}")
    share = 100 * commented / lines if lines else 0.0
    print(
        f"{len(uses)} uses; {share:.1f} lines with a comment in 100 lines of Python, at least {MIN_COMMENTS}"
    )
    return 1 if uses else 0


if __name__ == "__main__":
    sys.exit(main(tuple(sys.argv[1:])))
