"""What is stepped: matrices of given shapes, held by one process, by DDP replicas or by FSDP2 shards."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

Shape = tuple[int, int]

GPT2_SMALL_LAYER: tuple[Shape, ...] = ((2304, 768), (768, 768), (3072, 768), (768, 3072))
LLAMA_1B_LAYER, LLAMA_8B_LAYER = (
    ((width, width), (kv, width), (kv, width), (width, width), (hidden, width), (hidden, width), (width, hidden))
    for width, kv, hidden in ((2048, 512, 8192), (4096, 1024, 14336))
)


@dataclass(frozen=True)
class Layout:
    """Who holds the matrices: `one` process, `ddp` replicas, or `fsdp` shards of dim 0."""

    kind: Literal["one", "ddp", "fsdp"]
    ranks: int
    threads: int

    @property
    def name(self) -> str:
        """What `--layouts` calls it."""
        return self.kind if self.kind == "one" else f"{self.kind}{self.ranks}"

    @property
    def title(self) -> str:
        """What the table calls it."""
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        if self.kind == "one":
            return f"1 process, {threads}"
        return f"{'DDP' if self.kind == 'ddp' else 'FSDP2'}, {self.ranks} ranks of {threads}"


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("one", 1, 2),
        Layout("ddp", 2, 1),
        Layout("ddp", 4, 1),
        Layout("fsdp", 2, 1),
        Layout("fsdp", 4, 1),
    )
}


def parse_shapes(text: str) -> tuple[Shape, ...]:
    """Read `2304x768,768x768` as rows × cols (out × in) of each matrix of a layer."""
    shapes = []
    for item in text.split(","):
        rows, separator, cols = item.partition("x")
        if not separator or not rows.isdecimal() or not cols.isdecimal() or not int(rows) * int(cols):
            raise argparse.ArgumentTypeError(f"found {item!r}; needed rows x cols. Write 768x3072,768x768")
        shapes.append((int(rows), int(cols)))
    return tuple(shapes)


class Workload:
    """The parameters of a stack of linear layers, fp32, and gradients that change in place.

    The optimizers of one layout share the parameters and the gradients; only their states are their own.
    """

    def __init__(self, shapes: Sequence[Shape], layers: int, layout: Layout, device: str = "cpu") -> None:
        torch.manual_seed(0)
        model = nn.Sequential()
        for _ in range(layers):
            linears = (nn.Linear(cols, rows, bias=False, device=device) for rows, cols in shapes)
            model.append(nn.Sequential(*linears))
        if layout.kind == "fsdp":
            mesh = init_device_mesh(device, (layout.ranks,))
            for layer in model:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        self.parameters = list(model.parameters())
        self._gradients = []
        for parameter in self.parameters:
            gradient = torch.empty_like(_local(parameter))
            self._gradients.append(gradient)
            parameter.grad = _like(parameter, gradient)
        longest = max(gradient.numel() for gradient in self._gradients)
        if layout.kind == "fsdp":
            torch.manual_seed(dist.get_rank())  # replicas have equal gradients, shards do not
        # Drawn once, since drawing takes longer than some steps do.
        self._noise = torch.randn(longest + _OFFSETS, device=device) * 1e-3
        self._refreshed = 0

    def refresh_gradients(self) -> None:
        """Give every matrix another Gaussian gradient: the same noise, read from somewhere else."""
        for gradient in self._gradients:
            self._refreshed += 1
            offset = self._refreshed * _STRIDE % _OFFSETS
            gradient.copy_(self._noise[offset : offset + gradient.numel()].view_as(gradient))


_OFFSETS = 1 << 16
_STRIDE = 7919  # odd, so that all the offsets are visited


def full(parameter: Tensor) -> Tensor:
    """A copy of the whole matrix; for a DTensor all of its ranks must take part."""
    parameter = parameter.detach()
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.clone()


def _local(parameter: Tensor) -> Tensor:
    parameter = parameter.detach()
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _like(parameter: Tensor, local: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
