"""Bytes to disks and object stores, hashed in blocks; no torch, no tensors, no processes of a run.

    storage = open_storage("/runs/a/checkpoints")          # or s3://BUCKET/PREFIX, hdfs://..., ...
    storage.claim("step-00000100")
    with FileWriter() as writer:                            # a process of its own
        written = writer.write(FileJob(...))                # from shared memory, hashed on the way
    storage.put("step-00000100/manifest.json", data)        # appears whole or not at all

A local folder is written past the page cache where the file system allows it; everything else goes
through fsspec. Both keep one contract (`interface.py`, tests/storage/contract.py).
"""

from __future__ import annotations

from megascale.storage.blocks import check_file, page_aligned, read_block
from megascale.storage.interface import BLOCK_BYTES, FileJob, Storage, Written
from megascale.storage.local import LocalFolder
from megascale.storage.opening import is_url, open_storage
from megascale.storage.writer import FileWriter

__all__ = [
    "BLOCK_BYTES",
    "FileJob",
    "FileWriter",
    "LocalFolder",
    "Storage",
    "Written",
    "check_file",
    "is_url",
    "open_storage",
    "page_aligned",
    "read_block",
]
