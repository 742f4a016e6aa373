"""`muonmesh doctor`: it says what is there, whether it is whole, and what would not fit; scripts read its exit code."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from typer.testing import CliRunner

import muonmesh as mm
from muonmesh.checkpoint.folder import previous_at
from muonmesh.checkpoint.manifest import MANIFEST_FILE, Manifest
from muonmesh.numerics.kernels import auto_takes, compiled
from muonmesh.tools.cli import installation
from muonmesh.tools.cli.app import app
from muonmesh.tools.cli.report import append_metrics
from muonmesh.tools.cli.run_files import LOCK_FILE
from muonmesh.tools.cli.run_settings import Settings
from tests.support.folders import write
from tests.support.mutations import Acts
from tests.support.workers import Pool

COVERS = (
    "tools.cli.diagnosis.diagnose",
    "tools.cli.doctor.doctor",
    "tools.cli.installation.check_installation",
)

STATE = {
    "model.weight": torch.ones(6, 5),
    "model.bias": torch.ones(3, dtype=torch.bfloat16),
    "optimizer.state.weight.momentum_buffer": torch.ones(6, 5),
}
GROUPS = {"groups": [{"name": "muon", "algorithm": "normuon", "settings": {"lr": 0.02 / 3}}], "parameters": {}}
GROUPS |= {"products": []}


def our_checkpoint(folder: Path) -> Path:
    write(folder / "state", STATE, GROUPS)
    return folder / "state"


def archive(folder: Path) -> Path:
    torch.save(
        {"model": {"weight": torch.ones(6, 5)}, "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}}}, folder / "s"
    )
    return folder / "s"


def doctor(path: Path, *options: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["doctor", str(path), *options])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_it_says_which_products_multiply_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def products() -> str:
        compiled.library.cache_clear()
        auto_takes.cache_clear()
        return installation.products_here().result

    before = products()
    if auto_takes()[0]:
        assert f'variant {compiled.library().variant}. kernels="auto" takes them for bf16 matrices' in before
    with monkeypatch.context() as patch:
        patch.setattr(compiled, "__file__", str(tmp_path / "compiled.py"))
        message = products()
    assert message.startswith("none. Found no products.so in the package")
    assert "torch multiplies. To have them, build the package where there is a C compiler" in message
    assert products() == before


def test_it_looks_at_the_machine() -> None:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    by_subject = {finding["subject"]: finding for finding in json.loads(result.stdout)}
    assert result.exit_code == int(any(finding["remedy"] for finding in by_subject.values()))
    assert by_subject["torch"]["result"].startswith(torch.__version__)
    assert by_subject["torch"]["result"].endswith("muonmesh is tested with torch 2.11 and 2.13, in part with 2.15")
    assert not [by_subject[name] for name in ("torch", "orthogonalize", "NCCL") if by_subject[name]["remedy"]]


def fails() -> Any:
    raise RuntimeError("no such interface")


def test_what_is_wrong_with_the_machine_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = installation._finding_of("NCCL", fails)
    assert (failed.result, failed.remedy) == ("RuntimeError: no such interface", "Mend this first")
    with monkeypatch.context() as patch:
        patch.setattr(mm, "orthogonalize", lambda x, **settings: x if settings else -x)  # products that are wrong
        assert installation._orthogonalize().remedy == "Write kernels='torch', and report it"
    (line,) = installation.lines_of([installation.Finding("torch", "nothing", "Write so")])
    assert line == "do  torch: nothing. Write so"


def data(path: Path) -> Path:
    return next(file for file in (path / "__0_0.distcp", path) if file.is_file())


def flip(path: Path) -> None:
    file = data(path)
    content = bytearray(file.read_bytes())
    content[content.index(torch.ones(15).numpy().tobytes()) + 2] ^= 0x10
    file.write_bytes(bytes(content))


def cut_data(path: Path) -> None:
    data(path).write_bytes(data(path).read_bytes()[:-9])


def lose_data(path: Path) -> None:
    data(path).unlink()


def link(path: Path) -> None:
    file = data(path)
    file.rename(path.with_name("elsewhere"))
    file.symlink_to(path.with_name("elsewhere"))


def act(path: Path) -> None:
    (path / ".metadata").write_bytes(pickle.dumps(Acts(path.with_name("mark"))))


WHOLE: dict[str, tuple[Callable[[Path], Path], str]] = {
    "ours": (our_checkpoint, "a checkpoint of muonmesh.checkpoint.save, whole"),
    "archive": (archive, "a file of torch.save, whole"),
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_whole_is_told_and_every_tensor_named(name: str, tmp_path: Path) -> None:
    make, message = WHOLE[name]
    path = make(tmp_path)
    code, text = doctor(path)
    assert code == 0, text
    assert f"{path}: {message}" in text
    code, text = doctor(path, "--json")
    report = json.loads(text)
    assert (code, report["whole"], report["faults"]) == (0, True, [])
    weight = next(entry for key, entry in report["tensors"].items() if key.endswith("weight"))
    assert weight == {"shape": [6, 5], "dtype": "float32", "size": 120}
    if name == "ours":
        _, text = doctor(path)
        assert "group muon: normuon, lr 0.006667" in text
        assert "state: momentum_buffer" in text


def save_shards(path: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight, bias = (
        distribute_tensor(torch.ones(shape), mesh, [how]) for shape, how in (((6, 5), Shard(0)), ((3,), Replicate()))
    )
    torch.save({"model": {"weight": weight, "bias": bias}}, f"{path}-{dist.get_rank()}")


def test_the_file_of_one_rank_is_not_whole(workers: Callable[[int], Pool], tmp_path: Path) -> None:
    workers(2).run(save_shards, str(tmp_path / "rank"))
    code, text = doctor(tmp_path / "rank-1")
    assert code == 1, text
    assert "rank-1: a file of torch.save, not whole" in text
    assert "one rank's shards of 1 tensors (DTensors); the files of the other ranks have the rest" in text
    report = json.loads(doctor(tmp_path / "rank-1", "--json")[1])
    assert (report["whole"], report["shards"], report["faults"]) == (False, 1, [])
    assert report["tensors"]["model.weight"]["shape"] == [3, 5]


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        ("ours", flip, "__0_0.distcp: its content has changed"),
        ("ours", cut_data, "__0_0.distcp: found"),
        ("ours", lose_data, "__0_0.distcp: found nothing there"),
        ("ours", link, "__0_0.distcp: found a link"),
        ("ours", act, ".metadata: found"),
        ("ours", lambda path: (path / MANIFEST_FILE).write_text("{"), "manifest.json: not JSON"),
        ("ours", lambda path: (path / "settings.json").write_text("{"), "settings.json: not JSON"),
        ("ours", lambda path: (path / "settings.json").write_text("{}"), "settings.json['groups']: found nothing"),
        ("ours", lambda path: (path / "settings.json").unlink(), "settings.json: found nothing there"),
        ("ours", lambda path: (path / ".metadata").unlink(), ".metadata: found nothing there"),
        ("ours", lambda path: (path / MANIFEST_FILE).unlink(), "hashes that save wrote there last. Load another"),
        ("archive", flip, "found another checksum of s/data/0"),
        ("archive", cut_data, "found"),
    ],
)
def test_what_is_damaged_is_told_by_file(name: str, damage: Callable[[Path], Any], words: str, tmp_path: Path) -> None:
    path = WHOLE[name][0](tmp_path)
    damage(path)
    code, text = doctor(path)
    assert code == 1, text
    assert ", damaged" in text
    assert words in text.replace("\n", "")
    shown = json.loads(doctor(path, "--json")[1])
    assert not shown["whole"]
    assert len({fault.partition("; needed")[0] for fault in shown["faults"]}) == len(shown["faults"]), shown["faults"]
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(("saves", "whole"), [(1, True), (100, False)])
def test_a_checkpoint_that_is_replaced_meanwhile_is_read_again(
    saves: int, whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of two were told as damages, in a third of the calls beside a process that saves in a loop."""
    path, check, left = tmp_path / "saved", Manifest.check_files, [saves]

    def save_once(value: float) -> None:
        write(path, {**STATE, "model.more": torch.full((4, 6), value)}, GROUPS)

    def saved_before(*arguments: Any) -> None:
        if left[0]:
            left[0] -= 1
            save_once(float(left[0]))
        check(*arguments)

    save_once(-1.0)
    monkeypatch.setattr(Manifest, "check_files", saved_before)
    code, text = doctor(path)
    assert code == int(not whole)
    assert ("replaces again and again; needed one that stays" in text.replace("\n", " ")) != whole, text
    assert "its content has changed" not in text


def test_numbers_that_no_step_leaves_behind_are_damage_in_the_state_and_a_note_elsewhere(tmp_path: Path) -> None:
    key = "optimizer.state.weight.momentum_buffer"
    for name, code in ((key, 1), ("model.weight", 0)):
        path = tmp_path / name
        write(path, {**STATE, name: torch.full((6, 5), float("nan"))}, GROUPS)
        assert doctor(path)[0] == code
        assert f"{name}: found infinity or NaN" in doctor(path)[1]


def test_a_module_that_is_named_state_has_weights(tmp_path: Path) -> None:
    """They were told as state, and NaN in them as damage."""
    path = tmp_path / "saved"
    write(path, {**STATE, "model.cell.state.weight": torch.full((6, 5), float("nan"))}, GROUPS)
    code, text = doctor(path)
    assert code == 0, text
    assert "note: model.cell.state.weight: found infinity or NaN" in text
    assert "state: weight" not in text
    assert re.search(rf"^model +{1 + sum(name.startswith('model.') for name in STATE)} ", text, re.MULTILINE), text


def test_a_folder_may_be_given_as_a_dot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(our_checkpoint(tmp_path))
    assert doctor(Path("."))[0] == 0
    assert doctor(Path("/"))[0] == 2


def test_what_is_no_checkpoint_is_told_as_such(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("hello")
    (tmp_path / "pickle").write_bytes(pickle.dumps(Acts(tmp_path / "mark")))
    (tmp_path / "zero").mkdir()
    (tmp_path / "zero" / "latest").write_text("global_step3")
    torch.save({"weight": torch.ones(3), "scaler": Acts(tmp_path / "mark")}, tmp_path / "mp_rank_00_model_states.pt")
    (tmp_path / "megatron").mkdir()
    for file in (".metadata", "common.pt"):
        (tmp_path / "megatron" / file).touch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        save({"model": {"weight": torch.ones(6, 5)}, "optim": {"lr": 0.1}}, checkpoint_id=tmp_path / "torchs")
    act(tmp_path / "torchs")
    for name, message in (
        ("nothing", "nothing there; needed a folder or a file"),
        ("folder", "found 'notes.txt' in it; needed a run of muonmesh train, a checkpoint of muonmesh.checkpoint.save"),
        ("zero", "found 'latest' in it; needed a run"),
        ("megatron", "found 'common.pt' in it; needed a run"),
        ("torchs", "'__0_0.distcp' in it; needed a run"),
        ("mp_rank_00_model_states.pt", "states.pt: found more than data (posix.mkdir); needed a run"),
        ("mp_rank_00_model_states.pt", "Its checksums are right. Its content was not read"),
        ("folder/notes.txt", "found what torch.save does not write"),
        ("pickle", "it is a program, and is not opened"),
    ):
        code, text = doctor(tmp_path / name)
        assert code == 2, text
        assert message in text.replace("\n", "")
    assert not (tmp_path / "mark").exists()


def test_all_faults_of_a_run_stand_on_top_of_its_json(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (1, 2):
        path = run / "checkpoints" / "muon" / f"step-{step:08d}"
        write(path, STATE, GROUPS)
        cut_data(path)
    code, text = doctor(run, "--json")
    report = json.loads(text)
    assert code == 1
    assert [fault.partition(": found")[0] for fault in report["faults"]] == [
        str(run),  # no config.json
        *(str(run / "checkpoints" / "muon" / f"step-{step:08d}" / "__0_0.distcp") for step in (2, 1)),
    ]


def test_a_run_that_ended_before_its_first_checkpoint_is_a_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / LOCK_FILE).touch()
    settings = Settings(out=str(run))
    settings.save({"digest": settings.digest})
    code, text = doctor(run)
    assert code == 0, text
    assert f"no checkpoint is there. The run begins again with: muonmesh train --resume {run}" in text


@pytest.mark.parametrize("damage", ["cut", "changed"])
@pytest.mark.parametrize("older", [False, True])
def test_a_run_with_a_damaged_last_checkpoint_does_not_go_on(damage: str, older: bool, tmp_path: Path) -> None:
    """The other training's checkpoint was whole, and the run was said to go on; a resume ended with an error."""
    run = tmp_path / "run"
    run.mkdir()
    (run / LOCK_FILE).touch()
    Settings(out=str(run)).save({})
    write(run / "checkpoints" / "muon" / "step-00000060", STATE, GROUPS)
    for step in (30, 60) if older else (60,):
        write(run / "checkpoints" / "adamw" / f"step-{step:08d}", STATE, GROUPS)
    if damage == "cut":
        cut_data(run / "checkpoints" / "adamw" / "step-00000060")
    else:
        data = run / "checkpoints" / "adamw" / "step-00000060" / "__0_0.distcp"
        content = bytearray(data.read_bytes())
        content[-1] ^= 1
        data.write_bytes(content)
    code, text = doctor(run)
    text = text.replace("\n", " ")
    assert code == 1
    if older and damage == "cut":  # a resume passes over what is not there in full
        assert f"goes on with: muonmesh train --resume {run}" in text
        assert "a resume cannot" not in text
        return
    assert "goes on with" not in text
    begins = "go on from step 30" if older else "train it from the start"
    assert "a resume cannot load the last checkpoint of adamw. Bring an undamaged copy, or remove the damaged " in text
    assert f"checkpoints to {begins}" in text


def test_metrics_without_a_checkpoint_are_told(tmp_path: Path) -> None:
    """Whoever removed the checkpoints of a training learns it before a resume trains it again."""
    run = tmp_path / "run"
    run.mkdir()
    Settings(out=str(run)).save({})
    for name in ("adamw", "muon"):
        append_metrics(run, run=name, step=60, seconds=1.0, validation_loss=2.0)
    write(run / "checkpoints" / "adamw" / "step-00000060", STATE, GROUPS)
    text = doctor(run)[1].replace("\n", " ")
    assert "note: metrics of muon reach step 60, but muon has no checkpoint. A resume trains it again from" in text
    assert "metrics of adamw" not in text


def test_of_a_folder_of_runs_it_wants_one(tmp_path: Path) -> None:
    (tmp_path / ".text").mkdir()
    (tmp_path / "notes").mkdir()
    assert f"{tmp_path}: found 'notes' in it; needed a run" in doctor(tmp_path)[1]
    for name in ("second", "first"):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
    code, text = doctor(tmp_path)
    assert code == 2
    assert f"{tmp_path}: found 'first' in it; needed a run of muonmesh train" in text
    assert f"For a run in it, write: muonmesh doctor {tmp_path / 'first'}" in text


def test_one_whose_replacement_never_came_is_found_beside_its_place(tmp_path: Path) -> None:
    path = our_checkpoint(tmp_path)
    path.rename(previous_at(path))
    code, text = doctor(path)
    assert code == 0
    assert "the one that was to replace it never came" in text
    shutil.rmtree(previous_at(path))
    assert doctor(path)[0] == 2
