"""Copies: parameters that several ranks hold alike although no placement says so.

Tensor parallelism leaves norms, embeddings or a head plain, or sharded by FSDP2 alone. Each rank of the tensor-parallel
axis then has a copy, and a gradient norm that counts every copy is wrong. So ranks that share parameters tell each
other once, when they compare plans, what they hold: the name, the bits and the gradient of each such parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from muonmesh.errors import LayoutError, about

Copies = Mapping[tuple[str, tuple[int, ...]], Sequence[tuple[int, ...]]]
"""For a parameter, by its name and the ranks of one copy, the ranks of each of its copies."""

ALIKE = 1e-3
"""By how much of its norm the gradient of a copy may differ from that of another. Copies that compute the same have
equal bits, or nearly where a device adds up in no fixed order; those that saw other tokens differ by much more."""


class Claim(NamedTuple):
    """What one rank has of a parameter that other ranks may hold too.

    Attributes:
        name: Canonical name.
        kind: Text that is the same for all that may be copies: shape, dtype, placements.
        ranks: Those that hold one copy together, this one among them.
        bits: A number made of all bits that this rank has of it.
        gradient: Norm and sum of what it has of the gradient; None if there is none.
        unknown: Whether nothing says which ranks hold it, so that it cannot be taken for another parameter.
    """

    name: str
    kind: str
    ranks: tuple[int, ...]
    bits: int
    gradient: tuple[float, float] | None
    unknown: bool


def find_copies(claims: Mapping[int, Sequence[Claim]]) -> Copies:
    """Return which claims of ranks are copies of each other, the same on every rank.

    Copies have the same bits. Where bits differ there are two parameters of one name, as experts are.

    Args:
        claims: Of each rank of those that work together.

    Raises:
        LayoutError: parameters may be copies or not, on every rank.
    """
    held: dict[tuple[str, str], dict[tuple[int, ...], dict[int, Claim]]] = {}
    for rank, told in claims.items():
        for claim in told:
            held.setdefault((claim.name, claim.kind), {}).setdefault(claim.ranks, {})[rank] = claim
    found: dict[tuple[str, tuple[int, ...]], list[tuple[int, ...]]] = {}
    for (name, _), sets in held.items():
        alike: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for ranks in sorted(ranks for ranks, told in sets.items() if len(told) == len(ranks)):
            alike.setdefault(tuple(sets[ranks][rank].bits for rank in ranks), []).append(ranks)
        unknown = any(claim.unknown for told in sets.values() for claim in told.values())
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
                found.update({(name, ranks): copies for ranks in copies})
    return found


def _differ(a: tuple[float, float] | None, b: tuple[float, float] | None) -> bool:
    if a is None or b is None:  # the step says where some have a gradient and others lack it
        return False
    norm = max(a[0], b[0])
    return any(abs(one - other) > ALIKE * norm for one, other in zip(a, b, strict=True))


def _doubtful(name: str, what: str, first: Sequence[int], other: Sequence[int]) -> LayoutError:
    told = f"Parameters of this name have different {what} on the ranks {tuple(first)} and {tuple(other)}. If "
    told += "these are copies of one parameter, broadcast the weights, and let the plan of parallelize_module sum the "
    told += "gradients (SequenceParallel() for a norm). If these are two parameters, write "
    told += 'Muon(..., process_group="local"), or pass gradients= with a GradientSource whose group() returns the '
    told += "ranks that share each. muonmesh does not guess, because a wrong guess gives a wrong norm"
    return LayoutError(about(name, told))
