"""Text to token ids and back, exactly: the tokenizers of a study.

All are byte-level, so every text has tokens and, but for `gpt2-compact`, comes back from
them unchanged. None knows special strings: a text that holds `<|endoftext|>` is ordinary
text, and only the end of a document is the id `end_of_text`.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tune_study.config import ConfigError
from tune_study.data.cells import CellEncoder

if TYPE_CHECKING:
    import tiktoken

GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
"""How GPT-2 cuts text into pieces before merging; it covers every character.

The original is `'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+`
(openai/gpt-2, encoder.py); this form cuts alike and is the one tiktoken runs."""

DEFAULT_BPE = 512
"""Ids of a BPE that is asked for without a size."""
GPT2_SHA256 = {
    "gpt2_vocab": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "gpt2_encoder": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}
"""Of the files as OpenAI serves them; tiktoken pins the same."""


@dataclass(frozen=True)
class Tokenizer:
    """A byte-level BPE: byte strings in the order of their merging, rank = id.

    Attributes:
        kind: `bpe`, `gpt2`, `gpt2-compact` or `bytes`.
        pieces: byte string of each id; the 256 single bytes among them.
        kept: for `gpt2-compact`, the ids of `pieces` that keep an id of their own; their
            new id is their place here, and the id after the last stands for all others.
    """

    kind: str
    pieces: tuple[bytes, ...]
    kept: tuple[int, ...] | None = None

    @property
    def unknown(self) -> int | None:
        """The id that stands for every piece without one of its own, if there is such."""
        return None if self.kept is None else len(self.kept)

    @property
    def end_of_text(self) -> int:
        """The id that ends every document; always the last."""
        return self.vocab_size - 1

    @property
    def vocab_size(self) -> int:
        """Number of ids, the end of text included."""
        return len(self.pieces) + 1 if self.kept is None else len(self.kept) + 2

    @property
    def dtype(self) -> np.dtype:
        """The narrowest of uint16 and uint32 that holds every id."""
        return np.dtype(np.uint16 if self.vocab_size <= 2**16 else np.uint32)

    @cached_property
    def encoding(self) -> tiktoken.Encoding:
        import tiktoken

        return tiktoken.Encoding(
            name=self.kind,
            pat_str=GPT2_PATTERN,
            mergeable_ranks={piece: rank for rank, piece in enumerate(self.pieces)},
            special_tokens={},
        )

    @cached_property
    def _cells(self) -> CellEncoder:
        dtype = np.dtype(np.uint16 if len(self.pieces) < 2**16 else np.uint32)
        return CellEncoder(self.encoding.encode_ordinary, len(self.pieces), dtype)

    @cached_property
    def _compact(self) -> npt.NDArray[np.uint32]:
        """Table from an id of `pieces`, or its end of text, to the compact id."""
        assert self.kept is not None
        table = np.full(len(self.pieces) + 1, self.unknown, dtype=np.uint32)
        table[list(self.kept)] = np.arange(len(self.kept), dtype=np.uint32)
        table[-1] = self.end_of_text
        return table

    def encode(self, text: str) -> npt.NDArray:
        """Token ids of a text, without an end of text: [n] in `dtype`."""
        return self.encode_documents([text])[:-1]

    def encode_documents(self, texts: Sequence[str]) -> npt.NDArray:
        """Token ids of documents one after the other, an end of text after each."""
        return self.compact(self.encode_pieces(texts))

    def encode_pieces(self, texts: Sequence[str]) -> npt.NDArray:
        """As `encode_documents`, before `compact`: ids of `pieces`, its length as the end."""
        if self.kind == "bytes":
            ids = np.frombuffer("".join(texts).encode(), dtype=np.uint8)
            ends = np.cumsum([len(text.encode()) for text in texts])
            return np.insert(ids.astype(np.uint16), ends, 256)
        return self._cells(texts)

    def compact(self, ids: npt.NDArray) -> npt.NDArray:
        """Ids of `pieces` to ids of this tokenizer."""
        return ids if self.kept is None else self._compact[ids].astype(self.dtype)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids; an end of text becomes nothing, the unknown id U+FFFD."""
        pieces = self.pieces if self.kept is None else [self.pieces[i] for i in self.kept]
        extra = [b""] if self.kept is None else ["\ufffd".encode(), b""]
        table = [*pieces, *extra]
        return b"".join(table[i] for i in ids).decode("utf-8", errors="replace")

    def to_json(self) -> str:
        """Strict JSON of everything that determines the ids."""
        content: dict[str, Any] = {
            "kind": self.kind,
            "pattern": None if self.kind == "bytes" else GPT2_PATTERN,
            "pieces": [base64.b64encode(piece).decode() for piece in self.pieces],
            "kept": self.kept,
        }
        return json.dumps(content, indent=0)

    @classmethod
    def from_json(cls, text: str) -> Tokenizer:
        content = json.loads(text)
        return cls(
            content["kind"],
            tuple(base64.b64decode(piece) for piece in content["pieces"]),
            None if content["kept"] is None else tuple(content["kept"]),
        )

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()


def byte_tokenizer() -> Tokenizer:
    """The 256 bytes and the end of text."""
    return Tokenizer("bytes", tuple(bytes([byte]) for byte in range(256)))


def train_bpe(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of `vocab_size` ids, its end of text included (Sennrich et al. 2016,
    arXiv 1508.07909; on bytes as in GPT-2). Equal texts give equal merges.

    Raises:
        ConfigError: if the text has too few different pieces for so many merges.
    """
    import rustbpe

    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(texts, vocab_size=vocab_size - 1, pattern=GPT2_PATTERN)
    if trainer.vocab_size < vocab_size - 1:
        raise ConfigError(
            f"data.vocab_size = {vocab_size}: the training text yields only "
            f"{trainer.vocab_size + 1}. Give at most that, or more text."
        )
    return Tokenizer("bpe", tuple(bytes(piece) for piece, _ in trainer.get_mergeable_ranks()))


def gpt2_tokenizer(vocab: str | None, encoder: str | None) -> Tokenizer:
    """GPT-2's BPE: 50,257 ids, the end of text 50256 among them.

    Args:
        vocab: path of GPT-2's vocab.bpe; None for the copy that tiktoken keeps or downloads.
        encoder: path of GPT-2's encoder.json; None as above.

    Raises:
        ConfigError: if a file is missing or is not GPT-2's, or without files there is no
            network.
    """
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks
    from tiktoken_ext import openai_public

    if vocab is None or encoder is None:
        try:
            ranks = openai_public.gpt2()["mergeable_ranks"]
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"data.tokenizer = 'gpt2': its files cannot be fetched here "
                f"({type(error).__name__}). Bring vocab.bpe and encoder.json from "
                "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/ and set "
                "data.gpt2_vocab and data.gpt2_encoder to their paths."
            ) from None
    else:
        for setting, path in (("gpt2_vocab", vocab), ("gpt2_encoder", encoder)):
            file = Path(path).expanduser()
            known = file.is_file() and hashlib.sha256(file.read_bytes()).hexdigest()
            if known != GPT2_SHA256[setting]:
                why = "is not GPT-2's (by its SHA-256)" if known else "does not exist"
                raise ConfigError(f"data.{setting} = {path!r}: {why}. Give the file of GPT-2.")
        ranks = data_gym_to_mergeable_bpe_ranks(
            str(Path(vocab).expanduser()), str(Path(encoder).expanduser())
        )
    return Tokenizer("gpt2", tuple(sorted(ranks, key=ranks.__getitem__)))


def compacted(gpt2: Tokenizer, counts: npt.NDArray[np.int64], vocab_size: int | None) -> Tokenizer:
    """GPT-2's BPE with ids of their own only for the pieces most frequent in training.

    As in TinyStories (Eldan and Li 2023), which kept the 10,000 most frequent; here the
    others are not dropped but share one id.

    Args:
        gpt2: GPT-2's tokenizer.
        counts: [50257] how often each id occurs in the training tokens.
        vocab_size: at most so many ids, unknown and end of text included; None for no limit.
    """
    frequency = counts[:-1]
    most = np.argsort(-frequency, kind="stable")[: np.count_nonzero(frequency)]
    kept = most if vocab_size is None else most[: vocab_size - 2]
    return Tokenizer("gpt2-compact", gpt2.pieces, tuple(int(i) for i in np.sort(kept)))
