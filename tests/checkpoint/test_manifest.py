"""A checkpoint's own JSON: nothing else is unpickled or run, and what it says is checked before it costs anything."""

from __future__ import annotations

import json
import pickle
import resource
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

import muonmesh as mm
from muonmesh.checkpoint import manifest
from muonmesh.checkpoint.manifest import (
    MANIFEST_FILE,
    METADATA_FILE,
    SETTINGS_FILE,
    check_cover,
    read_manifest,
)
from muonmesh.errors import FileError, StateError
from tests.support.folders import forge, read, write
from tests.support.mutations import Acts

COVERS = (
    "checkpoint.manifest.read_manifest",
    "checkpoint.manifest.check_cover",
)

Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]  # where it begins, and its size
LONGEST = 10.0
"""Seconds of this process that a load may take until it refuses: of what is tried here, nothing took more than 4."""


class Net(nn.Module):
    """Two matrices, a vector, and a mask that says which of it to use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4, bias=False)
        self.register_buffer("mask", torch.tensor([True, False, True, True]))


Saved = tuple[Path, Net, mm.Muon]


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    """A folder, and another model and optimizer to load it into."""
    model = Net()
    optimizer = mm.from_model(model, lr=0.1)
    model.down(model.up(torch.ones(2, 4))).sum().backward()
    optimizer.step()
    mm.checkpoint.save(tmp_path / "saved", model, optimizer)
    other = Net()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    return tmp_path / "saved", other, mm.from_model(other, lr=0.3)


def load_of_changed_refused(saved: Saved) -> str:
    """Load, which must be refused with one short sentence, soon, and without memory or a change."""
    folder, model, optimizer = saved
    groups = [dict(group) for group in optimizer.param_groups]
    begin, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    size = sum(file.stat().st_size for file in folder.iterdir())
    with pytest.raises((FileError, StateError)) as caught:
        mm.checkpoint.load(folder, model, optimizer)
    took, grown = time.process_time() - begin, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before << 10
    assert took < LONGEST
    assert grown < (64 << 20) + 40 * size, "bytes; Python's own objects of some JSON take thirty times its size"
    assert not any(parameter.any() for parameter in model.parameters())
    assert [dict(group) for group in optimizer.param_groups] == groups
    assert not optimizer.state
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 4100
    return str(caught.value)


class SixValues(TensorProperties):
    """Properties that write a sixth value, as those of torch 2.15, and read five, as those of torch 2.13."""

    def __getstate__(self) -> tuple[Any, ...]:
        return (*super().__getstate__(), (1,))  # type: ignore[no-untyped-call]


def test_torch_reads_metadata_that_a_later_torch_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="too many values to unpack"):
        pickle.loads(pickle.dumps(SixValues(torch.float32)))
    monkeypatch.setattr(manifest, "TensorProperties", SixValues)
    write(tmp_path / "saved", {"weight": torch.arange(6.0).view(2, 3)}, {})
    described = dcp.FileSystemReader(tmp_path / "saved").read_metadata().state_dict_metadata["weight"]
    assert isinstance(described, TensorStorageMetadata)
    assert described.properties == SixValues(torch.float32)
    loaded = {"weight": torch.zeros(2, 3)}
    dcp.load(loaded, checkpoint_id=tmp_path / "saved")
    assert torch.equal(loaded["weight"], torch.arange(6.0).view(2, 3))


def test_a_load_reads_the_elements_of_tensors_and_json_and_nothing_else(saved: Saved, tmp_path: Path) -> None:
    """Whatever else torch wrote, the metadata and what stands around the elements, may be anything."""
    folder, model, optimizer = saved
    (folder / METADATA_FILE).write_bytes(pickle.dumps(Acts(tmp_path / "mark")))
    content = bytearray((folder / "__0_0.distcp").read_bytes())
    elements = bytearray(b"\xff" * len(content))
    tensors = read_manifest(folder).tensors
    for tensor in tensors.values():
        for piece in tensor.pieces:
            of_it = slice(piece.start, piece.start + tensor.bytes_of(piece))
            elements[of_it] = content[of_it]
    assert elements != content
    (folder / "__0_0.distcp").write_bytes(bytes(elements))
    forge(folder)
    mm.checkpoint.load(folder, model, optimizer)
    assert not (tmp_path / "mark").exists()
    first = Net()
    again = mm.from_model(first, lr=0.1)
    first.down(first.up(torch.ones(2, 4))).sum().backward()
    again.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, first.get_parameter(name))
        for key, state in again.state[first.get_parameter(name)].items():
            assert torch.equal(optimizer.state[parameter][key], state)
    assert {name for name in tensors if name.startswith("model.")} == {f"model.{name}" for name in model.state_dict()}


def test_memory_in_any_order_is_written_so_that_torch_and_we_read_it(tmp_path: Path) -> None:
    numbers = torch.randn(4, 6, dtype=torch.complex64)
    tensors = {
        "transposed": torch.arange(24.0).view(4, 6).mT,
        "last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "part": torch.arange(40.0).view(5, 8)[1:4, ::2],
        "conjugate": numbers.conj(),
        "number": torch.tensor(3, dtype=torch.int64),
        "none": torch.ones(0, 3),
        "truth": torch.tensor([True, False]),
        "half": torch.ones(3, dtype=torch.bfloat16) / 3,
    }
    write(tmp_path / "saved", tensors, {})
    by_muonmesh = {name: torch.zeros(source.shape, dtype=source.dtype) for name, source in tensors.items()}
    read(tmp_path / "saved", by_muonmesh)
    by_torch = {name: torch.zeros(source.shape, dtype=source.dtype) for name, source in tensors.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        dcp.load(by_torch, checkpoint_id=tmp_path / "saved")
    for name, tensor in tensors.items():
        assert torch.equal(by_muonmesh[name], tensor)
        assert torch.equal(by_torch[name], tensor)


def test_what_no_load_could_read_is_not_saved(tmp_path: Path) -> None:
    write(tmp_path / "saved", {"weight": torch.ones(3)}, {})
    scaled = torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 0, torch.qint8)
    message = (
        r"\['scaled'\]\['dtype'\]: found 'qint8'; needed a dtype.* Nothing was saved: give this tensor another name"
    )
    with pytest.raises(FileError, match=message):
        write(tmp_path / "saved", {"scaled": scaled}, {})
    assert read(tmp_path / "saved", {"weight": torch.zeros(3)}) == {}


# ------------------------------------------------------------------ forged tensors

UP, DOWN = "model.up.weight", "model.down.weight"


def piece(content: Any, name: str = UP) -> Any:
    return content["tensors"][name]["pieces"][0]


def with_piece(**values: Any) -> Callable[[Any], None]:
    return lambda content: piece(content).update(values)


def with_tensor(**values: Any) -> Callable[[Any], None]:
    return lambda content: content["tensors"][UP].update(values)


def with_whole_shape(*shape: int) -> Callable[[Any], None]:
    def change(content: Any) -> None:
        content["tensors"][UP]["shape"] = piece(content)["shape"] = list(shape)
        piece(content)["offset"] = [0] * len(shape)

    return change


def in_two_pieces(content: Any) -> None:
    entry = content["tensors"][UP]
    entry["pieces"] = [{**piece(content), "shape": [3, 4]}, {**piece(content), "shape": [3, 4], "offset": [3, 0]}]


def strangers(content: Any) -> None:
    empty = {"dtype": "float32", "shape": [0], "pieces": []}
    content["tensors"] |= {f"model.up.weight{number:06d}": empty for number in range(100_000)}


NUMBER = "needed a whole number of at least 0"
SHAPE = "needed a list of at most 16 whole numbers of at least 0"
FILE = "needed the name of a file with tensors"
FORGED: dict[str, tuple[Callable[[Any], None], str]] = {
    "begins after the end": (with_piece(start=10**9), "up to byte 1000000096 of __0_0.distcp, which has "),
    "begins before the begin": (with_piece(start=-1), f"['start']: found -1; {NUMBER}"),
    "begins at a huge number": (with_piece(start=10**400), f"['start']: found 1000000000000000000000000.*; {NUMBER}"),
    "begins at a fraction": (with_piece(start=1.5), f"['start']: found 1.5; {NUMBER}"),
    "begins at no number": (with_piece(start=float("nan")), f"['start']: found nan; {NUMBER}"),
    "begins at a truth": (with_piece(start=True), f"['start']: found True; {NUMBER}"),
    "begins at a string": (with_piece(start="0"), f"['start']: found '0'; {NUMBER}"),
    "begins nowhere": (lambda content: piece(content).pop("start"), f"['start']: found nothing; {NUMBER}"),
    "begins in another": (
        lambda content: piece(content).update(start=piece(content, DOWN)["start"]),
        "in another piece, at byte ",
    ),
    "file above": (with_piece(file="../__0_0.distcp"), f"found '../__0_0.distcp'; {FILE}"),
    "file elsewhere": (with_piece(file="/etc/passwd"), f"found '/etc/passwd'; {FILE}"),
    "file of ours": (with_piece(file=METADATA_FILE), f"found '.metadata'; {FILE}"),
    "file of other digits": (with_piece(file="__\u0660_\u0660.distcp"), FILE),
    "file of a line": (with_piece(file="__0_0.distcp\n"), FILE),
    "file of many digits": (with_piece(file=f"__{'1' * 5_000_000}_0.distcp"), FILE),
    "file of a list": (with_piece(file=["__0_0.distcp"]), f"found a list; {FILE}"),
    "file that is not there": (with_piece(file="__7_0.distcp"), "which the manifest does not tell of"),
    "larger": (with_whole_shape(10**15, 4), " up to byte "),
    "huge": (with_whole_shape(10**400, 4), SHAPE),
    "huge in all dims": (with_whole_shape(*[2**62] * 16), " up to byte "),
    "many dims": (with_whole_shape(*[1] * 17), SHAPE),
    "very many dims": (with_whole_shape(*[1] * 1_000_000), SHAPE),
    "less than nothing": (with_whole_shape(-6, 4), SHAPE),
    "no list": (with_tensor(shape=6), f"found 6; {SHAPE}"),
    "other dims": (with_tensor(shape=[24]), "with another number of dims"),
    "outside": (with_piece(offset=[1, 0]), "a piece of model.up.weight that lies outside of it"),
    "half": (with_piece(shape=[3, 4]), "no piece of model.up.weight for some elements"),
    "no pieces": (with_tensor(pieces=[]), "no piece of model.up.weight for some elements"),
    "twice": (lambda content: content["tensors"][UP].update(pieces=[piece(content)] * 2), "overlap"),
    "two for the same bytes": (in_two_pieces, "in another piece, at byte "),
    "wider dtype": (with_tensor(dtype="float64"), "float64, which float32 would round"),
    "no dtype": (with_tensor(dtype="float33"), "found 'float33'; needed a dtype"),
    "a class": (with_tensor(dtype="Tensor"), "found 'Tensor'; needed a dtype"),
    "a dtype with a scale": (with_tensor(dtype="qint8"), "found 'qint8'; needed a dtype"),
    "a dtype of a list": (with_tensor(dtype=[]), "found a list; needed a dtype"),
    "an extra key": (with_piece(module="os"), "found 'module'; needed one of offset, shape, file, start, record"),
    "another order of bytes": (lambda content: content.update(byteorder="middle"), "found 'middle'; needed 'little'"),
    "a long name": (
        lambda content: content["tensors"].update({"x" * 20_000_000: {}}),
        "needed a name of at most 1,000 characters",
    ),
    "no such bool": (
        lambda content: content["tensors"]["model.mask"]["pieces"][0].update(start=piece(content)["start"] + 96),
        "in model.mask; needed 0 and 1 in a bool",
    ),
    "another tensor": (
        lambda content: content["tensors"].update({"model.up.weights": content["tensors"].pop(UP)}),
        "no model.up.weight (the nearest is up.weights); model.up.weights, which nothing here has (the nearest is ",
    ),
    "another shape": (with_whole_shape(4, 6), "model.up.weight of shape (4, 6), where (6, 4) is needed"),
    "very many others": (strangers, "; and 99992 more; needed what this model"),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_manifest_is_refused(name: str, saved: Saved) -> None:
    folder, (change, message) = saved[0], FORGED[name]
    forge(folder, change)
    refusal = load_of_changed_refused(saved)
    parts = message.split(".*")
    assert all(part in refusal for part in parts), refusal


JUNK: dict[str, Callable[[int], str]] = {
    "nothing": lambda size: "",
    "no object": lambda size: "[]",
    "half": lambda size: '{"tensors": {',
    "deep lists": lambda size: "[" * size,
    "deep objects": lambda size: '{"tensors":' * (size // 11),
    "deep and closed": lambda size: f'{{"tensors": {"[" * 300 + "]" * 300}}}',
    "empty lists": lambda size: f'{{"tensors": [{"[]," * (size // 3)}[]]}}',
    "empty objects": lambda size: f'{{"tensors": [{"{}," * (size // 3)}{{}}]}}',
    "digits": lambda size: f'{{"tensors": {"1" * size}}}',
    "a long string": lambda size: f'{{"tensors": "{"x" * size}"}}',
    "a long key": lambda size: f'{{"{"x" * size}": 1}}',
    "many keys, one twice": lambda size: (
        "{" + "".join(f'"{n}":1,' for n in range(size // 10)) + f'"{size // 10 - 1}":2}}'
    ),
    "no numbers": lambda size: '{"tensors": NaN, "format": Infinity, "groups": -Infinity}',
    "a huge number": lambda size: f'{{"tensors": 1{"0" * 400}, "format": 1{"0" * 400}, "groups": 1e999}}',
}


@pytest.mark.parametrize(("file", "size"), [(MANIFEST_FILE, 20_000_000), (SETTINGS_FILE, 10**6)])
@pytest.mark.parametrize("name", JUNK)
def test_junk_is_refused_soon_and_takes_no_memory_to_speak_of(name: str, file: str, size: int, saved: Saved) -> None:
    (saved[0] / file).write_text(JUNK[name](size))
    if file != MANIFEST_FILE:
        forge(saved[0])
    assert file in load_of_changed_refused(saved)


# ------------------------------------------------------------------ forged settings and manifests


def setting(**values: Any) -> Callable[[Any], None]:
    return lambda content: content["groups"][0]["settings"].update(values)


def parameter(**values: Any) -> Callable[[Any], None]:
    return lambda content: content["parameters"]["up.weight"].update(values)


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else 1


PLAIN = "needed a number, a string, or lists of them, not nested deeper than 8"
SETTINGS: dict[str, tuple[Callable[[Any], None], str]] = {
    "a huge rate": (setting(lr=10**400), "lr: found 1000"),
    "no rate": (setting(lr=float("nan")), f"['lr']: found nan; {PLAIN}"),
    "an endless rate": (setting(lr=float("inf")), "lr: found inf"),
    "a long rate": (setting(lr="1" * 20_000_000), "lr: found '1111"),
    "many steps": (setting(ns_steps=10**9), "ns_steps: found 1000000000"),
    "huge steps": (setting(ns_steps=10**400), "ns_steps: found 1000"),
    "other parameters": (setting(params=[]), "found 'params'; needed the name of a setting"),
    "another kind": (setting(algorithm="adamw"), "found 'algorithm'; needed the name of a setting"),
    "another setting": (setting(hook="os.system"), "'hook'"),
    "a deep setting": (setting(betas=nested(100)), PLAIN),
    "an object": (setting(betas={}), PLAIN),
    "deep matrices": (parameter(matrices=nested(100)), PLAIN),
    "a group that is not there": (parameter(group=10**400), "needed the number of a group"),
    "a group before the first": (parameter(group=-1), "needed the number of a group"),
    "another key": (parameter(fresh=True), "found 'fresh'; needed one of group, matrices"),
    "a long rule": (lambda content: content["groups"][0].update(algorithm="x" * 20_000_000), "state of rule 'xxx"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_forged_settings_are_refused(name: str, saved: Saved) -> None:
    folder, (change, message) = saved[0], SETTINGS[name]
    content = json.loads((folder / SETTINGS_FILE).read_text())
    change(content)
    (folder / SETTINGS_FILE).write_text(json.dumps(content))
    forge(folder)
    refusal = load_of_changed_refused(saved)
    assert message in refusal, refusal


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ("[]", "found a list"),
        ('{"format": 1, "files": {}}', r"\['format'\]: found 1; needed 3: another version wrote it"),
        ('{"format": true, "files": {}}', r"\['format'\]: found True"),
        ('{"format": 3}', r"\['files'\]: found nothing; needed a dict"),
        ('{"format": 3, "files": {"../x": {}}}', "found '../x'; needed the name of a file of a checkpoint"),
        ('{"format": 3, "files": {"x": {}}}', "found 'x'; needed the name of a file of a checkpoint"),
        ('{"format": 3, "files": {"__0_0.distcp\\u0000": {}}}', "needed the name of a file of a checkpoint"),
        ('{"format": 3, "files": {"settings.json": 3}}', r"\['settings.json'\]: found 3; needed a dict"),
        (
            '{"format": 3, "files": {"settings.json": {"bytes": -1, "sha256": ""}}}',
            r"\['bytes'\]: found -1; needed a whole number of at least 0",
        ),
        ('{"format": 3, "files": {"settings.json": {"bytes": 1}}}', r"\['sha256'\]: found nothing; needed a string"),
        ('{"format": 3, "format": 3, "files": {}}', "'format' is there twice"),
    ],
)
def test_a_broken_manifest_is_one_sentence(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / MANIFEST_FILE).write_text(content)
    with pytest.raises(FileError, match=rf"manifest\.json.*{message}"):
        read_manifest(tmp_path)


def test_a_changed_number_in_the_manifest_is_noticed(saved: Saved) -> None:
    file, start = saved[0] / MANIFEST_FILE, read_manifest(saved[0]).tensors[UP].pieces[0].start
    file.write_text(file.read_text().replace(f'"start": {start}', f'"start": {start - 4}'))
    assert "manifest.json: its content has changed since it was written" in load_of_changed_refused(saved)


def test_a_manifest_that_leaves_out_a_file_is_refused(saved: Saved) -> None:
    for name in (SETTINGS_FILE, METADATA_FILE):
        forge(saved[0], lambda content, name=name: content["files"].pop(name))
        assert f"['files']['{name}']: found nothing; needed a dict" in load_of_changed_refused(saved)


# ------------------------------------------------------------------ pieces


@st.composite
def cut_anyhow(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A tensor in boxes, cut again and again, of which some may then be lost, copied or shifted."""
    size = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    boxes: list[Box] = [((0,) * len(size), size)]
    for _ in range(draw(st.integers(0, 6)) if size else 0):
        offsets, sizes = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(size) - 1))
        at = draw(st.integers(0, sizes[dim]))
        for start, length in ((0, at), (at, sizes[dim] - at)):
            box = [*offsets], [*sizes]
            box[0][dim], box[1][dim] = box[0][dim] + start, length
            boxes.append((tuple(box[0]), tuple(box[1])))
    for _ in range(draw(st.integers(0, 2))):
        offsets, sizes = box = draw(st.sampled_from(boxes))
        if draw(st.booleans()):
            boxes.remove(box)
        if draw(st.booleans()) or not boxes:
            moved = tuple(draw(st.integers(0, n - m)) for n, m in zip(size, sizes, strict=True))
            boxes.append((moved, sizes))
    return size, boxes


@settings(max_examples=100, deadline=None)
@given(cut_anyhow())
def test_pieces_are_taken_for_a_tensor_exactly_if_they_cover_each_element_once(
    cut: tuple[tuple[int, ...], list[Box]],
) -> None:
    size, boxes = cut
    painted = torch.zeros(size, dtype=torch.int64)
    for offsets, sizes in boxes:
        painted[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] += 1
    if bool((painted == 1).all()):
        check_cover("weight", size, boxes)
    else:
        with pytest.raises(ValueError, match=r"no piece of weight for some elements|two pieces of weight overlap"):
            check_cover("weight", size, boxes)


def test_twenty_thousand_pieces_are_looked_at_and_not_each_beside_each_other() -> None:
    """200 million pairs would take minutes."""
    boxes: list[Box] = [((row, column, 0), (1, 1, 3)) for row in range(200) for column in range(100)]
    check_cover("weight", (200, 100, 3), boxes)
    check_cover("weight", (3, 5000), [((0, column), (3, 1)) for column in range(5000)])
    boxes[777] = boxes[778]
    with pytest.raises(ValueError, match="two pieces of weight overlap"):
        check_cover("weight", (200, 100, 3), boxes)
    # However many dims a hostile file tells of.
    dims = 48
    halves: list[Box] = [((0,) * dims, (2,) * (dims - 1) + (1,)), ((0,) * (dims - 1) + (1,), (2,) * (dims - 1) + (1,))]
    check_cover("weight", (2,) * dims, halves)
    with pytest.raises(ValueError, match="two pieces of weight overlap"):
        check_cover("weight", (2,) * dims, halves[:1] * 2)
