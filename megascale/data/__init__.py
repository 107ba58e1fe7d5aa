"""Text to batches: tokenise and store, pack, shuffle, load; position is one global number."""

from megascale.data.indexed import IndexedTokens, IndexedWriter
from megascale.data.loader import (
    BatchSource,
    GlobalBatch,
    GlobalBatchLoader,
    MicroBatch,
    sample_numbers,
)
from megascale.data.mixture import Mixture, SampleOrder, ShuffledSamples, open_parts, shares_of
from megascale.data.prepare import Progress, prepare
from megascale.data.prepared import Meta, PreparedData, Split, SplitMeta, open_prepared
from megascale.data.samples import Dataset, PackedDataset, Packing, Sample, SyntheticDataset
from megascale.data.shuffle import permute, sample_index
from megascale.data.tokenizer import TextTokenizer, load_tokenizer, train_bpe

__all__ = [
    "BatchSource",
    "Dataset",
    "GlobalBatch",
    "GlobalBatchLoader",
    "IndexedTokens",
    "IndexedWriter",
    "Meta",
    "MicroBatch",
    "Mixture",
    "PackedDataset",
    "Packing",
    "PreparedData",
    "Progress",
    "Sample",
    "SampleOrder",
    "ShuffledSamples",
    "Split",
    "SplitMeta",
    "SyntheticDataset",
    "TextTokenizer",
    "load_tokenizer",
    "open_parts",
    "open_prepared",
    "permute",
    "prepare",
    "sample_index",
    "sample_numbers",
    "shares_of",
    "train_bpe",
]
