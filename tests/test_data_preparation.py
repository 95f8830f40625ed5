"""Preparation end to end: bytes, manifest, refusals, interruption, concurrency."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tune_study.config import ConfigError, DataConfig
from tune_study.data import Manifest, open_tokens, prepare, process
from tune_study.data.stories import tell

REPOSITORY = Path(__file__).parents[1]
SHARED = REPOSITORY / ".." / "shared" / "data"
STORIES = [SHARED / f"tinystories_{split}.txt" for split in ("train", "valid")]
GPT2 = [SHARED / "gpt2_vocab.bpe", SHARED / "gpt2_encoder.json"]
SMALL = DataConfig(train_documents=1000, validation_documents=400, vocab_size=384)
END = "<|endoftext|>\n"


def quiet(line: str) -> None:
    pass


def tree(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def local(tmp_path: Path, train: list[str], validation: list[str], **settings: Any) -> DataConfig:
    for name, texts in (("train", train), ("validation", validation)):
        content = "".join(f"{text}\n{END}" for text in texts)
        (tmp_path / f"{name}.txt").write_bytes(content.encode())
    paths = {name: str(tmp_path / f"{name}.txt") for name in ("train", "validation")}
    return DataConfig(corpus="text", **paths, **({"tokenizer": "bytes"} | settings))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    prepare(SMALL, root, quiet)
    return root


# --- What is in the folder ---------------------------------------------------------------


def test_the_tokens_are_the_documents(tmp_path: Path) -> None:
    config = local(tmp_path, ["ab", "c"], ["é"])
    tokens = open_tokens(config, prepare(config, tmp_path / "root", quiet).parent)
    assert tokens.train.tolist() == [97, 98, 256, 99, 256]
    assert tokens.validation.tolist() == [0xC3, 0xA9, 256]
    assert tokens.train.dtype == np.uint16
    assert not tokens.train.flags.writeable
    manifest = tokens.manifest
    assert manifest.vocab_size == 257
    assert manifest.end_of_text == 256
    assert manifest.bytes_per_token == pytest.approx(2 / 3)
    # Frequencies 1/5, 1/5, 1/5, 2/5: H1 = 3/5 ln 5 + 2/5 ln 5/2; 5 tokens for 3 bytes.
    h1 = 3 / 5 * math.log(5) + 2 / 5 * math.log(5 / 2)
    assert manifest.unigram_entropy == pytest.approx(h1)
    assert manifest.unigram_bits_per_byte == pytest.approx(h1 * 5 / 3 / math.log(2))
    assert manifest.loss_floor is None
    assert manifest.train.documents == 2
    assert (manifest.train.shortest, manifest.train.longest) == (2, 3)
    assert tokens.tokenizer.decode(tokens.train) == "abc"


def test_the_rules_for_documents(tmp_path: Path) -> None:
    train = ["one", "two", "", " \n", "one", "both ", "â€œmangledâ€\x9d", "was \ufffd"]
    config = local(tmp_path, train, ["both", "three", "", "three"])
    (tmp_path / "train.txt").write_bytes(
        (tmp_path / "train.txt").read_bytes() + b"bad \xff\n" + END.encode()
    )
    lines: list[str] = []
    tokens = open_tokens(config, prepare(config, tmp_path / "root", lines.append).parent)
    report = tokens.manifest.train
    assert report.documents == 6
    assert (report.empty, report.duplicates, report.in_validation) == (2, 1, 1)
    assert (report.repaired, report.replacement_characters, report.mangled) == (1, 1, 2)
    assert report.first_lines == ("one", "two", "one")
    assert tokens.manifest.validation.documents == 3
    assert tokens.manifest.validation.empty == 1
    assert tokens.manifest.validation.duplicates == 1
    text = "|".join(tokens.tokenizer.decode(part) for part in split_at_end(tokens.train))
    assert text == "one|two|one|â€œmangledâ€\x9d|was \ufffd|bad \ufffd"
    printed = "\n".join(lines)
    assert "6 documents" in printed
    assert "2 empty (left out), 1 also in validation (left out), 1 duplicate (kept)" in printed


def split_at_end(tokens: np.ndarray) -> list[np.ndarray]:
    ends = np.flatnonzero(tokens == 256)
    return [tokens[a + 1 : b] for a, b in zip([-1, *ends[:-1]], ends, strict=True)]


def test_synthetic_floor_and_entropy(small: Path) -> None:
    tokens = open_tokens(SMALL, small)
    manifest = tokens.manifest
    text = tokens.tokenizer.decode(tokens.validation)
    assert len(text) == manifest.validation.text_bytes
    ends = np.flatnonzero(tokens.validation == manifest.end_of_text)
    starts = [0, *(ends[:-1] + 1)]
    stories = [
        tokens.tokenizer.decode(tokens.validation[a:b]) for a, b in zip(starts, ends, strict=True)
    ]
    log_p = [process.read(tell, story)[0] for story in stories]
    assert manifest.loss_floor == pytest.approx(-sum(log_p) / len(tokens.validation))
    # The floor a document is a mean of 400 draws of -log p, whose expectation is the entropy.
    entropy = process.entropy(tell)
    assert manifest.document_entropy == pytest.approx(entropy)
    floor_a_document = manifest.loss_floor * manifest.validation.tokens / 400
    assert abs(floor_a_document - entropy) < 4 * np.std(log_p) / math.sqrt(400)
    assert 0 < manifest.loss_floor < manifest.unigram_entropy < math.log(manifest.vocab_size)


def test_default_synthetic_corpus_has_the_shape_the_studies_need(tmp_path: Path) -> None:
    manifest = open_tokens(DataConfig(), prepare(DataConfig(), tmp_path, quiet).parent).manifest
    assert manifest.vocab_size == 512
    assert manifest.train.tokens > 1_000_000
    assert 4.5 < manifest.unigram_entropy < 5
    assert manifest.loss_floor is not None
    assert manifest.loss_floor < 0.5
    assert manifest.train.in_validation == 0
    # The tokens are part of every result: other ones need another manifest.FORMAT.
    assert manifest.checksum[:16] == "4dc813ea3039e3d8"


def test_the_manifest_is_strict_json_and_comes_back(small: Path) -> None:
    folder = next(small.glob("synthetic-*"))
    json.loads((folder / "manifest.json").read_text(), parse_constant=pytest.fail)
    manifest = Manifest.read(folder)
    assert manifest.to_json() == (folder / "manifest.json").read_text()


# --- Recognised, rebuilt, refused --------------------------------------------------------


def test_unchanged_input_is_recognised_without_reading_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = local(tmp_path, ["ab"], ["c"])
    folder = prepare(config, tmp_path / "root", quiet)
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    monkeypatch.setattr("tune_study.data.corpora.read_documents", pytest.fail)
    lines: list[str] = []
    assert prepare(config, tmp_path / "root", lines.append) == folder
    assert lines == [f"{folder.name}: unchanged."]
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_every_change_gives_another_folder(tmp_path: Path) -> None:
    base = SMALL.replace(train_documents=50, validation_documents=10, vocab_size=300)
    changed = [
        base,
        base.replace(train_documents=51),
        base.replace(validation_documents=11),
        base.replace(seed=1),
        base.replace(vocab_size=301),
        base.replace(tokenizer="bytes", vocab_size=None),
    ]
    folders = [prepare(config, tmp_path, quiet) for config in changed]
    assert len(set(folders)) == len(changed)
    checksums = {open_tokens(config, tmp_path).manifest.checksum for config in changed}
    assert len(checksums) == len(changed)


def test_changed_text_is_another_corpus(tmp_path: Path) -> None:
    root = tmp_path / "root"
    config = local(tmp_path, ["ab"], ["c"])
    first = prepare(config, root, quiet)
    checksum = open_tokens(config, root).manifest.checksum
    local(tmp_path, ["abc"], ["c"])
    with pytest.raises(ConfigError, match=r"train\.txt: is not prepared, or has changed.*prepare"):
        open_tokens(config, root)
    # A sweep that has begun keeps its tokens: it names them by their checksum.
    assert open_tokens(config, root, verify=False, checksum=checksum).folder == first
    second = prepare(config, root, quiet)
    assert second != first
    assert open_tokens(config, root).folder == second
    assert open_tokens(config, root, checksum=checksum).folder == first
    with pytest.raises(ConfigError, match="with checksum 123 are under"):
        open_tokens(config, root, checksum="123")


def test_touched_text_is_read_once_more_and_recognised(tmp_path: Path) -> None:
    config = local(tmp_path, ["ab"], ["c"])
    folder = prepare(config, tmp_path / "root", quiet)
    os.utime(tmp_path / "train.txt", ns=(1, 1))
    assert prepare(config, tmp_path / "root", quiet) == folder
    assert open_tokens(config, tmp_path / "root").folder == folder


def test_tokens_stand_without_their_text(tmp_path: Path) -> None:
    config = local(tmp_path, ["ab"], ["c"])
    folder = prepare(config, tmp_path / "root", quiet)
    shutil.move(tmp_path / "root", tmp_path / "moved")
    (tmp_path / "train.txt").unlink()
    (tmp_path / "validation.txt").unlink()
    assert open_tokens(config, tmp_path / "moved").folder.name == folder.name
    assert prepare(config, tmp_path / "moved", quiet).name == folder.name
    other = config.replace(train=str(tmp_path / "other.txt"))
    with pytest.raises(ConfigError, match=r"no tokens of this configuration.*prepare STUDY"):
        open_tokens(other, tmp_path / "moved")
    with pytest.raises(ConfigError, match=r"train = .*other\.txt': does not exist"):
        prepare(other, tmp_path / "moved", quiet)


def test_the_same_text_in_other_files_is_the_same_corpus(tmp_path: Path) -> None:
    texts = ["one", "two", "three"]
    for name, rows in (("train", texts), ("validation", ["four"])):
        frame = pd.DataFrame({"text": rows})
        frame.to_parquet(tmp_path / f"{name}.parquet")
        frame.to_json(tmp_path / f"{name}.jsonl", orient="records", lines=True)
    checksums = set()
    for kind in ("txt", "parquet", "jsonl"):
        config = local(tmp_path, texts, ["four"], name="Numbers").replace(
            train=str(tmp_path / f"train.{kind}"), validation=str(tmp_path / f"validation.{kind}")
        )
        folder = prepare(config, tmp_path / "root", quiet)
        assert folder.name.startswith("Numbers-bytes-")
        checksums.add(open_tokens(config, tmp_path / "root").manifest.checksum)
    assert len(checksums) == 1


@pytest.mark.parametrize("name", ["train.bin", "validation.bin", "tokenizer.json"])
def test_an_altered_byte_is_refused_and_mended(small: Path, tmp_path: Path, name: str) -> None:
    root = shutil.copytree(small, tmp_path / "root")
    folder = next(root.glob("synthetic-*"))
    good = tree(folder)
    content = bytearray(good[name])
    content[len(content) // 2] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(ConfigError, match=rf"{name} .*altered.*tune_study prepare STUDY"):
        open_tokens(SMALL, root)
    lines: list[str] = []
    prepare(SMALL, root, lines.append)
    assert "Building it anew" in lines[0]
    assert tree(folder) == good


def test_damage_is_refused(small: Path, tmp_path: Path) -> None:
    root = shutil.copytree(small, tmp_path / "root")
    folder = next(root.glob("synthetic-*"))
    train = (folder / "train.bin").read_bytes()
    (folder / "train.bin").write_bytes(train[:-2])
    with pytest.raises(ConfigError, match=r"train\.bin is missing or cut off"):
        open_tokens(SMALL, root, verify=False)
    (folder / "train.bin").write_bytes(train)
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text[:-40])
    with pytest.raises(ConfigError, match=r"manifest\.json is missing, damaged.*prepare STUDY"):
        open_tokens(SMALL, root)
    content = json.loads(text) | {"format": 0}
    (folder / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="of another version"):
        open_tokens(SMALL, root)


def test_what_was_never_prepared_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not exist\. Run `python -m tune_study prepare"):
        open_tokens(SMALL, tmp_path)


def test_no_document_is_refused(tmp_path: Path) -> None:
    config = local(tmp_path, ["same"], ["same"])
    with pytest.raises(ConfigError, match=r"data\.train: holds no document"):
        prepare(config, tmp_path / "root", quiet)
    assert not [path for path in (tmp_path / "root").iterdir() if path.is_dir()]


# --- Cut off, and two at once ------------------------------------------------------------

PREPARE = """
import sys
from pathlib import Path
from tune_study.config import DataConfig
from tune_study.data import prepare
config = DataConfig(train_documents=1000, validation_documents=400, vocab_size=384)
print("started", flush=True)
print(prepare(config, Path(sys.argv[1])).name, flush=True)
"""


def start(root: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PREPARE, str(root)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
def test_killed_at_ten_moments_then_again_gives_the_same_bytes(small: Path, tmp_path: Path) -> None:
    undisturbed = next(small.glob("synthetic-*"))
    root = tmp_path / "root"

    def cut_off_after(seconds: float | None) -> tuple[float, bool]:
        """Starts a preparation, kills it; tells how long it ran and whether it was cut off."""
        running = start(root)
        assert running.stdout is not None
        running.stdout.readline()
        began = time.monotonic()
        if seconds is not None:
            time.sleep(seconds)
            running.send_signal(signal.SIGKILL)
        running.communicate()
        for folder in root.glob("synthetic-*"):  # what bears the name is whole
            made, good = tree(folder), tree(undisturbed)
            # Written after it, in one step too; the next to write it takes what was cut off away.
            for name in ("sources.json", ".sources.json.partial"):
                made.pop(name, None)
            good.pop("sources.json")
            assert made == good
            shutil.rmtree(folder)
        return time.monotonic() - began, running.returncode == -signal.SIGKILL

    whole, _ = cut_off_after(None)
    killed = [cut_off_after(whole * moment / 10)[1] for moment in range(10)]
    assert sum(killed) >= 3  # the machine may be faster the second time
    prepare(SMALL, root, quiet)
    assert tree(root / undisturbed.name) == tree(undisturbed)
    assert not list(root.glob(".*.partial"))


HELPER = """
import time
from tune_study.data.tokenizers import byte_tokenizer
from tune_study.data.workers import _Worker
worker = _Worker(byte_tokenizer())
worker.send(["a"])
print(worker.receive().tolist(), flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
def test_a_killed_preparation_leaves_no_helper_behind() -> None:
    running = subprocess.Popen(
        [sys.executable, "-c", HELPER],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stdout is not None
    assert running.stdout.readline() == "[97, 256]\n"
    running.send_signal(signal.SIGKILL)
    # The helper has the same standard error, which ends only when both have ended.
    _, errors = running.communicate(timeout=30)
    assert errors == ""


def test_two_at_once_do_not_collide(small: Path, tmp_path: Path) -> None:
    processes = [start(tmp_path) for _ in range(3)]
    for running in processes:
        _, errors = running.communicate(timeout=60)
        assert running.returncode == 0, errors
    undisturbed = next(small.glob("synthetic-*"))
    assert [path.name for path in tmp_path.glob("synthetic-*")] == [undisturbed.name]
    assert tree(tmp_path / undisturbed.name) == tree(undisturbed)


def test_the_package_needs_neither_torch_nor_ray() -> None:
    code = (
        "import sys, tune_study.data as d; "
        "print({'torch', 'ray', 'datasets', 'pandas', 'tiktoken', 'rustbpe'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"


# --- Real text ---------------------------------------------------------------------------


@pytest.mark.skipif(
    not all(path.exists() for path in STORIES + GPT2),
    reason="the TinyStories samples and GPT-2's BPE are not here",
)
def test_tinystories_known_counts(tmp_path: Path) -> None:
    config = DataConfig(
        corpus="text",
        name="TinyStories",
        train=str(STORIES[0]),
        validation=str(STORIES[1]),
        tokenizer="gpt2",
        gpt2_vocab=str(GPT2[0]),
        gpt2_encoder=str(GPT2[1]),
    )
    tokens = open_tokens(config, prepare(config, tmp_path, quiet).parent)
    manifest = tokens.manifest
    assert (manifest.train.documents, manifest.validation.documents) == (8393, 1166)
    assert (manifest.train.tokens, manifest.validation.tokens) == (1_658_208, 234_965)
    assert manifest.train.in_validation == 0
    both = np.union1d(np.unique(tokens.train), np.unique(tokens.validation))
    assert len(both) == 8_788
    compact = config.replace(tokenizer="gpt2-compact")
    small = open_tokens(compact, prepare(compact, tmp_path, quiet).parent)
    # Same tokens, renumbered: of the 8,788 ids 285 occur in validation alone.
    assert small.manifest.vocab_size == manifest.train.distinct_ids + 1
    assert small.manifest.unigram_entropy == pytest.approx(manifest.unigram_entropy)
    assert small.manifest.train.tokens == manifest.train.tokens
    assert 8_788 - manifest.train.distinct_ids == 285
    assert small.manifest.validation.unknown == int(
        np.isin(tokens.validation, np.unique(tokens.train), invert=True).sum()
    )
