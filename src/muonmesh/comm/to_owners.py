"""ToOwners: adds up gradients of replicas on the rank that keeps the momentum, while the backward pass runs."""

from __future__ import annotations

import itertools
import math
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from muonmesh.comm.agreement import Agreement, Field, Said, bits
from muonmesh.comm.communicator import AllToAll, Communicator, Counts, PendingCollective
from muonmesh.comm.gather_objects import gather_objects
from muonmesh.comm.gradients import PARAMETER_GRAD, GradientSource, gradient_of
from muonmesh.comm.process_groups import host_group, new_group
from muonmesh.comm.storage import Storage, local_of
from muonmesh.errors import LayoutError, PlanError, about, explain_error
from muonmesh.layout import FlatShards, MeshLayout
from muonmesh.layout.flat import Interval


class _Sent(NamedTuple):
    """Flat gradients on their way between all ranks; ``parts`` has the part from each rank, this rank included."""

    transfer: PendingCollective
    parts: Sequence[Tensor]


_living: weakref.WeakSet[ToOwners] = weakref.WeakSet()
"""All sources whose hooks receive gradients."""


class ToOwners(GradientSource):
    """A source that averages gradients over replicas: of Muon's matrices only at their owner, of AdamW on all ranks.

    ``muonmesh.from_model(model, gradients="to_owners")`` uses it. The momentum of a matrix is then kept on a single
    replica, and its gradient is added up there. During the backward pass, a bucket of matrices travels as soon as all
    its gradients are complete, and ``.grad`` is None afterwards. The remaining gradients travel when a step, clipping
    or metrics begin. Gradients are added in the order of the ranks, in fp32 or wider, and divided by the number of
    replicas. Gradients that a step has read are dropped when the next gradients arrive.

    Attributes:
        owners: For each matrix the number of the replica that keeps its momentum.
    """

    def __init__(self) -> None:
        self.owners: dict[Tensor, int] = {}
        self._averages: dict[Tensor, Tensor] = {}
        self._errors: dict[Tensor, Exception] = {}
        self._reduced: dict[Tensor, tuple[Tensor, int]] = {}
        # Small reductions at the same point of every rank's program. CPUs wait only for CPUs there, not for devices.
        self._agreements: Communicator | None = None
        # The gradients. A rank may send some earlier than others do, so every source has a group of its own.
        self._communicator: Communicator | None = None
        self._names: Mapping[Tensor, str] = {}
        self._buckets: Sequence[Sequence[Sequence[Tensor]]] = ()  # buckets; in each, the matrices of each rank
        self._ready: set[Tensor] = set()
        self._sent: list[_Sent] = []
        self._dropped: list[list[_Sent]] = []
        self._sent_gradients: set[Tensor] = set()
        # With one queue for all kernels, ranks must begin the collectives of all groups in one order. Backward passes
        # may have another order on each rank, so no gradient is sent before `complete`.
        self._sends = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1"
        self._step = self._steps_begun = -1
        self._unhook: weakref.finalize[[Sequence[RemovableHandle]], ToOwners] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return only the owners of momentum: a copy has parameters of its own, without gradients so far."""
        return {**vars(ToOwners()), "owners": self.owners}

    # ---------------------------------------------------------------- as a source

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """Return the gradient: for a matrix its flat average at the owner (elsewhere empty), else ``.grad``."""
        if parameter in self._errors:
            raise self._errors[parameter]
        return self._averages.get(parameter) if parameter in self.owners else parameter.grad

    def write(self, parameter: Tensor, gradient: Tensor | None) -> None:
        """Store a gradient; None drops the gradient, and gradients that are on their way."""
        if parameter not in self.owners:
            PARAMETER_GRAD.write(parameter, gradient)
            if gradient is not None and parameter in self._reduced:
                self._reduced[parameter] = gradient, local_of(gradient)._version
        elif gradient is not None:
            self._averages[parameter] = gradient
        else:
            self._averages.pop(parameter, None)
            self._errors.pop(parameter, None)
            parameter.grad = None
            if self._sent_gradients:  # all ranks drop equally many buckets, however many each rank has sent
                self._dropped.append(self._all_sent(empty=True))

    def at_momentum(self, parameter: Tensor) -> bool:
        """Whether the gradient of a parameter has the flattened layout of the momentum: true for matrices."""
        return parameter in self.owners

    @property
    def counts(self) -> Counts:
        """The traffic of all gradients so far on this rank."""
        return Counts() if self._communicator is None else self._communicator.counts

    def scaler_error(self) -> Exception | None:
        """Return the error for a GradScaler: it reads only ``.grad``, so it does not see gradients at their owners."""
        text = "A GradScaler does not see gradients that are at their owners. Train in bf16 without a GradScaler, or "
        return LayoutError(about("gradients='to_owners'", text + "leave out gradients='to_owners'"))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add up gradients in ``.grad`` without sending, for all micro-batches except the last one."""
        self._sends, before = False, self._sends
        try:
            yield
        finally:
            self._sends = before

    # ---------------------------------------------------------------- owners

    def momentum_storages(self, matrices: Sequence[tuple[str, Tensor, Storage]]) -> list[Storage]:
        """Return the place of each matrix's momentum: one replica, chosen once so that replicas compute equally much.

        Raises:
            LayoutError: a matrix is replicated along an axis of its own mesh, over which FSDP2 averages gradients
                itself; or its gradients go to another optimizer.
        """
        for name, tensor, storage in matrices:
            if any(tensor in other._names for other in _living if other is not self):
                problem = "another optimizer with gradients='to_owners', to which its gradients go"
                needed = "one such optimizer for each parameter"
                write = "Delete the other one before the backward pass, and call gc.collect() if a scheduler holds it"
                raise LayoutError(explain_error(name, problem, needed, write))
            if any(
                p.is_replicate() and storage.mesh.size(a) > 1 for a, p in enumerate(storage.placements) if storage.mesh
            ):
                problem = f"{storage.placements} with gradients='to_owners'"
                needed = "a mesh without replicas, because FSDP2 averages gradients over the replicas of its mesh"
                write = 'Write fully_shard(module, mesh=mesh["shard"]) and process_group=mesh["replicate"].get_group()'
                raise LayoutError(explain_error(name, problem, needed, write))
        # A matrix that tensor parallelism does not shard has several copies on each data-parallel replica.
        copies = min((storage.copies for *_, storage in matrices if storage.copies > 1), default=1)
        loads = dict.fromkeys(range(copies), 0)
        # First the matrices that have owners already, then the most expensive matrices.
        order = sorted(matrices, key=lambda entry: (entry[1] not in self.owners, -_cost(entry[2]), entry[0]))
        for _, tensor, storage in order:
            if tensor in self.owners or storage.copies > 1:
                owner = self.owners.setdefault(tensor, min(loads, key=loads.__getitem__))
                loads[owner] += _cost(storage)
        return [
            on_replica(storage, self.owners[t] * (storage.copies // copies)) if t in self.owners else storage
            for _, t, storage in matrices
        ]

    def bind(self, replicated: Mapping[Tensor, str], group: dist.ProcessGroup | None, bucket_bytes: int) -> None:
        """Register hooks for the gradients of these parameters; all replicas call this together for the same ones."""
        ranks = () if group is None else tuple(dist.get_process_group_ranks(group))
        if self._communicator is not None and self._communicator.ranks == ranks:
            self.complete(self._steps_begun)  # receives gradients sent in the buckets of the last plan
            # Steps are counted from 0 again. Gradients that no step has read stay for the next step.
            self._step = 0 if self._step == self._steps_begun else -1
        elif group is not None:
            self._agreements = Communicator(ranks, host_group(group))
            self._communicator = Communicator(ranks, new_group(ranks))
        if self._unhook is not None:
            self._unhook()
        if group is None:
            self._agreements, self._communicator, self._names, self._buckets = None, None, {}, ()
            return
        self._names, self._buckets = replicated, self.buckets_of(replicated, len(ranks), bucket_bytes)
        # Hooks live as long as the parameters. They do not keep the source alive, and do nothing once it is gone.
        heard = partial(_heard, weakref.ref(self))
        handles = [tensor.register_post_accumulate_grad_hook(heard) for tensor in self._matrices]  # type: ignore[no-untyped-call]
        self._unhook = weakref.finalize(self, _remove, handles)
        _living.add(self)

    @property
    def _matrices(self) -> list[Tensor]:
        """The matrices with owners, in the order of the buckets."""
        return [tensor for bucket in self._buckets for owned in bucket for tensor in owned]

    def buckets_of(self, replicated: Mapping[Tensor, str], copies: int, bucket_bytes: int) -> list[list[list[Tensor]]]:
        """Return the buckets of matrices; each bucket has a list of matrices for each replica that owns them."""
        buckets = list[list[list[Tensor]]]()
        room, kind = 0, None
        # Backward passes make the last gradients first.
        for tensor in reversed([tensor for tensor in replicated if tensor in self.owners]):
            local = local_of(tensor)
            if not buckets or room < local.nbytes or kind != (local.dtype, local.device):
                buckets.append([[] for _ in range(copies)])
                room, kind = bucket_bytes, (local.dtype, local.device)
            room -= local.nbytes
            buckets[-1][self.owners[tensor]].append(tensor)
        return buckets

    # ---------------------------------------------------------------- sending

    def _heard(self, parameter: Tensor) -> None:
        """Note that a gradient is complete, and send complete buckets; called by autograd, and by FSDP2 for a shard."""
        if not self._sends or parameter in self._sent_gradients:  # a second gradient waits in .grad
            return
        self._ready.add(parameter)
        while len(self._sent) < len(self._buckets):
            if any(tensor not in self._ready for owned in self._buckets[len(self._sent)] for tensor in owned):
                return
            self._send()

    def _all_sent(self, *, empty: bool = False) -> list[_Sent]:
        """Send the remaining buckets, and return all buckets; the next gradients begin with the first bucket again."""
        while len(self._sent) < len(self._buckets):
            self._send(empty=empty)
        sent, self._sent = self._sent, []
        self._ready, self._sent_gradients = set(), set()
        return sent

    def _send(self, *, empty: bool = False) -> None:
        """Send the next bucket. Missing gradients count as zero; with ``empty`` all do."""
        bucket = self._buckets[len(self._sent)]
        none = local_of(next(tensor for owned in bucket for tensor in owned)).new_empty(0)
        parts = [torch.cat([none, *(self._take_gradient(tensor, empty=empty) for tensor in owned)]) for owned in bucket]
        arriving = [len(parts[self._me])] * len(parts)
        self._sent.append(self._start("gradients on their way to owners", parts, arriving))

    def _take_gradient(self, parameter: Tensor, *, empty: bool) -> Tensor:
        """Return a parameter's flat gradient and set ``.grad`` to None; zeros if there is no gradient or ``empty``."""
        local = local_of(parameter)
        if not empty and parameter.grad is not None:
            self._sent_gradients.add(parameter)
            try:
                gradient = gradient_of(self._names[parameter], parameter, PARAMETER_GRAD)
                if gradient is not None and not isinstance(gradient, DTensor):
                    return gradient.reshape(-1).to(local.dtype)
                partial_sum = "a gradient that is partial over an axis of a mesh, with gradients='to_owners'"
                needed = "one that is whole on each replica"
                write = "Leave out gradients='to_owners' under this tensor-parallel plan"
                raise LayoutError(explain_error(self._names[parameter], partial_sum, needed, write))
            except (LayoutError, TypeError) as wrong:
                self._errors[parameter] = wrong
            finally:
                parameter.grad = None
        return torch.zeros(local.numel(), dtype=local.dtype, device=local.device)

    @property
    def _me(self) -> int:
        assert self._communicator is not None
        return self._communicator.ranks.index(self._communicator.rank)

    def _start(self, name: str, parts: Sequence[Tensor], arriving: Sequence[int]) -> _Sent:
        """Send each other rank its flat part; ``arriving`` has the number of elements that each rank sends here."""
        assert self._communicator is not None
        sent = [0 if rank == self._me else len(part) for rank, part in enumerate(parts)]
        received = [0 if rank == self._me else count for rank, count in enumerate(arriving)]
        send = torch.cat([part for rank, part in enumerate(parts) if rank != self._me])
        receive = send.new_empty(sum(received))
        arrived = list(torch.split(receive, received))
        arrived[self._me] = parts[self._me]
        return _Sent(self._communicator.start(AllToAll(name, send, receive, sent, received)), arrived)

    def _arrived(self, sent: _Sent) -> Sequence[Tensor]:
        """Wait for a transfer, and return the parts of all ranks."""
        assert self._communicator is not None
        self._communicator.finish(sent.transfer)
        for tensor in (*sent.transfer.memory, *sent.parts):
            if tensor.is_cuda:  # a hook may have made it on a stream of its wrapper's
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return sent.parts

    # ---------------------------------------------------------------- adding up

    def complete(self, step: int) -> None:
        """Send the remaining gradients and add all up. All replicas call this when a step, clipping or metrics begin.

        Args:
            step: The number of steps that have begun. Gradients of earlier steps are dropped when new ones arrive.

        Raises:
            PlanError: only some of the replicas have dropped gradients that were on their way. All of them raise.
        """
        self._steps_begun = step
        if self._agreements is None:
            return
        matrices, shared = self._matrices, [tensor for tensor in self._names if tensor not in self.owners]
        agreement = Agreement(
            Field("rounds", 2),
            Field("present", len(matrices)),
            Field("fresh", len(shared)),
            Field("dropped", 64, "equal"),
        )
        rounds_here = bool(self._sent_gradients) + any(tensor.grad is not None for tensor in matrices)
        answers: dict[str, Said] = {
            "rounds": [rounds_here > 0, rounds_here > 1],
            "present": [tensor in self._sent_gradients or tensor.grad is not None for tensor in matrices],
            "fresh": [tensor.grad is not None and not self._is_reduced(tensor) for tensor in shared],
            "dropped": bits(len(self._dropped)),
        }
        agreed = self._agreements.ask(agreement, answers, torch.device("cpu"), "the agreement on gradients")
        if differ := bool(agreed.differs().any()):  # all ranks send equally often, so that the next gradients match
            every = max(gather_objects(len(self._dropped) + rounds_here, group=self._agreements.group))
            while len(self._dropped) < every:
                self._dropped.append(self._all_sent())
        for sent in itertools.chain(*self._dropped):
            self._arrived(sent)
        self._dropped = []
        if differ:
            text = "zero_grad() dropped gradients on some ranks and not on others. Call zero_grad() on all ranks, "
            raise PlanError(about("the gradients", text + "after the same backward passes"))
        rounds = sum(agreed.answers("rounds").tolist())
        if rounds and self._step != step:
            self._averages.clear()
        self._step = step if rounds else self._step
        self._ready = set()
        present = set(itertools.compress(matrices, agreed.answers("present").tolist()))
        for _ in range(rounds):
            for bucket, sent in zip(self._buckets, self._all_sent(), strict=True):
                self._add(bucket, self._arrived(sent), present)
        self._average(list(itertools.compress(shared, agreed.answers("fresh").tolist())))

    def _add(self, bucket: Sequence[Sequence[Tensor]], parts: Sequence[Tensor], present: set[Tensor]) -> None:
        """Average the received gradients of this rank's matrices; matrices of other owners get an empty tensor."""
        total = mean(parts)
        for owner, owned in enumerate(bucket):
            sizes = [local_of(tensor).numel() * (owner == self._me) for tensor in owned]
            for tensor, part in zip(owned, torch.split(total[: sum(sizes)], sizes), strict=True):
                if tensor in present:
                    earlier = self._averages.get(tensor)
                    self._averages[tensor] = part if earlier is None else earlier + part

    def _is_reduced(self, parameter: Tensor) -> bool:
        """Whether ``.grad`` is still the average that `_average` has written."""
        before, gradient = self._reduced.get(parameter), parameter.grad
        return before is not None and gradient is before[0] and local_of(gradient)._version == before[1]

    def _average(self, parameters: Sequence[Tensor]) -> None:
        """Average the gradients of parameters that every replica updates, in ``.grad``."""
        assert self._communicator is not None
        kinds: dict[tuple[torch.dtype, torch.device], list[tuple[Tensor, Tensor]]] = {}
        for tensor in parameters:
            if tensor.grad is None:
                tensor.grad = torch.zeros_like(tensor)
            kinds.setdefault((tensor.dtype, tensor.device), []).append((tensor, tensor.grad))
        for (dtype, _), same in kinds.items():
            gradients = [local_of(gradient) for _, gradient in same]
            flat = torch.cat([gradient.reshape(-1).to(dtype) for gradient in gradients])
            segments = torch.tensor_split(flat, len(self._communicator.ranks))
            sizes = [len(segment) for segment in segments]
            own_segment = self._start("AdamW's gradients", segments, [sizes[self._me]] * len(sizes))
            average = mean(self._arrived(own_segment)).to(dtype)
            others = self._start("averages of AdamW's", [average] * len(sizes), sizes)
            parts = torch.split(torch.cat(list(self._arrived(others))), [g.numel() for g in gradients])
            for (tensor, gradient), local, part in zip(same, gradients, parts, strict=True):
                local.copy_(part.view(local.shape))
                self._reduced[tensor] = gradient, local._version


def _heard(source: weakref.ref[ToOwners], parameter: Tensor) -> None:
    """Pass a complete gradient to its source, if the source still exists."""
    if (living_source := source()) is not None:
        living_source._heard(parameter)


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def mean(summands: Sequence[Tensor]) -> Tensor:
    """Return the mean of replicas' gradients: added in the order of the ranks, in fp32 or wider."""
    total = summands[0].to(torch.promote_types(summands[0].dtype, torch.float32), copy=True)
    for summand in summands[1:]:
        total += summand
    return total.div_(len(summands))


def on_replica(storage: Storage, number: int) -> Storage:
    """Return the storage of momentum that only replica ``number`` keeps, flat; each of its ranks keeps its shard."""
    assert isinstance(storage.layout, MeshLayout)
    return Storage(_on_replica(storage.layout, number), storage.shape)


@lru_cache(maxsize=1024)
def _on_replica(layout: MeshLayout, number: int) -> FlatShards:
    """Return the layout of `on_replica`; the result is cached, so that matrices of all layers share it."""
    stores = [layout.replica_number(rank) == number for rank in layout.ranks]
    sizes = [math.prod(layout.local_shape(rank)) * stored for rank, stored in zip(layout.ranks, stores, strict=True)]
    return FlatShards(layout, tuple((Interval(0, size, 0),) for size in sizes))


def _cost(storage: Storage) -> int:
    return math.prod(storage.shape) * min(storage.shape)
