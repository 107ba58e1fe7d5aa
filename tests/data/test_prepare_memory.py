"""The memory of a preparation is that of its portions, whatever the size of the input."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megascale.data.tokenizer import train_bpe

_WORDS = "some words and some more words of a document\n"
_TEXT = _WORDS * 45  # 2 KB
_MEASURE = """
import resource, sys
from pathlib import Path
from megascale.data import sources
from megascale.data.inputs import tables
from megascale.data.prepare import prepare

def peak():
    return max(resource.getrusage(who).ru_maxrss >> 10
               for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))

if __name__ == "__main__":
    sources._SEGMENT_BYTES = tables._BATCH_BYTES = 1 << 16
    tables._LARGE_GROUP_BYTES = 1 << 18
    small, large, tokenizer, output = sys.argv[1:]
    prepare([small], tokenizer, Path(output + "-small"), workers=2)
    before = peak()
    prepare([large], tokenizer, Path(output), workers=2)
    print(before, peak())
"""


def _write(path: Path, num_documents: int) -> None:
    texts = [f"{i} {_TEXT}" for i in range(num_documents)]
    table = pa.table({"text": texts})
    if path.suffix == ".parquet":  # one row group
        pq.write_table(table, path, use_dictionary=False, compression="none", write_batch_size=64)
    elif path.suffix == ".arrow":
        with pa.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=64)
    elif path.suffix == ".txt":
        path.write_text("".join(texts))
    else:
        with gzip.open(path, "wt", compresslevel=1) as file:
            file.writelines(json.dumps({"text": t}) + "\n" for t in texts)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["parquet", "jsonl.gz", "arrow", "txt"])
def test_memory_does_not_grow_with_the_input(tmp_path: Path, kind: str) -> None:
    """A limit of 6 MiB more, for the process and for a worker, on 16 MiB after 1 MiB of input."""
    large, small, tokenizer = tmp_path / f"l.{kind}", tmp_path / f"s.{kind}", tmp_path / "tokenizer"
    tokenizer.mkdir()
    train_bpe([_TEXT], 320).save(tokenizer)
    _write(small, 1 << 9)
    _write(large, 8 << 10)
    result = subprocess.run(
        [sys.executable, "-c", _MEASURE, *map(str, (small, large, tokenizer, tmp_path / "out"))],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    before_mib, after_mib = map(int, result.stdout.split())
    assert after_mib - before_mib < 6, f"{before_mib} MiB, then {after_mib} MiB"
