"""Storage of the cache of kernel modules: a folder, or a bucket of S3."""

import shutil
from pathlib import Path
from typing import Any, Protocol

from gpukiln.clouds.base import Cloud, explain_aws_errors
from gpukiln.errors import UsageError
from gpukiln.files import atomic_path, name_full_disk_error

S3 = "s3://"
NONE = "none"


# Both stores are used with untrusted content: `modules.find_entry_fault` checks each entry.
class ModuleStore(Protocol):
    """Files by name; a name is FOLDER/FILE."""

    def names(self, folder: str) -> list[str]:
        """The names in a folder."""

    def get(self, name: str, file: Path) -> None:
        """Copy a file from the store.

        Args:
            file: Where it goes.
        """

    def put(self, file: Path, name: str) -> None:
        """Copy a file into the store, in the place of an older one."""


class FolderStore:
    """Files in a folder of this computer.

    Args:
        folder: It is created when the first file is put into it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def names(self, folder: str) -> list[str]:
        return [f"{folder}/{file.name}" for file in sorted((self._folder / folder).glob("*"))]

    def get(self, name: str, file: Path) -> None:
        """Copy a file from the store."""
        # An error of a full disk then names the file.
        with name_full_disk_error(file):
            shutil.copyfile(self._folder / name, file)

    def put(self, file: Path, name: str) -> None:
        """Copy a file into the store; another process never sees a part of it."""
        target = self._folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(target) as partial:
            shutil.copyfile(file, partial)


class S3Store:
    """Objects in a bucket.

    Args:
        client: S3, from boto3.
        bucket: The bucket, which must exist.
        prefix: What their keys begin with, without a slash at its end; may be empty.
    """

    def __init__(self, client: Any, bucket: str, prefix: str) -> None:
        self._s3, self._bucket, self._prefix = client, bucket, f"{prefix}/" if prefix else ""

    def names(self, folder: str) -> list[str]:
        """The names in a folder."""
        with explain_aws_errors(f"list the modules in {S3}{self._bucket}"):
            # A page has at most 1,000 keys, and a version of the driver has two objects a kernel.
            pages = self._s3.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=f"{self._prefix}{folder}/"
            )
            return [entry["Key"][len(self._prefix) :] for page in pages for entry in page.get("Contents", ())]

    def get(self, name: str, file: Path) -> None:
        """Copy a file from the store."""
        with explain_aws_errors(f"read {name} in {S3}{self._bucket}"):
            self._s3.download_file(self._bucket, f"{self._prefix}{name}", str(file))

    def put(self, file: Path, name: str) -> None:
        """Copy a file into the store."""
        with explain_aws_errors(f"write {name} into {S3}{self._bucket}"):
            self._s3.upload_file(str(file), self._bucket, f"{self._prefix}{name}")


def open_store(where: str, home: Path, cloud: Cloud) -> ModuleStore | None:
    """Open the store that `--module-cache` names.

    Args:
        where: s3://BUCKET/PREFIX, a folder, `none`; empty: the folder `modules` of this machine's state.
        home: The state folder.
        cloud: The cloud whose S3 is used.

    Raises:
        UsageError: The bucket has no name.
    """
    if where == NONE:
        return None
    if not where.startswith(S3):
        # absolute: a relative path would depend on the working directory
        return FolderStore(Path(where).expanduser().absolute() if where else home / "modules")
    bucket, _, prefix = where.removeprefix(S3).partition("/")
    if not bucket:
        raise UsageError(f"--module-cache {where} names no bucket", hint="s3://BUCKET/PREFIX")
    return S3Store(cloud.client("s3"), bucket, prefix.strip("/"))
