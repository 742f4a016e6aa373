"""Checkpoints: a run's state through `torch.distributed.checkpoint`, whole or not there at all."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from muonmesh.checkpoint.entries import CheckpointReader, check_finite, flat
from muonmesh.checkpoint.manifest import REMEDY, Entry, check_entries, entry_of, read_manifest, write_manifest
from muonmesh.checkpoint.metadata import METADATA_FILE, read_metadata
from muonmesh.checkpoint.together import on_first_rank, together
from muonmesh.cli.failure import RunError
from muonmesh.cli.settings import Optimizer
from muonmesh.files import cannot_write, check_fields, onto_disk, read_json, reason, write_text, writing

PROGRESS_FILE = "progress.json"
STEP_FOLDER = re.compile(r"step-(\d{8})")


class Checkpoints:
    """The checkpoints of one training, in folders ``step-00000120``; only the latest is kept.

    Every method is called on all ranks. The schedule, the order of the data and the random numbers are functions of
    the seed and the step, so model, optimizer and ``progress`` are all there is to save. Layouts do not show: what was
    saved by four ranks under FSDP2 loads into two under DDP.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.kept: int | None = None  # step of the one that is there, as far as this object knows

    def latest(self) -> int | None:
        """Step of the newest whole checkpoint, as rank 0 sees it, or None."""
        found: list[int | None] = [None]
        if dist.get_rank() == 0:
            found = [latest_step(self.directory)]
        dist.broadcast_object_list(found, src=0)
        self.kept = found[0]
        return self.kept

    def save(self, step: int, state: Mapping[str, Any], progress: dict[str, Any]) -> None:
        """Write beside its final place, then rename; older ones go once the new one is there.

        The manifest is written when all else is on the disk. A state that is not finite is not saved: the one before
        it would be thrown away for it.

        Raises:
            RunError: on every rank; the last checkpoint is as it was.
        """
        place = self._folder(step)
        scratch = place.with_suffix(".writing")
        kept = "No checkpoint was there yet. " if self.kept is None else f"The checkpoint of step {self.kept} is kept. "
        together(lambda: check_finite(state, kept))
        on_first_rank(lambda: self._clear(scratch))
        failed: str | None = None
        try:
            save(dict(state), checkpoint_id=scratch)
        except CheckpointException as error:
            failed = cannot_write(scratch, next(iter(error.failures.values()))[0], beside=kept)
        if failed is not None:
            on_first_rank(lambda: shutil.rmtree(scratch, ignore_errors=True))
            raise RunError(failed)
        entries: list[dict[str, Entry]] = [{} for _ in range(dist.get_world_size())]

        def hash_own() -> None:
            with writing(scratch, beside=kept):
                own = scratch.glob(f"__{dist.get_rank()}_*.distcp")
                entries[dist.get_rank()] = {file.name: entry_of(file) for file in own}

        together(hash_own)
        dist.all_gather_object(entries, entries[dist.get_rank()])
        everything = {name: entry for each in entries for name, entry in each.items()}
        on_first_rank(lambda: self._finish(scratch, place, everything, {"step": step, **progress}, kept))
        self.kept = step

    def load(self, step: int, state: dict[str, Any]) -> dict[str, Any]:
        """Read into ``state``, as the engine returns it, and return the ``progress`` that was saved with it.

        Nothing is written into ``state`` before all files have been read and looked at: their hashes, where they have
        a manifest, and of each tensor its name, shape, dtype and that it is finite. The ranks share that work.

        Raises:
            RunError: on every rank, naming the file and what is wrong with it.
        """
        folder = self._folder(step)
        reader: CheckpointReader | None = None
        progress: dict[str, Any] = {}
        rank, ranks = dist.get_rank(), dist.get_world_size()

        def look() -> None:
            nonlocal reader, progress
            entries = read_manifest(folder)
            if entries is not None:
                for name in (METADATA_FILE, PROGRESS_FILE):
                    if name not in entries:
                        raise RunError(f"{folder}: its manifest does not tell of {name}. {REMEDY}")
                check_entries(folder, entries, [METADATA_FILE, PROGRESS_FILE, *sorted(entries)[rank::ranks]])
            progress = _read_progress(folder / PROGRESS_FILE, step, manifest=entries is not None)
            reader = CheckpointReader(folder, read_metadata(folder))
            if entries is not None:
                reader.check_known(entries)
            reader.check_names(flat(state))

        together(look)
        assert reader is not None
        together(lambda: reader.check_tensors(share=rank, of=ranks))
        try:
            load(state, storage_reader=reader)
        except CheckpointException as error:
            first = next(iter(error.failures.values()))[0]
            raise RunError(f"{folder}: could not be loaded: {reason(first)}. {REMEDY}") from error
        return progress

    def _clear(self, scratch: Path) -> None:
        with writing(scratch):
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(parents=True)

    def _finish(
        self, scratch: Path, place: Path, entries: dict[str, Entry], progress: dict[str, Any], kept: str
    ) -> None:
        with writing(scratch, beside=kept):
            try:
                write_text(scratch / PROGRESS_FILE, json.dumps(progress))
                for name in (METADATA_FILE, PROGRESS_FILE):
                    entries[name] = entry_of(scratch / name)
                write_manifest(scratch, entries)
                onto_disk(scratch)
            except BaseException:
                shutil.rmtree(scratch, ignore_errors=True)
                raise
            older = [folder for folder in self.directory.iterdir() if folder != scratch]
            shutil.rmtree(place, ignore_errors=True)
            scratch.rename(place)
            onto_disk(self.directory)
        for folder in older:
            shutil.rmtree(folder, ignore_errors=True)

    def _folder(self, step: int) -> Path:
        return self.directory / f"step-{step:08d}"


def _read_progress(path: Path, step: int, *, manifest: bool) -> dict[str, Any]:
    content = read_json(path, needed="the progress that a training wrote there")
    if "step" not in content and not manifest:  # older checkpoints know it by their name alone
        content["step"] = step
    kinds = {"step": "a whole number of at least 0", "seconds": "a finite number of at least 0"}
    check_fields(path, content, kinds)
    if content["step"] != step:
        raise RunError(f"{path}: found step {content['step']}; needed {step}, as its folder is called. {REMEDY}")
    return content


def checkpoints_of(run: Path, optimizer: Optimizer) -> Path:
    """Where a run keeps the checkpoints of one of its trainings."""
    return run / "checkpoints" / optimizer


def latest_step(directory: Path) -> int | None:
    """Step of the newest whole checkpoint below ``directory``, or None."""
    if not directory.is_dir():
        return None
    matches = [STEP_FOLDER.fullmatch(folder.name) for folder in directory.iterdir()]
    return max((int(match[1]) for match in matches if match), default=None)
