"""Mutated files of `torch.save`: each is refused, or loads equal; none acts, crashes or hangs."""

from __future__ import annotations

import io
import resource
import shutil
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import muonmesh as mm
from muonmesh.errors import FileError
from muonmesh.tools.checkpoints.archive import read_archive
from muonmesh.tools.cli.diagnosis import diagnose
from tests.support.alone import alone
from tests.support.mutations import MANY, QUICK, mutate
from tests.support.tensors import same_bits

COVERS = ("tools.checkpoints.archive.read_archive",)


def trained_layers() -> tuple[torch.nn.Module, mm.Muon]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 4))
    optimizer = mm.from_model(model, lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def outcome_of_load(load: Callable[[], Any], right: Any) -> str:
    try:
        content = load()
    except FileError as error:
        return "refused" if "\n" not in str(error) else f"two lines: {error}"
    return "equal" if same_bits(right, content) else "other"


def save_whole(folder: Path) -> Any:
    """A full state dict, as rank 0 of any layout would save it, and what it holds."""
    model, optimizer = trained_layers()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7}
    torch.save(state, folder / "state.pt")
    return state


def of_saved(root: Path, count: int) -> Counter[str]:
    (root / "whole").mkdir()
    right = save_whole(root / "whole")
    outcomes = Counter[str]()
    for number in range(count):
        folder = shutil.copytree(root / "whole", root / str(number))
        mutation = mutate(folder, ["state.pt"], root / "outside", number)
        result = outcome_of_load(lambda folder=folder: read_archive(folder / "state.pt"), right)
        assert result in ("refused", "equal"), (number, mutation, result)
        outcomes[result] += 1
        shutil.rmtree(folder)
    return outcomes


@pytest.mark.parametrize("count", [QUICK, pytest.param(MANY, marks=pytest.mark.soak)])
def test_a_mutated_file_is_refused_or_harmless(count: int, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    outcomes = alone(of_saved, tmp_path, count, timeout=1800.0)
    assert count // 4 <= outcomes["refused"] < count
    assert not (tmp_path / "outside" / "mark").exists(), "something ran"
    print(f"a full state dict: {count} mutations of seeds 0 to {count - 1}: {dict(outcomes)}")


@pytest.mark.parametrize("reader", ["read_archive", "convert"])
def test_bytes_that_torch_load_takes_for_what_was_written_are_refused(reader: str, tmp_path: Path) -> None:
    """By all that read a file of torch.save: the doctor, and what takes another optimizer's state."""
    read: dict[str, Callable[[Path], Any]] = {"read_archive": read_archive}
    read["convert"] = lambda path: mm.checkpoint.convert(path, trained_layers()[1], package="torch")
    save_whole(tmp_path)
    content = bytearray((tmp_path / "state.pt").read_bytes())
    weight = trained_layers()[0].state_dict()["0.weight"].numpy().tobytes()
    content[content.index(weight) + 2] ^= 0x40
    (tmp_path / "state.pt").write_bytes(bytes(content))
    torch.load(tmp_path / "state.pt", weights_only=True)
    with pytest.raises(
        FileError, match=r"state\.pt: found another checksum of state/data/\d+; needed what torch\.save"
    ):
        read[reader](tmp_path / "state.pt")


def bombed(root: Path, inflated: int) -> tuple[str, int]:
    """A file of torch.save, one record of which inflates to so many bytes.

    Returns:
        What looking at it says, and by how many bytes the largest memory of the process grew meanwhile.
    """
    file, archive = root / "saved", io.BytesIO()
    torch.save({"weight": torch.ones(3)}, file)
    with zipfile.ZipFile(file) as before, zipfile.ZipFile(archive, "w") as after:
        for record in before.infolist():
            info = zipfile.ZipInfo(record.filename)
            info.compress_type = zipfile.ZIP_DEFLATED
            with after.open(info, "w", force_zip64=True) as written:
                if "/data/" in record.filename:
                    for _ in range(inflated >> 20):
                        written.write(bytes(1 << 20))
                else:
                    written.write(before.read(record))
    file.write_bytes(archive.getvalue())
    begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (fault,) = diagnose(file).faults
    return fault, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - begin) << 10


def test_a_record_that_inflates_is_refused_before_it_takes_memory(tmp_path: Path) -> None:
    fault, grown = alone(bombed, tmp_path, 1 << 30)
    assert (tmp_path / "saved").stat().st_size < 1 << 23
    assert "records that torch.save does not write" in fault, fault
    assert grown < 1 << 27, f"{fault}: {grown} bytes"
