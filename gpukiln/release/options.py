"""Values of a release's options, checked before the first call to a cloud."""

import re
from collections.abc import Iterable

from gpukiln.catalog.components import load_components
from gpukiln.catalog.regions import check_region
from gpukiln.errors import UsageError
from gpukiln.release.images import LaunchPermissions

# AWS Organizations API reference: Organization.Arn and OrganizationalUnit.Arn
_ORGANIZATION = re.compile(
    r"arn:aws[a-z-]*:organizations::\d{12}:(organization/o-[a-z0-9]{10,32}|ou/o-[a-z0-9]{10,32}/ou-[a-z0-9-]+)"
)


def unique_words(text: str) -> list[str]:
    """A list that is separated by commas, each word once.

    >>> unique_words("a, b,,a ")
    ['a', 'b']
    >>> unique_words("")
    []

    Args:
        text: For example `a, b`.
    """
    # A dictionary keeps the order in which they were typed.
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def region_names(text: str) -> list[str]:
    """Names of regions.

    Args:
        text: Separated by commas.

    Raises:
        UsageError: AWS has no such region.
    """
    return [check_region(name) for name in unique_words(text)]


def kubernetes_version() -> str:
    """The version that a build without options is for."""
    return load_components()["kubernetes"].version or ""


def sharing_with(accounts: str, organizations: str, *, public: bool) -> LaunchPermissions:
    """The launch permissions that the options name.

    Args:
        accounts: Account ids, separated by commas.
        organizations: ARNs of organizations and organizational units, separated by commas.
        public: Whether every account may launch the image.

    Raises:
        UsageError: An account id or ARN is malformed.
    """
    ids, arns = unique_words(accounts), unique_words(organizations)
    if wrong := [account for account in ids if not re.fullmatch(r"\d{12}", account)]:
        raise UsageError(f"--accounts: {', '.join(wrong)}: no account id", hint="account ids have 12 digits")
    if wrong := [arn for arn in arns if not _ORGANIZATION.fullmatch(arn)]:
        raise UsageError(
            f"--org: {', '.join(wrong)}: no ARN of an organization or organizational unit",
            hint="for example arn:aws:organizations::111122223333:organization/o-abcde12345",
        )
    return LaunchPermissions(tuple(ids), tuple(arns), public)


def key_by_region(text: str, regions: Iterable[str], *, encrypt: bool) -> dict[str, str]:
    """The KMS key that encrypts each region's copy.

    >>> key_by_region("us-west-2=alias/ami", ["us-west-2"], encrypt=False)
    {'us-west-2': 'alias/ami'}
    >>> key_by_region("", ["eu-west-1"], encrypt=True)
    {'eu-west-1': 'default'}

    Args:
        text: REGION=KEY, separated by commas.
        regions: The regions of the release.
        encrypt: Whether the account's default key is used in all of them.

    Returns:
        Keys by region; `default` is the account's. Empty: nothing is encrypted.

    Raises:
        UsageError: A region has no key, or a key no region.
    """
    pairs = dict(pair.partition("=")[::2] for pair in unique_words(text))
    if not pairs:
        return dict.fromkeys(regions, "default") if encrypt else {}
    # --kms-keys already encrypts; both together leave open which key is meant.
    if encrypt:
        raise UsageError("--encrypt and --kms-keys exclude each other", hint="leave out --encrypt")
    names = set(regions)
    # KMS keys are regional, so each copy needs a key of its region.
    if lacking := sorted(names - {region for region, key in pairs.items() if key}):
        raise UsageError(
            f"--kms-keys names no key for {', '.join(lacking)}: a key works in its own region only",
            hint=",".join(f"{region}=KEY" for region in sorted(names)),
        )
    if extra := sorted(set(pairs) - names):
        raise UsageError(f"--kms-keys names {', '.join(extra)}, which --regions does not have")
    return pairs
