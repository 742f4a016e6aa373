"""Rendezvous: ranks wait for each other; a rank that waited in vain raises an error that names the missing ranks.

The ranks use the store of torch.distributed, which still works when collectives fail. A rank writes to the store that
it will not come, and the other ranks read from it which ranks have come.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from muonmesh.comm.storage import this_rank, world_size
from muonmesh.errors import PlanError, about
from muonmesh.files import reason

PATIENCE = 5.0
"""Seconds for the other ranks of a failed collective to write to the store where they are."""

SILENCE = 5.0
"""Further seconds to wait for an answer of the store. The store has no timeout of its own if its machine is stopped or
cut off."""

GRACE = 2.0
"""Seconds in which a rank that has failed to make its optimizer may catch the error and make another one."""

_failures = 0
"""How often this process has failed to make an optimizer."""

_failures_of: dict[int, int] = {}
"""How often each other rank had failed to make an optimizer, when this rank last met other ranks."""

_announced: Counter[tuple[int, ...]] = Counter()
"""How often this process has announced each set of ranks. All ranks of a set announce it equally often, so this number
distinguishes an announcement from the next one."""


def shared_store() -> PrefixStore:
    """Return the store of torch.distributed's default group, with the key prefix "muonmesh"."""
    return PrefixStore("muonmesh", _get_default_store())


# ------------------------------------------------------------------ optimizers that were not made


@contextmanager
def announcing_failure(*, alone: bool = False, at_first_step: bool = False) -> Iterator[None]:
    """Write an error in making an optimizer to the store, so that the other ranks do not wait; not if ``alone``.

    With ``at_first_step`` the optimizer exists. Then only ranks that wait for this rank are told.
    """
    global _failures
    try:
        yield
    except Exception as error:
        if world_size() > 1 and not alone:
            _failures += 1
            with suppress(RuntimeError):  # the store cannot be reached; the note is only for other ranks
                store = shared_store()
                store.set(f"failed/{this_rank()}", json.dumps([_failures, str(error), at_first_step]))
                store.set("failed", "1")
        raise


def withdraw_failure() -> None:
    """Empty the note of `announcing_failure` in the store, because this rank has made an optimizer after all.

    The note stays there: another rank that has just seen it would wait for a deleted one, or read nothing.
    """
    if world_size() > 1 and _failures:
        with suppress(RuntimeError):
            shared_store().set(f"failed/{this_rank()}", json.dumps([_failures, None, False]))


def failure_of_others(*, waits: bool) -> str | None:
    """Return the error of another rank that has recently failed to make an optimizer, with its number; else None.

    Only failures since this rank last met other ranks count. A rank does not count if it has caught its error and made
    another optimizer meanwhile.

    Args:
        waits: Whether this rank waits for others, so that a failure at the first step counts too.
    """
    if world_size() == 1:
        return None
    until = time.monotonic() + GRACE
    while notes := _notes(waits=waits):
        if time.monotonic() >= until:
            rank, (_, text) = next(iter(notes.items()))
            return f"rank {rank}: {text}"
        time.sleep(0.05)
    return None


def _notes(*, waits: bool = True) -> dict[int, tuple[int, str]]:
    """Return new notes of other ranks about failures: those written since this rank last met other ranks."""
    store = shared_store()
    if not _has(store, "failed"):
        return {}
    notes = {}
    for rank in range(world_size()):
        if rank != this_rank() and _has(store, f"failed/{rank}"):
            count, text, at_first_step = json.loads(store.get(f"failed/{rank}"))
            if text is not None and count > _failures_of.get(rank, 0) and (waits or not at_first_step):
                notes[rank] = count, text
    return notes


# ------------------------------------------------------------------ rendezvous in the store


def connected(sets: Sequence[tuple[int, ...]], *, alone: bool = False) -> tuple[int, ...]:
    """Return all ranks that share parameters with this rank, directly or through other ranks, when all have come here.

    Each rank knows only the ranks that share its own parameters. It reads the sets of the other ranks from the store,
    and waits only for ranks that are linked to it. Ranks of another pipeline stage need not call this.

    Args:
        sets: The ranks of each parameter that this rank holds; all ranks of a set call this.
        alone: Whether a rank that shares nothing ignores failures of other ranks. If False, it raises an error if
            another rank could not make its optimizer.

    Raises:
        PlanError: a rank could not make its optimizer, even a rank of another pipeline stage; or a rank does not come
            within the timeout of collectives.
    """
    me, world = this_rank(), tuple(range(world_size()))
    own_sets = sorted({ranks for ranks in sets if len(ranks) > 1})
    if any(len(ranks) == len(world) for ranks in own_sets):
        own_sets = [world]
    if len(world) > 1 and dist.get_backend() == "fake":  # torch's backend of simulated ranks: they never come
        return tuple(sorted({me, *itertools.chain(*own_sets)}))
    if not own_sets:
        if not alone and (failed := failure_of_others(waits=False)) is not None:
            raise PlanError(failed)
        return (me,)
    store, numbered = shared_store(), [(ranks, _announced[ranks]) for ranks in own_sets]
    for ranks, count in numbered:
        store.set(f"{ranks}/{count}/{me}", json.dumps([] if ranks == world else numbered))
        store.add(f"{ranks}/{count}", 1)
    announcements, waiting = set(numbered), list(numbered)
    try:
        while waiting:
            ranks, count = waiting.pop()
            _wait_for(store, f"{ranks}/{count}", ranks)
            answers = store.multi_get([f"{ranks}/{count}/{rank}" for rank in ranks]) if ranks != world else []
            fresh = {(tuple(others), number) for answer in answers for others, number in json.loads(answer)}
            fresh -= announcements
            announcements |= fresh
            waiting += fresh
    except PlanError:
        for ranks, count in numbered:  # so that the next optimizer of these ranks begins anew
            store.delete_key(f"{ranks}/{count}/{me}")
            store.add(f"{ranks}/{count}", -1)
        raise
    _announced.update(own_sets)
    _failures_of.update({rank: count for rank, (count, _) in _notes().items()})
    return tuple(sorted({rank for ranks, _ in announcements for rank in ranks}))


def _wait_for(store: PrefixStore, note: str, ranks: Sequence[int]) -> None:
    """Wait until all ranks of a set have announced it, or a rank reports that it cannot come.

    Raises:
        PlanError: a rank could not make its optimizer, or is missing after the timeout of collectives.
    """
    until, pause = time.monotonic() + seconds_of_collectives(), 0.001
    while store.add(note, 0) < len(ranks):
        if _notes() and (failed := failure_of_others(waits=True)) is not None and store.add(note, 0) < len(ranks):
            raise PlanError(failed)
        if time.monotonic() >= until:
            missing = ranks_as_text([rank for rank in ranks if not _has(store, f"{note}/{rank}")])
            text = f"The ranks {missing} did not come to compare plans. Call step on all ranks that share "
            text += "parameters. If a rank has died, its launcher names it"
            raise PlanError(about("the first step", text))
        time.sleep(pause)
        pause = min(0.05, 1.5 * pause)


def seconds_of_collectives() -> float:
    """Return the timeout of collectives of the default process group, in seconds."""
    group = dist.group.WORLD
    assert group is not None
    for device in ("cpu", "cuda"):
        try:
            return float(group._get_backend(torch.device(device)).options._timeout.total_seconds())
        except (AttributeError, RuntimeError):
            continue
    return dist.default_pg_timeout.total_seconds()


# ------------------------------------------------------------------ collectives that fail


class naming_missing_ranks:
    """Turn the error of a failed collective into a PlanError that names the collective, its step and missing ranks.

    gloo raises an error on every waiting rank when its timeout is over or a connection breaks. Each of these ranks then
    leaves a note in the store; ranks without a note did not come. On CUDA, torch's own watchdog reports a failure
    instead.

    Args:
        ranks: The ranks of the collective.
        key: The key of these ranks in the store, the same on each rank.
        when: The step, such as "step 12".
        name: The collective, such as "the gather of bucket 0".

    Raises:
        PlanError: the collective failed; its cause is torch's RuntimeError.
        torch.OutOfMemoryError: this rank has no memory for it, whoever else has come.
    """

    def __init__(self, ranks: Sequence[int], key: str, when: str, name: str) -> None:
        self._collective = ranks, key, when, name

    def __enter__(self) -> None:
        """Begin the collective."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Raise the PlanError if the collective has failed."""
        if not isinstance(error, RuntimeError) or isinstance(error, PlanError | torch.OutOfMemoryError):
            return
        ranks, _, when, name = self._collective
        text = f"The ranks {ranks_as_text(ranks)} did not meet in {name}. {_who_is_missing(*self._collective)}. "
        text += "Every rank must call the optimizer as often as the others. If a rank has died, its launcher names it. "
        text += f"The cause as torch tells it: {reason(error)}"
        raise PlanError(about(when, text)) from error


def _who_is_missing(ranks: Sequence[int], key: str, when: str, name: str) -> str:
    """Return a text about the ranks that have not come. A thread asks the store, because it may never answer."""
    answers: list[str] = []
    problems: list[str] = ["no answer"]

    def ask() -> None:
        try:
            answers.append(_told_by_store(ranks, key, when, name))
        except (RuntimeError, ValueError) as error:
            problems.append(reason(error))

    asking = threading.Thread(target=ask, name="who is missing", daemon=True)
    asking.start()
    asking.join(PATIENCE + SILENCE)
    if answers:
        return answers[0]
    return (
        "The store of the ranks, in the process of rank 0 or of its torchrun, does not answer "
        f"({problems[-1]}), so it is unknown which ranks are missing. Rank 0, its machine or the network has failed"
    )


def _told_by_store(ranks: Sequence[int], key: str, when: str, name: str) -> str:
    store, me = shared_store(), this_rank()
    store.set(f"{key}/{me}", f"{when}, {name}")
    others = [rank for rank in ranks if rank != me]
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until and not all(_has(store, f"{key}/{rank}") for rank in others):
        time.sleep(0.05)
    waited_in = {rank: store.get(f"{key}/{rank}").decode() for rank in others if _has(store, f"{key}/{rank}")}
    missing = [rank for rank in others if rank not in waited_in]
    sentences = [f"Rank {rank} waited in {waits}" for rank, waits in waited_in.items() if waits != f"{when}, {name}"]
    if missing:
        sentences.append(f"Missing: {ranks_as_text(missing)}")
    elif not sentences:
        sentences.append("All of them waited, so a connection has failed")
    return ". ".join(sentences)


def ranks_as_text(ranks: Sequence[int]) -> str:
    """Return ranks as text; more than 16 ranks as the first, the last and their number."""
    return ", ".join(map(str, ranks)) if len(ranks) <= 16 else f"{ranks[0]} to {ranks[-1]} ({len(ranks)} of them)"


def _has(store: PrefixStore, key: str) -> bool:
    return bool(store.check([key]))
