"""ultralytics' own training on images made here, with examples/ultralytics_muon.py's trainer: it steps Muon and saves.

The Makefile has `without_torchvision_ops` imported first. Of torchvision's compiled operators validation needs `nms`,
in whose place ultralytics' own is taken; nothing else is replaced.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
import torchvision
from ultralytics import YOLO
from ultralytics.models.yolo.detect import DetectionTrainer
from ultralytics.utils.nms import TorchNMS

import muonmesh as mm

torchvision.ops.nms = TorchNMS.nms


class MuonTrainer(DetectionTrainer):  # type: ignore[misc]
    def build_optimizer(
        self,
        model: Any,
        name: str = "auto",
        lr: float = 0.001,
        momentum: float = 0.9,
        decay: float = 1e-5,
        iterations: float = 1e5,
    ) -> mm.Muon:
        image = torch.zeros(1, 3, self.args.imgsz, self.args.imgsz, device=self.device)
        settings = {"lr": lr, "momentum": momentum, "weight_decay": decay, "process_group": "auto"}
        return mm.from_model(model, **settings, example=image)


def squares(folder: Path) -> Path:
    """Write images of a green or red square each, and return the file that describes them."""
    random = np.random.default_rng(0)
    for split in ("train", "val"):
        for kind in ("images", "labels"):
            (folder / kind / split).mkdir(parents=True)
        for number in range(8):
            image = random.integers(0, 60, (64, 64, 3), dtype=np.uint8)
            x, y = random.integers(8, 40, 2)
            image[y : y + 16, x : x + 16] = (255, 0, 0) if number % 2 else (0, 255, 0)
            cv2.imwrite(str(folder / "images" / split / f"{number}.png"), image)
            label = f"{number % 2} {(x + 8) / 64} {(y + 8) / 64} .25 .25\n"
            (folder / "labels" / split / f"{number}.txt").write_text(label)
    file = folder / "data.yaml"
    file.write_text(f"path: {folder}\ntrain: images/train\nval: images/val\nnames: [green, red]\n")
    return file


def test_its_trainer_steps_muon(tmp_path: Path) -> None:
    settings = {"epochs": 2, "imgsz": 64, "batch": 4, "nbs": 4, "device": "cpu", "workers": 0, "warmup_epochs": 0}
    model = YOLO("yolo26n.yaml")
    started: dict[str, torch.Tensor] = {}

    def start(trainer: DetectionTrainer) -> None:
        started.update({name: p.detach().clone() for name, p in trainer.model.named_parameters()})

    model.add_callback("on_train_start", start)
    data = str(squares(tmp_path))
    model.train(trainer=MuonTrainer, data=data, project=str(tmp_path), lr0=0.002, amp=False, plots=False, **settings)
    optimizer = model.trainer.optimizer
    assert isinstance(optimizer, mm.Muon)
    group = optimizer.param_groups[0]
    assert (group["name"], group["initial_lr"], group["momentum"]) == ("muon", 0.002, 0.937)
    # Not the output layers, by which the branches of the three scales end: a forward of the example shows them.
    assert len(group["params"]) == 99
    assert not any(re.search(r"cv[23]\.\d\.2\.weight", name) for name in group["param_names"])
    after = dict(model.trainer.model.named_parameters())
    assert all(p.isfinite().all() for p in after.values())
    unchanged = [name for name in group["param_names"] if torch.equal(after[name], started[name])]
    # The box branches of scales at which no square lies have gradients of exactly zero, and Muon leaves those alone.
    assert all(name.startswith("model.23.one2one_cv2.") for name in unchanged)
    assert model.trainer.last.exists()
