"""The rival of `benchmarks.data.prepare`: `tokenizers` as its manual says, and nothing else.

    python -m benchmarks.data.plain TEXT.jsonl TOKENIZER PREFIX

Batches of documents on all of the library's threads (`encode_batch_fast`, its fastest call), and
the same PREFIX.bin and .idx.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from megascale.data.indexed import IndexedWriter, token_dtype

BATCH_DOCUMENTS = 256


def main() -> None:
    """Tokenise one file."""
    text, folder, prefix = map(Path, sys.argv[1:])
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.encode_special_tokens = True  # what a document spells is text
    vocab_size = tokenizer.get_vocab_size()
    dtype = token_dtype(vocab_size)
    end = np.array([tokenizer.token_to_id("<|endoftext|>")], dtype)
    with text.open(encoding="utf-8") as lines, IndexedWriter(prefix, vocab_size) as writer:
        for batch in _batches(lines):
            encoded = tokenizer.encode_batch_fast(batch, add_special_tokens=False)
            documents = [np.array(e.ids, dtype) for e in encoded]
            lengths = np.array([len(document) + 1 for document in documents])
            closed = [part for document in documents for part in (document, end)]
            writer.add(np.concatenate(closed), lengths)


def _batches(lines: Iterator[str]) -> Iterator[list[str]]:
    while batch := [json.loads(line)["text"] for line in islice(lines, BATCH_DOCUMENTS)]:
        yield batch


if __name__ == "__main__":
    main()
