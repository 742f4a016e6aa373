"""ToOwners: adds up the gradients of replicas at the rank that owns the momentum, while the backward pass runs."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from muonmesh.comm.agreement import host_group, new_group
from muonmesh.comm.gradients import PARAMETER_GRAD, GradientSource, gradient_of
from muonmesh.comm.storage import Storage, local_of
from muonmesh.comm.wire import Counts, Swap, Transfer, Wire
from muonmesh.errors import LayoutError, PlanError, about, explain_error
from muonmesh.layout import FlatShards, MeshLayout
from muonmesh.layout.flat import Interval


class _Sent(NamedTuple):
    """A bucket of gradients that is on its way: the tensors that arrive, and this rank's own summands."""

    bucket: int
    transfer: Transfer
    received: Tensor
    own: Sequence[Tensor]


@dataclass
class _Links:
    """One set of replicas, with the parameters whose gradients they add up.

    Attributes:
        talk: Small reductions at the same point of every rank's program. Hosts wait for hosts there, for no device.
        wire: The gradients. A rank may send some earlier than others do, so every source has a group of its own.
        buckets: For each bucket and each rank of the wire the matrices that it owns, in the order of all buckets.
        shared: The parameters that every replica steps, AdamW's.
        names: Of all of these.
    """

    talk: Wire
    wire: Wire
    buckets: Sequence[Sequence[Sequence[Tensor]]]
    shared: Sequence[Tensor]
    names: Mapping[Tensor, str]


_living: weakref.WeakSet[ToOwners] = weakref.WeakSet()
"""All sources that hear of gradients."""


class ToOwners(GradientSource):
    """Averages gradients over replicas itself: those of Muon's matrices at the owner alone, AdamW's on all ranks.

    ``muonmesh.from_model(model, gradients="to_owners")`` makes one. A matrix's momentum then lies on one replica, and
    its gradient is added up there: while the backward pass runs, buckets of matrices travel as soon as they are
    complete, and ``.grad`` is None from then on. What no bucket has taken travels when a step, clipping or metrics
    begin. Summands are added in the order of the ranks, in fp32 or wider, and divided by the number of replicas. What
    a step has read is dropped when the next gradients arrive.
    """

    def __init__(self) -> None:
        self._owners: dict[Tensor, int] = {}
        self._held: dict[Tensor, Tensor] = {}
        self._wrong: dict[Tensor, Exception] = {}
        self._reduced: dict[Tensor, tuple[Tensor, int]] = {}
        self._links: _Links | None = None
        self._ready: set[Tensor] = set()
        self._sent: list[_Sent] = []
        self._dropped: list[list[_Sent]] = []
        self._seen: set[Tensor] = set()
        self._sends = True
        self._step = self._asked = -1
        self._unhook: weakref.finalize[[Sequence[RemovableHandle]], ToOwners] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Where momentum lives. A copy has parameters of its own, of whose gradients nobody has heard."""
        return {**vars(ToOwners()), "_owners": self._owners}

    # ---------------------------------------------------------------- as a source

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """Return the sum of a matrix at its owner, flat, elsewhere one of no elements; of others ``.grad``."""
        if parameter in self._wrong:
            raise self._wrong[parameter]
        return self._held.get(parameter) if parameter in self._owners else parameter.grad

    def write(self, parameter: Tensor, gradient: Tensor | None) -> None:
        """Keep a gradient; None drops it, and what is on its way."""
        if parameter not in self._owners:
            PARAMETER_GRAD.write(parameter, gradient)
            if gradient is not None and parameter in self._reduced:
                self._reduced[parameter] = gradient, local_of(gradient)._version
        elif gradient is not None:
            self._held[parameter] = gradient
        else:
            self._held.pop(parameter, None)
            self._wrong.pop(parameter, None)
            parameter.grad = None
            if self._seen and self._links is not None:  # all ranks drop as many, whatever each of them has sent
                self._dropped.append(self._all_sent(self._links, empty=True))
                self._ready, self._seen = set(), set()

    def at_momentum(self, parameter: Tensor) -> bool:
        """Whether a gradient lies where the momentum does."""
        return parameter in self._owners

    @property
    def counts(self) -> Counts:
        """What all gradients up to now have sent and received on this rank."""
        return Counts() if self._links is None else self._links.wire.counts

    def overflowed(self) -> bool | Tensor:
        """Return whether a sum that this rank owns is not finite; no other rank can see that."""
        found = [~torch.isfinite(gradient).all() for gradient in self._held.values()]
        return torch.stack(found).any() if found else False

    def scaled_error(self, scale: Tensor | None) -> Exception | None:
        """Return what is wrong if a GradScaler has unscaled already: it reads ``.grad`` alone.

        Args:
            scale: What it has left to take out of the gradients; None if it has done that.
        """
        if scale is not None:
            return None
        what = "scaler.unscale_(optimizer) has divided only some of the gradients, because the others are at their "
        what += "owners. Leave out scaler.unscale_(optimizer): step() takes the scale out of all gradients"
        return LayoutError(about("gradients='to_owners'", what))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add gradients up in ``.grad`` and send nothing, for the micro-batches before the last one."""
        self._sends, before = False, self._sends
        try:
            yield
        finally:
            self._sends = before

    # ---------------------------------------------------------------- owners

    def place(self, matrices: Sequence[tuple[str, Tensor, Storage]]) -> list[Storage]:
        """Return where the momentum of each matrix lives: on one replica, chosen once by what each has to compute.

        Raises:
            LayoutError: a matrix is replicated along an axis of its own mesh, over which FSDP2 averages itself; or its
                gradients go to another optimizer.
        """
        others = [links for other in _living if other is not self and (links := other._links) is not None]
        for name, tensor, storage in matrices:
            if any(tensor in links.names for links in others):
                found = "another optimizer with gradients='to_owners', to which its gradients go"
                needed = "one such optimizer for each parameter"
                write = "Delete the other one before the backward pass, and call gc.collect() if a scheduler holds it"
                raise LayoutError(explain_error(name, found, needed, write))
            if any(
                p.is_replicate() and storage.mesh.size(a) > 1 for a, p in enumerate(storage.placements) if storage.mesh
            ):
                found = f"{storage.placements} with gradients='to_owners'"
                needed = "a mesh without replicas, because FSDP2 averages gradients over the replicas of its mesh"
                write = 'Write fully_shard(module, mesh=mesh["shard"]) and process_group=mesh["replicate"].get_group()'
                raise LayoutError(explain_error(name, found, needed, write))
        jobs = sorted((-_cost(storage), name, at) for at, (name, _, storage) in enumerate(matrices))
        # A matrix that tensor parallelism leaves whole has several copies on each of the replicas that average.
        copies = min((storage.copies for *_, storage in matrices if storage.copies > 1), default=1)
        loads = dict.fromkeys(range(copies), 0)
        for _, tensor, storage in matrices:
            if tensor in self._owners:
                loads[self._owners[tensor]] += _cost(storage)
        for cost, _, at in jobs:
            _, tensor, storage = matrices[at]
            if tensor not in self._owners and storage.copies > 1:
                self._owners[tensor] = min(loads, key=loads.__getitem__)
                loads[self._owners[tensor]] -= cost
        return [
            on_replica(storage, self._owners[t] * (storage.copies // copies)) if t in self._owners else storage
            for _, t, storage in matrices
        ]

    def bind(self, replicated: Mapping[Tensor, str], group: dist.ProcessGroup | None, bucket_bytes: int) -> None:
        """Hear of these parameters' gradients from now on; all replicas bind the same ones together."""
        ranks = () if group is None else tuple(dist.get_process_group_ranks(group))
        if self._links is not None and self._links.wire.ranks == ranks:
            self.complete(self._asked)  # what was sent since, in the buckets of the plan before
            # Steps are counted from 0 again, and what none of them has read stays for the next one.
            self._step = 0 if self._step == self._asked else -1
            talk, wire = self._links.talk, self._links.wire
        elif group is not None:
            talk, wire = Wire(ranks, host_group(group)), Wire(ranks, new_group(ranks))
        if self._unhook is not None:
            self._unhook()
        if group is None:
            self._links = None
            return
        buckets = self._buckets(replicated, len(ranks), bucket_bytes)
        shared = [tensor for tensor in replicated if tensor not in self._owners]
        self._links = _Links(talk, wire, buckets, shared, replicated)
        mine = {tensor for bucket in buckets for some in bucket for tensor in some}
        # Hooks live as long as the parameters; they neither hold the source, nor take gradients when it is gone.
        heard = partial(_heard, weakref.ref(self))
        handles = [tensor.register_post_accumulate_grad_hook(heard) for tensor in mine]  # type: ignore[no-untyped-call]
        self._unhook = weakref.finalize(self, _remove, handles)
        _living.add(self)

    def _buckets(self, replicated: Mapping[Tensor, str], copies: int, bucket_bytes: int) -> list[list[list[Tensor]]]:
        buckets = list[list[list[Tensor]]]()
        room, kind = 0, None
        # Backward passes make the last gradients first.
        for tensor in reversed([tensor for tensor in replicated if tensor in self._owners]):
            local = local_of(tensor)
            if not buckets or room < local.nbytes or kind != (local.dtype, local.device):
                buckets.append([[] for _ in range(copies)])
                room, kind = bucket_bytes, (local.dtype, local.device)
            room -= local.nbytes
            buckets[-1][self._owners[tensor]].append(tensor)
        return buckets

    def traffic(self, replicated: Mapping[Tensor, str], *, copy: int, copies: int, bucket_bytes: int) -> Counts:
        """Return what gradients move: those of matrices to their owners, AdamW's to all replicas."""
        if copies == 1:
            return Counts()
        shared = [local_of(tensor) for tensor in replicated if tensor not in self._owners]
        averaged = 2 * sum(local.nbytes for local in shared) * (copies - 1) // copies
        sizes = [0] * copies
        for tensor in replicated:
            if tensor in self._owners:
                sizes[self._owners[tensor]] += local_of(tensor).nbytes
        return Counts(
            collectives=len(self._buckets(replicated, copies, bucket_bytes))
            + 2 * len({(local.dtype, local.device) for local in shared}),
            bytes_sent=averaged + sum(sizes) - sizes[copy],
            bytes_received=averaged + (copies - 1) * sizes[copy],
        )

    # ---------------------------------------------------------------- sending

    def _heard(self, parameter: Tensor) -> None:
        """Take note of a gradient, and send what is complete; called by autograd, and by FSDP2 for a shard."""
        links = self._links
        if links is None or not self._sends or parameter in self._seen:  # a second one waits in .grad
            return
        self._ready.add(parameter)
        while len(self._sent) < len(links.buckets):
            bucket = links.buckets[len(self._sent)]
            if any(tensor not in self._ready for some in bucket for tensor in some):
                return
            self._send(links)

    def _all_sent(self, links: _Links, *, empty: bool = False) -> list[_Sent]:
        """Send the buckets that are left, and return all of them; the next gradients begin anew."""
        while len(self._sent) < len(links.buckets):
            self._send(links, empty=empty)
        sent, self._sent = self._sent, []
        return sent

    def _send(self, links: _Links, *, empty: bool = False) -> None:
        """Send the next bucket; what has no gradient counts as zero."""
        number, me = len(self._sent), links.wire.ranks.index(dist.get_rank())
        bucket = links.buckets[number]
        parts = [[self._taken(links, tensor, empty=empty) for tensor in some] for some in bucket]
        like = local_of(next(tensor for some in bucket for tensor in some))
        away = [part for rank, some in enumerate(parts) if rank != me for part in some]
        sent = [0 if rank == me else sum(part.numel() for part in some) for rank, some in enumerate(parts)]
        arriving = sum(part.numel() for part in parts[me])
        arrives = [0 if rank == me else arriving for rank in range(len(parts))]
        send = torch.cat(away) if away else like.new_empty(0)
        received = like.new_empty(sum(arrives))
        transfer = links.wire.swap(Swap("gradients on their way to owners", send, received, sent, arrives))
        self._sent.append(_Sent(number, transfer, received, parts[me]))

    def _taken(self, links: _Links, parameter: Tensor, *, empty: bool) -> Tensor:
        """Return a parameter's gradient, flat, and forget it; zeros if there is none."""
        local = local_of(parameter)
        if not empty and parameter.grad is not None:
            self._seen.add(parameter)
            try:
                found = gradient_of(links.names[parameter], parameter, PARAMETER_GRAD)
                parameter.grad = None
                if found is not None and not isinstance(found, DTensor):
                    return found.reshape(-1).to(local.dtype)
                partial_sum = "a gradient that is partial over an axis of a mesh, with gradients='to_owners'"
                needed = "one that is whole on each replica"
                write = "Leave out gradients='to_owners' under this tensor-parallel plan"
                raise LayoutError(explain_error(links.names[parameter], partial_sum, needed, write))
            except (LayoutError, TypeError) as wrong:
                parameter.grad = None
                self._wrong[parameter] = wrong
        return torch.zeros(local.numel(), dtype=local.dtype, device=local.device)

    # ---------------------------------------------------------------- adding up

    def complete(self, step: int) -> None:
        """Send what no bucket has taken, and add up; all replicas call it where a step, clipping or metrics begin.

        Args:
            step: How many steps have begun. Gradients of a step before are dropped when new ones arrive.

        Raises:
            PlanError: only some of the replicas have dropped gradients that were on their way. All of them raise.
        """
        links, self._asked = self._links, step
        if links is None:
            return
        matrices = [tensor for bucket in links.buckets for some in bucket for tensor in some]
        rounds = int(bool(self._seen)) + any(tensor.grad is not None for tensor in matrices)
        dropped = len(self._dropped) % 256
        present = [tensor in self._seen or tensor.grad is not None for tensor in matrices]
        fresh = [tensor.grad is not None and not self._is_reduced(tensor) for tensor in links.shared]
        told = torch.tensor([rounds, dropped, 255 - dropped, *present, *fresh], dtype=torch.uint8, device="cpu")
        most, low, high, *flags = links.talk.reduce(told, dist.ReduceOp.MAX, "the agreement on gradients").tolist()
        if low + high != 255:
            self._even_out(links, len(self._dropped) + rounds)
            what = "zero_grad() dropped gradients on some ranks and not on others. Call zero_grad() on all ranks, "
            raise PlanError(about("the gradients", what + "after the same backward passes"))
        self._finish_dropped(links)
        present, fresh = flags[: len(matrices)], flags[len(matrices) :]
        if most and self._step != step:
            self._held.clear()
        self._step = step if most else self._step
        some = {tensor for tensor, flag in zip(matrices, present, strict=True) if flag}
        for _ in range(most):
            for each in self._all_sent(links):
                self._add(links, each, some)
        self._ready, self._seen = set(), set()
        self._average(links, [tensor for tensor, flag in zip(links.shared, fresh, strict=True) if flag])

    def _even_out(self, links: _Links, rounds: int) -> None:
        """Let all ranks send as often, and drop what arrives, so that the next gradients meet their own kind."""
        told = torch.tensor([rounds], dtype=torch.int64, device="cpu")
        most = links.talk.reduce(told, dist.ReduceOp.MAX, "the agreement on rounds")
        while len(self._dropped) < int(most):
            self._dropped.append(self._all_sent(links))
        self._finish_dropped(links)
        self._ready, self._seen = set(), set()

    def _finish_dropped(self, links: _Links) -> None:
        for sent in itertools.chain(*self._dropped):
            links.wire.finish(sent.transfer)
        self._dropped = []

    def _add(self, links: _Links, sent: _Sent, present: set[Tensor]) -> None:
        """Add up what has arrived for this rank's matrices."""
        links.wire.finish(sent.transfer)
        me, count = links.wire.ranks.index(dist.get_rank()), len(links.wire.ranks)
        arrived = list(sent.received.view(count - 1, -1).unbind()) if sent.received.numel() else []
        for owner, some in enumerate(links.buckets[sent.bucket]):
            start = 0
            for place, tensor in enumerate(some):
                if tensor not in present:
                    start += local_of(tensor).numel()
                    continue
                total = local_of(tensor).new_empty(0, dtype=torch.float32)
                if owner == me:
                    size = sent.own[place].numel()
                    summands = [part[start : start + size] for part in arrived]
                    total = mean([*summands[:me], sent.own[place], *summands[me:]] if size else [sent.own[place]])
                    start += size
                held = self._held.get(tensor)
                self._held[tensor] = total if held is None else held + total

    def _is_reduced(self, parameter: Tensor) -> bool:
        """Whether ``.grad`` is the average that `_average` has left there."""
        before, gradient = self._reduced.get(parameter), parameter.grad
        return before is not None and gradient is before[0] and local_of(gradient)._version == before[1]

    def _average(self, links: _Links, parameters: Sequence[Tensor]) -> None:
        """Average the gradients of parameters that every replica steps, into ``.grad``."""
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in parameters:
            if tensor.grad is None:
                tensor.grad = torch.zeros_like(tensor)
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        me, count = links.wire.ranks.index(dist.get_rank()), len(links.wire.ranks)
        for (dtype, _), same in kinds.items():
            gradients = [local_of(tensor.grad) for tensor in same if tensor.grad is not None]
            flat = torch.cat([gradient.reshape(-1).to(dtype) for gradient in gradients])
            cuts = [len(flat) * rank // count for rank in range(count + 1)]
            segments = [flat[low:high] for low, high in itertools.pairwise(cuts)]
            sizes = [0 if rank == me else len(segment) for rank, segment in enumerate(segments)]
            mine = [0 if rank == me else len(segments[me]) for rank in range(count)]
            parts = flat.new_empty(sum(mine))
            others = torch.cat([*segments[:me], *segments[me + 1 :]])
            links.wire.finish(links.wire.swap(Swap("AdamW's gradients", others, parts, sizes, mine)))
            summands = list(parts.view(count - 1, -1).unbind())
            own = mean([*summands[:me], segments[me], *summands[me:]]).to(dtype)
            back = flat.new_empty(sum(sizes))
            send = own.repeat(count - 1)
            links.wire.finish(links.wire.swap(Swap("averages of AdamW's", send, back, mine, sizes)))
            before = sum(sizes[:me])
            whole = torch.cat([back[:before], own, back[before:]])
            parts_of = torch.split(whole, [gradient.numel() for gradient in gradients])
            for tensor, gradient, part in zip(same, gradients, parts_of, strict=True):
                gradient.copy_(part.view(gradient.shape))
                assert tensor.grad is not None
                self._reduced[tensor] = tensor.grad, gradient._version


def untold_error() -> Exception:
    """Return what is wrong if a GradScaler cannot be told what other ranks have found."""
    what = "A GradScaler sees the overflows of its own rank alone, so scales, and then weights, would differ between "
    return LayoutError(about("gradients='to_owners'", what + "ranks. Write scaler.step(optimizer, scaler=scaler)"))


def _heard(source: weakref.ref[ToOwners], parameter: Tensor) -> None:
    """Tell a source of a gradient, if it is still there."""
    if (here := source()) is not None:
        here._heard(parameter)


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
    """Return where momentum lives that one replica alone keeps, flat, each of its ranks of what it stores."""
    assert isinstance(storage.layout, MeshLayout)
    return Storage(_on_replica(storage.layout, number), storage.shape)


@lru_cache(maxsize=1024)
def _on_replica(layout: MeshLayout, number: int) -> FlatShards:
    """Return that layout; the matrices of all layers share it."""
    stores = [layout.replica_number(rank) == number for rank in layout.ranks]
    sizes = [math.prod(layout.local_shape(rank)) * some for rank, some in zip(layout.ranks, stores, strict=True)]
    held = tuple((Interval(0, size, 0),) if size else () for size in sizes)
    return FlatShards(layout, held, tuple(sizes))


def _cost(storage: Storage) -> int:
    return math.prod(storage.shape) * min(storage.shape)
