"""Runtime: everything that an optimizer keeps between two steps besides torch's state and groups."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from muonmesh.comm.gradients import PARAMETER_GRAD, GradientSource
from muonmesh.comm.ranks import ranks_of_a_machine
from muonmesh.errors import StateError, about, explain_error
from muonmesh.layout import Declared
from muonmesh.layout.owners import KnownMatrix
from muonmesh.numerics.kernels import KernelName
from muonmesh.numerics.kernels.memory import download
from muonmesh.numerics.rules import rule_method_of
from muonmesh.settings import ProcessGroup
from muonmesh.step.blocks import Blocks
from muonmesh.step.offload import Offload
from muonmesh.step.planning import Connected, Planned
from muonmesh.step.precision import Precision
from muonmesh.step.untrained import IdleParameters
from muonmesh.step.update_squares import UpdateSquares

_TORN = "so some weights and their state are of another step than others"
_LOAD = "Load model and optimizer from a checkpoint (load_state_dict; a new optimizer for torch.distributed.checkpoint)"


class Clip(NamedTuple):
    """The result of a clipping call, which the next step reads.

    Attributes:
        skip: 0-d bool tensor, whether the next step changes nothing; None: it is not skipped.
        means: The running means of the norms after the next step, see `muonmesh.clip.norm_means`; None: they stay.
        error: An error of this rank that the next step raises, because the CPU has not waited for the other ranks.
    """

    skip: Tensor | None = None
    means: Tensor | None = None
    error: Exception | None = None


@dataclass
class Runtime:
    """The runtime state of one optimizer. It is created once and never replaced, so wrappers may hold it.

    Wrappers (Lightning's, Fabric's) copy the attributes of an optimizer and call its methods on the copy. An attribute
    that a method assigns would be set on the copy only. Optimizer and copy share this object, so a field set here is
    set for both.

    Attributes:
        precision: Dtypes, kernels, and the place of the state.
        process_group: The ranks that hold plain tensors, as the user set them.
        found_group: The process group of the DDP wrapper that was found for the plan, if the user set "auto".
        layouts: The declared layouts of plain local shards, by name.
        shard_state: Whether replicas share the momentum.
        memory_budget_mb: MiB that a step may take; None: `Budget` chooses a number.
        cuda_graphs: Whether batches are captured in CUDA graphs.
        complete: Whether the constructor has finished. Groups that are added afterwards must name their algorithm.
        planned: The plan of this rank's parameters; None until it is needed.
        connected: The plan that all ranks have compared, with its exchange; None before the first step.
        keepers: For each matrix with state at its owner, this owner, which stays the owner in later plans.
        compared: The plan at whose first step replicas were compared.
        loaded: Whether state has been loaded since the last step.
        clip: The result of clipping for the next step.
        update_squares: Squares of the last step's updates; None unless `Muon.metrics` has requested them.
        late: Results of the last step that the CPU has not read yet, the flags first: a tensor on its way to the CPU,
            the event after which it can be read (None: now), and the function to call with the tensor.
        warned: Whether a warning about rounding was given.
        unsuited_told: Names of parameters with a past warning that they do not suit their rule.
        idle: Counts the steps in which parameters have had no gradient.
        replaced: Learning rates that several groups shared: see `keep_rates_apart`.
        counted: The groups in which the last step was counted (`Rule.steps_taken`).
        wrote: The blocks by which momentum in int8 was last written; None: none was written.
        creates_state: Whether a step with learning rate 0 and zero gradients only creates state (decision 3). False if
            this optimizer sees a part of the gradients and cannot know whether the others are zero.
        waits: Whether the CPU waits for the flags; None: only if the parameters are on a CPU.
        offload: Whether a step works on copies of the state; None: only if the state is not on the parameters' device.
        brought_back: The event after which the CPU may read state that was copied back; None: it may read it now.
        absent: The tensors without a gradient on this rank in the last step, each with `ParameterStep.present`.
        stopped: Whether the last step changed nothing; a 0-d bool tensor if the CPU did not wait for the flags.
        interrupted: The step or the load that has begun to write and not ended; None: there is none.
        source: The source of gradients, names and process groups.
        machine: Number of ranks of each machine, if all ranks agree; 0: all are on one machine, or it is unknown.
        asked: The ``kernels`` that the user set; the kernels that all ranks use are in `precision`.
        wrappers: The DistributedDataParallel wrappers of the parameters, found when the plan was compared.
        everywhere: A function that a step calls if other pipeline stages step too, after the ranks have agreed and
            before any rank writes; the CPU waits then. Its argument says whether these ranks raise an error. If they do
            not, it returns a clip by a norm of all stages (or None), and raises an error if ranks elsewhere do.
    """

    precision: Precision
    process_group: ProcessGroup
    layouts: Mapping[str, Declared]
    shard_state: bool
    memory_budget_mb: float | None
    cuda_graphs: bool = False
    complete: bool = False
    planned: Planned | None = None
    connected: Connected | None = None
    keepers: Mapping[KnownMatrix, int] = field(default_factory=dict)
    compared: Planned | None = None
    loaded: bool = False
    clip: Clip = field(default_factory=Clip)
    update_squares: UpdateSquares | None = None
    late: list[tuple[Tensor, torch.cuda.Event | None, Callable[[Tensor], None]]] = field(default_factory=list)
    warned: bool = False
    unsuited_told: set[str] = field(default_factory=set)
    idle: IdleParameters = field(default_factory=IdleParameters)
    replaced: dict[Tensor, int] = field(default_factory=dict)
    counted: list[dict[str, Any]] = field(default_factory=list)
    wrote: Blocks | None = None
    creates_state: bool = True
    waits: bool | None = None
    offload: bool | None = None
    brought_back: torch.cuda.Event | None = None
    absent: Mapping[Tensor, bool | Tensor] = field(default_factory=dict)
    stopped: bool | Tensor = False
    interrupted: str | None = None
    source: GradientSource = PARAMETER_GRAD
    found_group: dist.ProcessGroup | None = None
    machine: int = field(default_factory=ranks_of_a_machine)
    wrappers: Sequence[weakref.ref[DistributedDataParallel]] = ()
    everywhere: Callable[[bool], Clip | None] | None = None
    asked: KernelName = field(init=False)

    def __post_init__(self) -> None:
        """Keep the kernels that the user set."""
        self.asked = self.precision.kernels

    @property
    def holders(self) -> ProcessGroup:
        """The ranks that hold plain tensors: as the user set them, or as found for "auto"."""
        return self.found_group if self.process_group == "auto" else self.process_group

    def refuse_if_interrupted(self) -> None:
        """Raise a StateError if a step or a load was interrupted while it wrote, and no state was loaded afterwards."""
        if self.interrupted is not None:
            found = f"{self.interrupted} that was interrupted while it wrote, {_TORN}"
            raise StateError(explain_error("the optimizer", found, "those of one step", _LOAD))

    def explain_interruption(self, error: Exception) -> None:
        """Add to the error that ends a step which has begun to write: which rule raised it, and what to do.

        The error itself stays, since programs may catch it by its class. The note stands below it in the traceback.
        """
        method = rule_method_of(error)
        if method is not None:
            self.interrupted = f"{self.interrupted}, ended by an error in {method},"
        where = f"This error was raised{'' if method is None else f' in {method}'} after the step had begun to write"
        error.add_note(about("muonmesh", f"{where}, {_TORN}. {_LOAD}"))

    def tell(self, value: Tensor, say: Callable[[Tensor], None], *, first: bool = False) -> None:
        """Call ``say`` with ``value`` in CPU memory: now if it is there, else when the next step begins. No waiting.

        With ``first``, ``say`` is always called when the next step begins, before other such functions; it may raise.
        """
        host, arrived = download(value)
        if arrived is None and not first:
            say(host)
        else:
            self.late.insert(0 if first else len(self.late), (host, arrived, say))

    def hear(self) -> None:
        """Wait for the results in ``late`` and call their functions. Errors of these functions are raised."""
        while self.late:
            value, arrived, say = self.late.pop(0)
            if arrived is not None:
                arrived.synchronize()
            say(value)

    def host_waits(self, planned: Planned) -> bool:
        """Whether the CPU waits for reduced flags and sums: by default only if the parameters are on a CPU."""
        known = True if self.everywhere is not None else self.waits
        return planned.device.type == "cpu" if known is None else known

    def offload_of(self, planned: Planned) -> Offload | None:
        """Return the `Offload` that copies the state of this step to the device and back; None if it is there."""
        leaves = self.precision.on_host and planned.device.type != "cpu"
        needed = leaves if self.offload is None else self.offload
        return Offload(planned.device, elements=planned.plan.budget.elements_on_device) if needed else None
