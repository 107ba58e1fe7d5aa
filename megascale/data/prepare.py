"""`megascale data prepare`: text in, one folder of token files, tokenizer and meta data out.

The folder is written beside its final place as `.NAME.partial-HOST-PID` and renamed when it is
whole. An exception removes it; what a killed run leaves, the next one on that host clears. No file
locks: many cluster file systems have none.

Invariant: the output exists complete or not at all, and depends on the documents, the tokenizer,
the validation fraction and the seed; not on the number of workers.
"""

from __future__ import annotations

import glob
import logging
import math
import os
import platform
import random
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from megascale.data.corpus import CorpusWriter, cross_entropy_nats, entropy_nats
from megascale.data.encode import SplitRule, encode_tasks
from megascale.data.prepared import FORMAT_VERSION, Meta
from megascale.data.sources import Task, list_files, make_tasks, read_documents
from megascale.data.tokenizer import (
    TextTokenizer,
    load_tokenizer,
    train_bpe,
    training_vocab_size,
)
from megascale.errors import DataError

if TYPE_CHECKING:
    from rich.progress import TaskID

logger = logging.getLogger(__name__)

# training reads 5 to 8 MB/s; 4,096 entries learnt from 8 of the standard library's 12 MB need 1.2 %
# more tokens than entries learnt from all of it
_TOKENIZER_SAMPLE_BYTES = 8 << 20


@dataclass(frozen=True)
class Progress:
    """How far a preparation is; given to its `progress` callback after each step."""

    phase: Literal["tokenizer", "encode"]
    done_bytes: int
    total_bytes: int
    tokens: int


ProgressCallback = Callable[[Progress], None]


def prepare(
    inputs: Sequence[str],
    tokenizer: str,
    output: Path,
    *,
    workers: int | None = None,
    validation_fraction: float = 0.02,
    seed: int = 0,
    progress: ProgressCallback | None = None,
) -> Meta:
    """Tokenise `inputs` into the folder `output`, which must be new or empty.

    inputs               globs, files, folders, `.jsonl` files with a "text", or `stdlib`
    tokenizer            `train:BPE:VOCAB`, a tokenizer.json, or a folder with one
    workers              processes; None: one a core
    validation_fraction  share of documents held out, chosen by the hash of their text; above 0
                         at least one of several documents is
    Files that are not UTF-8 are skipped and counted. Raises DataError; then nothing is left.
    """
    if not 0.0 <= validation_fraction < 1.0:
        raise DataError(f"validation fraction {validation_fraction} is not in [0, 1)")
    output = Path(os.path.abspath(output))
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise DataError(f"output {output} exists and is not an empty folder; name a new one")
    rule = SplitRule(validation_fraction, seed)
    report = progress or (lambda _: None)
    try:
        files = list_files(inputs)
        tasks = make_tasks(files)
        workers = workers or _num_cores()
        encoder = _obtain_tokenizer(tokenizer, tasks, rule, report)
        with _published_whole(output) as partial:
            corpus = _write_corpus(partial, tasks, encoder, rule, workers, report)
            if (
                validation_fraction > 0
                and "valid" not in corpus.splits
                and corpus.num_documents > 1
            ):
                wider = _hold_one_out(corpus, rule)
                encoder = _obtain_tokenizer(tokenizer, tasks, wider, report)
                corpus = _write_corpus(partial, tasks, encoder, wider, workers, report)
            corpus.require_splits(rule)
            command = _command(inputs, tokenizer, output, rule)
            meta = _describe(corpus, encoder, rule, len(files), command)
            meta.write(partial)
    except OSError as error:  # an input that cannot be read, a disk that is full
        raise DataError(f"could not prepare {output}: {error}; nothing was left behind") from error
    return meta


def prepare_with_progress(
    inputs: Sequence[str],
    tokenizer: str,
    output: Path,
    *,
    workers: int | None = None,
    validation_fraction: float = 0.02,
    seed: int = 0,
) -> None:
    """`prepare` with a bar on standard error and a summary on standard output."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    titles = {"tokenizer": "learn the vocabulary", "encode": "tokenise"}
    with Bars(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bars:
        bar_of: dict[str, TaskID] = {}

        def show(step: Progress) -> None:
            if step.phase not in bar_of:
                bar_of[step.phase] = bars.add_task(titles[step.phase], total=step.total_bytes)
            bars.update(bar_of[step.phase], completed=step.done_bytes)

        meta = prepare(
            inputs,
            tokenizer,
            output,
            workers=workers,
            validation_fraction=validation_fraction,
            seed=seed,
            progress=show,
        )
    for name, split in meta.splits.items():
        print(f"{name}: {split.tokens:,} tokens in {split.documents:,} documents")
    print(f"skipped: {meta.skipped_empty:,} empty, {meta.skipped_undecodable:,} not UTF-8")
    print(f"vocabulary {meta.vocab_size:,}; unigram entropy {meta.unigram_entropy_nats:.3f} nats")
    print(f"written to {output}")


def _obtain_tokenizer(
    spec: str, tasks: Sequence[Task], rule: SplitRule, report: ProgressCallback
) -> TextTokenizer:
    vocab_size = training_vocab_size(spec)
    if vocab_size is None:
        return load_tokenizer(Path(spec))
    return train_bpe(_sample_texts(tasks, rule, report), vocab_size)


def _sample_texts(
    tasks: Sequence[Task], rule: SplitRule, report: ProgressCallback
) -> Iterator[str]:
    """Training documents of tasks drawn from all over the corpus; held-out text stays unseen."""
    total = min(_TOKENIZER_SAMPLE_BYTES, sum(_num_bytes(task) for task in tasks))
    done = 0
    for task in random.Random(rule.seed).sample(tasks, len(tasks)):
        yield from (t for t in read_documents(task) if t and rule.split(t) == "train")
        done += _num_bytes(task)
        report(Progress("tokenizer", min(done, total), total, 0))
        if done >= total:
            return


def _hold_one_out(corpus: CorpusWriter, rule: SplitRule) -> SplitRule:
    """A rule that holds out the document with the smallest draw, and its copies.

    Then all is done again, the vocabulary too: it must not be learnt from held-out text. It is rare
    but for a few documents.
    """
    logger.warning(
        "none of the %d documents is held out at validation fraction %s; holding out the one with "
        "the smallest hash",
        corpus.num_documents,
        rule.validation_fraction,
    )
    return SplitRule(math.nextafter(corpus.smallest_draw, 1.0), rule.seed)


def _write_corpus(
    folder: Path,
    tasks: Sequence[Task],
    tokenizer: TextTokenizer,
    rule: SplitRule,
    workers: int,
    report: ProgressCallback,
) -> CorpusWriter:
    """Tokenizer and token files; over those of an earlier call."""
    tokenizer.save(folder)
    with CorpusWriter(folder, tokenizer.vocab_size) as corpus:
        _encode_all(corpus, tasks, tokenizer, rule, workers, report)
    return corpus


def _encode_all(
    corpus: CorpusWriter,
    tasks: Sequence[Task],
    tokenizer: TextTokenizer,
    rule: SplitRule,
    workers: int,
    report: ProgressCallback,
) -> None:
    total = sum(_num_bytes(task) for task in tasks)
    done = 0
    with closing(encode_tasks(tasks, tokenizer, rule, workers)) as encoded_tasks:
        for encoded in encoded_tasks:
            corpus.add(encoded)
            done += encoded.num_bytes
            report(Progress("encode", done, total, corpus.num_tokens))


def _describe(
    corpus: CorpusWriter, tokenizer: TextTokenizer, rule: SplitRule, num_files: int, command: str
) -> Meta:
    train, valid = corpus.counts["train"], corpus.counts["valid"]
    return Meta(
        format_version=FORMAT_VERSION,
        tokenizer_sha256=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        end_of_document_id=tokenizer.end_of_document_id,
        splits=corpus.splits,
        unigram_entropy_nats=entropy_nats(train),
        valid_unigram_cross_entropy_nats=cross_entropy_nats(valid, train),
        skipped_undecodable=corpus.num_undecodable,
        skipped_empty=corpus.num_empty,
        source_files=num_files,
        documents_sha256=corpus.documents_sha256,
        seed=rule.seed,
        validation_fraction=rule.validation_fraction,
        command=command,
    )


def _num_bytes(task: Task) -> int:
    return sum(segment.num_bytes for segment in task)


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


@contextmanager
def _published_whole(output: Path) -> Iterator[Path]:
    """A folder beside `output` to write into, renamed to `output` when the block ends well."""
    stem = f".{output.name}.partial-{platform.node()}-"
    output.parent.mkdir(parents=True, exist_ok=True)
    for leftover in output.parent.glob(f"{glob.escape(stem)}*"):
        pid = leftover.name.removeprefix(stem)
        if pid.isdecimal() and not _is_running(int(pid)):
            shutil.rmtree(leftover)
    partial = output.with_name(f"{stem}{os.getpid()}")
    partial.mkdir()
    try:
        yield partial
        os.rename(partial, output)  # onto an empty folder or nothing; refused where there is more
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # alive, and somebody else's
        return True
    return True


def _command(inputs: Sequence[str], tokenizer: str, output: Path, rule: SplitRule) -> str:
    return shlex.join(
        [
            *("megascale", "data", "prepare"),
            *(part for name in inputs for part in ("--input", name)),
            *("--tokenizer", tokenizer),
            *("--output", str(output)),
            *("--validation-fraction", str(rule.validation_fraction)),
            *("--seed", str(rule.seed)),
        ]
    )
