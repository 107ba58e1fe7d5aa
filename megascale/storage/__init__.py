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

from megascale.storage.interface import BLOCK_BYTES, FileJob, Storage, Written
from megascale.storage.local import LocalFolder
from megascale.storage.opening import open_storage

__all__ = ["BLOCK_BYTES", "FileJob", "LocalFolder", "Storage", "Written", "open_storage"]
