"""A real S3 server on the loopback (moto's), in a process of its own.

    with s3_server() as server:         # sets what AWS's libraries read; child processes inherit it
        storage = open_storage(f"{server.new_bucket()}/checkpoints")

moto keeps objects in memory and checks no signatures: what it shows is that requests are right and
in what order they come, not how fast or how safe S3 is.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

_numbers = itertools.count()


@dataclass(frozen=True)
class S3Server:
    endpoint: str
    pid: int

    def new_bucket(self) -> str:
        """Its URL; nobody else has it."""
        import s3fs

        bucket = f"bucket-{os.getpid()}-{time.monotonic_ns()}-{next(_numbers)}"
        s3fs.S3FileSystem(skip_instance_cache=True).mkdir(bucket)
        return f"s3://{bucket}"


@contextmanager
def s3_server() -> Iterator[S3Server]:
    import s3fs

    with subprocess.Popen(
        [sys.executable, "-m", "tests.storage.s3_server"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # a line for each request
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        endpoint = process.stdout.readline().decode().strip()
        variables = {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "NO_PROXY": "127.0.0.1",
        }
        try:
            with mock.patch.dict(os.environ, variables):
                s3fs.S3FileSystem.clear_instance_cache()  # of a server before this one
                yield S3Server(endpoint, process.pid)
        finally:
            s3fs.S3FileSystem.clear_instance_cache()
            process.kill()


def _serve() -> None:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    print(f"http://{host}:{port}", flush=True)
    sys.stdin.read()  # until whoever started it is gone


if __name__ == "__main__":
    _serve()
