"""Corpus to tokenizer to tokens on disk to batches. Knows neither torch nor Ray."""

from tune_study.data.batches import Batches, validation_windows
from tune_study.data.manifest import Manifest
from tune_study.data.preparation import prepare
from tune_study.data.store import Tokens, open_tokens
from tune_study.data.tokenizers import Tokenizer

__all__ = [
    "Batches",
    "Manifest",
    "Tokenizer",
    "Tokens",
    "open_tokens",
    "prepare",
    "validation_windows",
]
