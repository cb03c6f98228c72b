"""Prices without an account: AWS's public price list, from a server on loopback with files of AWS's form."""

import csv
import io
import json
import re
from datetime import date
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from gpukiln.clouds.aws import AwsCloud
from gpukiln.errors import PartialError, UnavailableError
from gpukiln.offers import cache, price_files, prices
from gpukiln.offers.refresh import MACHINE, VOLUME, refresh, require_complete

HERE = "us-west-2"
VERSION = "20261119204817"
# Columns of a file of AmazonEC2, without many that nobody reads.
COLUMNS = (
    *("SKU", "OfferTermCode", "RateCode", "TermType", "PriceDescription", "EffectiveDate", "StartingRange"),
    *("EndingRange", "Unit", "PricePerUnit", "Currency", "Product Family", "serviceCode", "Location"),
    *("Instance Type", "Tenancy", "Operating System", "Group", "usageType", "operation", "CapacityStatus"),
    *("MarketOption", "Pre Installed S/W", "Region Code", "Volume API Name"),
)
HEAD = [
    ["FormatVersion", "v1.0"],
    ["Disclaimer", "This pricing list is for informational purposes only."],
    ["Publication Date", "2026-11-19T20:48:17Z"],
    ["Version", VERSION],
    ["OfferCode", "AmazonEC2"],
]


def machine(name, usd, **other):
    return {
        **{"SKU": f"SKU{name}", "TermType": "OnDemand", "StartingRange": "0", "EndingRange": "Inf"},
        **{"Unit": "Hrs", "PricePerUnit": usd, "Currency": "USD", "Product Family": "Compute Instance"},
        **{"Instance Type": name, "Tenancy": "Shared", "Operating System": "Linux", "CapacityStatus": "Used"},
        **{"MarketOption": "OnDemand", "Pre Installed S/W": "NA", "Region Code": HERE},
        **{"PriceDescription": f'${usd} per "On Demand" Linux, {name}', "usageType": f"USW2-BoxUsage:{name}"},
        **other,
    }


GP3 = {
    **{"SKU": "K9", "TermType": "OnDemand", "StartingRange": "0", "Unit": "GB-Mo", "Currency": "USD"},
    **{"PricePerUnit": "0.0800000000", "Product Family": "Storage", "Region Code": HERE},
    **{"Volume API Name": "gp3", "usageType": "USW2-EBS:VolumeUsage.gp3"},
}
ADDRESS = {
    **{"SKU": "7R", "TermType": "OnDemand", "StartingRange": "0", "Unit": "Hrs", "Currency": "USD"},
    **{"PricePerUnit": "0.0050000000", "Group": "VPCPublicIPv4Address", "Region Code": HERE},
    **{"usageType": "USW2-PublicIPv4:InUseAddress"},
}
EC2 = (
    machine("g5.xlarge", "1.0060000000"),
    machine("g5.xlarge", "0.6340000000", TermType="Reserved"),
    machine("g5.xlarge", "1.1066000000", Tenancy="Dedicated"),
    machine("g5.xlarge", "1.1900000000", **{"Operating System": "Windows"}),
    machine("g5.xlarge", "1.2070000000", **{"Region Code": "us-west-2-lax-1"}),
    machine("m7i.large", "0.1008000000"),  # it has no GPU
    GP3,
    machine("g7e.2xlarge", "3.3631200000"),
)


def listed(rows, columns=COLUMNS):
    text = io.StringIO()
    write = csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n")
    write.writerows([*HEAD, columns, *([row.get(name, "") for name in columns] for row in rows)])
    return text.getvalue().encode()


class Files:
    """A server of files by path; notes what it was asked for."""

    def __init__(self):
        self.files = {}
        self.asked = []
        self.missing = {}  # bytes by path that are announced and not sent
        for service, rows in (("AmazonEC2", EC2), ("AmazonVPC", [ADDRESS])):
            at = f"/offers/v1.0/aws/{service}/{VERSION}/{HERE}/index"
            regions = {HERE: {"regionCode": HERE, "currentVersionUrl": f"{at}.json"}}
            index = {"formatVersion": "v1.0", "publicationDate": "2026-11-19T20:48:17Z", "regions": regions}
            self.files[f"/offers/v1.0/aws/{service}/current/region_index.json"] = json.dumps(index).encode()
            self.files[f"{at}.csv"] = listed(rows)
        self.ec2 = f"/offers/v1.0/aws/AmazonEC2/{VERSION}/{HERE}/index.csv"


@pytest.fixture
def server(monkeypatch):
    files = Files()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            files.asked.append(self.path)
            body = files.files.get(self.path)
            self.send_response(404 if body is None else 200)
            self.send_header("Content-Length", str(len(body or b"") + files.missing.get(self.path, 0)))
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        Thread(target=http.serve_forever, daemon=True).start()
        monkeypatch.setattr(price_files, "ADDRESS", f"http://127.0.0.1:{http.server_port}")
        yield files
        http.shutdown()


@pytest.fixture(autouse=True)
def no_account(tmp_path, monkeypatch):
    """boto3 finds no credentials, and asks no metadata service for them."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("GPUKILN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def run():
    told = []
    return refresh(AwsCloud(HERE), told.append), told


def failed(refreshed):
    return {part.name: part.error for part in refreshed.parts if part.error}


def test_prices_are_read_without_credentials(server):
    refreshed, told = run()
    today = cache.read("aws", HERE).on_demand.as_of
    found = prices.on_demand("g5.xlarge", HERE, today)
    assert (found.value, found.source) == (Decimal("1.006"), "AWS's public price list of AmazonEC2")
    assert prices.on_demand("g7e.2xlarge", HERE, today).value == Decimal("3.36312")
    assert set(cache.read("aws", HERE).on_demand.usd_hour) == {"g5.xlarge", "g7e.2xlarge"}
    volume, address = prices.volume(HERE, today), prices.public_ipv4(HERE, today)
    assert (volume.value, volume.source) == (
        Decimal("0.08"),
        "AWS's public price list of AmazonEC2: EBS:VolumeUsage.gp3",
    )
    assert (address.value, address.age_days) == (Decimal("0.005"), 0)
    assert set(failed(refreshed)) == {"types", "offerings", "spot", "quotas"}
    with pytest.raises(PartialError, match="4 of 7 queries") as caught:
        require_complete(refreshed)
    assert "no AWS credentials; log in" in caught.value.details[0]
    assert [path for path in server.asked if path.endswith(".csv")] == [
        f"/offers/v1.0/aws/{service}/{VERSION}/{HERE}/index.csv" for service in ("AmazonEC2", "AmazonVPC")
    ]  # each once, though prices of machines and of volumes are both of the first
    assert any("no AWS credentials: reading http" in text for text in told)


def files():
    return price_files.PriceFiles(HERE, lambda _: None, {"AmazonEC2": (MACHINE, VOLUME)})


def test_a_file_is_read_in_pieces_and_little_of_it_is_kept(server, monkeypatch):
    rows = [machine("m7i.large", "0.1", SKU=str(number), Tenancy="Dedicated") for number in range(9000)]
    server.files[server.ec2] = listed([*EC2, *rows])
    pieces = []
    read = price_files._LimitedResponse.readinto
    monkeypatch.setattr(
        price_files._LimitedResponse,
        "readinto",
        lambda self, buffer: pieces.append(len(buffer)) or read(self, buffer),
    )
    names = [row["product"]["attributes"]["instanceType"] for row in files().products("AmazonEC2", MACHINE)]
    assert names == ["g5.xlarge", "g5.xlarge", "m7i.large", "g7e.2xlarge"]  # one of them of a local zone
    assert len(server.files[server.ec2]) > 2 * max(pieces)


@pytest.mark.parametrize(
    ("file", "index", "said"),
    [
        (None, None, "index.csv can't be read: HTTP Error 404"),
        (b"<html>", None, "is no price list that is known: no CapacityStatus"),
        (listed(EC2, COLUMNS[:-1]), None, "is no price list that is known: no Volume API Name"),
        (listed(EC2) + b'"cut","off"\n', None, "line 15: 2 of 25 columns"),
        (b"\xff" + listed(EC2), None, "is no price list: 'utf-8' codec"),
        (b"", b"{}", "region_index.json is no list of regions: KeyError"),
        (b"", b"nothing", "region_index.json is no list of regions"),
        (b"", b'{"regions": {}}', "has no prices of us-west-2"),
    ],
)
def test_what_is_no_price_list_is_refused_and_not_read_again(server, file, index, said):
    server.files[server.ec2] = file
    if index is not None:
        server.files["/offers/v1.0/aws/AmazonEC2/current/region_index.json"] = index
    list_of_region = files()
    for attributes in (MACHINE, VOLUME):
        with pytest.raises(UnavailableError) as caught:
            list_of_region.products("AmazonEC2", attributes)
        assert said in caught.value.message
    assert len(server.asked) == (1 if index is not None else 2)


def test_a_file_that_was_cut_off_leaves_the_old_price(server):
    old = cache.HourlyPrices(date(2026, 10, 1), "AWS", {"g5.xlarge": Decimal("1.0")})
    cache.update("aws", HERE, {"on_demand": old})
    server.missing[server.ec2] = 7
    refreshed, _ = run()
    errors = failed(refreshed)
    assert re.search(
        r"index.csv ended after \d+ of \d+ bytes; run the same command again", errors["on_demand"]
    )
    assert errors["volume"] == errors["on_demand"]
    assert "public_ipv4" not in errors  # of another file
    assert cache.read("aws", HERE).on_demand == old


def test_without_a_network_it_says_what_was_tried_and_what_to_do(monkeypatch):
    nobody = "http://127.0.0.1:1"
    monkeypatch.setattr(price_files, "ADDRESS", nobody)
    with pytest.raises(UnavailableError) as caught:
        files().products("AmazonEC2", MACHINE)
    index = f"{nobody}/offers/v1.0/aws/AmazonEC2/current/region_index.json"
    assert caught.value.message.startswith(f"{index} can't be read: ")
    assert "check the network and the proxy (HTTPS_PROXY)" in caught.value.hint


@pytest.mark.parametrize(("name", "limit"), [("LIMIT_BYTES", 1000), ("LIMIT_S", 0)])
@pytest.mark.usefixtures("server")
def test_what_a_file_may_take_has_an_end(monkeypatch, name, limit):
    monkeypatch.setattr(price_files, name, limit)
    with pytest.raises(UnavailableError, match="has more than"):
        files().products("AmazonEC2", MACHINE)
