"""Plan text: the words for the figures of a plan, the same on the terminal and on the page."""

from __future__ import annotations

from typing import Any

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
    return [
        (
            "Model",
            f"{found['elements'] / 1e9:,.4g}B parameters, {found['matrices']:,} matrices in {found['buckets']} buckets"
            f"; {sum(k['count'] for k in found['kinds'] if k['algorithm'] == 'adamw'):,} other parameters are AdamW's",
        ),
        (
            "Balance",
            f"busiest over mean {balance['busiest over mean']:.3f}, of {balance['least that any plan could have']:.3f} "
            f"that any plan must have; {balance['share of matrices at home']:.0%} of the matrices are orthogonalised "
            "where they lie whole",
        ),
        (f"Rank {found['rank']}, counted", _counted(found["counted"])),
        (f"Rank {found['rank']}, modelled", _modelled(found["modelled"])),
    ]


def _counted(figures: dict[str, Any]) -> str:
    kept = ("weights", "gradients", "momentum", "AdamW's moments")
    stored = ", ".join(f"{what} {figures[f'bytes of {what}'] / 2**30:.3g}" for what in kept)
    return (
        f"orthogonalises {figures['matrices']:,}, {figures['flops'] / 1e12:,.3g} TFLOP; "
        f"{figures['bytes sent'] / 1e6:,.4g} MB sent and {figures['bytes received'] / 1e6:,.4g} MB received in "
        f"{figures['collectives']} collectives; GiB of {stored}"
    )


def _modelled(figures: dict[str, Any]) -> str:
    parts = ", ".join(
        f"{part} {figures[f'seconds of the {part}'] * 1e3:,.3g}" for part in ("host", "device", "network")
    )
    return (
        f"{figures['launches']:,} launches; {figures['bytes of the exchange'] / 2**30:.3g} GiB beside what is stored, "
        f"{figures['bytes together'] / 2**30:.3g} GiB together, without activations; "
        f"{figures['seconds'] * 1e3:,.3g} ms a step, the slowest of {parts} ms"
    )
