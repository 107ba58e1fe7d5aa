"""One contract, each kind of storage: a folder on a disk, one on tmpfs, memory, S3, web HDFS."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megascale.storage import open_storage
from megascale.storage.remote import RemoteFolder
from tests.storage.contract import CASES, Case
from tests.storage.s3_server import S3Server, s3_server
from tests.storage.webhdfs_stand_in import webhdfs_stand_in


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


def _named(case: Case) -> str:
    return case.__name__


@pytest.mark.parametrize("case", CASES, ids=_named)
def test_a_folder_on_a_disk(case: Case, tmp_path: Path) -> None:
    case(open_storage(tmp_path / "root"))


@pytest.mark.parametrize("case", CASES, ids=_named)
def test_a_folder_by_its_file_url(case: Case, tmp_path: Path) -> None:
    case(open_storage(f"file://{tmp_path}/root"))


@pytest.mark.parametrize("case", CASES, ids=_named)
def test_memory(case: Case, tmp_path: Path) -> None:
    case(open_storage(f"memory://{tmp_path}/root"))


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=_named)
def test_s3(case: Case, s3: S3Server) -> None:
    case(open_storage(f"{s3.new_bucket()}/some/prefix"))


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=_named)
def test_web_hdfs_against_a_stand_in(case: Case, tmp_path: Path) -> None:
    """Real Hadoop was not at hand: see webhdfs_stand_in.py for what this shows."""
    with webhdfs_stand_in(tmp_path) as url:
        case(open_storage(f"{url}/some/prefix"))


@pytest.mark.parametrize("case", CASES, ids=_named)
def test_hdfs_by_its_wrapper_over_another_file_system(case: Case, tmp_path: Path) -> None:
    """fsspec's hdfs is a wrapper of pyarrow's: here the same wrapper, over pyarrow's local one."""
    fs = pytest.importorskip("pyarrow.fs")
    from fsspec.implementations.arrow import ArrowFSWrapper

    system = ArrowFSWrapper(fs.LocalFileSystem())
    case(RemoteFolder("hdfs://stand-in/root", system, str(tmp_path / "root"), "hdfs"))
