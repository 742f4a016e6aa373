"""Declares torchvision's compiled operators, which this build of torch cannot load; timm imports torchvision.

torchvision registers fake kernels for them when it is imported, and fails where nothing declares them. No model of timm
that the tests build uses one.
"""

import torch

for name in ("nms", "qnms"):
    torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
