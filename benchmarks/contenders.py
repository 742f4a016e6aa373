"""The optimizers that are compared: ours, torch's, and peers imported from a checkout that the caller names.

All of them get the same hyperparameters: momentum 0.95 with Nesterov, weight decay 0.1, and updates scaled to
AdamW's RMS where that can be chosen. Each keeps its own coefficients, compute dtype and communication.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.workload import Layout
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.1
MOMENTUM = 0.95

Parameters = list[torch.nn.Parameter]
Build = Callable[[Parameters, Layout], Optimizer]

OURS = "muonmesh"
TORCH = "torch.optim.Muon"


@dataclass(frozen=True)
class Contender:
    """An optimizer under test; `is_muon` says that its update must be orthogonal."""

    name: str
    is_muon: bool
    build: Build
    layouts: tuple[str, ...] = ("one", "ddp", "fsdp")
    """The kinds of Layout that it supports at all."""


@dataclass(frozen=True)
class Entries:
    """Who was asked to take part, as plain data that can be handed to ranks.

    Attributes:
        names: Of `ours`, `torch` and `adamw`.
        variants: `label:key=value,...`, muonmesh.Muon with other settings.
        peers: Checkouts by name.
    """

    names: tuple[str, ...]
    variants: tuple[str, ...]
    peers: dict[str, str]

    def contenders(self) -> list[Contender]:
        """The optimizers to build.

        Raises:
            ValueError: an unknown name, an unreadable variant, or a path that does not hold the peer.
        """
        contenders: list[Contender] = []
        for name in self.names:
            if name not in _OWN:
                raise ValueError(f"--contenders: found {name!r}; needed some of {', '.join(_OWN)}")
            contenders += _OWN[name]
        contenders += [_variant(text) for text in self.variants]
        for name, path in self.peers.items():
            if name not in _PEERS:
                raise ValueError(f"--peer: found {name!r}; needed one of {', '.join(_PEERS)}. Write NAME=PATH")
            contenders += _PEERS[name](Path(path))
        return contenders


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of every benchmark."""
    parser.add_argument("--rounds", type=_positive, default=10, help="counted rounds (default 10)")
    parser.add_argument("--warmup", type=_positive, default=2, help="rounds before them (default 2)")
    parser.add_argument("--contenders", nargs="+", default=["ours", "torch", "adamw"], help="default: all three")
    parser.add_argument("--ours", action="append", default=[], metavar="LABEL:KEY=VALUE,...", help="a variant of ours")
    parser.add_argument(
        "--peer", action="append", default=[], metavar="NAME=PATH", help="dion, gram or keller, a checkout"
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures there")


def entries(parser: argparse.ArgumentParser, chosen: argparse.Namespace) -> Entries:
    """Who was asked to take part; leaves with a message if that makes no sense."""
    pairs = (item.partition("=") for item in chosen.peer)
    peers = {name: str(Path(path).resolve()) for name, _, path in pairs}
    chosen_entries = Entries(tuple(chosen.contenders), tuple(chosen.ours), peers)
    try:
        chosen_entries.contenders()
    except ValueError as error:
        parser.error(str(error))
    return chosen_entries


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"found {number}; needed at least 1")
    return number


def muonmesh_with(settings: Mapping[str, Any]) -> Build:
    """muonmesh.Muon with the given settings on top of its defaults."""

    def build(parameters: Parameters, layout: Layout) -> Optimizer:
        import muonmesh

        optimizer = muonmesh.Muon(
            [{"params": parameters, "algorithm": "muon"}],
            lr=LEARNING_RATE,
            momentum=MOMENTUM,
            weight_decay=WEIGHT_DECAY,
            process_group="world" if layout.kind == "ddp" else None,
            **settings,
        )
        assert isinstance(optimizer, Optimizer)
        return optimizer

    return build


def torch_muon(parameters: Parameters, layout: Layout) -> Optimizer:
    """torch.optim.Muon with its own defaults, but for what all contenders have alike."""
    return torch.optim.Muon(
        parameters,
        lr=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        momentum=MOMENTUM,
        adjust_lr_fn="match_rms_adamw",
    )


def _adamw(*, fused: bool) -> Build:
    def build(parameters: Parameters, layout: Layout) -> Optimizer:
        return torch.optim.AdamW(
            parameters, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=fused, foreach=not fused
        )

    return build


_OWN = {
    "ours": [Contender(OURS, True, muonmesh_with({}))],
    "torch": [Contender(TORCH, True, torch_muon)],
    "adamw": [
        Contender("AdamW fused", False, _adamw(fused=True)),
        Contender("AdamW foreach", False, _adamw(fused=False)),
    ],
}


def _variant(text: str) -> Contender:
    """Read `label:ns_method=standard,compute_dtype=float32`."""
    label, separator, body = text.partition(":")
    settings: dict[str, Any] = {}
    for item in body.split(","):
        key, equals, value = item.partition("=")
        if not separator or not label or not key or not equals:
            raise ValueError(
                f"--ours: found {text!r}; needed a label and settings of muonmesh.Muon. "
                "Write for example fp32:compute_dtype=float32,ns_method=standard"
            )
        settings[key] = getattr(torch, value) if key.endswith("_dtype") else _literal(value)
    return Contender(f"{OURS} {label}", True, muonmesh_with(settings))


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _dion(path: Path) -> list[Contender]:
    """microsoft/dion's Muon: a ProcessGroup for DDP, the mesh for FSDP2, as its README says."""
    if not (path / "dion" / "muon.py").is_file():
        raise ValueError("--peer dion: needed a checkout of microsoft/dion, with dion/muon.py in it")

    def build(parameters: Parameters, layout: Layout) -> Optimizer:
        if str(path) not in sys.path:
            sys.path.insert(0, str(path))
        mesh = parameters[0].device_mesh if isinstance(parameters[0], DTensor) else None
        optimizer = importlib.import_module("dion").Muon(
            parameters,
            distributed_mesh={"one": None, "ddp": dist.group.WORLD, "fsdp": mesh}[layout.kind],
            lr=LEARNING_RATE,
            mu=MOMENTUM,
            weight_decay=WEIGHT_DECAY,
            nesterov=True,
            adjust_lr="rms_norm",
        )
        assert isinstance(optimizer, Optimizer)
        return optimizer

    return [Contender("dion Muon", True, build)]


def _gram(path: Path) -> list[Contender]:
    """Dao-AILab/gram-newton-schulz's Muon, for one process; its kernels where there is a GPU."""
    if not (path / "gram_newton_schulz" / "muon" / "muon.py").is_file():
        needed = "a checkout of Dao-AILab/gram-newton-schulz, with gram_newton_schulz/muon/muon.py in it"
        raise ValueError(f"--peer gram: needed {needed}")

    def build(parameters: Parameters, layout: Layout) -> Optimizer:
        if str(path) not in sys.path:
            sys.path.insert(0, str(path))
        optimizer = importlib.import_module("gram_newton_schulz").Muon(
            parameters,
            lr=LEARNING_RATE,
            momentum=MOMENTUM,
            weight_decay=WEIGHT_DECAY,
            nesterov=True,
            adjust_lr="rms_norm",
            ns_use_kernels=torch.cuda.is_available(),
        )
        assert isinstance(optimizer, Optimizer)
        return optimizer

    return [Contender("gram-newton-schulz Muon", True, build, ("one",))]


def _keller(path: Path) -> list[Contender]:
    """KellerJordan/Muon: its single-device class, and in DDP the one that divides the matrices over ranks."""
    if not (path / "muon.py").is_file():
        raise ValueError("--peer keller: needed a checkout of KellerJordan/Muon, with muon.py in it")

    def build(parameters: Parameters, layout: Layout) -> Optimizer:
        specification = importlib.util.spec_from_file_location("keller_muon", path / "muon.py")
        assert specification is not None
        assert specification.loader is not None
        module = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)
        chosen = module.SingleDeviceMuon if layout.kind == "one" else module.Muon
        optimizer = chosen(parameters, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, momentum=MOMENTUM)
        assert isinstance(optimizer, Optimizer)
        return optimizer

    return [Contender("KellerJordan Muon", True, build, ("one", "ddp"))]


_PEERS: dict[str, Callable[[Path], list[Contender]]] = {"dion": _dion, "gram": _gram, "keller": _keller}
