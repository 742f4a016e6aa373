"""ultralytics with Muon: a trainer whose optimizer is that of muonmesh."""

import torch
from ultralytics import YOLO
from ultralytics.models.yolo.detect import DetectionTrainer

import muonmesh as mm


class MuonTrainer(DetectionTrainer):
    def build_optimizer(self, model, name="auto", lr=0.001, momentum=0.9, decay=1e-5, iterations=1e5):
        size = self.args.imgsz
        image = torch.zeros(1, 3, size, size, device=self.device)  # shows which layers are output layers
        settings = {"lr": lr, "momentum": momentum, "weight_decay": decay, "process_group": "auto"}
        return mm.from_model(model, **settings, example=image)


if __name__ == "__main__":
    YOLO("yolo26n.yaml").train(trainer=MuonTrainer, data="data.yaml", lr0=0.002)
