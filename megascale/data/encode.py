"""Documents to tokens over all cores, in order: what is written does not depend on the workers.

A worker takes a task (about 1 MiB of text), reads, splits and encodes it, and returns arrays. The
tokenizer's own threads are no faster on two cores, and making arrays of its results holds Python's
lock, which caps them near ten cores; processes do not share one.

Invariant: which split a document belongs to is a function of its text and the seed alone, so equal
documents never lie on both sides, and adding documents moves none. (A document that was given as
text and again as tokens is two.)
"""

from __future__ import annotations

import ctypes
import hashlib
import multiprocessing
import multiprocessing.process
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np
from numpy.typing import NDArray

from megascale.data.inputs.documents import Kind, Skipped, Task, TokenDocument
from megascale.data.prepared import SPLITS, Split
from megascale.data.tokenizer import TextTokenizer
from megascale.env import variable
from megascale.errors import DataError

_TASKS_AHEAD = 4  # per worker; bounds what waits to be written

Kept = str | NDArray[np.int32]  # a document's text, or its tokens with the end of document


@dataclass(frozen=True)
class SplitRule:
    """A document is held out where its draw, uniform in [0, 1), is below `validation_fraction`."""

    validation_fraction: float
    seed: int

    def draw(self, digest: bytes) -> float:
        seeded = hashlib.blake2b(digest + self.seed.to_bytes(8, "little"), digest_size=8).digest()
        return int.from_bytes(seeded[:6], "little") / 2**48

    def split(self, text: str) -> Split:
        return "valid" if self.draw(document_digest(text)) < self.validation_fraction else "train"


def document_digest(document: Kept) -> bytes:
    raw = document.encode() if isinstance(document, str) else document.tobytes()
    return hashlib.blake2b(raw, digest_size=16).digest()


@dataclass(frozen=True)
class Recipe:
    """How documents become tokens.

    strict   what would be skipped and counted raises DataError, but for empty documents: of those
             nothing is lost
    """

    tokenizer: TextTokenizer
    rule: SplitRule
    strict: bool = False


@dataclass(frozen=True)
class Encoded:
    """One task's documents: per split their tokens end to end and their lengths, in order."""

    tokens: dict[Split, NDArray[np.int32]]
    lengths: dict[Split, NDArray[np.int32]]
    digests: bytes  # of every kept document, in order
    smallest_draw: float
    skipped: dict[Kind, int]
    broken: list[str]  # what is damaged, and where
    ends_added: int  # to documents that were tokens already
    num_bytes: int


def encode_task(task: Task, recipe: Recipe) -> Encoded:
    """Raises DataError for tokens that do not fit the tokenizer, and for what `strict` refuses."""
    kept, skipped, ends_added = _sorted_out(task, recipe)
    digests = [document_digest(document) for document in kept]
    draws = np.array([recipe.rule.draw(digest) for digest in digests])
    tokens, lengths = _tokens(kept, recipe.tokenizer)
    is_valid = draws < recipe.rule.validation_fraction
    of_split: dict[Split, NDArray[np.bool_]] = {"train": ~is_valid, "valid": is_valid}
    return Encoded(
        tokens={split: tokens[np.repeat(of_split[split], lengths)] for split in SPLITS},
        lengths={split: lengths[of_split[split]] for split in SPLITS},
        digests=b"".join(digests),
        smallest_draw=float(draws.min(initial=1.0)),
        skipped=Counter(document.kind for document in skipped),
        broken=[document.where for document in skipped if document.is_broken],
        ends_added=ends_added,
        num_bytes=sum(part.num_bytes for part in task),
    )


def _sorted_out(task: Task, recipe: Recipe) -> tuple[list[Kept], list[Skipped], int]:
    """(documents to keep, what is skipped, ends of documents that were added)"""
    end = recipe.tokenizer.end_of_document_id
    kept: list[Kept] = []
    skipped: list[Skipped] = []
    ends_added = 0
    for document in (document for part in task for document in part.read()):
        if isinstance(document, Skipped):
            if recipe.strict:
                raise DataError(
                    f"{document.where}: {document.reason}; repair it or leave it out, or prepare "
                    "without --strict, which skips and counts it"
                )
            skipped.append(document)
        elif isinstance(document, TokenDocument):
            tokens = _fitting(document, recipe.tokenizer)
            is_open = not len(tokens) or tokens[-1] != end
            if len(tokens) < 2 - is_open:
                skipped.append(Skipped(Kind.EMPTY, document.where))
                continue
            ends_added += is_open
            kept.append(np.append(tokens, np.int32(end)) if is_open else tokens)
        elif document:
            kept.append(document)
        else:
            skipped.append(Skipped(Kind.EMPTY, ""))
    return kept, skipped, int(ends_added)


def _fitting(document: TokenDocument, tokenizer: TextTokenizer) -> NDArray[np.int32]:
    tokens = document.tokens
    outside = (tokens < 0) | (tokens >= tokenizer.vocab_size)
    if outside.any():
        place = int(outside.argmax())
        raise DataError(
            f"{document.where}: token {place} is {tokens[place]}, outside the vocabulary of "
            f"{tokenizer.vocab_size:,}: another tokenizer made these tokens; give that one"
        )
    return tokens.astype(np.int32)


def _tokens(
    documents: list[Kept], tokenizer: TextTokenizer
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """(tokens end to end, the length of each document)"""
    texts = [document for document in documents if isinstance(document, str)]
    tokens, lengths = tokenizer.encode_documents(texts)
    if len(texts) == len(documents):
        return tokens, lengths
    encoded = iter(np.split(tokens, np.cumsum(lengths)[:-1]))
    pieces = [next(encoded) if isinstance(document, str) else document for document in documents]
    return np.concatenate(pieces), np.array([len(piece) for piece in pieces], np.int32)


def encode_tasks(tasks: Iterable[Task], recipe: Recipe, workers: int) -> Generator[Encoded]:
    """The encoded tasks in the order of `tasks`, by up to `workers` processes.

    `tasks` may be read from a stream: it is asked for the next task when a result was taken.
    """
    rest = iter(tasks)
    first = list(islice(rest, workers))
    workers = len(first)
    rest = chain(first, rest)
    if workers <= 1:
        yield from (encode_task(task, recipe) for task in rest)
        return
    with ProcessPoolExecutor(
        workers,
        multiprocessing.get_context("spawn"),  # a fork would copy the caller's threads' locks
        _start_worker,
        (recipe,),
    ) as pool:
        try:
            # no threads of numpy's: they would not be used
            with variable("OPENBLAS_NUM_THREADS", "1"):
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

_recipe: Recipe
_PR_SET_PDEATHSIG = 1  # of Linux's prctl.h
_MALLOPT = {-1: 1 << 30, -3: 1 << 30}  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of glibc's malloc.h


def _start_worker(recipe: Recipe) -> None:
    global _recipe
    _recipe = recipe
    _keep_freed_memory()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core a worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent answers the keyboard
    _die_with_parent()


def _keep_freed_memory() -> None:
    """Every task frees what the next allocates: memory stays with the process in between (page
    faults of one run: 59,035 without, 36,661 with; no gain in time was shown)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in _MALLOPT.items():
            mallopt(parameter, value)


def _die_with_parent() -> None:
    """A killed parent cannot stop its workers, and the pool's pipes do not tell them."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is None or prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        threading.Thread(target=_exit_after, args=(parent,), daemon=True).start()
    elif os.getppid() != parent.pid:  # it died before
        os._exit(1)


def _exit_after(parent: multiprocessing.process.BaseProcess) -> None:
    parent.join()
    os._exit(1)


def _encode(task: Task) -> Encoded:
    return encode_task(task, _recipe)
