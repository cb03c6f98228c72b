"""The one place that talks to Proxmox VE: by proxmoxer, over HTTPS with a token or by pvesh as root.

Its errors come as a status line with the message, a body with `errors` by parameter, 595 to 599 where
pveproxy did not reach the node (pve-http-server PVE/APIServer/AnyEvent.pm); pvesh writes the same words on
standard error.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpukiln.errors import BusyError, GpukilnError, IncompatibleError, UnavailableError, UsageError
from gpukiln.redact import redact

TOKEN_VARIABLE = "PROXMOX_VE_API_TOKEN"  # noqa: S105 - the variable that the bpg/proxmox provider of Terraform reads too
# USER@REALM!TOKENID=SECRET, as pveum prints it and as the bpg/proxmox provider takes it.
TOKEN_FORM = re.compile(r"([^@!=\s]+@[^@!=\s]+)!([^@!=\s]+)=(\S+)")
# For one answer: work that takes longer is a task, which `wait` polls.
ANSWER_S = 30.0
# An image of 40 GiB at 100 MB/s takes seven minutes; four hours are for slow storages and lines.
LOOK_S, IMPORT_S, UPLOAD_S = 60.0, 4 * 3600.0, 4 * 3600.0
POLL_S = 1.0
PORT = 8006
# Status codes of pveproxy's own, see the docstring above
NOT_REACHED = range(595, 600)


class UnansweredError(UnavailableError):
    """A request that changes something got no answer: the change may have happened."""


@dataclass(frozen=True)
class PveTarget:
    """How a host is reached.

    Args:
        pve: `HOST[:PORT]` for HTTPS, `ssh://[USER@]HOST[:PORT]`, or `local`.
        fingerprint: SHA-256 of its certificate, which then needs no CA.
        ca: File of the CA that vouches for it; empty: this computer's own.
        token_file: Where the token is; empty: the environment.
    """

    pve: str
    fingerprint: str = ""
    ca: str = ""
    token_file: str = ""

    @property
    def https(self) -> bool:
        return self.pve != "local" and not self.pve.startswith("ssh://")


class Pve:
    """A Proxmox VE that answers.

    Args:
        resource: proxmoxer's.
        user: Who asks: root@pam by pvesh, else USER@REALM!TOKEN.
    """

    def __init__(self, resource: Any, target: PveTarget, user: str) -> None:
        self._resource, self.target, self.user = resource, target, user

    @property
    def is_root(self) -> bool:
        """Whether it is asked as root@pam, which is no token: a token of root is not (check_hostpci_perm)."""
        return self.user == "root@pam"

    def get(self, path: str, /, **parameters: Any) -> Any:
        """GET; parameters that are None are left out."""
        with self._errors_explained(f"GET {path}", changes=False):
            return self._resource(path).get(**parameters)

    def put(self, path: str, /, **values: Any) -> Any:
        """Change something.

        Raises:
            UnansweredError: It may have happened.
        """
        with self._errors_explained(f"PUT {path}", changes=True):
            return self._resource(path).put(**values)

    def post(self, path: str, /, **values: Any) -> Any:
        """As `put`; returns the id of the task."""
        with self._errors_explained(f"POST {path}", changes=True):
            return self._resource(path).post(**values)

    def delete(self, path: str, /, **parameters: Any) -> Any:
        """As `put`; returns the id of the task where there is one."""
        with self._errors_explained(f"DELETE {path}", changes=True):
            return self._resource(path).delete(**parameters)

    def wait(
        self, task: str, node: str, *, limit_s: float, said: Callable[[str], None] | None = None
    ) -> None:
        """Wait for a task to end well.

        Args:
            task: Its id, UPID:...
            said: Gets each new line of its log.

        Raises:
            IncompatibleError: It failed; with its own words.
            BusyError: It had not ended by then.
        """
        path, line, until = f"nodes/{node}/tasks/{task}", 0, time.monotonic() + limit_s
        while True:
            status = self.get(f"{path}/status")
            # The log is asked only for somebody who reads it: each request costs a round trip.
            for log_line in self.get(f"{path}/log", start=line, limit=500) if said else ():
                if log_line["n"] > line and log_line.get("t") not in (None, "no content"):
                    said(str(log_line["t"])) if said else None
                    line = int(log_line["n"])
            if status.get("status") == "stopped":
                break
            if time.monotonic() > until:
                raise BusyError(
                    f"the task {task} goes on after {limit_s:.0f} s", hint="look at it in the task log"
                )
            time.sleep(POLL_S)
        ended = str(status.get("exitstatus", ""))
        # A task that ends with warnings has done its work (WARNINGS: N).
        if ended != "OK" and not ended.startswith("WARNINGS"):
            raise task_failed(task, ended)

    @contextlib.contextmanager
    def _errors_explained(self, what: str, *, changes: bool) -> Iterator[None]:
        import requests  # noqa: PLC0415 - slow to import
        from proxmoxer import ResourceException  # noqa: PLC0415 - slow to import

        try:
            yield
        except ResourceException as error:
            raise explain_error(error, what, self, changes=changes) from error
        except requests.exceptions.SSLError as error:
            raise _untrusted_error(self.target, str(error)) from error
        except requests.exceptions.RequestException as error:
            # What was never sent can't have changed anything.
            kind = UnansweredError if changes and not _never_sent(error) else UnavailableError
            raise kind(
                f"{self.target.pve} gave no answer to {what}: {redact(_innermost(error))}",
                hint="check that it is a Proxmox VE, that pveproxy runs and that no firewall blocks its port",
            ) from error


def connect(target: PveTarget, *, limit_s: float = ANSWER_S) -> Pve:
    """Make ready to ask; nothing is sent yet.

    Args:
        limit_s: For one answer.

    Raises:
        UsageError: The token is missing or none, an option is not understood.
    """
    from proxmoxer import ProxmoxAPI  # noqa: PLC0415 - slow to import
    from proxmoxer.backends.command_base import JsonSimpleSerializer  # noqa: PLC0415
    from proxmoxer.core import ProxmoxResource  # noqa: PLC0415

    if not target.https:
        # Only when it is used: proxmoxer's command backend is slow to import.
        from gpukiln.nodes.passthrough.pvesh import Pvesh  # noqa: PLC0415

        if target.fingerprint or target.ca or target.token_file:
            raise UsageError(
                "--fingerprint, --ca and --token-file apply to HTTPS only, and --pve is no HTTPS address"
            )
        session = Pvesh("" if target.pve == "local" else target.pve, max(limit_s, LOOK_S))
        return Pve(
            ProxmoxResource(base_url="", session=session, serializer=JsonSimpleSerializer()),
            target,
            "root@pam",
        )
    host, port = _parse_host_port(target.pve)
    user, name, value = read_token(target)
    if target.ca and not Path(target.ca).is_file():
        raise UsageError(f"--ca {target.ca} is no file", hint="the host's is /etc/pve/pve-root-ca.pem")
    api = ProxmoxAPI(
        host,
        port=port,
        user=user,
        token_name=name,
        token_value=value,
        timeout=limit_s,
        # A fingerprint names one certificate; checking who signed it would add nothing.
        # requests would otherwise check the chain first and refuse a self-signed certificate.
        verify_ssl=False if target.fingerprint else target.ca or True,
    )
    if target.fingerprint:
        from requests_toolbelt.adapters.fingerprint import FingerprintAdapter  # noqa: PLC0415 - slow to import

        session = api._store["session"]  # proxmoxer hands it out nowhere else
        session.mount("https://", FingerprintAdapter(parse_fingerprint(target.fingerprint)))
    return Pve(api, target, f"{user}!{name}")


def read_token(target: PveTarget) -> tuple[str, str, str]:
    """User, name and value of the token, from its file or the environment; never from the command line.

    Raises:
        UsageError: There is none, it is none, or others may read its file.
    """
    form = f"wanted USER@REALM!NAME=VALUE, in ${TOKEN_VARIABLE} or in the file of --token-file"
    if target.token_file:
        file = Path(target.token_file).expanduser()
        if not file.is_file():
            raise UsageError(f"--token-file {target.token_file} is no file", hint=form)
        # A token is a password: like a private SSH key it must be readable by its owner alone.
        if stat.S_IMODE(file.stat().st_mode) & 0o077:
            raise UsageError(
                f"others may read the token in {target.token_file}", hint=f"`chmod 600 {target.token_file}`"
            )
        text, where = file.read_text(encoding="utf-8").strip(), target.token_file
    else:
        text, where = os.environ.get(TOKEN_VARIABLE, "").strip(), f"${TOKEN_VARIABLE}"
        if not text:
            raise UsageError(f"{target.pve} needs a token, and none is given", hint=form)
    token_match = TOKEN_FORM.fullmatch(text)
    if not token_match:
        raise UsageError(f"{where} does not hold a token", hint=form)
    return token_match[1], token_match[2], token_match[3]


def parse_fingerprint(text: str) -> str:
    """A SHA-256 as 64 hexadecimal digits.

    Raises:
        UsageError: It is none.

    >>> parse_fingerprint("SHA256:" + ":".join(["AB"] * 32)) == "ab" * 32
    True
    >>> parse_fingerprint("ab" * 32) == "ab" * 32
    True
    """
    plain = text.removeprefix("sha256:").removeprefix("SHA256:").replace(":", "").lower()
    if not re.fullmatch(r"[0-9a-f]{64}", plain):
        raise UsageError(
            f"--fingerprint {text!r} is no SHA-256 of a certificate",
            hint="`pvenode cert info` prints it on the host",
        )
    return plain


def explain_error(error: Any, what: str, pve: Pve, *, changes: bool) -> GpukilnError:
    """The error of gpukiln for an error that Proxmox VE answered."""
    text = redact(str(error.content or error.status_message or "")).strip()
    errors = error.errors if isinstance(error.errors, dict) else {}
    # `errors` has one message for each parameter that Proxmox VE refused.
    more = tuple(
        f"{name}: {str(message_text).strip()}" for name, message_text in errors.items() if name != "errors"
    )
    details = more or tuple(text.splitlines()[1:8])
    first = text.splitlines()[0] if text else f"status {error.status_code}"
    code, where = error.status_code, pve.target.pve
    if code == 401:
        return UnavailableError(
            f"{where} rejects the token of {pve.user}: {first}",
            hint=f"`pveum user token list {pve.user.partition('!')[0]}` lists them, `token add` makes one",
        )
    if code in NOT_REACHED:
        kind = UnansweredError if changes and code != 595 else UnavailableError
        return kind(
            f"{where} did not reach the node for {what}: {first}", hint="is the node up? `pvecm status`"
        )
    for pattern, refused, message, hint in REFUSALS:
        if re.search(pattern, f"{code} {text}"):
            reason = text.splitlines()[-1] if refused is IncompatibleError and not more else first
            return refused(
                message.format(where=where, what=what, user=pve.user, reason=reason), hint=hint, details=more
            )
    if code in (400, 501) or more:
        return IncompatibleError(
            f"{where} rejects {what}: {first}",
            details=details,
            hint="is this Proxmox VE older than 8? `pveversion`",
        )
    return UnavailableError(f"{where} failed at {what}: {first}", details=details)


# Status and words, what they are for us, in which words, and the next step.
REFUSALS: tuple[tuple[str, type[GpukilnError], str, str], ...] = (
    (
        r"^403|Permission check failed",
        UnavailableError,
        "{user} is not permitted to {what}: {reason}",
        "give the token the right: `pveum acl modify PATH --tokens 'USER@REALM!NAME' --roles ROLE`",
    ),
    (
        r"detected modified configuration",
        BusyError,
        "another user changed it in the meantime: {reason}",
        "nothing was written: run the same command again",
    ),
    (
        r"can't lock file|got (?:lock request )?timeout|is locked",
        BusyError,
        "{where} refuses {what} for now: {reason}",
        "another task holds the lock: try again",
    ),
    (
        r"no quorum|cluster not ready",
        UnavailableError,
        "{where} can change nothing: {reason}",
        "`pvecm status` shows which nodes are missing",
    ),
    (
        r"[Oo]nly root (?:can|may)",
        IncompatibleError,
        "{where} accepts that only from root@pam, which no token can be: {reason}",
        "--gpu mapping:NAME, or run it on the host: --pve local",
    ),
)


def task_failed(task: str, ended: str) -> GpukilnError:
    """The error for a task that did not end well."""
    # UPID:NODE:PID:PSTART:STARTTIME:TYPE:ID:USER: (pve-common PVE/Tools.pm, upid_decode).
    kind = task.split(":")[5] if task.count(":") >= 8 else "task"
    if re.search(r"can't lock file|got timeout", ended):
        return BusyError(f"{kind} failed: {ended}", hint="another task holds the lock: try again")
    if re.search(r"No space left|not enough|out of space", ended, re.IGNORECASE):
        return UnavailableError(f"{kind} failed: {ended}", hint="free space on the storage")
    return UnavailableError(f"{kind} failed: {ended or 'without a message'}", hint=f"the task is {task}")


def _parse_host_port(pve: str) -> tuple[str, int]:
    """Host and port, IPv6 with and without brackets.

    >>> _parse_host_port("pve1.example.org")
    ('pve1.example.org', 8006)
    >>> _parse_host_port("https://[2001:db8::1]:8007/")
    ('[2001:db8::1]', 8007)
    """
    address_match = re.fullmatch(r"(?:https://)?(\[[0-9a-fA-F:]+\]|[^:/\s\[\]@]+)(?::(\d{1,5}))?/?", pve)
    if not address_match and re.fullmatch(r"[0-9a-fA-F:]+", pve):
        return f"[{pve}]", PORT
    if not address_match:
        raise UsageError(f"--pve {pve!r}: wanted HOST[:PORT], ssh://[USER@]HOST[:PORT] or local")
    return address_match[1], int(address_match[2] or PORT)


def _untrusted_error(target: PveTarget, text: str) -> UnavailableError:
    # urllib3 words it so (util/ssl_.py, assert_fingerprint), with and without a capital letter.
    if "ingerprints did not match" in text:
        seen = re.search(r'got "?([0-9a-fA-F]{64})', text)
        shown = f": it is {':'.join(re.findall('..', seen[1].upper()))}" if seen else ""
        return UnavailableError(
            f"the certificate of {target.pve} is not the one of --fingerprint{shown}",
            hint="if the host renewed it, `pvenode cert info` prints the new one there; if not, another "
            "machine answers in its place",
        )
    return UnavailableError(
        f"no trusted CA signed the certificate of {target.pve}: {_certificate_error(text)}",
        hint="--ca FILE, the host's /etc/pve/pve-root-ca.pem; or --fingerprint (`pvenode cert info`)",
    )


def _certificate_error(text: str) -> str:
    reason_match = re.search(r"certificate verify failed: ([^(\"']+)", text)
    return (reason_match[1] if reason_match else text).strip()[:200]


def _innermost(error: BaseException) -> str:
    """What the system said, without the layers above."""
    # requests wraps urllib3's error, which wraps the system's.
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return str(error) or type(error).__name__


def _never_sent(error: Exception) -> bool:
    import requests  # noqa: PLC0415 - slow to import

    if isinstance(error, requests.exceptions.ConnectTimeout):
        return True
    return "NewConnectionError" in str(error) or "NameResolutionError" in str(error)
