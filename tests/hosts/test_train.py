"""`muonmesh train` with libraries that it can use where they are: pyarrow, datasets, TensorBoard, wandb."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pytest
from datasets import Dataset, DatasetDict
from pyarrow import parquet
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2

from muonmesh.cli.corpus import prepare_corpus
from muonmesh.cli.failure import RunError
from muonmesh.cli.metrics import read_metrics
from muonmesh.errors import FileError

TEXTS = [f"Sentence {number} tells that {number} times {number} is {number * number}. " * 6 for number in range(120)]


def test_the_same_records_are_the_same_tokens_in_every_kind_of_file(tmp_path: Path) -> None:
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps({"body": text, "n": 1}) + "\n" for text in TEXTS))
    parquet.write_table(pyarrow.table({"n": [1] * 120, "body": TEXTS}), tmp_path / "rows.parquet", row_group_size=50)
    Dataset.from_dict({"body": TEXTS}).save_to_disk(tmp_path / "saved")
    found = {
        name: prepare_corpus([str(tmp_path / name)], vocab=300, cache=tmp_path / "cache", field="body")
        for name in ("lines.jsonl", "rows.parquet", "saved")
    }
    assert len({corpus.digest for corpus in found.values()}) == 1
    assert len({corpus.directory for corpus in found.values()}) == 3
    assert found["saved"].files == 1, "what lies beside the Arrow files was read too"
    assert found["saved"].characters == sum(map(len, TEXTS))


def test_a_folder_of_splits_is_told_which_there_are(tmp_path: Path) -> None:
    part = Dataset.from_dict({"text": TEXTS})
    DatasetDict({"train": part, "held": part}).save_to_disk(tmp_path / "saved")
    with pytest.raises(
        RunError, match=r"found the splits held, train; needed one of them\. Write: --data .*saved/held"
    ):
        prepare_corpus([str(tmp_path / "saved")], vocab=300, cache=tmp_path / "cache")
    one = prepare_corpus([str(tmp_path / "saved" / "train")], vocab=300, cache=tmp_path / "cache")
    assert one.characters == sum(map(len, TEXTS))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"body": ["a"]}, r"found no text 'text' in it, but body\. Name the field with --text-field"),
        ({"text": [3]}, r"found int64 in the column 'text'; needed text"),
        ({"text": ["a", None]}, r"found a null in the column 'text'; needed text in each row"),
    ],
)
def test_a_column_without_text_is_told_by_its_name(
    columns: dict[str, list[object]], message: str, tmp_path: Path
) -> None:
    parquet.write_table(pyarrow.table(columns), tmp_path / "rows.parquet")
    with pytest.raises(FileError, match=message):
        prepare_corpus([str(tmp_path / "rows.parquet")], vocab=300, cache=tmp_path / "cache")


def test_a_cut_file_is_one_sentence(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.table({"text": TEXTS}), tmp_path / "rows.parquet")
    (tmp_path / "rows.parquet").write_bytes((tmp_path / "rows.parquet").read_bytes()[:-40])
    with pytest.raises(FileError, match=r"rows\.parquet: could not be read \(.*; needed a whole \.parquet file"):
        prepare_corpus([str(tmp_path / "rows.parquet")], vocab=300, cache=tmp_path / "cache")


def records(content: bytes) -> Iterator[wandb_internal_pb2.Record]:
    """What a .wandb file holds: LevelDB's log format, in blocks of 32 KiB, after a header of seven bytes."""
    whole, position = b"", 7
    while position + 7 <= len(content):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", content[position : position + 7])
        whole += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def test_losses_and_metrics_reach_tensorboard_and_wandb(tmp_path: Path) -> None:
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    run = tmp_path / "run"
    options = ("--data", tmp_path / "lines.jsonl", "--model", "nano", "--vocab", 300, "--seq", 32, "--batch", 4)
    options += ("--steps", 2, "--eval-every", 1, "--eval-sequences", 2, "--ranks", 1, "--parallel", "ddp")
    options += ("--device", "cpu", "--dtype", "fp32", "--optimizer", "muon", "--out", run)
    command = [sys.executable, "-c", "from muonmesh.cli import main; main()", "train", *map(str, options)]
    logs = ["--log", "tensorboard", "--log", "wandb"]
    done = subprocess.run([*command, *logs], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = read_metrics(run)

    events = EventAccumulator(str(run / "tensorboard" / "muon"))
    events.Reload()
    for name in ("loss", "validation_loss", "lr"):
        written = [(line["step"], line[name]) for line in lines if name in line]
        assert [event.step for event in events.Scalars(name)] == [step for step, _ in written]
        assert [event.value for event in events.Scalars(name)] == pytest.approx([value for _, value in written])
    details = lines[-1]["optimizer"]
    assert {f"optimizer/{name}" for name, value in details.items() if value is not None} <= set(
        events.Tags()["scalars"]
    )

    (file,) = (run / "wandb").glob("offline-run-*/run-*.wandb")
    losses = []
    for record in records(file.read_bytes()):
        items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
        losses += [json.loads(items["loss"])] if "loss" in items else []
    assert losses == [line["loss"] for line in lines if "loss" in line]
