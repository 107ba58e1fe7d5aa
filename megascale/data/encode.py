"""Documents to tokens over all cores, in order: what is written does not depend on the workers.

A worker takes a task (about 1 MiB of text), reads, splits and encodes it, and returns arrays. The
tokenizer's own threads are as fast on two cores, but making arrays of its results holds Python's
lock, which caps them near ten cores; processes do not share one.

Invariant: which split a document belongs to is a function of its text and the seed alone, so equal
documents never lie on both sides, and adding documents moves none.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from megascale.data.prepared import SPLITS, Split
from megascale.data.sources import Task, read_documents
from megascale.data.tokenizer import TextTokenizer
from megascale.errors import DataError

_TASKS_AHEAD = 4  # per worker; bounds what waits to be written


@dataclass(frozen=True)
class SplitRule:
    """A document is held out where its draw, uniform in [0, 1), is below `validation_fraction`."""

    validation_fraction: float
    seed: int

    def draw(self, digest: bytes) -> float:
        seeded = hashlib.blake2b(digest + self.seed.to_bytes(8, "little"), digest_size=8).digest()
        return int.from_bytes(seeded[:6], "little") / 2**48

    def split(self, text: str) -> Split:
        return self.split_of(self.draw(document_digest(text)))

    def split_of(self, draw: float) -> Split:
        return "valid" if draw < self.validation_fraction else "train"


def document_digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


@dataclass(frozen=True)
class Encoded:
    """One task's documents: per split their tokens end to end and their lengths, in order."""

    tokens: dict[Split, NDArray[np.int32]]
    lengths: dict[Split, NDArray[np.int32]]
    digests: bytes  # of every kept document, in order
    smallest_draw: float
    num_undecodable: int
    num_empty: int
    num_bytes: int


def encode_task(task: Task, tokenizer: TextTokenizer, rule: SplitRule) -> Encoded:
    read = list(read_documents(task))
    texts = [text for text in read if text]
    digests = [document_digest(text) for text in texts]
    draws = [rule.draw(digest) for digest in digests]
    encoded = tokenizer.encode_documents(texts)
    documents: dict[Split, list[NDArray[np.int32]]] = {split: [] for split in SPLITS}
    for draw, tokens in zip(draws, encoded, strict=True):
        documents[rule.split_of(draw)].append(tokens)
    none = np.zeros(0, np.int32)
    return Encoded(
        tokens={split: np.concatenate([none, *documents[split]]) for split in SPLITS},
        lengths={split: np.array([len(d) for d in documents[split]], np.int32) for split in SPLITS},
        digests=b"".join(digests),
        smallest_draw=min(draws, default=1.0),
        num_undecodable=read.count(None),
        num_empty=read.count(""),
        num_bytes=sum(segment.num_bytes for segment in task),
    )


def encode_tasks(
    tasks: Sequence[Task], tokenizer: TextTokenizer, rule: SplitRule, workers: int
) -> Generator[Encoded]:
    """The encoded tasks in the order of `tasks`, by up to `workers` processes."""
    workers = min(workers, len(tasks))
    if workers <= 1:
        yield from (encode_task(task, tokenizer, rule) for task in tasks)
        return
    with ProcessPoolExecutor(
        workers,
        multiprocessing.get_context("spawn"),  # a fork would copy the caller's threads' locks
        _start_worker,
        (tokenizer, rule),
    ) as pool:
        try:
            rest = iter(tasks)
            pending: deque[Future[Encoded]] = deque(
                pool.submit(_encode, task) for task in islice(rest, workers * _TASKS_AHEAD)
            )
            while pending:
                yield pending.popleft().result()
                pending.extend(pool.submit(_encode, task) for task in islice(rest, 1))
        except BrokenProcessPool as error:
            raise DataError(
                f"a worker process died ({error}); use fewer workers where memory is short, and "
                "call prepare under `if __name__ == '__main__':` in a script"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


# --- in the worker process ---------------------------------------------------------------------

_worker_job: tuple[TextTokenizer, SplitRule]


def _start_worker(tokenizer: TextTokenizer, rule: SplitRule) -> None:
    global _worker_job
    _worker_job = (tokenizer, rule)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core a worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent answers the keyboard
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    """A killed parent cannot stop its workers, and the pool's pipes do not tell them."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode(task: Task) -> Encoded:
    return encode_task(task, *_worker_job)
