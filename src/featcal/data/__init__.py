"""Calibration data: from a recipe's `data:` section to batches that a model takes.

samples = load_samples(spec, seed=42, n=256, task="math")          # rows, chosen and checked; never a label
reads = ModelInput.from_config(config)                             # what the model takes
processor = find_processor(reads, merged, base, experts)           # whose tokenizer, said aloud
batches = make_batches(samples.rows, processor, reads, batch_size=16, max_length=512)
"""

from .batches import Batches, check_vocab, make_batches, take_batches
from .processor import ModelInput, Processor, find_processor
from .samples import Counts, Samples, load_samples
from .tables import Table, open_table

__all__ = [
    "Batches",
    "Counts",
    "ModelInput",
    "Processor",
    "Samples",
    "Table",
    "check_vocab",
    "find_processor",
    "load_samples",
    "make_batches",
    "open_table",
    "take_batches",
]
