"""Names and labels as the API server takes them (k8s.io/apimachinery/pkg/util/validation)."""

from __future__ import annotations

import re

NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")  # DNS-1123 label
SERVICE = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")  # DNS-1035 label: a Service's
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_QUALIFIED = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")


def is_subdomain(text: str) -> bool:
    """Whether a text is a name of most objects, or the domain of a label."""
    return len(text) <= 253 and _SUBDOMAIN.fullmatch(text) is not None


def is_key(text: str) -> bool:
    """Whether a text is the key of a label or a taint, or the name of a resource: [DOMAIN/]NAME."""
    domain, slash, name = text.rpartition("/")
    return _QUALIFIED.fullmatch(name) is not None and (not slash or is_subdomain(domain))


def is_label(key: str, value: str) -> bool:
    return is_key(key) and LABEL_VALUE.fullmatch(value) is not None
