"""Figures: a forecast as plain data, from which ``muonmesh plan`` makes its table, its JSON and its picture."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from muonmesh.errors import FileError
from muonmesh.files import is_number, read_json
from muonmesh.layout.balance import at_home, least_imbalance
from muonmesh.report.device_rates import DeviceRates
from muonmesh.report.forecast import WIRE, Forecast, Weight

PER_SECOND = ("flops", "published", "bytes", "wire")
"""Rates that are so much a second; the others are seconds."""


def figures_of(weights: Sequence[Weight], found: Forecast) -> dict[str, Any]:
    """Return all figures of a forecast. What is counted and what is modelled stand under these two names.

    Seconds, bytes, FLOPs and elements are plain numbers; ``flops_by_rank`` follows the order of the ranks, and
    ``owners`` names the owner of each matrix of each parameter.
    """
    plan = found.plan
    owners: dict[str, list[int]] = {}
    for assignment in plan.assignments:
        owners.setdefault(plan.parameters[assignment.parameter].name, []).append(assignment.owner)
    return {
        "ranks": len(plan.ranks),
        "elements": sum(math.prod(weight.layout.shape) for weight in weights),
        "matrices": len(plan.assignments),
        "buckets": len(plan.buckets),
        "balance": {
            "busiest over mean": found.imbalance,
            "least that any plan could have": least_imbalance(plan),
            "share of matrices at home": at_home(plan),
        },
        "rank": found.rank,
        "counted": {
            "matrices": len(found.owned),
            "flops": found.flops,
            "bytes sent": found.bytes_sent,
            "bytes received": found.bytes_received,
            "collectives": found.collectives,
            "messages": found.messages,
            "bytes of gradients sent": found.gradients.bytes_sent,
            "bytes of gradients received": found.gradients.bytes_received,
            "collectives of gradients": found.gradients.collectives,
            "bytes of weights": found.memory.weights,
            "bytes of gradients": found.memory.gradients,
            "bytes of momentum": found.memory.momentum,
            "bytes of AdamW's moments": found.memory.adamw,
        },
        "modelled": modelled_of(found),
        "rates": asdict(found.rates),
        "kinds": _kinds(weights, found, owners),
        "flops_by_rank": [plan.loads[rank] for rank in plan.ranks],
        "owners": owners,
    }


def modelled_of(found: Forecast) -> dict[str, Any]:
    """Return what is modelled, beside the collectives, which are counted, since they follow from the memory too."""
    return {
        "bytes of the exchange": found.memory.exchange,
        "bytes of NCCL": found.memory.nccl,
        "bytes together": found.memory.total,
        "collectives": found.collectives,
        "launches": found.launches,
        "elementwise bytes": found.elementwise_bytes,
        **{
            f"seconds{whose}": dict(zip(("products as published", "products at best"), ends, strict=True))
            for whose, ends in _seconds(found).items()
        },
    }


def load_rates(path: Path) -> DeviceRates:
    """Read rates of a device from a JSON object; what it leaves out is one H100's.

    Raises:
        FileError: it is no such object, or a name or a number in it is none.
    """
    content = read_json(path, needed="rates such as those of the documentation")
    known = asdict(DeviceRates())
    for name, value in content.items():
        if name not in known:
            raise FileError(f"--rates {path}: found {name!r}; needed {', '.join(known)}. Rename it or leave it out")
        least = 0 if name not in PER_SECOND else math.nextafter(0, 1)
        if not is_number(value) or not least <= value < math.inf:
            needed = "a number of seconds" if least == 0 else "a positive, finite number a second"
            raise FileError(f"--rates {path}: found {name} {value!r}; needed {needed}. Correct it")
    return DeviceRates(**content)


def _seconds(found: Forecast) -> dict[str, tuple[float, float]]:
    published, best = found.parts(), found.parts(published=False)
    return {
        "": (found.seconds, found.best_seconds),
        **{f" of the {part}": (published[part], best[part]) for part in best},
        " of torch.optim.Muon": (found.seconds_of_torch(), found.seconds_of_torch(published=False)),
    }


def _kinds(weights: Sequence[Weight], found: Forecast, owners: dict[str, list[int]]) -> list[dict[str, Any]]:
    """Return one entry for the parameters of all layers that are alike."""
    numbers = {parameter.name: number for number, parameter in enumerate(found.plan.parameters)}
    alike: dict[tuple[str, tuple[int, ...]], list[Weight]] = {}
    for weight in weights:
        alike.setdefault((re.sub(r"\.\d+\.", ".*.", weight.name), weight.layout.shape), []).append(weight)
    kinds = []
    for (name, shape), some in alike.items():
        of = [numbers[weight.name] for weight in some if weight.matrices is not None]
        who = [owner for weight in some for owner in owners.get(weight.name, ())]
        kinds.append(
            {
                "name": name,
                "count": len(some),
                "shape": list(shape),
                "algorithm": "muon" if of else "adamw",
                "split": some[0].matrices,
                "layout": some[0].layout.describe(),
                "matrices": len(who),
                "owners": len(set(who)),
                "flops": sum(sum(found.plan.parameters[number].flops) for number in of),
                "bytes sent": sum(found.traffic.sent[number] for number in of) * WIRE,
            }
        )
    return kinds
