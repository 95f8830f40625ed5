"""The manifest beside the tokens: what they are, how many, and how to know them again."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from tune_study.config import Config, ConfigError

FORMAT = 1
"""Changes when the same input would give other bytes, so that old folders are not taken."""

MANIFEST, TOKENIZER = "manifest.json", "tokenizer.json"
TOKENS = {"train": "train.bin", "validation": "validation.bin"}


class Source(Config):
    """One file that was read."""

    split: str
    name: str
    size: int = Field(description="bytes")
    sha256: str


class SplitReport(Config):
    """What a split holds, and what was found in its text. docs/data.md defines the rules."""

    documents: int = Field(description="documents in the tokens")
    tokens: int = Field(description="tokens, one end of text a document included")
    text_bytes: int = Field(description="bytes of UTF-8 text, ends of text excluded")
    empty: int = Field(description="documents without a visible character, left out")
    duplicates: int = Field(description="documents that repeat an earlier one, kept")
    in_validation: int = Field(description="documents that validation holds too, left out")
    repaired: int = Field(description="invalid bytes or surrogates, each now U+FFFD")
    replacement_characters: int = Field(description="U+FFFD that the text came with, left")
    mangled: int = Field(description="characters encoded twice, such as a mangled quote, left")
    distinct_ids: int = Field(description="different token ids, end of text included")
    unknown: int = Field(description="tokens that became the unknown id")
    shortest: int = Field(description="tokens of the shortest document, end of text included")
    longest: int = Field(description="tokens of the longest document, end of text included")
    first_lines: tuple[str, ...] = Field(description="beginnings of the first three documents")


class Manifest(Config):
    """All there is to know about a folder of tokens. Entropies are in nats."""

    format: int
    corpus: str
    settings: dict[str, Any]
    sources: tuple[Source, ...]
    tokenizer: str
    tokenizer_sha256: str
    tokenizer_sample: int = Field(description="first training documents that trained the BPE")
    vocab_size: int
    end_of_text: int
    dtype: str
    sha256: dict[str, str] = Field(description="of the bytes of each token file")
    checksum: str = Field(description="of tokenizer and tokens: their one name")
    unigram_entropy: float = Field(description="H1 of the training tokens, nats a token")
    unigram_bits_per_byte: float = Field(description="of the unigram model on training text")
    bytes_per_token: float = Field(description="bytes of validation text a token stands for")
    loss_floor: float | None = Field(
        description="nats a token that the corpus' own distribution needs on validation"
    )
    document_entropy: float | None = Field(
        description="exact entropy of the corpus' distribution, nats a document"
    )
    train: SplitReport
    validation: SplitReport

    def to_json(self) -> str:
        """Strict JSON, the same for equal manifests."""
        return json.dumps(self.model_dump(mode="json"), indent=2, allow_nan=False) + "\n"

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a folder.

        Raises:
            ConfigError: if it is missing, damaged or of another format.
        """
        path = folder / MANIFEST
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise ConfigError(f"{path}: is missing or damaged.") from None
        return cls(**content)

    def report(self) -> list[str]:
        """The data report: lines for people."""
        lines = [
            f"{self.corpus}: {self.tokenizer} tokenizer, {self.vocab_size:,} ids, "
            f"H1 {self.unigram_entropy:.4f} nats/token "
            f"({self.unigram_bits_per_byte:.4f} bits/byte as a unigram model), "
            f"{self.bytes_per_token:.3f} bytes/token"
        ]
        if self.loss_floor is not None:
            lines.append(
                f"  loss floor {self.loss_floor:.4f} nats/token on validation: "
                "what the process that wrote it needs itself"
            )
        for name, split in (("training", self.train), ("validation", self.validation)):
            lines.append(
                f"  {name}: {split.documents:,} documents, {split.tokens:,} tokens "
                f"({split.distinct_ids:,} different), {split.text_bytes:,} bytes; "
                f"{split.shortest:,} to {split.longest:,} tokens a document"
            )
            found = {
                "empty (left out)": split.empty,
                "also in validation (left out)": split.in_validation,
                "duplicate (kept)": split.duplicates,
                "invalid characters (now U+FFFD)": split.repaired,
                "U+FFFD (left)": split.replacement_characters,
                "mangled characters (left)": split.mangled,
                "tokens unknown to the tokenizer": split.unknown,
            }
            lines.append(
                "    found: " + ", ".join(f"{n:,} {what}" for what, n in found.items() if n)
                if any(found.values())
                else "    found: nothing to note"
            )
        lines += [f"  | {line}" for line in self.train.first_lines]
        return lines


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tokens_checksum(tokenizer_sha256: str, sha256: dict[str, str]) -> str:
    """One name for tokenizer and tokens: SHA-256 over their SHA-256s."""
    parts = [tokenizer_sha256, *(sha256[split] for split in TOKENS)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def unigram_entropy(counts: np.ndarray) -> float:
    """H1 = -sum p ln p of token frequencies, in nats; what a model without context loses."""
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())
