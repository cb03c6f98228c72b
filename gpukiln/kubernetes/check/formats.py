"""Formats of single values that the API server accepts: names, keys, addresses, quantities, schedules."""

from __future__ import annotations

import base64
import binascii
import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpukiln.kubernetes.quantity import quantity

# RFC 1123 labels; names of Services and ports have the older RFC 1035 form, which begins with a letter.
_LABEL = r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN = rf"{_LABEL}(?:\.{_LABEL})*"
_NAME_PART = r"[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
LABEL = re.compile(rf"(?=.{{1,63}}\Z){_LABEL}")
LABEL_1035 = re.compile(r"[a-z](?:[-a-z0-9]{0,61}[a-z0-9])?")
SUBDOMAIN = re.compile(rf"(?=.{{1,253}}\Z){_SUBDOMAIN}")
LABEL_VALUE = re.compile(rf"(?:{_NAME_PART})?")
LABEL_KEY = re.compile(rf"(?:(?=[^/]{{1,253}}/){_SUBDOMAIN}/)?{_NAME_PART}")
# A key becomes a file name in a volume, so . and .. are not allowed.
CONFIG_KEY = re.compile(r"(?!\.\Z|\.\.)[-._a-zA-Z0-9]{1,253}")
# IsValidPathSegmentName (apimachinery, pkg/api/validation/path)
SEGMENT = re.compile(r"(?!\.\.?\Z)[^/%]*")
# Names of services in RFC 6335, section 5.1
_PORT_NAME = re.compile(r"(?=.{1,15}\Z)(?=.*[a-z])(?!.*--)[a-z0-9](?:[a-z0-9-]*[a-z0-9])?")
# IsDomainPrefixedPath (apimachinery, pkg/util/validation)
_DOMAIN_PATH = re.compile(rf"(?=[^/]{{1,253}}/){_SUBDOMAIN}/[A-Za-z0-9/\-._~%!$&'()*+,;=:]+")
_HOST = re.compile(rf"(?=.{{1,253}}\Z)(?:\*\.)?{_SUBDOMAIN}")
# sysctl(8) accepts both separators, dots and slashes.
_SYSCTL = re.compile(
    r"(?=.{1,253}\Z)(?:[a-z0-9](?:[-_a-z0-9]*[a-z0-9])?[./])*[a-z0-9](?:[-_a-z0-9]*[a-z0-9])?"
)
# spec.host is an old name of spec.nodeName, which the API server still converts.
_FIELD_PATH = re.compile(
    r"metadata\.(?:name|namespace|uid|labels|annotations|(?:labels|annotations)\['[^']+'\])"
    r"|spec\.(?:nodeName|serviceAccountName|host)|status\.(?:hostIPs?|podIPs?)"
)
_RESOURCE_FIELD = re.compile(r"(?:limits|requests)\.(?:cpu|memory|ephemeral-storage|hugepages-[\w.]+)")
# RFC 3339
_TIME = re.compile(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(?:\.\d+)?(?:[Zz]|[+-]\d\d:\d\d)")
# Resources of Kubernetes itself, and of quotas; all others have a domain.
_BARE_RESOURCES = re.compile(
    r"cpu|memory|ephemeral-storage|storage|pods|services|configmaps|secrets|resourcequotas"
    r"|replicationcontrollers|persistentvolumeclaims|services\.(?:nodeports|loadbalancers)"
    r"|hugepages-\w+|(?:limits|requests)\.[\w./-]+|count/[\w./-]+"
)


def is_label(key: str, value: str) -> bool:
    """Whether key and value are a valid label.

    >>> is_label("example.com/team", "vision"), is_label("team", "a b")
    (True, False)
    """
    return LABEL_KEY.fullmatch(key) is not None and LABEL_VALUE.fullmatch(value) is not None


@dataclass(frozen=True)
class ValueFormat:
    """A format.

    Args:
        wanted: Description for messages.
        holds: Whether a value has the format; values are texts, or numbers in fields that allow them.
    """

    wanted: str
    holds: Callable[[Any], bool]


# A value of another type passes every format: the schema reports the type.
def _text(pattern: re.Pattern[str]) -> Callable[[Any], bool]:
    return lambda value: not isinstance(value, str) or pattern.fullmatch(value) is not None


def _address(value: Any) -> bool:
    try:
        ipaddress.ip_address(_without_zeros(str(value)))
    except ValueError:
        return False
    return True


def _network(value: Any) -> bool:
    if "/" not in str(value):
        return False
    try:
        ipaddress.ip_interface(_without_zeros(str(value)))
    except ValueError:
        return False
    return True


def _without_zeros(text: str) -> str:
    """Without leading zeros: in older fields the API server still accepts 010.0.0.1 as 10.0.0.1.

    >>> _without_zeros("010.0.0.1")
    '10.0.0.1'
    """
    return text if ":" in text else re.sub(r"(?<!\d)0+(?=\d)", "", text)


def _port(value: Any) -> bool:
    if isinstance(value, str):
        return _PORT_NAME.fullmatch(value) is not None
    return not isinstance(value, int) or 1 <= value <= 65535


def _share(most: int) -> Callable[[Any], bool]:
    """A count, or a percentage of at most `most`."""

    def holds(value: Any) -> bool:
        if isinstance(value, str):
            return re.fullmatch(r"\d{1,9}%", value) is not None and int(value[:-1]) <= most
        # The fields are int32 (intstr.IntOrString).
        return not isinstance(value, int) or 0 <= value < 2**31

    return holds


def _amount(*, least: int | None = None, more_than: int | None = None) -> Callable[[Any], bool]:
    def holds(value: Any) -> bool:
        if not isinstance(value, str | int | float) or isinstance(value, bool):
            return True  # the schema reports the type
        number = quantity(value)
        if number is None:
            return False
        return (least is None or number >= least) and (more_than is None or number > more_than)

    return holds


def _relative(value: Any) -> bool:
    return not isinstance(value, str) or not (value.startswith("/") or ".." in value.split("/"))


def _base64(value: Any) -> bool:
    if not isinstance(value, str):
        return True
    try:
        # Go's encoding/base64 ignores line breaks, and Python's does not.
        base64.b64decode(re.sub(r"[\r\n]", "", value), validate=True)
    except (binascii.Error, ValueError):
        return False
    return True


def resource_name(value: Any) -> bool:
    """Whether a resource is a standard one or has a domain.

    >>> resource_name("nvidia.com/gpu"), resource_name("cpu"), resource_name("gpu")
    (True, True, False)
    """
    text = str(value)
    return (LABEL_KEY.fullmatch(text) is not None and "/" in text) or (
        _BARE_RESOURCES.fullmatch(text) is not None
    )


def _indexes(value: Any) -> bool:
    """Rising numbers and ranges.

    >>> _indexes("0,2-4,7"), _indexes("3,1")
    (True, False)
    """
    if not isinstance(value, str):
        return True
    last = -1
    for part in value.split(",") if value else ():
        if not (match := re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part)):
            return False
        first, end = int(match[1]), int(match[2] or match[1])
        if first <= last or end < first or (match[2] and end == first):
            return False
        last = end
    return True


# Upper limits of the pattern of volumeSize in the CRD.
_MOST_OF_VOLUME = {"Gi": 59_000, "G": 64_000, "Ti": 58, "T": 64}


def _volume_size(value: Any) -> bool:
    """The size of an EBS volume in an EC2NodeClass."""
    match = re.fullmatch(r"([1-9]\d{0,4})(Gi?|Ti?)", value) if isinstance(value, str) else None
    return match is not None and int(match[1]) <= _MOST_OF_VOLUME[match[2]]


_DIVISORS = r"(?:0|1m|1|1k|1[MGTPE]|1[KMGTPE]i)"
# apimachinery/pkg/util/validation, pkg/apis/core/validation
FORMATS: dict[str, ValueFormat] = {
    "label": ValueFormat("small letters, digits and hyphens, 63 characters at most", _text(LABEL)),
    "label1035": ValueFormat(
        "small letters, digits and hyphens after a letter, 63 at most", _text(LABEL_1035)
    ),
    "subdomain": ValueFormat(
        "small letters, digits, hyphens and dots, 253 characters at most", _text(SUBDOMAIN)
    ),
    "key": ValueFormat(
        "letters, digits, - _ . with 63 characters at most, and a domain with / before it where there is one",
        _text(LABEL_KEY),
    ),
    "value": ValueFormat("letters, digits, - _ . with 63 characters at most", _text(LABEL_VALUE)),
    "config-key": ValueFormat("letters, digits, - _ . with 253 characters at most", _text(CONFIG_KEY)),
    "segment": ValueFormat("a name without / and %", _text(SEGMENT)),
    "port-name": ValueFormat(
        "small letters, digits and hyphens, a letter among them, 15 at most", _text(_PORT_NAME)
    ),
    "port": ValueFormat("1 to 65535, or a port's name with 15 characters at most", _port),
    "domain-path": ValueFormat("a domain and a path: example.com/name", _text(_DOMAIN_PATH)),
    "qualified": ValueFormat(
        "a domain and a name: example.com/name",
        lambda value: (
            not isinstance(value, str)
            or value in ("kubernetes", "orphan", "foregroundDeletion")
            or ("/" in value and LABEL_KEY.fullmatch(value) is not None)
        ),
    ),
    "host": ValueFormat("a host name in small letters, or *. before one", _text(_HOST)),
    # An Ingress host is a DNS name, never an address.
    "host-name": ValueFormat(
        "a host name in small letters, or *. before one, and no IP address",
        lambda value: _text(_HOST)(value) and not _address(value),
    ),
    # A DNS name that ends with a dot is absolute.
    "external-name": ValueFormat(
        "a host name in small letters",
        lambda value: not isinstance(value, str) or SUBDOMAIN.fullmatch(value.removesuffix(".")) is not None,
    ),
    # aws/karpenter-provider-aws:pkg/apis/crds at v1.14.1
    "duration": ValueFormat("hours, minutes or seconds: 1h30m", _text(re.compile(r"(?:[0-9]+[smh])+"))),
    "duration-or-never": ValueFormat(
        "hours, minutes or seconds, 720h, or Never", _text(re.compile(r"(?:[0-9]+[smh])+|Never"))
    ),
    "budget": ValueFormat("a number, or 0% to 100%", _text(re.compile(r"(?:100|[0-9]{1,2})%|[0-9]+"))),
    "budget-duration": ValueFormat(
        "hours and minutes: 1h30m", _text(re.compile(r"(?:[0-9]+[hm]|[0-9]+h[0-9]+m)(?:0s)?"))
    ),
    "ami-alias": ValueFormat(
        "al2, al2023 or bottlerocket with a version, al2023@v20260101, or windows2022@latest",
        _text(re.compile(r"(?:al2|al2023|bottlerocket)@.+|windows20(?:19|22|25)@latest")),
    ),
    "volume-size": ValueFormat("1Gi to 59000Gi, or the same in G, Ti or T", _volume_size),
    "iqn": ValueFormat(
        "a name that begins with iqn., eui. or naa.", _text(re.compile(r"(?:iqn|eui|naa)\..+"))
    ),
    "time": ValueFormat("a time: 2026-01-31T12:00:00Z", _text(_TIME)),
    "ip": ValueFormat("an IP address", _address),
    "cidr": ValueFormat("a range of IP addresses: 10.9.8.0/24", _network),
    "quantity": ValueFormat("a quantity: 500m, 16Gi", _amount()),
    "amount": ValueFormat("a quantity of 0 or more", _amount(least=0)),
    "positive": ValueFormat("a quantity above 0", _amount(more_than=0)),
    "ratio": ValueFormat("a quantity of 1 or more", _amount(least=1)),
    "share": ValueFormat("a number of 0 or more, or a percentage: 25%", _share(10**9)),
    "share100": ValueFormat("a number of 0 or more, or a percentage of at most 100%", _share(100)),
    "relative": ValueFormat("a relative path without ..", _relative),
    "absolute": ValueFormat("a path that begins with /", _text(re.compile(r"/.*", re.DOTALL))),
    "no-steps": ValueFormat(
        "a path without ..", lambda value: not isinstance(value, str) or ".." not in value.split("/")
    ),
    "no-colon": ValueFormat("a path without :", lambda value: not isinstance(value, str) or ":" not in value),
    "base64": ValueFormat("base64", _base64),
    "resource": ValueFormat(
        "a resource of Kubernetes, or a domain and a name: nvidia.com/gpu", resource_name
    ),
    "indexes": ValueFormat("rising indexes and ranges: 0,2-4", _indexes),
    "header": ValueFormat("letters, digits and hyphens", _text(re.compile(r"[-A-Za-z0-9]+"))),
    "filled": ValueFormat("a key that is not empty", bool),
    # Printable ASCII (KEP-4369); before, only names that a shell can read were accepted.
    "env-name": ValueFormat("a name without =", _text(re.compile(r"[ -<>-~]+"))),
    "sysctl": ValueFormat("a sysctl's name: net.core.somaxconn", _text(_SYSCTL)),
    "field-path": ValueFormat(
        "metadata.name, status.podIP or another field of the downward API", _text(_FIELD_PATH)
    ),
    "resource-field": ValueFormat("limits.memory, requests.cpu or another resource", _text(_RESOURCE_FIELD)),
    "divisor": ValueFormat(
        "1, 1m, 1k, 1M, 1Gi or another power", lambda value: re.fullmatch(_DIVISORS, str(value)) is not None
    ),
    "webhook-name": ValueFormat(
        "a domain with three parts: check.example.com",
        lambda value: (
            not isinstance(value, str) or (SUBDOMAIN.fullmatch(value) is not None and value.count(".") >= 2)
        ),
    ),
    "https": ValueFormat("https:// with a host", _text(re.compile(r"(?i:https)://[^/?#@\s]+[^?#\s]*"))),
    "kind": ValueFormat(
        "a letter, then letters, digits and hyphens",
        _text(re.compile(r"(?i:[a-z](?:[-a-z0-9]{0,61}[a-z0-9])?)")),
    ),
    "json-path": ValueFormat("a path that begins with a dot: .spec.replicas", _text(re.compile(r"\..+"))),
    "identifier": ValueFormat("letters, digits and _", _text(re.compile(r"[A-Za-z_][A-Za-z0-9_]*"))),
    # DeviceMaxDomainLength and DeviceMaxIDLength of resource.k8s.io
    "attribute": ValueFormat(
        "a domain and a name: example.com/model",
        _text(re.compile(rf"(?=[^/]{{1,63}}/)(?i:{_SUBDOMAIN})/[A-Za-z_][A-Za-z0-9_]{{0,31}}")),
    ),
    "driver": ValueFormat(
        "a driver's name: letters, digits, - and . with 63 characters at most",
        _text(re.compile(rf"(?=.{{1,63}}\Z)(?i:{_SUBDOMAIN})")),
    ),
    "request": ValueFormat(
        "the name of a request, or request/subrequest", _text(re.compile(rf"{_LABEL}(?:/{_LABEL})?"))
    ),
}
