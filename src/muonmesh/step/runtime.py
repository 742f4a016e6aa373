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
from muonmesh.groups.watch import Watch
from muonmesh.layout import Declared
from muonmesh.layout.owners import KnownMatrix
from muonmesh.numerics.kernels import KernelName
from muonmesh.numerics.kernels.pinned_copies import download
from muonmesh.settings import ProcessGroup
from muonmesh.settings.reading import StepSettings
from muonmesh.step.int8_momentum import Blocks
from muonmesh.step.planning import StepPlan
from muonmesh.step.state_layout import Precision
from muonmesh.step.untrained import IdleParameters

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


UNCLIPPED = Clip()
"""What a step reads if nobody has clipped."""


class Requested(NamedTuple):
    """What the user has asked for once, in the constructor.

    Attributes:
        kernels: The kernels; those that all ranks use are in `Runtime.precision`.
        shard_state: Whether replicas share the momentum.
        memory_budget_mb: MiB that a step may take; None: `Budget` chooses a number.
    """

    kernels: KernelName = "auto"
    shard_state: bool = False
    memory_budget_mb: float | None = None


@dataclass(frozen=True)
class Driver:
    """What is decided outside of a step, by an integration that drives the steps or by a test.

    Attributes:
        waits: Whether the CPU waits for reduced flags and sums of parameters (`preflight.host_waits`); None: for those
            on a CPU.
        stages: Meets other pipeline stages, which step too, when the ranks of this stage have agreed and written
            nothing yet. It takes whether these ranks raise an error (``raises=``), and returns the clip by a norm of
            all stages, or None if they do not clip. It raises a PlanError if only ranks of other stages raise an error.
            None: there are no other stages.
    """

    waits: bool | None = None
    stages: Callable[..., Clip | None] | None = None


@dataclass
class Ranks:
    """What this rank has learned of the ranks that share its parameters.

    Attributes:
        group: The process group of the DDP wrapper that was found for the plan, if the user set "auto".
        machine: Number of ranks of each machine, if all ranks agree; 0: all are on one machine, or it is unknown.
        keepers: For each matrix with state at its owner, this owner, which stays the owner in later plans.
        wrappers: The DistributedDataParallel wrappers of the parameters, found when the plan was compared.
        compared: The plan at whose first step replicas were compared.
        warns: Whether this rank warns of what the first training forward showed. If it showed the same on all ranks,
            the first one does.
    """

    group: dist.ProcessGroup | None = None
    machine: int = field(default_factory=ranks_of_a_machine)
    keepers: Mapping[KnownMatrix, int] = field(default_factory=dict)
    wrappers: Sequence[weakref.ref[DistributedDataParallel]] = ()
    compared: StepPlan | None = None
    warns: bool = True


@dataclass
class LastStep:
    """What the last step has left.

    Attributes:
        settings: The settings that it read.
        counted: The groups in which it was counted (`Rule.steps_taken`), until the next step begins.
        absent: The tensors without a gradient on this rank, each with `ParameterStep.present`.
        stopped: Whether it changed nothing; a 0-d bool tensor if the CPU did not wait for the flags.
        squares: The squares of its updates by group, to be added up; None unless `Muon.metrics` has requested them.
        scale: The loss scale by which its gradients were still multiplied, 0-d; None: by none.
        blocks: The blocks by which momentum in int8 was last written; None: none was written.
        brought_back: The event after which the CPU may read state that was copied back; None: it may read it now.
    """

    settings: StepSettings | None = None
    counted: list[dict[str, Any]] = field(default_factory=list)
    absent: Mapping[Tensor, bool | Tensor] = field(default_factory=dict)
    stopped: bool | Tensor = False
    squares: dict[int, list[Tensor]] | None = None
    scale: Tensor | None = None
    blocks: Blocks | None = None
    brought_back: torch.cuda.Event | None = None


@dataclass
class Runtime:
    """The runtime state of one optimizer. It is created once and never replaced, so wrappers may hold it.

    Wrappers (Lightning's, Fabric's) copy the attributes of an optimizer and call its methods on the copy. An attribute
    that a method assigns would be set on the copy only. Optimizer and copy share this object, so a field set here is
    set for both.

    Attributes:
        precision: Dtypes, kernels, and the place of the state.
        process_group: The ranks that hold plain tensors, as the user set them.
        layouts: The declared layouts of plain local shards, by name.
        requested: What the user has asked for once.
        source: The source of gradients, names and process groups.
        driver: What an integration decides in a step.
        complete: Whether the constructor has finished. Groups that are added afterwards must name their algorithm.
        planned: The plan of this rank's parameters; None until it is needed.
        connected: The plan that all ranks have compared; None before the first step.
        ranks: What this rank has learned of the ranks that share its parameters.
        last: What the last step has left.
        clip: The result of clipping for the next step.
        loaded: Whether state has been loaded since the last step.
        pending: Results of the last step that the CPU has not read yet, the flags first: a tensor on its way there, the
            event after which it can be read (None: now), and the function to call with the tensor.
        interrupted: The step or the load that has begun to write and not ended; None: there is none.
        replaced: Learning rates that several groups shared: see `keep_rates_apart`.
        warned: What the user was warned of, or need not be: of rounding for a set of dtypes, and parameters that do not
            suit their rule.
        idle: Counts the steps in which parameters have had no gradient.
        watch: The watch on the model's first training forward; None once its forward has been compared.
    """

    precision: Precision
    process_group: ProcessGroup
    layouts: Mapping[str, Declared]
    requested: Requested
    source: GradientSource = PARAMETER_GRAD
    driver: Driver = field(default_factory=Driver)
    complete: bool = False
    planned: StepPlan | None = None
    connected: StepPlan | None = None
    ranks: Ranks = field(default_factory=Ranks)
    last: LastStep = field(default_factory=LastStep)
    clip: Clip = field(default_factory=Clip)
    loaded: bool = False
    pending: list[tuple[Tensor, torch.cuda.Event | None, Callable[[Tensor], None]]] = field(default_factory=list)
    interrupted: str | None = None
    replaced: dict[Tensor, int] = field(default_factory=dict)
    warned: set[object] = field(default_factory=set)
    idle: IdleParameters = field(default_factory=IdleParameters)
    watch: Watch | None = None

    @property
    def holders(self) -> ProcessGroup:
        """The ranks that hold plain tensors: as the user set them, or as found for "auto"."""
        return self.ranks.group if self.process_group == "auto" else self.process_group

    def refuse_if_interrupted(self) -> None:
        """Raise a StateError if a step or a load was interrupted while it wrote, and no state was loaded afterwards."""
        if self.interrupted is not None:
            problem = f"{self.interrupted} that was interrupted while it wrote, {_TORN}"
            raise StateError(explain_error("the optimizer", problem, "those of one step", _LOAD))

    def explain_interruption(self, error: Exception) -> None:
        """Add to the error that ends a step which has begun to write what that means, and what to do.

        The error itself stays, since programs may catch it by its class. The note stands below it in the traceback.
        """
        error.add_note(about("muonmesh", f"This error was raised after the step had begun to write, {_TORN}. {_LOAD}"))

    def tell(self, value: Tensor, say: Callable[[Tensor], None], *, first: bool = False) -> None:
        """Call ``say`` with ``value`` in CPU memory: now if it is there, else when the next step begins. No waiting.

        With ``first``, ``say`` is always called when the next step begins, before other such functions; it may raise.
        """
        host, arrived = download(value)
        if arrived is None and not first:
            say(host)
        else:
            self.pending.insert(0 if first else len(self.pending), (host, arrived, say))

    def hear(self) -> None:
        """Wait for the results in ``pending`` and call their functions; raise their errors, or that of `interrupted`.

        The rank that found such an error has not counted the last step, so it does not count here either.
        """
        self.refuse_if_interrupted()
        counted, self.last.counted = self.last.counted, []
        try:
            while self.pending:
                value, arrived, say = self.pending.pop(0)
                if arrived is not None:
                    arrived.synchronize()
                say(value)
        except Exception:
            for group in counted:
                group["steps_taken"] -= 1
            raise
