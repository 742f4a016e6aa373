"""QKClip: MuonClip's bound on attention logits (Kimi Team, arXiv 2507.20534)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes

from muonmesh.checkpoint.record import recorded_in
from muonmesh.comm.placing import storage_of
from muonmesh.comm.storage import local_of, this_rank
from muonmesh.errors import calling, escaped, explain_error, warn
from muonmesh.groups.example import Example, facts_of_example
from muonmesh.groups.parameter_sites import class_names
from muonmesh.integrations.qk_clip.attention import (
    KernelBounds,
    largest_logits,
    refuse_unknown_attention,
    runs_for_shapes,
    watch,
    watch_functions,
)
from muonmesh.integrations.qk_clip.rows import Attention, LogitRows, attentions, scale_rows, without_softmax
from muonmesh.integrations.qk_clip.shared_heads import SharedHeads, first_head, parts_of_heads
from muonmesh.names import canonical_name
from muonmesh.optimizer import Muon
from muonmesh.step.connection import placed_members
from muonmesh.step.members import OptimizedParameter, names_in
from muonmesh.step.untrained import PATIENCE, listed
from muonmesh.table import aligned

_SHARDED = "Make the QKClip before the model is sharded. To make it after, leave example= out and pass optimizer=, "
_SHARDED += "with groups = split_params(model, example=...) from before, and Muon(groups.held_by(model))"


class QKClip:
    """Keeps the attention logits of a model below a threshold by scaling query and key weights.

    During the forward pass, QKClip records a number S for each head: its largest logit, or an upper bound on it. Fast
    kernels return the log-sum-exp (lse) of each query's logits. With n keys, the largest logit lies in
    [lse − ln n, lse]. With this bound no logit stays above the threshold, but S may be too large by up to ln n.

    Models of `transformers` need no change: QKClip reads their attention interface (sdpa, flash and flex attention).
    For eager attention, and for sdpa without a fast kernel, QKClip computes the logits a second time. For modules of
    your own, call `watching`, `record` or `observe`. `explain` shows the source of S.

    After a step, QKClip scales the logits of each head by γ = min(1, threshold/S). It multiplies the head's rows of W_q
    and W_k, and of their biases, by √γ each. Where heads share a key, and for the rotary part of latent attention, it
    multiplies only the queries, by γ. Momentum does not change. Position biases and other numbers that are added to the
    logits count in S, but are not scaled. Layers without a softmax are left out. With an ``optimizer``, frozen modules
    are left out too.

    All ranks that share the model call `step`. One all-reduce takes the largest S of each head over these ranks, for
    each attention module over those that have one of its name. After the first step, the CPU does not wait for the
    device.

    Only modules in training mode record. So an evaluation between two steps changes no weight.

    Args:
        model: Any module, as it is trained; sharded or not, but with ``example`` not yet sharded.
        threshold: The largest logit that is allowed.
        optimizer: The optimizer after whose steps the weights are clipped: a `Muon`, or a wrapper of one, such as a
            DeepSpeed engine's. QKClip then also clips shards that are no DTensors, flat buffers and fp32 master
            weights. None: write ``clip.step()`` after each step; only plain weights and DTensors are clipped.
        process_group: The ranks that train this model, or this pipeline stage; None means all. With an ``optimizer``
            whose ``process_group`` is "local", None means those that share parameters with this rank.
        example: One forward of the model, as for `split_params`. It shows which rows of a fused weight make queries and
            keys. If one weight makes both, this or an ``optimizer`` whose ``"matrices"`` say it is needed.

    Raises:
        ValueError: QKClip knows no attention module of this model, or a module bounds its logits by norms of queries
            and keys, the threshold is not above 0, or another QKClip already clips this model; or an ``optimizer`` is
            given, and a module that is trained has weights to scale that are frozen or that it does not step; or
            an attention module of `transformers` that is trained has queries and keys that are not known.
    """

    def __init__(
        self,
        model: nn.Module,
        threshold: float = 100.0,
        *,
        optimizer: Any = None,
        process_group: dist.ProcessGroup | None = None,
        example: Example | None = None,
    ) -> None:
        if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not threshold > 0:
            raise ValueError(explain_error("threshold", f"{threshold!r}", "a number above 0", "Write threshold=100"))
        self.threshold = float(threshold)
        self._model, self._group = model, process_group
        inner = None if optimizer is None else recorded_in(optimizer)
        if optimizer is not None and inner is None:
            needed, write = "a muonmesh.Muon, or a wrapper of one", "Leave it out and call clip.step() after each step"
            raise TypeError(explain_error("QKClip", f"optimizer={type(optimizer).__name__}", needed, write))
        muons: Sequence[Muon] = () if inner is None else inner.muons
        self._optimizers = tuple(ref(muon) for muon in muons)  # weak: the optimizers' hooks refer to this QKClip
        own_names = {id(parameter): canonical_name(key) for key, parameter in model.named_parameters()}
        stepped = {
            own_names.get(id(tensor), name): matrices  # the optimizer may have been made from a module around this one
            for group in (group for muon in muons for group in muon.param_groups if "matrices" in group)
            for name, tensor, matrices in zip(
                group.get("param_names", ()), group["params"], group["matrices"], strict=False
            )
        }
        with calling("QKClip"):
            forward_facts = {} if example is None else facts_of_example(model, example, sharded=_SHARDED)
        attention_modules = attentions(model, forward_facts, stepped)
        if muons:
            _refuse_unstepped(attention_modules, muons)
        self._without = without_softmax(model)
        refuse_unknown_attention(model, [a.module for a in attention_modules], self._without)
        self._sources: dict[int, str] = {}
        self._steps = 0
        *starts, total = accumulate((attention.heads for attention in attention_modules), initial=0)
        self._attentions = {id(a.module): (a, start) for a, start in zip(attention_modules, starts, strict=True)}
        # Until the first logits are on another device.
        self._largest = torch.full((total,), -torch.inf, dtype=torch.float32, device="cpu")
        self._last = self._largest.clone()
        self._shared: SharedHeads | None = None
        of_transformers = [a.module for a in attention_modules if class_names(a.module, "transformers")]
        self._models_of_transformers = watch(model, of_transformers, self) if of_transformers else []
        for muon in muons[:1]:  # a DeepSpeed engine has several Muons, which step one after the other
            muon.register_step_post_hook(lambda *_: self._agree())
        for muon in muons:
            muon.register_step_post_hook(lambda muon, *_: self._clip(muon))

    @property
    def largest(self) -> Mapping[str, Tensor]:
        """The number S of each head over all ranks, as used by the last step: fp32 (heads,) by attention module name.

        −inf means that nothing was recorded; inf means that a logit was not finite.
        """
        return {a.name: self._last[start:][: a.heads] for a, start in self._attentions.values()}

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def observe(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        *,
        scale: float,
        mask: Any = None,
        bias: Tensor | None = None,
        causal: bool = False,
    ) -> None:
        """Record the largest logits of one call of your own attention module, computed from queries and keys.

        A module in eval mode records nothing.

        Args:
            module: The attention module.
            query: Shape (batch, heads, queries, size), after rotary embedding; the heads that this rank computes.
            key: Shape (batch, groups, keys, size).
            scale: The factor of the products of queries and keys.
            mask: None, bool, numbers to be added, or a BlockMask, see `largest_logits`.
            bias: Numbers to be added beside the mask, such as a position bias.
            causal: Whether a query ignores later keys.
        """
        if any(isinstance(tensor, DTensor) for tensor in (query, key)):
            problem, needed = "queries or keys that are DTensors", "the heads that this rank computes, as plain tensors"
            write = "Write clip.observe(module, query.to_local(), key.to_local(), scale=...)"
            raise ValueError(explain_error(type(module).__name__, problem, needed, write))
        if module.training:
            with _disable_current_modes():
                largest = largest_logits(query, key, scale=scale, mask=mask, bias=bias, causal=causal)
            self._record_in_forward(module, largest, bound=False)
            self._sources[id(module)] = "exact, computed once more"

    @contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        """Record the log-sum-exp of the attention kernels that run in this context, for your own attention module.

        It supports `torch.nn.functional.scaled_dot_product_attention` (not its math kernel),
        `torch.nn.attention.varlen`, and flash-attn 2 and 3. If keys come part by part, as in ring attention, all parts
        count. A module in eval mode, or without gradients, records nothing.

        Raises:
            ValueError: No supported kernel ran in this context.
        """
        if not module.training or not torch.is_grad_enabled():
            yield
            return
        with KernelBounds() as kernels:
            yield
        if kernels.bound is None:
            needed, write = "a kernel that returns the log-sum-exp", "Write clip.observe(module, query, key, scale=...)"
            raise ValueError(explain_error(type(module).__name__, "no such kernel in watching()", needed, write))
        self._record_in_forward(module, kernels.bound, bound=True)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def record(self, module: nn.Module, largest: Tensor, *, first: int | None = None, bound: bool = False) -> None:
        """Record the largest logit of each head of an attention module; nothing if it is in eval mode.

        Args:
            module: The attention module.
            largest: Shape (heads,). FlexAttention gives it by ``AuxRequest(max_scores=True)``, Transformer Engine by
                ``return_max_logit=True``.
            first: The index of the first of these heads, if a rank computes some of them. None means all heads, or
                the heads whose weights this rank holds as a DTensor.
            bound: Whether ``largest`` is an upper bound, such as the largest log-sum-exp of a head.

        Raises:
            ValueError: QKClip does not know the weights of this module, or the module has other heads.
        """
        if id(module) not in self._attentions:
            names = ", ".join(a.name for a, _ in self._attentions.values())
            raise ValueError(explain_error(type(module).__name__, "a module that is not known", f"one of {names}"))
        if not module.training or runs_for_shapes():
            return
        attention, start = self._attentions[id(module)]
        if first is None:
            first = first_head(attention, len(largest))
        if first < 0 or first + len(largest) > attention.heads:
            problem, needed = f"heads {first} to {first + len(largest) - 1}", f"some of its {attention.heads}"
            raise ValueError(explain_error(attention.name, problem, needed, "Write record(..., first=...)"))
        if self._largest.device != largest.device:
            self._largest = self._largest.to(largest.device)
        with _disable_current_modes():  # selective checkpointing would keep this memory, and notice that it is written
            recorded = self._largest[start + first :][: len(largest)]
            recorded.copy_(torch.maximum(recorded, largest.detach().float()))
        self._sources[id(module)] = "bound, the kernel's log-sum-exp" if bound else "exact, as recorded"

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _record_in_forward(self, module: nn.Module, largest: Tensor, *, bound: bool) -> None:
        """Record as `record` does, inside of the module's forward, where a weight is a shard of heads only.

        Raises:
            ValueError: the module states the heads of this rank for those of all ranks.
        """
        if id(module) in self._attentions:
            attention, _ = self._attentions[id(module)]
            parts = parts_of_heads(attention)
            if parts > 1 and len(largest) == attention.heads:
                problem = f"{len(largest)} heads on each of the {parts} ranks that share its queries, "
                problem += "and of the whole module"
                needed = "a module that states how many heads all ranks have"
                write = "Make the QKClip before you divide its number of heads by the ranks"
                raise ValueError(explain_error(attention.name, problem, needed, write))
        self.record(module, largest, bound=bound)

    def explain(self) -> str:
        """Return a table with a line for each attention module: its number of heads, and the source of S.

        The last line names the layers without a softmax, which have no logits to clip.
        """
        rows = [
            (a.name, str(a.heads), self._sources.get(id(a.module), "nothing yet")) for a, _ in self._attentions.values()
        ]
        lines = aligned([("attention", "heads", "S is"), *rows], right=(1,))
        if self._without:
            lines.append(escaped("left out, without a softmax: " + ", ".join(self._without)))
        return "\n".join(lines)

    def step(self) -> None:
        """Scale the weights by what was recorded since the last call. Call it on all ranks after the optimizer's step.

        If the optimizer skipped its step, no weight changes.
        """
        self._agree()
        for optimizer in [reference() for reference in self._optimizers] or [None]:
            self._clip(optimizer)

    def _agree(self) -> None:
        """Take the largest S of each head over all ranks, and reset the recorded values."""
        # By the device of the weights on every rank: some ranks may have recorded nothing, or logits of another device.
        device = next(getattr(*attention.queries).device for attention, _ in self._attentions.values())
        largest = self._largest.to(device).nan_to_num(torch.inf, torch.inf, -torch.inf)  # gloo's MAX would lose NaN
        self._largest.fill_(-torch.inf)  # in place: a CUDA graph of the forward goes on writing here
        self._last = self._over_all_ranks(largest)
        self._steps += 1
        if self._models_of_transformers:  # they may have changed to a new implementation
            watch_functions(self._models_of_transformers)
        missing = [a.name for a, _ in self._attentions.values() if id(a.module) not in self._sources]
        if self._steps == PATIENCE and missing:
            text = f"QKClip: {listed(missing)} recorded no logits in {PATIENCE} steps, so they are not clipped. If "
            text += "their forward runs, call model.train() before it: modules in eval mode record nothing. Or let it "
            text += "call clip.observe(self, query, key, scale=...), or run its kernel in `with clip.watching(self):`. "
            warn(text + "print(clip.explain()) lists all of them")

    def _over_all_ranks(self, largest: Tensor) -> Tensor:
        """Return the largest S of each head over the ranks that have an attention module of this name."""
        group = self._ranks()
        if group is None or dist.get_world_size(group) <= 1:  # -1: this rank is not in it
            return largest
        if self._shared is None or self._shared.group is not group:
            self._shared = SharedHeads(group, {a.name: a.heads for a, _ in self._attentions.values()}, largest.device)
        return self._shared.largest(largest)

    def _ranks(self) -> dist.ProcessGroup | None:
        """Return the ranks over which S is the largest; None for this rank alone."""
        if not dist.is_available() or not dist.is_initialized():
            return None
        for optimizer in (reference() for reference in self._optimizers):
            if self._group is None and optimizer is not None and optimizer._runtime.process_group == "local":
                connected = optimizer._runtime.connected
                return None if connected is None else connected.exchange.communicator.group
        return self._group or dist.group.WORLD

    @torch.no_grad()
    def _clip(self, optimizer: Muon | None) -> None:
        """Scale the weights that an optimizer steps; None means all weights of the model.

        Raises:
            ValueError: the shape of a weight has changed, such as by a wrapper that flattens weights.
        """
        # A logit that is not finite gives no factor. The optimizer's ``skip_above`` handles such steps.
        clipped = (self._last > self.threshold) & self._last.isfinite()
        if optimizer is not None:
            clipped &= ~torch.as_tensor(optimizer.stopped, dtype=torch.bool, device=clipped.device)
        gamma = torch.where(clipped, self.threshold / self._last.double(), 1.0)
        tensors = _tensors_of([attention for attention, _ in self._attentions.values()])
        factors: dict[int, list[tuple[LogitRows, Tensor]]] = {}
        shapes: dict[int, tuple[int, ...]] = {}
        for attention, start in self._attentions.values():
            shapes.update((id(tensors[name]), shape) for name, shape in attention.shapes.items())
            for rows in attention.rows:
                factor = gamma[start + rows.head] ** rows.power
                factors.setdefault(id(tensors[rows.name]), []).append((rows, factor))
        for parameter in self._parameters(optimizer):
            own = parameter.tensor if id(parameter.tensor) in factors else tensors.get(parameter.name)
            if own is not None:
                if (shape := tuple(parameter.storage.shape)) != shapes[id(own)]:
                    problem = f"shape {shape}, but {shapes[id(own)]} when the QKClip was made"
                    needed, write = "weights that keep their shape", "Shard with fully_shard, or leave QKClip out"
                    raise ValueError(explain_error(parameter.name, problem, needed, write))
                state = {} if optimizer is None else optimizer.state.get(parameter.tensor, {})
                if (master := state.get("master")) is not None and master.device != parameter.tensor.device:
                    assert optimizer is not None
                    optimizer.finish()  # the step may still copy it to the CPU
                weights = parameter.weights(state)
                scale_rows(weights, parameter.storage, factors[id(own)])
                if state.get("master") is not None:
                    local_of(parameter.tensor.detach()).copy_(weights)

    def _parameters(self, optimizer: Muon | None) -> Iterator[OptimizedParameter]:
        """Yield each parameter of this rank.

        Raises:
            ValueError: DeepSpeed has master weights of a parameter, and there is no optimizer that knows them.
        """
        if optimizer is not None:
            yield from placed_members(optimizer)
            return
        for key, tensor in self._model.named_parameters():
            name, replicas = canonical_name(key), None if isinstance(tensor, DTensor) else (this_rank(),)
            if hasattr(tensor, "ds_id") or hasattr(tensor, "_hp_mapping"):
                problem = "a weight that DeepSpeed copies from its master weight"
                needed = "the optimizer with this master"
                write = "Write mm.QKClip(engine.module, optimizer=engine.optimizer)"
                raise ValueError(explain_error(name, problem, needed, write))
            storage = storage_of(name, tensor, replicas)
            yield OptimizedParameter(name, tensor, storage, storage)


def _tensors_of(attention_modules: Sequence[Attention]) -> dict[str, Tensor]:
    """Return the parameters with rows to scale, by each of their names in the model.

    An optimizer has the same tensors, perhaps by other names, or flat buffers that contain parameters of these names.
    """
    places = (place for attention in attention_modules for place in attention.places.items())
    return {name: getattr(module, key) for name, (module, key) in places}


def _refuse_unstepped(attention_modules: Sequence[Attention], muons: Sequence[Muon]) -> None:
    """Raise ValueError if an optimizer does not step all weights to scale of a module that is trained.

    A frozen module stays as it is.
    """
    tensors = _tensors_of(attention_modules)
    stepped: set[int] = set()
    for group in (group for muon in muons for group in muon.param_groups):
        stepped.update(id(tensor) for tensor in group["params"])
    for muon in muons:
        names = (name for group in muon.param_groups for name in group["param_names"])
        contained = (part for name in names for part in names_in(name, muon.layouts))
        stepped.update(id(tensors[name]) for name in contained if name in tensors)
    for attention in attention_modules:
        if not any(parameter.requires_grad for parameter in attention.module.parameters()):
            continue
        for name in attention.places:
            if not tensors[name].requires_grad:
                problem = "a frozen parameter, which optimizer= does not step, in a module that is trained"
                needed, write = "queries and keys that are trained, or none", "Train it, or leave QKClip out"
                raise ValueError(explain_error(name, problem, needed, write))
            if id(tensors[name]) not in stepped:
                problem = "a parameter that makes queries or keys, and that optimizer= does not step"
                needed = "one optimizer for all of them, since QKClip scales only what it steps"
                write = "Give it to this optimizer, or leave optimizer= out and call clip.step() after each step"
                raise ValueError(explain_error(name, problem, needed, write))
