"""AWS's public price list as files, which need no credentials, in the place of GetProducts.

A region of EC2 is hundreds of MB, so a file is read as it arrives and what is asked for is kept. It is read
as CSV, a price a line; in JSON the prices stand far behind their products. Addresses and form:
AWS Billing user guide, "Getting price list files manually"; the names of the columns are those of a file of
AmazonEC2 in ap-northeast-1 of 2025-09-12.
"""

from __future__ import annotations

import csv
import http.client
import io
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpukiln.errors import UnavailableError
from gpukiln.parsing import parse_json

Row = dict[str, Any]
ADDRESS = "https://pricing.us-east-1.amazonaws.com"  # of every commercial region; no request of it is signed
TIMEOUT_S = 30.0  # of a connection that says nothing
LIMIT_S = 1800.0  # of one file
LIMIT_BYTES = 4 * 2**30  # of one file; those of EC2 have hundreds of MB
INDEX_LIMIT_BYTES = 2**20  # of the list of regions, which has some 40
HEAD_ROWS = 20  # before the names of the columns; there are five
NETWORK_HINT = "it is public: check the network and the proxy (HTTPS_PROXY), then run the same command again"
# Attributes of GetProducts by the names of their columns.
COLUMNS = {
    "capacitystatus": "CapacityStatus",
    "group": "Group",
    "instanceType": "Instance Type",
    "marketoption": "MarketOption",
    "operatingSystem": "Operating System",
    "preInstalledSw": "Pre Installed S/W",
    "productFamily": "Product Family",
    "regionCode": "Region Code",
    "tenancy": "Tenancy",
    "usagetype": "usageType",
    "volumeApiName": "Volume API Name",
}
PRICE = ("SKU", "TermType", "StartingRange", "Unit", "PricePerUnit", "Currency")


@dataclass
class PriceFiles:
    """The price list of one region; each file is read once, and a failure is not tried again.

    Args:
        say: Receives the address that is read.
        wanted: Attributes of what is kept, by service: products that have all of one of these.
    """

    region: str
    say: Callable[[str], None]
    wanted: Mapping[str, Sequence[Mapping[str, str]]]
    _read: dict[str, list[Row] | UnavailableError] = field(default_factory=dict)

    def has_read(self, service: str) -> bool:
        """Whether the answers of a service are of its file."""
        return isinstance(self._read.get(service), list)

    def products(self, service: str, attributes: Mapping[str, str]) -> Iterator[Row]:
        """Products on demand that have all of these attributes, in the form of GetProducts.

        Raises:
            UnavailableError: The file can't be read, or is no price list.
        """
        if service not in self._read:
            try:
                self._read[service] = list(self._rows(service))
            except UnavailableError as error:
                self._read[service] = error
        rows = self._read[service]
        if isinstance(rows, UnavailableError):
            raise rows
        return (row for row in rows if _has_attributes(row["product"]["attributes"], attributes))

    def _rows(self, service: str) -> Iterator[Row]:
        url = _file_of(service, self.region)
        self.say(f"no AWS credentials: reading {url} (of EC2 that is hundreds of MB)")
        with _open_url(url, LIMIT_BYTES) as answer:
            rows = csv.reader(io.TextIOWrapper(answer, encoding="utf-8", newline=""))
            try:
                head = next((row for row in rows if row[:1] == ["SKU"] or rows.line_num > HEAD_ROWS), [])
                places = {name: place for place, name in enumerate(head)}
                kept = self.wanted[service]
                needed = {*PRICE, *(COLUMNS[name] for kept_attributes in kept for name in kept_attributes)}
                if missing := sorted(needed - set(places)):
                    raise UnavailableError(f"{url} is no price list that is known: no {', '.join(missing)}")
                named = {name: places[column] for name, column in COLUMNS.items() if column in places}
                term = places["TermType"]
                for row in rows:
                    if len(row) != len(head):
                        raise UnavailableError(
                            f"{url}, line {rows.line_num}: {len(row)} of {len(head)} columns"
                        )
                    if row[term] != "OnDemand":
                        continue
                    attributes = {name: row[place] for name, place in named.items()}
                    if any(_has_attributes(attributes, kept_attributes) for kept_attributes in kept):
                        yield _product(attributes, {name: row[places[name]] for name in PRICE})
            except (csv.Error, UnicodeDecodeError) as error:
                raise UnavailableError(f"{url} is no price list: {error}") from error


def _has_attributes(attributes: Mapping[str, str], required: Mapping[str, str]) -> bool:
    return all(attributes.get(name) == value for name, value in required.items())


def _product(attributes: Mapping[str, str], price: Mapping[str, str]) -> Row:
    step = {
        "unit": price["Unit"],
        "beginRange": price["StartingRange"],
        "pricePerUnit": {price["Currency"]: price["PricePerUnit"]},
    }
    term = {"priceDimensions": {price["SKU"]: step}}
    return {"product": {"attributes": attributes}, "terms": {"OnDemand": {price["SKU"]: term}}}


def _file_of(service: str, region: str) -> str:
    """The address of the newest file of a service in a region, as the service's list of regions gives it."""
    url = f"{ADDRESS}/offers/v1.0/aws/{service}/current/region_index.json"
    with _open_url(url, INDEX_LIMIT_BYTES) as answer:
        try:
            regions = parse_json(answer.read().decode())["regions"]
            path = str(regions[region]["currentVersionUrl"]) if region in regions else ""
        except (ValueError, KeyError, TypeError) as error:
            raise UnavailableError(f"{url} is no list of regions: {error!r}") from error
    if not path:
        raise UnavailableError(
            f"{url} has no prices of {region}", hint="China's are in another list; --region names another one"
        )
    return f"{ADDRESS}{path.removesuffix('.json')}.csv"


class _LimitedResponse(io.RawIOBase):
    """An answer that ends with an error where it is too long, takes too long, or was cut off."""

    def __init__(self, answer: http.client.HTTPResponse, url: str, most: int) -> None:
        super().__init__()
        self._answer, self._url, self._most = answer, url, most
        self._all = answer.length  # None where the server did not say
        self._got, self._ends = 0, time.monotonic() + LIMIT_S

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            got = self._answer.readinto(buffer)
        except (OSError, http.client.HTTPException) as error:
            raise UnavailableError(f"{self._url} can't be read: {error}", hint=NETWORK_HINT) from error
        self._got += got
        if self._got > self._most or time.monotonic() > self._ends:
            raise UnavailableError(
                f"{self._url} has more than {self._most} bytes, or takes longer than {LIMIT_S:g} s"
            )
        if not got and self._all is not None and self._got < self._all:
            raise UnavailableError(
                f"{self._url} ended after {self._got} of {self._all} bytes", hint="run the same command again"
            )
        return got

    def close(self) -> None:
        self._answer.close()
        super().close()


def _open_url(url: str, most: int) -> io.BufferedReader:
    try:
        answer = urllib.request.urlopen(url, timeout=TIMEOUT_S)  # noqa: S310 - of AWS, or of a test
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise UnavailableError(f"{url} can't be read: {error}", hint=NETWORK_HINT) from error
    return io.BufferedReader(_LimitedResponse(answer, url, most), buffer_size=2**20)
