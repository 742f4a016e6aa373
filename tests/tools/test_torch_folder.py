"""A folder of `torch.distributed.checkpoint`: its pickle is read without running it, and its tensors are checked."""

from __future__ import annotations

import os
import pickle
import resource
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties
from torch.distributed.checkpoint.state_dict_saver import save

from muonmesh.checkpoint.manifest import METADATA_FILE, check_entries, entry_of, read_manifest, write_manifest
from muonmesh.errors import FileError
from muonmesh.step.state_form import wrong_numbers
from muonmesh.tools.checkpoints.torch_folder import check_tensors, survey

STATE: dict[str, Any] = {
    "model": {"weight": torch.arange(600.0).view(20, 30), "bias": torch.ones(3, dtype=torch.bfloat16)},
    "optimizer": {"state": {"weight": {"exp_avg_sq": torch.ones(20, 30), "step": torch.tensor(3.0)}}},
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "step"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        save(STATE, checkpoint_id=folder)
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    return shutil.copytree(written, tmp_path / "step")


def look(folder: Path) -> None:
    check_tensors(folder, survey(folder)[0], wrong=wrong_numbers)


def test_what_torch_writes_is_read_as_torch_reads_it(folder: Path) -> None:
    look(folder)
    (found, _), expected = survey(folder), pickle.loads((folder / METADATA_FILE).read_bytes())
    assert found.state_dict_metadata == expected.state_dict_metadata
    assert found.storage_data == expected.storage_data


class Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def test_a_pickle_that_acts_is_refused_and_does_not_act(folder: Path, tmp_path: Path) -> None:
    mark = tmp_path / "it acted"
    (folder / METADATA_FILE).write_bytes(pickle.dumps(Evil(mark)))
    with pytest.raises(FileError, match=r"\.metadata: not what a training writes: it names posix\.mkdir"):
        survey(folder)
    assert not mark.exists()
    pickle.loads((folder / METADATA_FILE).read_bytes())
    assert mark.exists(), "it would have"


def test_an_entry_that_is_no_tensor_is_named_and_not_read(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save({"model": {"weight": torch.ones(3), "extra": Evil(tmp_path / "mark")}}, checkpoint_id=tmp_path / "step")
    metadata, others = survey(tmp_path / "step")
    assert others == ("model.extra",)
    check_tensors(tmp_path / "step", metadata, wrong=wrong_numbers)
    assert not (tmp_path / "mark").exists()


def test_a_pickle_cannot_change_torchs_classes(folder: Path) -> None:
    # The state of a class, not of an object: what an unpickler sets as its attributes.
    attack = b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N(dS'mark'\nI1\nstb."
    (folder / METADATA_FILE).write_bytes(attack)
    with pytest.raises(FileError, match="not what a training writes"):
        survey(folder)
    assert not hasattr(Metadata, "mark")


@pytest.mark.parametrize(
    "attack",
    [b"Nr\xff\xff\xff\x03.", b"\x80\x05\x96\x00\x00\x00\x00\x04\x00\x00\x00."],
    ids=["a place far away", "bytes that are to come"],
)
def test_a_pickle_cannot_take_memory(attack: bytes, folder: Path) -> None:
    """A few bytes that make C's unpickler take gigabytes: one, and 64 where they say 0xff."""
    (folder / METADATA_FILE).write_bytes(attack)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(FileError, match="not what a training writes"):
        survey(folder)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000, "kilobytes"


def change(folder: Path, how: Callable[[Any], None]) -> None:
    metadata = pickle.loads((folder / METADATA_FILE).read_bytes())
    how(metadata)
    (folder / METADATA_FILE).write_bytes(pickle.dumps(metadata))


def place(metadata: Any, name: str) -> Any:
    return next(info for index, info in metadata.storage_data.items() if index.fqn == name)


def leave(metadata: Any, path: str) -> None:
    place(metadata, "model.weight").relative_path = path


def halve(metadata: Any) -> None:
    (chunk,) = metadata.state_dict_metadata["model.weight"].chunks
    chunk.sizes = torch.Size([10, 30])


def twice(metadata: Any) -> None:
    metadata.state_dict_metadata["model.weight"].chunks *= 2


def outside(metadata: Any) -> None:
    (chunk,) = metadata.state_dict_metadata["model.weight"].chunks
    chunk.sizes = torch.Size([20, 31])


def swap(metadata: Any) -> None:
    one, other = (place(metadata, name) for name in ("model.weight", "model.bias"))
    one.offset, one.length, other.offset, other.length = other.offset, other.length, one.offset, one.length


def retype(metadata: Any) -> None:
    metadata.state_dict_metadata["model.bias"].properties = TensorProperties(dtype=torch.float16)


def reshape(metadata: Any) -> None:
    entry = metadata.state_dict_metadata["model.weight"]
    entry.size = entry.chunks[0].sizes = torch.Size([30, 20])


def far(metadata: Any) -> None:
    place(metadata, "model.weight").length = 10**9


CHANGES: dict[str, tuple[Callable[[Any], None], str]] = {
    "above": (lambda m: leave(m, "../other.distcp"), r"it names the file '\.\./other\.distcp'"),
    "absolute": (lambda m: leave(m, "/etc/passwd"), r"it names the file '/etc/passwd'"),
    "hidden": (lambda m: leave(m, ".metadata"), r"it names the file '\.metadata'"),
    "absent": (lambda m: leave(m, "__7_0.distcp"), r"__7_0\.distcp: found nothing there"),
    "half": (halve, r"no piece of model\.weight for some elements"),
    "twice": (twice, r"two pieces of model\.weight overlap"),
    "outside": (outside, r"a piece of model\.weight that lies outside"),
    "swapped": (swap, r"__0_0\.distcp: found .* of shape .* for model\.\w+; needed"),
    "dtype": (retype, r"found bfloat16 of shape \(3,\) for model\.bias; needed a tensor, float16"),
    "shape": (
        reshape,
        r"found float32 of shape \(20, 30\) for model\.weight; needed a tensor, float32 of shape \(30, 20\)",
    ),
    "length": (far, r"__0_0\.distcp: found \d+ bytes; needed 10000"),
    "more": (
        lambda m: m.state_dict_metadata.update(other=m.state_dict_metadata["model.bias"]),
        r"nothing says where other is",
    ),
    "packed": (
        lambda m: setattr(place(m, "model.bias"), "transform_descriptors", ["stream.zstd"]),
        r"compressed or encrypted",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_metadata_that_do_not_fit_are_refused(name: str, folder: Path) -> None:
    how, message = CHANGES[name]
    change(folder, how)
    with pytest.raises(FileError, match=message):
        look(folder)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("weight", float("nan"), r"__0_0\.distcp: found infinity or NaN in model\.weight"),
        ("weight", float("inf"), r"__0_0\.distcp: found infinity or NaN in model\.weight"),
        ("exp_avg_sq", -1.0, r"found a negative number in optimizer\.state\.weight\.exp_avg_sq"),
    ],
)
def test_numbers_that_cannot_be_are_refused(name: str, value: float, message: str, tmp_path: Path) -> None:
    state = {
        "model": {key: tensor.clone() for key, tensor in STATE["model"].items()},
        "optimizer": {"state": {"weight": {"exp_avg_sq": torch.ones(20, 30), "step": torch.tensor(3.0)}}},
    }
    held: Any = state["model"] if name == "weight" else state["optimizer"]["state"]["weight"]
    held[name][7, 11] = value
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(state, checkpoint_id=tmp_path / "step")
    with pytest.raises(FileError, match=message):
        look(tmp_path / "step")


def test_a_link_in_place_of_a_file_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "__0_0.distcp").rename(tmp_path / "elsewhere")
    (folder / "__0_0.distcp").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileError, match=r"__0_0\.distcp: found a link"):
        look(folder)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damaged_metadata_are_one_sentence_whatever_the_damage(written: Path, data: st.DataObject) -> None:
    content = bytearray((written / METADATA_FILE).read_bytes())
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    for _ in range(data.draw(st.integers(0, 4))):
        if content:
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    folder = written.with_name("damaged")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(written, folder)
    (folder / METADATA_FILE).write_bytes(bytes(content))
    message = str(folder)
    try:
        look(folder)
    except FileError as error:
        message = str(error)
    assert str(folder) in message
    assert "\n" not in message


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_changed_bytes_are_noticed_by_the_manifest_wherever_they_are(written: Path, data: st.DataObject) -> None:
    folder = written.with_name("changed")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(written, folder)
    names = [METADATA_FILE, "__0_0.distcp"]
    write_manifest(folder, {name: entry_of(folder / name) for name in names})
    entries = read_manifest(folder)
    check_entries(folder, entries, names)
    name = data.draw(st.sampled_from(names))
    content = bytearray((folder / name).read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[at] ^= data.draw(st.integers(1, 255))
        message = "its content has changed"
    else:
        del content[at:]
        message = f"found {at} bytes"
    (folder / name).write_bytes(bytes(content))
    with pytest.raises(FileError, match=message):
        check_entries(folder, entries, names)
