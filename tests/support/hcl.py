"""Terraform's files as tests read them."""

import re

import hcl2

REFERENCE = re.compile(r"\b(var|local|data|terraform_data|aws_[a-z_]+)\.([a-z_0-9]+)(?:\.([a-z_0-9]+))?")
INDENT = 2
ASSIGNED = re.compile(r'^( *)([\w"()./-]+)( *)= (?!=)(.*)$')


def unquoted(value):
    """hcl2 keeps the quotes of strings and of block labels."""
    if isinstance(value, dict):
        return {key.strip('"'): unquoted(one) for key, one in value.items()}
    if isinstance(value, list):
        return [unquoted(one) for one in value]
    return value[1:-1] if isinstance(value, str) and value[:1] == value[-1:] == '"' else value


def module(text):
    """The blocks of a module by their address; the locals are one of them."""
    blocks = {}
    for kind, found in unquoted(hcl2.loads(text)).items():
        for block in found if isinstance(found, list) else ():
            if kind == "locals":
                blocks["locals"] = block
            elif kind in ("resource", "data"):
                for type_, named in block.items():
                    prefix = "data." if kind == "data" else ""
                    blocks |= {f"{prefix}{type_}.{name}": body for name, body in named.items()}
            elif kind in ("variable", "output"):
                prefix = "var" if kind == "variable" else kind
                blocks |= {f"{prefix}.{name}": body for name, body in block.items()}
    return blocks


def dangling(text):
    """References of a module to what it does not have."""
    code = re.sub(r"(?m)^\s*#.*$", "", text)
    blocks = module(text)
    known = {*blocks, *(f"local.{name}" for name in blocks.get("locals", ()))}
    wrong = set()
    for kind, name, more in REFERENCE.findall(code):
        address = f"data.{name}.{more}" if kind == "data" else f"{kind}.{name}"
        wrong |= {address} - known
    return wrong


def unformatted(text):
    """Lines that `terraform fmt` would change, as far as these rules of its go.

    Two spaces a level; no spaces at the end, no tabs, one empty line at most; the `=` of arguments that
    follow each other below one another. (Terraform, "Style conventions".)
    """
    wrong, level, before, group, until = [], 0, "", [], ""
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if until:  # the text of a here-document is nobody's to change
            until = "" if line.strip() == until else until
            continue
        if begun := re.search(r"<<-?(\w+)$", line):
            until = begun[1]
        code = re.sub(r'"(\\.|[^"\\])*"', '""', line)
        code = re.sub(r"(^|\s)(#|//).*$", "", code)
        shut = len(re.match(r"[\s)\]}]*", code)[0].replace(" ", ""))
        if line.strip() and len(line) - len(line.lstrip(" ")) != INDENT * max(0, level - bool(shut)):
            wrong.append(number)
        if line != line.rstrip() or "\t" in line or (number > 1 and line == before == ""):
            wrong.append(number)
        opened = sum(code.count(one) for one in "([{")
        closed = sum(code.count(one) for one in ")]}")
        level += (opened > closed) - (closed > opened)
        found = ASSIGNED.match(line)
        # An argument of several lines stands apart: the alignment ends before it.
        if found and opened == closed and (not group or len(found[1]) == len(group[0][1][1])):
            group.append((number, found))
        else:
            wrong += _unaligned(group)
            group = []
        before = line
    return sorted({*wrong, *_unaligned(group), *([len(lines)] if lines[-1] else [])})


def _unaligned(group):
    widest = max((len(found[2]) for _, found in group), default=0)
    return [number for number, found in group if len(found[2]) + len(found[3]) != widest + 1]
