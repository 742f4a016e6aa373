"""Undeclared replicas: finds parameters of which several ranks hold copies although no placement says so.

With tensor parallelism, norms, embeddings or a head may be plain tensors, or sharded by FSDP2 only. Each rank of the
tensor-parallel axis then has a copy, and a gradient norm that counts every copy is wrong. So ranks that share
parameters exchange, once when they compare plans, the name, the bits and the gradient of each such parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from muonmesh.errors import LayoutError, about

Copies = Mapping[tuple[str, tuple[int, ...]], Sequence[tuple[int, ...]]]
"""For a parameter, by its name and the ranks of one copy, the ranks of each of its copies."""

ALIKE = 1e-2
"""The largest relative difference between gradients of two copies. Copies with the same inputs have equal gradients, up
to rounding if a device adds in no fixed order. Copies with other tokens as inputs differ by much more."""

Sums = tuple[float, float]
"""The norm of a gradient, and its product with a fixed vector (a wave), with which other gradients differ."""

Gradients = Mapping[int, Mapping[str, Sums]]
"""The sums of gradients on one rank: for each set of ranks that hold replicas of the same parameters, by name. The key
of a set is equal on ranks that can compare: a checksum of the ranks and of the names of parameters with a gradient."""


class Claim(NamedTuple):
    """The facts about one rank's part of a parameter of which other ranks may hold copies.

    Attributes:
        name: Canonical name.
        kind: A text that is equal for possible copies: shape, dtype and placements.
        ranks: The ranks that hold one copy together, including this rank.
        bits: A checksum of all bits of this rank's part.
        gradient: Sums of this rank's part of the gradient; None if there is no gradient.
        unknown: Whether it is unknown which ranks hold the parameter. Then parameters of the same name and kind must be
            copies; different bits are an error.
    """

    name: str
    kind: str
    ranks: tuple[int, ...]
    bits: int
    gradient: Sums | None
    unknown: bool


def find_copies(claims: Mapping[int, Sequence[Claim]]) -> Copies:
    """Return the copies among the parameters that ranks claim. The result is the same on every rank.

    Copies have the same bits. If bits differ, there are two parameters of the same name, as with experts.

    Args:
        claims: The claims of each rank of the connected set.

    Raises:
        LayoutError: it is not clear whether parameters are copies. Every rank raises this error.
    """
    claims_of: dict[tuple[str, str], dict[tuple[int, ...], dict[int, Claim]]] = {}
    for rank, by_rank in claims.items():
        for claim in by_rank:
            claims_of.setdefault((claim.name, claim.kind), {}).setdefault(claim.ranks, {})[rank] = claim
    copies_of: dict[tuple[str, tuple[int, ...]], list[tuple[int, ...]]] = {}
    for (name, _), sets in claims_of.items():
        alike: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for ranks in sorted(ranks for ranks, by_rank in sets.items() if len(by_rank) == len(ranks)):
            alike.setdefault(tuple(sets[ranks][rank].bits for rank in ranks), []).append(ranks)
        unknown = any(claim.unknown for by_rank in sets.values() for claim in by_rank.values())
        if unknown and len(alike) > 1:
            first, other = (copies[0] for copies in list(alike.values())[:2])
            raise _doubtful(name, "weights", first, other)
        for copies in alike.values():
            first = copies[0]
            for other in copies[1:]:
                pairs = zip(first, other, strict=True)
                if any(_differ(sets[first][a].gradient, sets[other][b].gradient) for a, b in pairs):
                    raise _doubtful(name, "gradients of equal weights", first, other)
            if len(copies) > 1:
                copies_of.update({(name, ranks): copies for ranks in copies})
    return copies_of


def added(gradients: Gradients) -> dict[int, Sums]:
    """Return the sums over all parameters that the same ranks hold."""
    return {
        key: (math.hypot(*(norm for norm, _ in sums.values())), sum(product for _, product in sums.values()))
        for key, sums in gradients.items()
    }


def insist_on_averages(sums_of: Mapping[int, Mapping[int, Sums]], ask: Callable[[], Mapping[int, Gradients]]) -> None:
    """Check that replicas that the user or DDP declares have equal gradients.

    Args:
        sums_of: For each rank of the connected set what `added` returns there.
        ask: Returns the gradients of each rank, by which the error names a parameter. All ranks call it, or none.

    Raises:
        LayoutError: gradients differ, so nothing has averaged them. Every rank raises this error.
    """
    first: dict[int, tuple[int, Sums]] = {}
    for rank, sums in sums_of.items():
        for key, of_rank in sums.items():
            other, expected = first.setdefault(key, (rank, of_rank))
            if _differ(expected, of_rank):
                everyone = ask()
                by_name, other_by_name = everyone[other][key], everyone[rank][key]
                name = max(by_name, key=lambda name: _distance(by_name[name], other_by_name[name]))
                (norm, product), (norm_there, product_there) = by_name[name], other_by_name[name]
                text = f"The ranks {other} and {rank} hold replicas of this parameter, but their gradients differ "
                text += f"(norms {norm:.4g} and {norm_there:.4g}, products with a fixed vector {product:.4g} and "
                text += f"{product_there:.4g}). Nothing has averaged them, or ranks step optimizers in another order. "
                text += "Under DistributedDataParallel, call the wrapper, not its .module, and run the last "
                text += "micro-batch outside of no_sync(). Without a wrapper, average each gradient over the group of "
                text += "the replicas before optimizer.step(): dist.all_reduce(p.grad, group=group); "
                text += "p.grad /= dist.get_world_size(group). If each rank trains its own copy, write "
                raise LayoutError(about(name, text + 'process_group="local"'))


def _differ(a: Sums | None, b: Sums | None) -> bool:
    if a is None or b is None:  # the step raises an error if only some copies have a gradient
        return False
    return _distance(a, b) > ALIKE * max(a[0], b[0])


def _distance(a: Sums, b: Sums) -> float:
    return max(abs(number - other) for number, other in zip(a, b, strict=True))


def _doubtful(name: str, difference: str, first: Sequence[int], other: Sequence[int]) -> LayoutError:
    text = f"Parameters of this name have different {difference} on the ranks {tuple(first)} and {tuple(other)}. If "
    text += "these are copies of one parameter, broadcast the weights, and let the plan of parallelize_module sum the "
    text += "gradients (SequenceParallel() for a norm). If these are two parameters, write "
    text += 'Muon(..., process_group="local"), or pass gradients= with a GradientSource whose group() returns the '
    text += "ranks that share each. muonmesh does not guess, because a wrong guess gives a wrong norm"
    return LayoutError(about(name, text))
