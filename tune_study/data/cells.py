"""Exact BPE encoding at several times the speed of encoding whole documents.

Nearly all the time of a byte-level BPE goes into cutting text into pieces by its regular
expression, again and again for the same words. GPT-2's pattern never looks behind, and
none of its alternatives goes on from a visible character over a space. So a single space
between two visible characters always begins a new piece, and the text between two such
spaces, a cell, has the same tokens wherever it stands. Cells repeat, as words do: each is
encoded once and looked up after that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

MEMORY = 1 << 19
"""Cells to keep; beyond that all are forgotten, to bound memory to about 100 MB."""


class _IrregularError(Exception):
    """A word that is no cell: empty, or with white space at an end."""


class CellEncoder:
    """Encodes documents cell by cell. Not to be shared between threads.

    Args:
        encode: token ids of a text, by a pattern with the property above.
        end: the id that follows every document.
        dtype: of the token ids.
    """

    def __init__(self, encode: Callable[[str], list[int]], end: int, dtype: np.dtype) -> None:
        self._dtype = dtype
        self._encode = lambda text: np.array(encode(text), dtype=dtype).tobytes()
        self._end = np.array([end], dtype=dtype).tobytes()
        self._first = _Cells(self._encode, "")
        self._inner = _Cells(self._encode, " ")

    def __call__(self, texts: Sequence[str]) -> npt.NDArray:
        """Token ids of documents one after the other, with the end after each: [n]."""
        parts: list[bytes] = []
        inner = self._inner.__getitem__
        for text in texts:
            mark = len(parts)
            words = text.split(" ")
            try:
                parts.append(self._first[words[0]])
                parts.extend(map(inner, words[1:]))
            except _IrregularError:  # two spaces, or a space beside a line break
                parts[mark:] = [self._encode(text)]
            parts.append(self._end)
        if len(self._first) + len(self._inner) > MEMORY:
            self._first.clear()
            self._inner.clear()
        return np.frombuffer(b"".join(parts), dtype=self._dtype)


class _Cells(dict[str, bytes]):
    """Word to the bytes of its token ids, encoded after `before` when first asked for."""

    def __init__(self, encode: Callable[[str], bytes], before: str) -> None:
        self._encode, self._before = encode, before

    def __missing__(self, word: str) -> bytes:
        # isspace() is true for all that the pattern's \s matches, and a little more.
        if not word or word[0].isspace() or word[-1].isspace():
            raise _IrregularError
        self[word] = ids = self._encode(self._before + word)
        return ids
