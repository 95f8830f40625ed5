"""How fast, and in how much memory, text becomes tokens; against the usual way.

    python benchmarks/prepare.py [--megabytes 2000] [--usual-megabytes 400]

Both sides run one after the other on the same machine, on the same text: stories of the
built-in generator, repeated up to the size asked for.

- ours: `tune_study.data.prepare`, all of it: hashing the file, reading and checking the
  documents, training the BPE, encoding, counting, checksums.
- usual: `datasets.map` over tiktoken's `encode_ordinary` with one process a core, then
  concatenation into a memory map. It gets the trained tokenizer as a present, and a
  loaded data set; only map and concatenation are timed. It may get a shorter piece of
  the text, since its speed does not depend on the length.

Prints MB/s of both, processor seconds (which other work on the machine disturbs less), the
peak resident memory of ours (of the process that has most) and the ratio of the MB/s. Checks
that the tokens are the same. The exit code is 1 if they are not, if the ratio is below 2, or
if all processes of ours together may have taken 1 GiB or more.

A BPE is trained on at most 64 MiB of text, which takes longer than encoding as much: shorter
texts than the default show that and little else.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tune_study.config import DataConfig  # noqa: E402
from tune_study.data import Tokenizer, open_tokens, prepare  # noqa: E402
from tune_study.data.corpora import read_documents  # noqa: E402
from tune_study.data.stories import stories  # noqa: E402
from tune_study.data.workers import MOST  # noqa: E402

END = "<|endoftext|>"
BLOCK = 150_000
"""Different stories, about 62 MB; then they repeat."""


def config(folder: Path) -> DataConfig:
    return DataConfig(
        corpus="text",
        name="bench",
        train=str(folder / "train.txt"),
        validation=str(folder / "validation.txt"),
    )


def make_text(folder: Path, megabytes: int) -> None:
    """Training text of the size asked for, and a small validation text."""
    train = "".join(f"{text}\n{END}\n" for text, _ in islice(stories(0, "train"), BLOCK)).encode()
    with (folder / "train.txt").open("wb") as file:
        while file.tell() < megabytes * 10**6:
            file.write(train)
    # The title keeps these apart from all training stories, so that none is left out there.
    held_out = (f"A tale. {text}\n{END}\n" for text, _ in islice(stories(0, "validation"), 2000))
    (folder / "validation.txt").write_text("".join(held_out))


def usual(folder: Path, tokens_folder: Path, megabytes: int) -> None:
    """The usual way, on the first megabytes of the text; writes usual.bin and its seconds."""
    import datasets

    datasets.disable_progress_bars()
    tokenizer = Tokenizer.from_json((tokens_folder / "tokenizer.json").read_text())
    encoding, end = tokenizer.encoding, tokenizer.end_of_text
    texts, size = [], 0
    for document in read_documents(folder / "train.txt", END, "text"):
        texts.append(bytes(document).decode())  # type: ignore[arg-type]
        size += len(document)
        if size >= megabytes * 10**6:
            break
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(str(folder / "rows"))
    del texts
    rows = datasets.load_from_disk(str(folder / "rows"))

    def process(row: dict[str, str]) -> dict[str, object]:
        ids = encoding.encode_ordinary(row["text"])
        ids.append(end)
        return {"ids": ids, "len": len(ids)}

    started, before = time.monotonic(), processor_seconds()
    mapped = rows.map(process, remove_columns=["text"], num_proc=os.cpu_count())
    mapped = mapped.with_format("arrow")  # far faster than rows as Python lists
    lengths = sum(batch["len"].to_numpy().sum() for batch in mapped.iter(100_000))
    target = np.memmap(folder / "usual.bin", dtype=np.uint16, mode="w+", shape=(int(lengths),))
    at = 0
    for batch in mapped.iter(10_000):
        ids = batch["ids"].combine_chunks().flatten().to_numpy()
        target[at : at + len(ids)] = ids
        at += len(ids)
    target.flush()
    seconds = time.monotonic() - started
    print(size, seconds, processor_seconds() - before)


def processor_seconds() -> float:
    """Of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def child(*arguments: object) -> tuple[str, float, float, int]:
    """Runs this file; gives its output, seconds, processor seconds, peak memory in bytes."""
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, __file__, *map(str, arguments)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{arguments[0]} failed")
    scale = 1 if sys.platform == "darwin" else 1024
    processor = usage.ru_utime + usage.ru_stime  # its own processes' included
    return output, time.monotonic() - started, processor, usage.ru_maxrss * scale


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--megabytes", type=int, default=2000, help="text for ours")
    parser.add_argument("--usual-megabytes", type=int, default=400, help="text for the usual way")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-prepare-"))
    try:
        make_text(folder, arguments.megabytes)
        size = (folder / "train.txt").stat().st_size
        print(f"text: {size / 1e6:,.0f} MB, {os.cpu_count()} cores", flush=True)
        _, seconds, processor, memory = child("ours", folder)
        ours = size / 1e6 / seconds
        print(
            f"ours:  {ours:6.1f} MB/s, {seconds:.0f} s, {processor:.0f} processor seconds "
            f"for {size / 1e6:,.0f} MB, at most {memory / 2**20:,.0f} MiB a process",
            flush=True,
        )
        tokens = open_tokens(config(folder), folder / "data", verify=False)
        least = min(arguments.usual_megabytes, arguments.megabytes)
        output, _, _, _ = child("usual", folder, tokens.folder, least)
        done, usual_seconds, usual_processor = map(float, output.split())
        print(
            f"usual: {done / 1e6 / usual_seconds:6.1f} MB/s, {usual_seconds:.0f} s, "
            f"{usual_processor:.0f} processor seconds for {done / 1e6:,.0f} MB"
        )
        same = np.memmap(folder / "usual.bin", dtype=np.uint16, mode="r")
        equal = all(
            np.array_equal(same[at : at + 2**22], tokens.train[at : at + 2**22][: len(same) - at])
            for at in range(0, len(same), 2**22)
        )
        print(f"the tokens are {'the same' if equal else 'NOT the same'}")
        ratio = ours / (done / 1e6 / usual_seconds)
        print(f"ratio: {ratio:.2f}")
        helpers = max(0, min((os.cpu_count() or 1) - 1, MOST))
        return 0 if equal and ratio >= 2 and memory * (1 + helpers) < 2**30 else 1
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    if sys.argv[1:2] == ["ours"]:
        prepare(config(Path(sys.argv[2])), Path(sys.argv[2]) / "data", lambda line: None)
    elif sys.argv[1:2] == ["usual"]:
        usual(Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
    else:
        sys.exit(main())
