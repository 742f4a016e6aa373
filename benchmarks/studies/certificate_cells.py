"""What the ranks of `certificate.py` do: a project's optimizer takes three steps in one layout.

The weights, and the gradients of every step, are functions of a name: the same in every layout and for every project.
The gradients are small integers times a power of two, and those of the ranks differ, so that data-parallel engines
have something to average; the average is exact in whatever order it is computed.
"""

from __future__ import annotations

import importlib
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

STEPS = 3
RATE = 0.02

# Four of each, so that a rule that hands out equal shapes to the ranks has as many of them as there are ranks. The
# borders of ZeRO's flat partitions lie inside of matrices.
SHAPES = {"tall": (384, 256), "wide": (256, 384), "square": (256, 256)}
DENSE = {f"{name}{i}": shape for i in range(4) for name, shape in SHAPES.items()}
UNEVEN = {"tall": (50, 30), "wide": (30, 50), "thin": (3, 40)}  # 2 and 4 divide no rows; 4 ranks share 3 rows
EXPERTS = {"up": (4, 48, 32), "down": (4, 32, 48)}
MODELS = {"dense": DENSE, "uneven": UNEVEN, "experts": EXPERTS}


@dataclass(frozen=True)
class Layout:
    """Where the weights are: a column of the table, on so many ranks.

    Attributes:
        kind: The column.
        ranks: How many; 1 is one process.
        model: A key of MODELS.
    """

    kind: str
    ranks: int
    model: str = "dense"

    @property
    def name(self) -> str:
        """What `--cells` calls it."""
        return f"{self.kind}-{self.ranks}"

    def alone(self, kind: str) -> Layout:
        """The same weights in one process, of this kind."""
        return Layout(kind, 1, self.model)


KINDS = {
    "ddp": ("DDP", "dense"),
    "fsdp2": ("FSDP2", "dense"),
    "uneven": ("FSDP2, uneven", "uneven"),
    "hsdp": ("HSDP", "dense"),
    "tp": ("TP", "dense"),
    "tp_dp": ("TP × data parallel", "dense"),
    "ep": ("EP", "experts"),
    "zero1": ("ZeRO-1", "dense"),
    "zero2": ("ZeRO-2", "dense"),
    "zero3": ("ZeRO-3", "dense"),
    "distributed": ("distributed optimizer", "dense"),
}
"""The columns: title, and which weights."""

TWO_DIMS = ("hsdp", "tp_dp")  # 2 × 2 ranks


def layouts(kinds: Iterable[str]) -> list[Layout]:
    """The layouts of these columns, on 2 and on 4 ranks."""
    pairs = ((kind, ranks) for kind in kinds for ranks in (2, 4) if ranks == 4 or kind not in TWO_DIMS)
    return [Layout(kind, ranks, KINDS[kind][1]) for kind, ranks in pairs]


# ---------------------------------------------------------------- weights and gradients


class Weight(nn.Module):
    """One weight; the gradient of its output is what its forward is given."""

    def __init__(self, name: str, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(start(name, shape))

    def forward(self, gradient: Tensor) -> Tensor:
        """The sum of weight times gradient, a scalar."""
        return (self.weight * gradient).sum()


class Model(nn.Module):
    """Weights whose loss is linear in them, so that the gradient of a step is known exactly."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: Weight(name, shape) for name, shape in shapes.items()})
        self.shapes = {f"layers.{name}.weight": shape for name, shape in shapes.items()}

    def forward(self, number: int, rank: int, ranks: int) -> Tensor:
        """The loss of a rank in a step, a scalar."""
        whole = zip(self.layers.values(), self.shapes.items(), strict=True)
        return torch.stack([layer(gradient(name, number, shape, rank, ranks)) for layer, (name, shape) in whole]).sum()


def start(name: str, shape: Iterable[int]) -> Tensor:
    """A whole weight before the first step."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(tuple(shape), generator=generator) / 8


def gradient(name: str, number: int, shape: Iterable[int], rank: int = 0, ranks: int = 1) -> Tensor:
    """What one rank of an even number contributes to a whole gradient; the mean over the ranks is that of one rank."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {number}".encode()))
    shared, apart = (torch.randint(-8, 9, tuple(shape), generator=generator).float() * 2.0**-12 for _ in range(2))
    return shared if ranks == 1 else shared + apart * (-1) ** rank


# ---------------------------------------------------------------- optimizers that step a torch.nn.Module


Make = Callable[[list[nn.Parameter], Layout, Any], Any]
"""Makes an optimizer of parameters, a layout, and its mesh."""


def mesh_of(layout: Layout) -> DeviceMesh | None:
    """The mesh of a layout of DTensors."""
    if layout.kind in ("one", "ddp", "zero1"):
        return None
    if layout.kind in TWO_DIMS:
        names = ("replicate", "shard") if layout.kind == "hsdp" else ("dp", "tp")
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    return init_device_mesh("cpu", (layout.ranks,), mesh_dim_names=("shard",))


def sharded(model: Model, layout: Layout, mesh: DeviceMesh | None) -> nn.Module:
    """Wrap or shard a model as the layout says; returns what forward is called on."""
    if layout.kind in ("ddp", "zero1"):
        return DistributedDataParallel(model)
    if mesh is None:
        return model
    if layout.kind in ("tp", "tp_dp", "ep"):

        def cut(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
            if isinstance(module, Weight):  # columns of the second projection of a block, rows of all else
                dim = 1 if "wide" in name else 0
                module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [Shard(dim)]))

        distribute_module(model, mesh["tp"] if layout.kind == "tp_dp" else mesh, cut)
    if layout.kind in ("fsdp2", "uneven", "hsdp", "tp_dp"):
        data = mesh["dp"] if layout.kind == "tp_dp" else mesh
        for layer in model.layers.values():
            fully_shard(layer, mesh=data)
        fully_shard(model, mesh=data)
    return model


def give_gradients(model: Model, wrapped: nn.Module, layout: Layout, number: int) -> None:
    """Put a step's gradients into `.grad`: by a backward that averages them over data-parallel ranks, if there are."""
    from muonmesh.comm.placing import storage_of
    from muonmesh.tools.auditing.probe import give_gradient

    if layout.kind in ("tp", "tp_dp", "ep"):  # a forward on tensor-parallel weights would need a model's activations
        for name, parameter in model.named_parameters():
            storage = storage_of(name, parameter, None)
            give_gradient(parameter, storage, gradient(name, number, storage.shape))
    else:
        rank = dist.get_rank() if layout.ranks > 1 else 0
        wrapped(number, rank, layout.ranks).backward()


def whole_weights(model: Model) -> dict[str, Tensor]:
    """The whole weights, on every rank.

    Raises:
        ReplicasError: two ranks hold different values of one element.
    """
    from muonmesh.comm.placing import storage_of
    from muonmesh.comm.storage import local_of
    from muonmesh.tools.auditing.probe import gathered

    weights = {}
    for name, parameter in model.named_parameters():
        storage = storage_of(name, parameter, None)
        high, low = gathered(local_of(parameter).detach(), storage, model.shapes[name], torch.device("cpu"))
        if not torch.equal(high, low):
            raise ReplicasError(f"the ranks hold different values of {name}")
        weights[name] = high
    return weights


class ReplicasError(Exception):
    """Replicas of one weight differ."""


def of_module(make: Make, prepare: Callable[[Model, Any], None] | None = None) -> Callable[[Layout, bool], Any]:
    """Return what runs a cell of an optimizer that steps a torch.nn.Module: the weights after each step, or verdicts.

    `prepare` is called with the model and its mesh before the model is sharded.
    """

    def run(layout: Layout, audited: bool) -> Any:
        model = Model(MODELS[layout.model])
        mesh = mesh_of(layout)
        if prepare is not None:
            prepare(model, mesh)
        wrapped = sharded(model, layout, mesh)
        optimizer = make(list(model.parameters()), layout, mesh)
        if audited:
            return verdicts(optimizer, model)
        weights = [whole_weights(model)]
        for number in range(STEPS):
            optimizer.zero_grad()
            give_gradients(model, wrapped, layout, number)
            optimizer.step()
            weights.append(whole_weights(model))
        return weights

    return run


def verdicts(optimizer: Any, model: nn.Module) -> dict[str, int]:
    """How many weights an audit says what of."""
    import muonmesh

    named = dict(model.named_parameters())
    specs = ["stack" if parameter.ndim == 3 else "whole" for parameter in named.values()]
    group = {"params": [*named.values()], "param_names": [*named], "algorithm": "muon", "matrices": specs}
    return dict(Counter(row.verdict for row in muonmesh.audit(optimizer, model, groups=[group]).rows))


def muonmesh(parameters: list[nn.Parameter], layout: Layout, mesh: Any) -> Any:
    import muonmesh

    group = "world" if layout.kind == "ddp" else None
    return muonmesh.Muon([{"params": parameters, "algorithm": "muon"}], lr=RATE, process_group=group)


def torch_muon(parameters: list[nn.Parameter], layout: Layout, mesh: Any) -> Any:
    if layout.kind == "zero1":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(parameters, optimizer_class=torch.optim.Muon, lr=RATE)
    return torch.optim.Muon(parameters, lr=RATE)


def dion(parameters: list[nn.Parameter], layout: Layout, mesh: Any) -> Any:
    """README: a ProcessGroup for DDP, the mesh for FSDP2, and of HSDP's mesh the dim that shards."""
    by_kind = {"ddp": dist.group.WORLD, "hsdp": mesh and layout.kind == "hsdp" and mesh["shard"]}
    return importlib.import_module("dion").Muon(parameters, distributed_mesh=by_kind.get(layout.kind, mesh), lr=RATE)


def keller_jordan(parameters: list[nn.Parameter], layout: Layout, mesh: Any) -> Any:
    """README: MuonWithAuxAdam, and its class for one device."""
    package = importlib.import_module("muon")
    single = layout.kind == "one"
    kind = package.SingleDeviceMuonWithAuxAdam if single else package.MuonWithAuxAdam
    return kind([{"params": parameters, "lr": RATE, "use_muon": True}])


def muonium(parameters: list[nn.Parameter], layout: Layout, mesh: Any) -> Any:
    module = importlib.import_module("muonium.orthogonalize").orthogonalize
    module.pe_loop_triton = module.pe_loop  # without the kernels that need CUDA
    return importlib.import_module("muonium").Muon(parameters, lr=RATE)


def muon_fsdp2(parameters: list[nn.Parameter], layout: Layout, mesh: Any) -> Any:
    return importlib.import_module("muon_fsdp2").Muon([{"params": parameters, "lr": RATE, "use_muon": True}])


def heavyball(parameters: list[nn.Parameter], layout: Layout, mesh: Any) -> Any:
    package = importlib.import_module("heavyball")
    package.utils.compile_mode = None
    return package.Muon(parameters, lr=RATE)


def veomni(parameters: list[nn.Parameter], layout: Layout, mesh: Any) -> Any:
    """Its plain iteration: the default, gram_quack, is a kernel for CUDA."""
    package = importlib.import_module("veomni.optim.muon")
    return package.DistributedMuon(parameters, lr=RATE, ns_implementation="std")


def axolotl_8bit(parameters: list[nn.Parameter], layout: Layout, mesh: Any) -> Any:
    """As its factory, which makes one class with a mesh and without."""
    kind = importlib.import_module("axolotl.utils.optimizers.muon_8bit").Muon8bit
    return kind(parameters, distributed_mesh=None if mesh is None else mesh["shard"], lr=RATE)


def axolotl(parameters: list[nn.Parameter], layout: Layout, mesh: Any) -> Any:
    """As its factories: DistMuon where axolotl has a mesh (of HSDP's the dim that shards), else Muon."""
    contributed = importlib.import_module("axolotl.contribs.mit.muon")
    if layout.kind in ("one", "ddp"):
        return contributed.Muon(muon_params=parameters, lr=RATE)
    kind = importlib.import_module("axolotl.contribs.mit.muon.dist_muon").DistMuon
    return kind(parameters, distributed_mesh=mesh["shard"], lr=RATE)


def torchtitan(parameters: list[nn.Parameter], layout: Layout, mesh: Any) -> Any:
    flex = importlib.import_module("torchtitan.distributed.flex_shard.dist_muon")
    reshard = importlib.import_module("torchtitan.distributed.flex_shard.optimizer_reshard")
    names = [str(i) for i in range(len(parameters))]
    owned = {name: reshard.ComputeLayout({"shard": reshard.Owned()}) for name in names}
    groups = [{"params": parameters, "param_names": names}]
    return flex.build_dist_muon(groups, compute_sharding_by_fqn=owned, bucket_configs=[], lr=RATE)


def dmuon(parameters: list[nn.Parameter], layout: Layout, mesh: Any) -> Any:
    return importlib.import_module("dmuon").Muon(parameters, lr=RATE)


def dedicated(model: Model, mesh: Any) -> None:
    """README: before fully_shard, DMuon is told which weights it owns."""
    importlib.import_module("dmuon").dedicate_params(model, mesh, predicate=lambda name, parameter: True)


# ---------------------------------------------------------------- engines


def deepspeed(its_muon: bool) -> Callable[[Layout, bool], Any]:
    """Return what runs a cell of DeepSpeed's engine, with its own Muon or with muonmesh."""

    def run(layout: Layout, audited: bool) -> Any:
        os.environ.update(RANK=str(dist.get_rank()), LOCAL_RANK=str(dist.get_rank()), WORLD_SIZE=str(layout.ranks))
        from benchmarks.deepspeed_step import close, config_of, weights

        importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
        model = Model(MODELS[layout.model])
        stage = int(layout.kind.removeprefix("zero")) if layout.kind.startswith("zero") else 0
        elements = sum(parameter.numel() for parameter in model.parameters())
        config = config_of(stage, reduce_scatter=stage < 3, bf16=False, offload=False, elements=elements)
        if its_muon:
            muon = {"type": "Muon", "params": {"lr": RATE}}
            config |= {"optimizer": muon, "zero_allow_untested_optimizer": True}
            package = importlib.import_module("deepspeed")
            engine = package.initialize(model=model, config=config, model_parameters=model.parameters())[0]
        else:
            integration = importlib.import_module("muonmesh.integrations.deepspeed")
            settings = {"lr": RATE, "overrides": {"weight": "muon"}}
            engine = integration.initialize(model=model, config=config, optimizer=settings)[0]
        snapshots = [dict(zip(model.shapes, weights(engine), strict=True))]
        for number in range(STEPS):
            engine.backward(engine(number, dist.get_rank(), layout.ranks))
            engine.step()
            snapshots.append(dict(zip(model.shapes, weights(engine), strict=True)))
        close(engine)
        return snapshots

    return run


def megatron(mode: str) -> Callable[[Layout, bool], Any]:
    """Return what runs a cell of Megatron-Core's GPTModel: with its Muon in a mode, or with muonmesh ("").

    "distributed" is Megatron's layer-wise optimizer: from 0.17 on a setting, before that an argument.
    """

    def run(layout: Layout, audited: bool) -> Any:
        from tests.megatron import gathered, host
        from tests.megatron.shapes import MOE

        tp = {"tp": layout.ranks, "tp_dp": 2}.get(layout.kind, 1)
        experts = MOE if layout.model == "experts" else ()
        flat = layout.kind == "distributed" and not mode
        ep = layout.ranks if layout.kind == "ep" else 1
        shape = host.Shape(tp=tp, ep=ep, flat=flat, model=(("num_query_groups", 4), *experts))
        host.begin(shape)
        chunks = host.chunks_of(shape)
        parameters = gathered.named(chunks)
        whole = {name: tensor.shape for name, tensor in gathered.gather(gathered.local_values(parameters)).items()}
        for name, parameter in parameters.items():
            parameter.data.copy_(_megatron_shard(name, start(name, whole[name])))
        config = host.optimizer_config(shape, clip_grad=0.0)
        if mode:
            config.optimizer, config.muon_tp_mode = "muon", mode
            layer_wise = layout.kind == "distributed"
            if hasattr(config, "use_layer_wise_distributed_optimizer"):
                config.use_layer_wise_distributed_optimizer = layer_wise
                optimizer = importlib.import_module("megatron.core.optimizer").get_megatron_optimizer(config, chunks)
            else:
                make = importlib.import_module("megatron.core.optimizer.muon").get_megatron_muon_optimizer
                optimizer = make(config, chunks, layer_wise_distributed_optimizer=layer_wise)
        else:
            make = importlib.import_module("muonmesh.integrations.megatron").get_megatron_optimizer
            optimizer = make(config, chunks, muon={"lr": RATE})
        snapshots = [gathered.gather(gathered.local_values(parameters))]
        for number in range(STEPS):
            for chunk in chunks:
                chunk.zero_grad_buffer()
            for name, parameter in parameters.items():
                parameter.main_grad.copy_(_megatron_gradient(name, number, whole[name]))
            for chunk in chunks:
                chunk.finish_grad_sync()
            reduced = gathered.gather(gathered.local_values(parameters, gathered.gradients(chunks)))
            for name, tensor in reduced.items():
                assert torch.equal(tensor, gradient(name, number, tensor.shape)), f"{name}: another gradient"
            optimizer.step()
            snapshots.append(gathered.gather(gathered.local_values(parameters)))
        return snapshots

    return run


def _megatron_gradient(name: str, number: int, shape: torch.Size) -> Tensor:
    """What a rank contributes to its shard of a gradient, so that Megatron's scaling gives the exact mean."""
    from megatron.core import parallel_state as state

    data = ranks = state.get_data_parallel_world_size()
    rank = state.get_data_parallel_rank()
    if "local_experts" in name:
        ranks, rank = state.get_expert_data_parallel_world_size(), state.get_expert_data_parallel_rank()
    return _megatron_shard(name, gradient(name, number, shape, rank, ranks) * (data // ranks))


def _megatron_shard(name: str, whole: Tensor) -> Tensor:
    """Cut a rank's shard out of a whole parameter."""
    from megatron.core.parallel_state import get_tensor_model_parallel_world_size
    from tests.megatron.gathered import CUTS, tensor_parallel_rank

    dim, pieces = next((cut for end, cut in CUTS.items() if name.endswith(end)), (None, 1))
    parts = 1 if "local_experts" in name else get_tensor_model_parallel_world_size()
    if dim is None or parts == 1:
        return whole
    assert isinstance(pieces, int)
    return torch.cat([piece.chunk(parts, dim)[tensor_parallel_rank(name)] for piece in whole.chunk(pieces, dim)], dim)


# ---------------------------------------------------------------- who takes part


@dataclass(frozen=True)
class Project:
    """One row of the table.

    Attributes:
        title: In the table.
        run: Runs a cell on a rank.
        kinds: The columns that it documents, or that a user would try.
        package: What is imported once, before the ranks start.
        unpromised: Those of the columns that its documentation does not list, or says not to support.
        audits: Whether `muonmesh.audit` can step it.
        alone: What it is compared with: "one", or a column on one rank where the package needs that.
        note: What to know about the row.
    """

    title: str
    run: Callable[[Layout, bool], Any]
    kinds: tuple[str, ...]
    package: str
    unpromised: tuple[str, ...] = ()
    audits: bool = True
    alone: str = "one"
    note: str = ""


OF_TORCH = ("ddp", "fsdp2", "uneven", "hsdp", "tp", "tp_dp", "ep")
OF_DEEPSPEED = ("ddp", "zero1", "zero2", "zero3")
OF_MEGATRON = ("ddp", "tp", "tp_dp", "ep", "distributed")
SHARDED = ("ddp", "fsdp2", "uneven", "hsdp")


def _in_deepspeed(title: str, its_muon: bool, note: str = "") -> Project:
    return Project(title, deepspeed(its_muon), OF_DEEPSPEED, "deepspeed", audits=False, note=note)


def _in_megatron(title: str, mode: str, note: str = "") -> Project:
    return Project(title, megatron(mode), OF_MEGATRON, "megatron.core", audits=False, note=note)


PROJECTS = {
    "muonmesh": Project("muonmesh", of_module(muonmesh), OF_TORCH, "muonmesh"),
    "muonmesh_deepspeed": _in_deepspeed("muonmesh in DeepSpeed", its_muon=False),
    "muonmesh_megatron": _in_megatron("muonmesh in Megatron-Core 0.16", ""),
    "muonmesh_megatron_next": _in_megatron("muonmesh in Megatron-Core 0.19", ""),
    "torch": Project(
        "torch.optim.Muon",
        of_module(torch_muon),
        (*OF_TORCH, "zero1"),
        "torch.optim",
        note="ZeRO-1 is torch's ZeroRedundancyOptimizer. Its documentation takes 2-D weights only.",
    ),
    "dion": Project(
        "dion",
        of_module(dion),
        OF_TORCH,
        "dion",
        unpromised=("tp", "tp_dp"),
        note="The README lists DDP, FSDP2 and HSDP for Muon, and says that it has no tensor parallelism.",
    ),
    "deepspeed": _in_deepspeed(
        "DeepSpeed's Muon",
        its_muon=True,
        note="The column DDP is ZeRO-0. `gradient_clipping` is 0, and `reduce_scatter` is off for ZeRO-3, where "
        "DeepSpeed's Muon refuses it.",
    ),
    "megatron_blockwise": _in_megatron(
        "Megatron-Core 0.16, blockwise",
        "blockwise",
        note="`blockwise` is the default of `muon_tp_mode`: each shard is a matrix of its own, by design.",
    ),
    "megatron_duplicated": _in_megatron(
        "Megatron-Core 0.16, duplicated",
        "duplicated",
        note="In both modes, the distributed optimizer is the layer-wise one (`dist_muon`).",
    ),
    "megatron_next_blockwise": _in_megatron("Megatron-Core 0.19, blockwise", "blockwise"),
    "megatron_next_duplicated": _in_megatron(
        "Megatron-Core 0.19, duplicated",
        "duplicated",
        note="The distributed optimizer is the layer-wise one (`use_layer_wise_distributed_optimizer`). That of 0.19.2 "
        "wraps parameters for bf16 alone, and the weights here are fp32.",
    ),
    "torchtitan": Project(
        "torchtitan's DistMuon",
        of_module(torchtitan),
        ("fsdp2",),
        "torchtitan",
        alone="fsdp2",
        note="Its documentation promises the bits of torch.optim.Muon for `Owned` matrices.",
    ),
    "dmuon": Project("DMuon", of_module(dmuon, dedicated), ("fsdp2", "hsdp"), "dmuon", alone="fsdp2"),
    "veomni": Project(
        "VeOmni",
        of_module(veomni),
        (*SHARDED, "ep"),
        "veomni.optim.muon",
        note='With `ns_implementation="std"`; the default is a kernel for CUDA.',
    ),
    "axolotl": Project(
        "axolotl",
        of_module(axolotl),
        SHARDED,
        "axolotl.contribs",
        note="Without a mesh, axolotl makes another class (`Muon`) than with one (`DistMuon`), with another scale and "
        "without Nesterov momentum. So what is sharded differs from one process, although each matrix is whole.",
    ),
    "axolotl_8bit": Project("axolotl, muon_8bit", of_module(axolotl_8bit), SHARDED, "axolotl.contribs"),
    "heavyball": Project("HeavyBall", of_module(heavyball), SHARDED, "heavyball"),
    "muonium": Project("muonium", of_module(muonium), OF_TORCH, "muonium"),
    "keller_jordan": Project("KellerJordan/Muon", of_module(keller_jordan), ("ddp",), "muon"),
    "muon_fsdp2": Project(
        "muon-fsdp2",
        of_module(muon_fsdp2),
        ("fsdp2", "uneven"),
        "muon_fsdp2",
        alone="fsdp2",
        note="It is compared with FSDP2 on one rank: on a plain tensor, it raises NameError (`muon_update`).",
    ),
}


def cell(project: str, layout: Layout, audited: bool = False) -> Any:
    """One rank's part of a cell: of rank 0, the weights before and after each step, or the verdicts of an audit."""
    value = PROJECTS[project].run(layout, audited)
    return value if not dist.is_initialized() or dist.get_rank() == 0 else None
