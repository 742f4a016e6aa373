"""Plan text: the words for the figures of a plan, the same on the terminal and on the page."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from muonmesh.report.device_rates import DeviceRates

HEADINGS = ("parameters", "shape", "matrices", "owners", "TFLOP", "MB sent")


def rows_of(found: dict[str, Any]) -> list[list[str]]:
    """The table: a row for the matrices of all layers that are alike; bytes are those of the rank that is told of."""
    rows = []
    for kind in found["kinds"]:
        if kind["algorithm"] == "muon":
            shape = "×".join(map(str, kind["shape"]))
            rows.append(
                [
                    kind["name"].removeprefix("model.").removesuffix(".weight"),
                    shape if kind["count"] == 1 else f"{kind['count']} of {shape}",
                    f"{kind['matrices']:,}",
                    f"{kind['owners']:,}",
                    f"{kind['flops'] / 1e12:,.4g}",
                    f"{kind['bytes sent'] / 1e6:,.3f}" if kind["bytes sent"] else "",
                ]
            )
    return rows


def lines_of(found: dict[str, Any]) -> list[tuple[str, str]]:
    """What is said below the table, by title; a line of modelled figures says so."""
    balance = found["balance"]
    device = "one H100" if found["rates"] == asdict(DeviceRates()) else "the rates given"
    return [
        (
            "Model",
            f"{amount(found['elements'])} parameters, {found['matrices']:,} matrices in {found['buckets']} buckets"
            f"; {sum(k['count'] for k in found['kinds'] if k['algorithm'] == 'adamw'):,} other parameters are AdamW's",
        ),
        (
            "Balance",
            f"busiest over mean {balance['busiest over mean']:.3f}, of {balance['least that any plan could have']:.3f} "
            f"that any plan must have; {balance['share of matrices at home']:.0%} of the matrices are orthogonalised "
            "where they lie whole",
        ),
        (f"Rank {found['rank']}, counted", _counted(found["counted"])),
        (f"Rank {found['rank']}, modelled for {device}", _modelled(found["modelled"])),
    ]


def _counted(figures: dict[str, Any]) -> str:
    kept = ("weights", "gradients", "momentum", "AdamW's moments")
    stored = ", ".join(f"{what} {size(figures[f'bytes of {what}'])}" for what in kept)
    return (
        f"orthogonalises {figures['matrices']:,}, {figures['flops'] / 1e12:,.3g} TFLOP; "
        f"{figures['bytes sent'] / 1e6:,.4g} MB sent and {figures['bytes received'] / 1e6:,.4g} MB received in "
        f"{figures['collectives']} collectives; {stored}"
    )


def _modelled(figures: dict[str, Any]) -> str:
    parts = ", ".join(
        f"{part} {figures[f'seconds of the {part}'] * 1e3:,.3g}" for part in ("host", "device", "network")
    )
    return (
        f"{figures['launches']:,} launches; {size(figures['bytes of the exchange'])} beside what is stored, "
        f"{size(figures['bytes together'])} together, without activations; {figures['seconds'] * 1e3:,.3g} ms a step, "
        f"the slowest of {parts} ms"
    )


def amount(count: int) -> str:
    """Return a large count in short: 671B, 1.28M."""
    for unit, factor in (("B", 1e9), ("M", 1e6)):
        if count >= factor:
            return f"{count / factor:,.4g}{unit}"
    return f"{count:,}"


def size(count: int) -> str:
    """Return a number of bytes in a unit that suits it."""
    exponent = 0
    while exponent < 4 and count >= 1024 ** (exponent + 1):
        exponent += 1
    return f"{count / 1024**exponent:.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[exponent]}"
