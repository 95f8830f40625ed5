"""Draws figures into files: NAME.vl.json in, NAME.svg, NAME.pdf and NAME.png beside it.

    python analysis/convert.py report/figures/*.vl.json

As a script it also takes paths from its standard input, one a line. `Converters` runs it
that way: vl-convert holds Python's lock while it draws, so that only processes draw side by
side. Nothing but vl-convert is imported, as each of them starts anew.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

import vl_convert

SUFFIX = ".vl.json"
SCALE = 2.5
"""Pixels of a PNG for one of the drawing; 180 a printed inch at one column's width."""


def convert(path: Path) -> None:
    """Draws the Vega-Lite specification in `path`. Each file appears whole or not at all."""
    spec = json.loads(path.read_text(encoding="utf-8"))
    version = re.search(r"/v(\d+\.\d+)[^/]*\.json$", spec["$schema"])
    if version is None:
        raise ValueError(f"{path}: $schema {spec['$schema']!r} names no version of Vega-Lite")
    svg = _numbered_afresh(vl_convert.vegalite_to_svg(spec, vl_version=version[1]))
    stem = path.name.removesuffix(SUFFIX)
    # Drawn once; the others are made of the drawing.
    replace_file(path.with_name(f"{stem}.svg"), svg)
    replace_file(path.with_name(f"{stem}.pdf"), vl_convert.svg_to_pdf(svg))
    replace_file(path.with_name(f"{stem}.png"), vl_convert.svg_to_png(svg, scale=SCALE))


def _numbered_afresh(svg: str) -> str:
    """The drawing with its ids counted from 0; Vega counts on from one drawing to the next."""
    ids = {name: f"id_{i}" for i, name in enumerate(dict.fromkeys(_ID.findall(svg)))}
    return re.sub(r"\b(?:clip|gradient_?)\d+\b", lambda name: ids.get(name[0], name[0]), svg)


_ID = re.compile(r'id="((?:clip|gradient_?)\d+)"')


def replace_file(path: Path, content: bytes | str) -> None:
    """Writes a file whole or not at all: beside its place first, then moved there."""
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(content.encode() if isinstance(content, str) else content)
    os.replace(part, path)


class Converters:
    """Processes that draw while this one goes on; to be used in a `with`, which waits for them."""

    def __init__(self, count: int) -> None:
        command = [sys.executable, "-P", str(Path(__file__).resolve())]
        self._processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, text=True) for _ in range(count)
        ]

    def convert(self, path: Path, by: int) -> None:
        """Hands one specification to process number `by`; returns at once."""
        stdin = self._processes[by].stdin
        assert stdin is not None
        stdin.write(f"{path.resolve()}\n")
        stdin.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Waits until all is drawn, or stops the processes after an error.

        Raises:
            RuntimeError: if one of them failed; what it said stands on the standard error.
        """
        for process in self._processes:
            if error is not None:
                process.kill()
            process.communicate()
        failed = [p.returncode for p in self._processes if p.returncode]
        if failed and (error is None or isinstance(error, BrokenPipeError)):
            raise RuntimeError(f"a figure could not be drawn, exit code {failed[0]}") from None


def main() -> None:
    """Draws every file named, then those that the standard input names until it ends."""
    # Ctrl-C reaches the whole group; whoever started this process decides about it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in sys.argv[1:] or sys.stdin:
        convert(Path(name.rstrip("\n")))


if __name__ == "__main__":
    main()
