"""A large S3 object in parts, several at once (s3fs's own files send one after another).

The object appears whole when all its parts are there, not before. Memory: what is gathered of small
parts, and the copies that are under way: 2 x 4 x 32 MiB at most.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from megascale.errors import StorageError
from megascale.storage.gathered import Gathered
from megascale.storage.waiting import answer, move_all

PART_BYTES = 32 << 20
NUM_THREADS = 4
MAX_PARTS = 10_000  # S3's own limit


class MultipartUpload:
    """`system` is an `s3fs.S3FileSystem`; `path` is BUCKET/KEY. Small objects go in one request."""

    def __init__(
        self, system: Any, path: str, *, doing: str, stall_s: float, moved: Callable[[int], None]
    ) -> None:
        self._system, self._path = system, path
        self._doing, self._stall_s, self._moved = doing, stall_s, moved
        bucket, key, _ = system.split_path(path)
        self._object = {"Bucket": bucket, "Key": key}
        self._upload: dict[str, str] = {}
        self._etags: dict[int, str] = {}
        self._gathered = Gathered(NUM_THREADS * PART_BYTES, PART_BYTES, self._send)

    def append(self, part: memoryview) -> None:
        self._gathered.append(part)

    def finish(self) -> None:
        rest = self._gathered.rest()
        if not self._upload:
            self._ask(lambda: self._system.pipe_file(self._path, bytes(rest)))
            self._moved(rest.nbytes)
            return
        if rest.nbytes:
            self._send(rest)
        parts = [{"PartNumber": n, "ETag": self._etags[n]} for n in sorted(self._etags)]
        self._ask(
            lambda: self._system.call_s3(
                "complete_multipart_upload",
                **self._object,
                **self._upload,
                MultipartUpload={"Parts": parts},
            )
        )

    def abort(self) -> None:
        """Parts of an upload that never ends are kept, and paid for: take them away."""
        if self._upload:
            with contextlib.suppress(Exception):  # what failed before is what is told
                self._ask(
                    lambda: self._system.call_s3(
                        "abort_multipart_upload", **self._object, **self._upload
                    )
                )

    def _send(self, run: memoryview) -> None:
        if not self._upload:
            started = self._ask(
                lambda: self._system.call_s3("create_multipart_upload", **self._object)
            )
            self._upload = {"UploadId": started["UploadId"]}
        starts = range(0, run.nbytes, PART_BYTES)
        first = len(self._etags) + 1
        if first + len(starts) - 1 > MAX_PARTS:
            raise StorageError(
                f"{self._doing}: S3 takes {MAX_PARTS:,} parts of {PART_BYTES:,} bytes a file and "
                "no more; save from more ranks, so that each file is smaller"
            )

        def send(position: int) -> int:
            data = bytes(run[position : position + PART_BYTES])
            number = first + position // PART_BYTES
            reply = self._system.call_s3(
                "upload_part", **self._object, **self._upload, PartNumber=number, Body=data
            )
            self._etags[number] = reply["ETag"]
            return len(data)

        move_all(
            starts,
            send,
            doing=self._doing,
            stall_s=self._stall_s,
            num_threads=min(NUM_THREADS, len(starts)),
            moved=self._moved,
        )

    def _ask(self, call: Callable[[], Any]) -> Any:
        return answer(call, doing=self._doing, stall_s=self._stall_s)
