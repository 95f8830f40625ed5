"""Which tokens a training step and a validation see: pure functions, nothing to save."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tune_study.config import ConfigError

Windows = npt.NDArray[np.int64]


class Batches:
    """Training windows, as a pure function of (seed, step).

    Every start at which a whole window fits is equally likely, at every step anew, so
    every token can be drawn and passing over a corpus several times needs no epochs.
    The numbers come from one Philox stream a seed (Salmon et al. 2011, a counter-based
    generator): step s reads its own blocks of the stream, whatever was read before. Only
    the raw 64-bit output is used, which numpy keeps stable over versions.

    Args:
        tokens: [n] token ids of the training split.
        seed: of the data order; from 0 up to 2**128.
        windows: windows a step.
        context: tokens a window, beside the one more that is its last target.

    Raises:
        ConfigError: if not even one window fits into the tokens.
    """

    def __init__(self, tokens: npt.NDArray, seed: int, windows: int, context: int) -> None:
        # A plain view: indexing an np.memmap costs several times more than an array.
        self._tokens = np.asarray(tokens)
        self._seed, self._windows = seed, windows
        self._offsets = np.arange(context + 1)
        self._starts = len(tokens) - context
        self._blocks = -(-windows // 4)  # Philox4x64 gives four numbers a counter
        if self._starts < 1:
            raise ConfigError(
                f"context = {context}: a window of {context + 1} tokens does not fit into the "
                f"{len(tokens)} tokens of training. Give at most {len(tokens) - 1}."
            )

    def at(self, step: int) -> Windows:
        """Windows of one step: int64 [windows, context + 1]."""
        return self.range(step, step + 1)[0]

    def range(self, start: int, stop: int) -> Windows:
        """Windows of steps start to stop - 1: int64 [stop - start, windows, context + 1]."""
        steps = stop - start
        stream = np.random.Philox(key=self._seed, counter=start * self._blocks)
        raw = stream.random_raw(steps * self._blocks * 4).reshape(steps, -1)[:, : self._windows]
        # The bias of the remainder is at most starts / 2**64: nothing.
        starts = (raw % np.uint64(self._starts)).astype(np.int64)
        return self._tokens[starts[:, :, None] + self._offsets].astype(np.int64)


def validation_windows(tokens: npt.NDArray, windows: int, context: int) -> Windows:
    """Fixed, disjoint windows, spread evenly over the split.

    Args:
        tokens: [n] token ids of the validation split.
        windows: how many.
        context: tokens a window, beside the one more that is its last target.

    Returns:
        int64 [windows, context + 1].

    Raises:
        ConfigError: if so many do not fit without overlap; tells how many do.
    """
    fit = len(tokens) // (context + 1)
    if windows > fit:
        raise ConfigError(
            f"val_windows = {windows}: only {fit} windows of {context + 1} tokens fit into the "
            f"{len(tokens)} tokens of validation. Give at most {fit}, or more validation text."
        )
    # Neighbouring starts differ by at least floor(n / windows) >= context + 1.
    starts = np.arange(windows) * len(tokens) // windows
    return np.asarray(tokens)[starts[:, None] + np.arange(context + 1)].astype(np.int64)
