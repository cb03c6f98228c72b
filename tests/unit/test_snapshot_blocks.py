"""The embedded cloud's EBS direct APIs answer and refuse as EBS does; botocore's own client asks."""

import base64
import hashlib
import time

import pytest
from botocore.exceptions import ClientError

from gpukiln.clouds.embedded import snapshot_blocks
from gpukiln.clouds.embedded.layout import Layout
from gpukiln.clouds.embedded.snapshot_blocks import BLOCK, SnapshotBlocks
from gpukiln.disks import sparse
from tests.support.exports import INDEXES, fill, image_with_disk
from tests.support.release_cloud import Cloud, tell

DATA = b"x" * BLOCK


@pytest.fixture(autouse=True)
def empty(empty_cloud):
    """Each test begins with an empty cloud."""


def ebs():
    return Cloud().client("ebs")


def checksum(data=DATA):
    return base64.b64encode(hashlib.sha256(data).digest()).decode()


def start(**more):
    return ebs().start_snapshot(**{"VolumeSize": 1, **more})


def put(snapshot, index=0, data=DATA, **more):
    asked = {"DataLength": len(data), "Checksum": checksum(data), "ChecksumAlgorithm": "SHA256", **more}
    return ebs().put_snapshot_block(SnapshotId=snapshot, BlockIndex=index, BlockData=data, **asked)


def refused(code, reason, call, *arguments, **asked):
    with pytest.raises(ClientError) as error:
        call(*arguments, **asked)
    assert (error.value.response["Error"]["Code"], error.value.response.get("Reason", "")) == (code, reason)


def written_blocks(disk):
    with sparse.opened(disk) as number:
        return list(sparse.blocks(number, BLOCK))


def test_only_blocks_with_data_are_listed_in_pages():
    image_id, disk = image_with_disk()
    snapshot = image_id.replace("ami-", "snap-")
    page = ebs().list_snapshot_blocks(SnapshotId=snapshot, MaxResults=10_000)
    assert [one["BlockIndex"] for one in page["Blocks"]] == list(INDEXES) == written_blocks(disk)
    assert (page["BlockSize"], page["VolumeSize"]) == (BLOCK, 1)
    assert page["ExpiryTime"].timestamp() > time.time()
    assert "NextToken" not in page
    fill(disk, range(150))
    first = ebs().list_snapshot_blocks(SnapshotId=snapshot, MaxResults=100)
    second = ebs().list_snapshot_blocks(SnapshotId=snapshot, MaxResults=100, NextToken=first["NextToken"])
    assert [one["BlockIndex"] for one in first["Blocks"] + second["Blocks"]] == list(range(150))
    rest = ebs().list_snapshot_blocks(SnapshotId=snapshot, StartingBlockIndex=140)["Blocks"]
    assert [one["BlockIndex"] for one in rest] == list(range(140, 150))


def test_what_can_not_be_read_is_refused():
    image_id, disk = image_with_disk()
    snapshot, invalid = image_id.replace("ami-", "snap-"), "ValidationException"
    listing, get = ebs().list_snapshot_blocks, ebs().get_snapshot_block
    tokens = {one["BlockIndex"]: one["BlockToken"] for one in listing(SnapshotId=snapshot)["Blocks"]}
    answer = get(SnapshotId=snapshot, BlockIndex=1, BlockToken=tokens[1])
    data = answer["BlockData"].read()
    assert data == disk.read_bytes()[BLOCK : 2 * BLOCK]
    assert (answer["DataLength"], answer["Checksum"], answer["ChecksumAlgorithm"]) == (
        BLOCK,
        checksum(data),
        "SHA256",
    )
    refused(invalid, "INVALID_BLOCK_TOKEN", get, SnapshotId=snapshot, BlockIndex=2, BlockToken=tokens[1])
    refused(invalid, "INVALID_BLOCK_TOKEN", get, SnapshotId=snapshot, BlockIndex=1, BlockToken="AAAA")
    refused(invalid, "INVALID_PAGE_TOKEN", listing, SnapshotId=snapshot, NextToken="AAAA")
    missing = {"SnapshotId": "snap-0123456789abcdef0"}
    refused("ResourceNotFoundException", "SNAPSHOT_NOT_FOUND", listing, **missing)
    refused(invalid, "INVALID_SNAPSHOT_ID", listing, SnapshotId=start()["SnapshotId"])
    # a token that has expired: in this process, whose clock can be moved
    blocks = SnapshotBlocks(Layout(disk.parent))
    token = blocks._seal(snapshot, 1, int(time.time()) - 1)
    with pytest.raises(snapshot_blocks.EbsError, match="expired"):
        blocks._open(token, snapshot, "INVALID_BLOCK_TOKEN")


def test_a_snapshot_is_made_of_blocks():
    tags = [{"Key": "a", "Value": "b"}]
    again = {"Tags": tags, "ClientToken": "the same"}
    answer = start(Description="words", **again)
    snapshot, disk = answer["SnapshotId"], Cloud().snapshot_disk(answer["SnapshotId"])
    assert (answer["Status"], answer["BlockSize"], answer["Tags"], answer["Description"]) == (
        "pending",
        BLOCK,
        tags,
        "words",
    )
    assert start(Description="words", **again)["SnapshotId"] == snapshot
    refused("ConflictException", "", start, Description="other words", **again)
    assert put(snapshot, 3)["Checksum"] == checksum()
    put(snapshot, 2047, b"y" * BLOCK)
    put(snapshot, 3)  # again
    described = Cloud().client("ec2").describe_snapshots(SnapshotIds=[snapshot])["Snapshots"][0]
    assert (described["State"], described["Tags"]) == ("pending", tags)
    assert not disk.exists()
    linear = hashlib.sha256(DATA).digest() + hashlib.sha256(b"y" * BLOCK).digest()
    more = {"ChecksumAlgorithm": "SHA256", "ChecksumAggregationMethod": "LINEAR"}
    complete = ebs().complete_snapshot
    invalid, value = "ValidationException", "INVALID_PARAMETER_VALUE"
    refused(invalid, value, complete, SnapshotId=snapshot, ChangedBlocksCount=3)
    refused(invalid, value, complete, SnapshotId=snapshot, ChangedBlocksCount=2, Checksum=checksum(), **more)
    complete(SnapshotId=snapshot, ChangedBlocksCount=2, Checksum=checksum(linear), **more)
    assert written_blocks(disk) == [3, 2047]
    assert disk.stat().st_size == 1 << 30
    refused(invalid, "INVALID_SNAPSHOT_ID", put, snapshot, 4)
    child = start(ParentSnapshotId=snapshot)["SnapshotId"]
    put(child, 4)
    complete(SnapshotId=child, ChangedBlocksCount=1)
    assert written_blocks(Cloud().snapshot_disk(child)) == [3, 4, 2047]


def test_what_is_no_block_is_refused():
    snapshot, invalid = start()["SnapshotId"], "ValidationException"
    refused(invalid, "INVALID_BLOCK", put, snapshot, 2048)
    refused(invalid, "INVALID_BLOCK", put, snapshot, 0, b"short")
    refused(invalid, "INVALID_BLOCK", put, snapshot, 0, Checksum=checksum(b"other"))
    refused(invalid, "INVALID_VOLUME_SIZE", start, VolumeSize=70_000)
    refused(invalid, "INVALID_PARAMETER_VALUE", start, Timeout=5_000)
    both = {"Encrypted": True, "ParentSnapshotId": snapshot}
    refused(invalid, "INVALID_PARAMETER_VALUE", start, **both)


def test_a_snapshot_that_is_not_finished_ends_with_its_deletion_and_outlives_no_server():
    snapshot = start(ClientToken="deleted")["SnapshotId"]
    put(snapshot)
    folder = Cloud().snapshot_disk(snapshot).parent
    assert [one.name for one in folder.glob(".*.partial")] == [f".{snapshot}.raw.ebs.partial"]
    tell("keep")
    kept = (folder.parent / "regions/us-west-2.json").read_text()
    assert snapshot not in kept
    Cloud().client("ec2").delete_snapshot(SnapshotId=snapshot)
    assert list(folder.glob(".*.partial")) == []
    refused("ResourceNotFoundException", "SNAPSHOT_NOT_FOUND", put, snapshot)
    assert start(ClientToken="deleted")["SnapshotId"] == snapshot  # what was answered once is answered again


def test_what_nobody_writes_to_is_cancelled(tmp_path):
    class Snapshot:
        status = "pending"

    class Backend:
        snapshots = {"snap-1": Snapshot()}  # noqa: RUF012 - one object

    blocks, file = SnapshotBlocks(Layout(tmp_path)), tmp_path / "disk"
    file.touch()
    blocks._unfinished["snap-1"] = snapshot_blocks._Unfinished(file, 1, timeout_s=600)
    blocks._unfinished["snap-1"].written -= 601
    with pytest.raises(snapshot_blocks.EbsError) as told:
        blocks._writable(Backend, "snap-1")
    assert (told.value.reason, Backend.snapshots["snap-1"].status) == ("WRITE_REQUEST_TIMEOUT", "error")
    assert not file.exists()
