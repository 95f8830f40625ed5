"""The rules for documents: what is repaired, left out, kept, and counted.

- A document that is not valid Unicode (bytes that are not UTF-8, lone surrogates in JSON)
  is repaired: each fault becomes U+FFFD, and is counted.
- Characters that were encoded twice (a mangled quote: U+00E2 U+20AC U+0153) and U+FFFD that
  the text came with are counted and left: what is right is a guess, and a study of
  TinyStories should see the data set that others saw.
- An empty document, without any visible character, is left out.
- A training document that validation holds too is left out of training. Documents are the
  same if they are equal, white space at their ends aside.
- A document that repeats an earlier one of its split is counted and kept.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

REPLACEMENT = "\ufffd"

# UTF-8 of a character above U+007F, read as Windows-1252: the lead byte of two or three
# and a continuation byte, as the characters they turn into there.
_CONTINUATION = "".join(
    bytes([byte]).decode("cp1252", errors="ignore") or chr(byte) for byte in range(0x80, 0xC0)
)
MANGLED = re.compile(f"[\u00c2-\u00df][{_CONTINUATION}]|[\u00e0-\u00ef][{_CONTINUATION}]{{2}}")
"""One character encoded twice."""


@dataclass
class Found:
    """Counts of what `clean` saw."""

    repaired: int = 0
    replacement_characters: int = 0
    mangled: int = 0


def clean(document: str | bytes, found: Found) -> str:
    """A document as valid Unicode text; adds what it saw to `found`."""
    if isinstance(document, bytes):
        if document.isascii():
            return document.decode("ascii")
        text = document.decode("utf-8", errors="replace")
        present = document.count(REPLACEMENT.encode())
    else:
        if document.isascii():
            return document
        present = document.count(REPLACEMENT)
        # Joins the halves of a character above U+FFFF, replaces halves that stand alone.
        text = document.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    found.repaired += text.count(REPLACEMENT) - present
    found.replacement_characters += present
    found.mangled += sum(1 for _ in MANGLED.finditer(text))
    return text


def fingerprint(text: str) -> bytes:
    """16 bytes that are equal for equal documents, white space at the ends aside.

    Different documents share one with probability 2**-128.
    """
    return hashlib.blake2b(text.strip().encode(), digest_size=16).digest()
