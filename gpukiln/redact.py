"""Removes secrets from texts and data before they are stored or printed.

The module is sent to machines under verification (`gpukiln.probe.packing`), and Ansible's callback loads it
by its path: standard library, Python 3.9.

A secret is the value of a name that says so (`password`, `X_TOKEN`, `--api-key`, `Authorization:`), or a text
in the form of a secret (keys, tokens, the user in a URL). Redacting too much costs a word of a log, redacting
too
little an account: a value ends at the last possible place. Names of files, digests, UUIDs and serial numbers
stay. Every pattern takes time linear in the length of the text: it consumes what it scans, or has a limit.
"""

from __future__ import annotations

import re
from typing import Any

REPLACEMENT = "(left out)"

_WORDS = (
    r"(?:password|passphrase|(?<!etc/)passwd|secret|token|api[_-]?key|access[_-]?key"
    r"|private[_-]?key|signing[_-]?key|encryption[_-]?key|account[_-]?key|auth[_-]?key|ssh[_-]?pass)"
)
# Names that end in one of these words describe a secret and have none: token_url, secret_name,
# --password-stdin.
_ABOUT = "".join(
    f"(?<![_-]{word})"
    for word in "file path dir stdin name arn url uri type count length age".split()  # noqa: SIM905
)
_NAME = rf"{_WORDS}[\w.-]{{0,40}}{_ABOUT}"
# Quotes may be escaped: a JSON document may be a string in another one.
_QUOTE = r"\\{0,8}[\"']"
_QUOTED = rf"(?P<q>{_QUOTE})(?P<quoted>.*?)(?P<end>(?<!\\)(?P=q)(?=[\s,;:}}\])>&|\\]|$)|$)"
_BARE = (
    r"(?!\(left out\)|(?:null|true|false|None|True|False)\b)[^\s\"'\\{\[,;]\S*?"
    rf"(?=[,;]?(?:{_QUOTE}(?:[\s,;:}}\])]|$)|\s|$)|[,}}\]][\"'{{}}\],])"
)
_VALUE = rf"(?:{_QUOTED}|{_BARE})"
_HEADER = (
    r"(?:(?:proxy-)?authorization|(?:set-)?cookie|x-api-key|x-auth-token|x-vault-token|x-amz-security-token)"
)
_NOT_YET = rf"(?!\s{{0,20}}(?:{_QUOTE})?\(left out\))"


def _keep_quotes(match: re.Match[str]) -> str:
    if match["q"]:
        return f"{match['name']}{match['q']}{REPLACEMENT if match['quoted'] else ''}{match['end']}"
    return f"{match['name']}{REPLACEMENT}"


# One `\b` for all that begin with it: Python's `re` would test it for each, and take five times as long. The
# lookahead has the length of the shortest of them (Slack's): it skips most words, a third of the time.
_FORMS = "|".join(
    (
        r"\b(?=[\w.:\\-]{15})(?:(?:A3T[A-Z0-9]|ABIA|ACCA|AKIA|ASIA)[0-9A-Z]{16}\b"  # AWS access keys
        r"|gh[pousr]_\w{20,255}|github_pat_\w{20,255}|glpat-[\w-]{20,100}"
        r"|xox[abeoprs]-[\w-]{10,255}|hf_[A-Za-z0-9]{20,100}|nvapi-[\w-]{20,255}"
        # Prefixes that no other text has; Yelp/detect-secrets, detect_secrets/plugins, and gitleaks,
        # config/gitleaks.toml
        r"|(?:gl(?:dt|ptt|rt|cbt|imt|ft|oas|oat|agent|soat)-|GR1348941)[\w-]{20,100}"
        r"|[rs]k_live_[0-9A-Za-z]{24,99}"
        r"|SG\.[\w-]{22}\.[\w-]{43}|sq0csp-[\w\\-]{43}|AIza[\w-]{35}|tskey-[\w-]{20,100}"
        r"|AKC[A-Za-z0-9]{60,80}\b|[0-9a-f]{32}-us[0-9]{1,2}\b|[0-9]{8,10}:AA[\w-]{33}\b"
        r"|SK[0-9a-f]{32}\b|[MNO][\w-]{23,25}\.[\w-]{6}\.[\w-]{27}\b"
        r"|npm_[A-Za-z0-9]{30,60}|pypi-AgE[\w-]{40,1000}|dckr_pat_[\w-]{20,60}|sk-[\w-]{20,255})",
        r"hooks\.slack\.com/services/T\w{4,20}/B\w{4,20}/\w{4,40}",
        r"eyJ(?<![\w.-]eyJ)[\w-]{5,}(?:\.[\w-]+){2,4}",  # JSON web tokens
    )
)
# The order matters: each rule sees the text that the earlier rules have changed.
_RULES: tuple[tuple[re.Pattern[str], Any], ...] = (
    (
        # PEM, OpenSSH and PGP; in a JSON string its lines end in \n written out. Without an end: all of it.
        re.compile(
            r"(?s)-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----"
            r".*?(?:-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----|\Z)"
        ),
        "(private key left out)",
    ),
    # The host stays, for it shows where the request went; a long user alone is a token (https://TOKEN@github.com).
    (re.compile(r"(?<=://)(?:[^/\s:@\"']{0,200}:[^/\s\"']{1,1000}|[\w-]{20,255})@"), f"{REPLACEMENT}@"),
    (re.compile(_FORMS), REPLACEMENT),
    (
        # A header on a line of its own (curl -v has > and < before it), and one within quotes.
        re.compile(rf"(?im)^(?P<name>[<>* \t]{{0,20}}{_HEADER}:){_NOT_YET}[ \t]{{0,20}}[^\n]+"),
        rf"\g<name> {REPLACEMENT}",
    ),
    (
        re.compile(
            rf"(?i)(?P<name>\b{_HEADER}(?:{_QUOTE})?\s{{0,20}}[:=])"
            rf"{_NOT_YET}(?P<q>\s{{0,20}}(?:{_QUOTE})?)[^\n\"'\\]+"
        ),
        rf"\g<name>\g<q>{REPLACEMENT}",
    ),
    # Only with a digit, a dot or a sign: "bearer authentication failed" is no token.
    (re.compile(r"(?i)(\bbearer\s{1,20})(?=[\w~+/-]{0,200}[\d.=])[\w.~+/=-]{8,}"), rf"\1{REPLACEMENT}"),
    (
        # YAML's block of lines that are indented more than their name.
        re.compile(
            rf"(?im)^(?P<in>[ \t]{{0,80}})(?P<name>(?:- )?[\"']?[\w.-]{{0,80}}?{_NAME}[\"']?:)"
            r"[ \t]*[|>][-+\d]*[ \t]*\n(?:(?P=in)[ \t]+[^\n]*(?:\n|\Z)|[ \t]*\n)+"
        ),
        rf"\g<in>\g<name> {REPLACEMENT}\n",
    ),
    (
        # A line of YAML, or a prompt: everything behind the name, which may be several words.
        re.compile(
            rf"(?im)^(?P<name>[ \t]{{0,80}}(?:- )?[\w.-]{{0,80}}?{_NAME}:[ \t]+)"
            r"(?!\(left out\))[^\s\"'{\[|>][^\n]*"
        ),
        rf"\g<name>{REPLACEMENT}",
    ),
    (
        re.compile(rf"(?im)(?P<name>{_NAME}(?:{_QUOTE})?\s{{0,20}}(?:=>|[=:])\s{{0,20}}){_VALUE}"),
        _keep_quotes,
    ),
    # On command lines, also as a list of words.
    (
        re.compile(
            rf"(?im)(?P<name>(?<![\w-])--?[\w-]{{0,40}}?{_NAME}(?:{_QUOTE},)?[ \t]{{1,20}}(?!-)){_VALUE}"
        ),
        _keep_quotes,
    ),
    (
        re.compile(
            rf"(?im)(?P<name>\bsshpass(?:{_QUOTE},)?[ \t]{{1,20}}(?:{_QUOTE})?-p(?:{_QUOTE},)?[ \t]*){_VALUE}"
        ),
        _keep_quotes,
    ),
    (
        re.compile(
            rf"(?im)(?P<name>(?<![\w-])-(?:u|-user|-proxy-user)[ =]{{1,20}}(?:{_QUOTE})?[^\s:\"']{{1,200}}:)"
            r"(?!\(left out\))[^\s\"'\\]+"
        ),
        rf"\g<name>{REPLACEMENT}",
    ),
    # netrc(5), and `auth` in Docker's config.json.
    (
        re.compile(r"(?i)(\blogin\s{1,20}\S{1,200}\s{1,20}password\s{1,20})(?!\(left out\))\S+"),
        rf"\1{REPLACEMENT}",
    ),
    (re.compile(rf"(?i)(\bauth{_QUOTE}\s{{0,20}}:\s{{0,20}}{_QUOTE})[\w+/=-]{{4,}}"), rf"\1{REPLACEMENT}"),
)
_SECRET_NAME = re.compile(rf"(?i){_NAME}$|^(?:{_HEADER}|auth)$")
_SECRET_OPTION = re.compile(rf"(?i)^--?[\w-]{{0,40}}{_NAME}$")
_KEY_BEGINS = re.compile(r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----")
_KEY_ENDS = re.compile(r"-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----")


# References to a value, and placeholders: $VAR, %i, <token>, {{ name }}, /run/secrets/x, xxx.
_NO_VALUE = re.compile(
    r"(?i)[$%<{/*@]|x{3,}|(?:true|false|yes|no|none|null|on|off|\d{1,4}|unset|default|auto)$"
    r"|(?:your|my|change|example|dummy|insert|replace)"
    r"|(?:user(?:name)?|pass(?:word|wd|phrase)?|secret|token|key)$"
)
_HELD_SECRETS = (
    re.compile(rf"(?i){_NAME}(?:{_QUOTE})?\s{{0,20}}[=:]\s{{0,20}}(?:{_QUOTE})?(?P<held>[^\s\"'\\,;]{{4,}})"),
    re.compile(r"://[^/\s:@\"']{0,200}:(?P<held>[^/\s@\"']{1,1000})@"),
    re.compile(
        rf"(?i)\b{_HEADER}\s{{0,20}}[:=]\s{{0,20}}(?:(?:basic|bearer|token)\s+)?(?P<held>[^\s\"']{{8,}})"
    ),
    re.compile(rf"(?i)\bauth{_QUOTE}\s{{0,20}}:\s{{0,20}}{_QUOTE}(?P<held>[\w+/=-]{{4,}})"),
    re.compile(rf"(?P<held>{_FORMS})"),
)
FORMS = re.compile(_FORMS)
"""Texts in the form of a secret, whatever their name is."""


def holds_secret(line: str) -> bool:
    """Whether a line of settings has a credential: not in a comment, not as a reference or a placeholder.

    >>> holds_secret("password = hunter2-4711"), holds_secret("password = $DB_PASSWORD")
    (True, False)
    >>> holds_secret("# password = hunter2-4711")
    False
    """
    if line.lstrip().startswith(("#", ";", "// ")):
        return False
    return any(not _NO_VALUE.match(match["held"]) for held in _HELD_SECRETS for match in held.finditer(line))


def redact(text: str) -> str:
    """A text without secrets; a redacted text does not change again.

    >>> redact("train.py --api-key s3cr3t --epochs 3")
    'train.py --api-key (left out) --epochs 3'
    >>> redact("https://ann:s3cr3t@host/repo")
    'https://(left out)@host/repo'
    """
    for pattern, instead in _RULES:
        text = pattern.sub(instead, text)
    return text


def redact_value(value: Any) -> Any:
    """Plain data without secrets: every text is redacted, and values with the name of a secret are replaced.

    >>> redact_value({"user": "ann", "password": "s3cr3t"})
    {'user': 'ann', 'password': '(left out)'}
    >>> redact_value(["--token", "s3cr3t"])
    ['--token', '(left out)']
    """
    if isinstance(value, dict):
        return {key: _redact_named(str(key), inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        shown = [redact_value(inner) for inner in value]
        for at, before in enumerate(value[:-1]):
            if isinstance(before, str) and _SECRET_OPTION.match(before) and isinstance(value[at + 1], str):
                shown[at + 1] = REPLACEMENT if not value[at + 1].startswith("-") else shown[at + 1]
        return shown
    return redact(value) if isinstance(value, str) else value


def _redact_named(name: str, value: Any) -> Any:
    if not _SECRET_NAME.search(name) or isinstance(value, (bool, float, dict)) or value in (None, "", []):
        return redact_value(value)
    if isinstance(value, (list, tuple)):
        return [_redact_named(name, inner) for inner in value]
    return REPLACEMENT


class LogRedactor:
    """Redacts a log line by line, with the state that a private key of several lines needs."""

    def __init__(self) -> None:
        self._in_key = False

    def __call__(self, line: str) -> str:
        """The redacted line with its line end; empty within a key."""
        if self._in_key:
            ends = _KEY_ENDS.search(line)
            self._in_key = ends is None
            return redact(line[ends.end() :]) if ends else ""
        shown = redact(line)
        begins = [match.end() for match in _KEY_BEGINS.finditer(line)]
        self._in_key = bool(begins) and _KEY_ENDS.search(line, begins[-1]) is None
        return shown + "\n" if self._in_key and line.endswith("\n") else shown
