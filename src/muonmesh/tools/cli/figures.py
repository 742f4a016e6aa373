"""Figures: a forecast as plain data, from which ``muonmesh plan`` makes its tables and its JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from muonmesh.checkpoint.form import POSITIVE, check_form, only
from muonmesh.errors import FileError
from muonmesh.files import read_json
from muonmesh.names import starred
from muonmesh.tools.forecasts.balance import at_home, least_imbalance
from muonmesh.tools.forecasts.device_rates import DeviceRates
from muonmesh.tools.forecasts.forecast import WIRE, Forecast, Weight


def figures_of(weights: Sequence[Weight], found: Forecast) -> dict[str, Any]:
    """Return all figures of a forecast, with exact figures under "counted" and estimates under "modelled".

    Seconds, bytes, FLOPs and elements are plain numbers. ``flops_by_rank`` is in the order of the ranks. ``owners`` has
    for each parameter the owner of each of its matrices, the rank that orthogonalizes the matrix.
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
            "busiest rank over mean": found.imbalance,
            "lowest that any plan could reach": least_imbalance(plan),
            "share of matrices stored whole by their owner": at_home(plan),
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
            **{f"bytes of {what}": size for what, size in found.stored.items()},
            "bytes stored in total": sum(found.stored.values()),
            "bytes stored in total, with AdamW for all": 4 * found.stored["weights"],  # with gradients and two moments
        },
        "modelled": {
            "limited by": found.limited_by,
            **_seconds(found),
            "bytes of buffers in the step": found.exchange,
            "bytes of NCCL's buffers": found.nccl,
            "bytes in total": sum(found.stored.values()) + found.exchange + found.nccl,
            "kernel launches": found.launches,
            "bytes that elementwise kernels move": found.elementwise_bytes,
        },
        "rates": asdict(found.rates),
        "kinds": _kinds(weights, found, owners),
        "flops_by_rank": [plan.loads[rank] for rank in plan.ranks],
        "owners": owners,
    }


def load_rates(path: Path) -> DeviceRates:
    """Return the rates of a device from a JSON file; missing rates are an H100's.

    Raises:
        FileError: the file is no JSON object, a name is unknown, or a rate is no positive number.
    """
    known = asdict(DeviceRates())
    content = {**known, **read_json(path, needed='rates such as {"flops": 4e14, "wire": 2.5e10}')}
    form = only(dict.fromkeys(known, POSITIVE))
    check_form(str(path), content, form, "Correct the file or leave --rates out", kind=FileError)
    return DeviceRates(**content)


def _seconds(found: Forecast) -> dict[str, dict[str, float]]:
    """Return the times of a step, of its parts, and of torch's optimizers, each with slow and with fast products."""
    published, best = found.parts(), found.parts(published=False)
    ends = {"seconds": (found.seconds, found.best_seconds)}
    ends |= {f"seconds of the {part}": (published[part], best[part]) for part in best}
    torchs = found.seconds_of_torch(), found.seconds_of_torch(published=False)
    ends["seconds of torch.optim.Muon, without communication"] = torchs
    ends["seconds of torch.optim.AdamW for all parameters"] = 2 * (found.seconds_of_adamw(),)
    return {name: {"products as published": slow, "products at best": fast} for name, (slow, fast) in ends.items()}


def _kinds(weights: Sequence[Weight], found: Forecast, owners: dict[str, list[int]]) -> list[dict[str, Any]]:
    """Return one entry for each kind of parameters: equal names, apart from the layer's number, and equal shapes."""
    numbers = {parameter.name: number for number, parameter in enumerate(found.plan.parameters)}
    alike: dict[tuple[str, tuple[int, ...]], list[Weight]] = {}
    for weight in weights:
        alike.setdefault((starred(weight.name), weight.layout.shape), []).append(weight)
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
