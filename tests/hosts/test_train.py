"""`muonmesh train` with libraries that it can use where they are: pyarrow, datasets."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pytest
from datasets import Dataset
from pyarrow import parquet

from muonmesh.cli.corpus import prepare_corpus
from muonmesh.errors import FileError

TEXTS = [f"Sentence {number} tells that {number} times {number} is {number * number}. " * 6 for number in range(120)]


def test_the_same_records_are_the_same_tokens_in_every_kind_of_file(tmp_path: Path) -> None:
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps({"body": text, "n": 1}) + "\n" for text in TEXTS))
    parquet.write_table(pyarrow.table({"n": [1] * 120, "body": TEXTS}), tmp_path / "rows.parquet", row_group_size=50)
    Dataset.from_dict({"body": TEXTS}).to_parquet(tmp_path / "saved.parquet")
    found = {
        name: prepare_corpus([str(tmp_path / name)], vocab=300, cache=tmp_path / "cache", field="body")
        for name in ("lines.jsonl", "rows.parquet", "saved.parquet")
    }
    assert len({corpus.digest for corpus in found.values()}) == 1
    assert len({corpus.directory for corpus in found.values()}) == 3
    assert found["saved.parquet"].characters == sum(map(len, TEXTS))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"body": ["a"]}, r"found no text 'text' in it, but body\. Name the field with --text-field"),
        ({"text": [3]}, r"found a number in the column 'text'; needed text"),
        ({"text": ["a", None]}, r"found null in the column 'text'; needed text in each row"),
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
    with pytest.raises(FileError, match=r"rows\.parquet: could not be read \(.*; needed a whole file"):
        prepare_corpus([str(tmp_path / "rows.parquet")], vocab=300, cache=tmp_path / "cache")
