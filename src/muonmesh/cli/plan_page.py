"""Plan page: the words for the figures of a plan, on the terminal and in one HTML file with a picture of the ranks."""

from __future__ import annotations

import html
from dataclasses import asdict
from typing import Any

from muonmesh.cli.page import document, table
from muonmesh.report.device_rates import DeviceRates

CELL, GAP, WIDE = 11, 1, 64  # pixels of a rank, between two, and ranks in a row at the most
COLOURS = ("#f3f3f0", "#fbe3d6", "#f2a99b", "#d1495b")  # of no work, less than the mean, about it, much more
BARS = {"weights": "#30638e", "gradients": "#5b8fb9", "momentum": "#d1495b", "AdamW's moments": "#e8a0a8"}


def page(found: dict[str, Any]) -> str:
    """Return the page."""
    title = f"{found['model']} on {found['ranks']:,} ranks"
    lines = "".join(f"<p><b>{html.escape(name)}</b>: {html.escape(line)}</p>" for name, line in lines_of(found))
    asked = f"mesh {found['mesh']}" + (f"; experts {found['experts']}" if found["experts"] else "")
    note = (
        "Counted figures follow from the plan that every rank makes before its first step. Modelled ones follow from "
        f"these and from rates: {', '.join(f'{name} {value:.3g}' for name, value in found['rates'].items())}."
    )
    return document(
        title,
        f"<p>{html.escape(asked)}; weights and gradients {found['weights']}.</p>"
        f"<h2>Who computes how much</h2>{_ranks(found)}"
        f"<h2>What rank {found['rank']} holds</h2>{_memory(found)}"
        f"<h2>Figures</h2>{lines}<p class='note'>{html.escape(note)}</p>"
        f"<h2>Matrices</h2>{table(list(HEADINGS), rows_of(found))}"
        f"<h2>Where they lie</h2>{table(('parameters', 'by', 'layout'), _places(found))}",
    )


def _places(found: dict[str, Any]) -> list[list[str]]:
    return [[kind["name"], kind["algorithm"], kind["layout"]] for kind in found["kinds"]]


def _ranks(found: dict[str, Any]) -> str:
    """Return a square for each rank, darker the more it has to do; the mouse tells its number and its FLOPs."""
    loads = found["flops_by_rank"]
    mean = sum(loads) / len(loads)
    wide = min(WIDE, len(loads))
    step = CELL + GAP
    squares = []
    for rank, load in enumerate(loads):
        x, y = rank % wide * step, rank // wide * step
        share = load / mean if mean else 0.0
        squares.append(
            f'<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}" fill="{_colour(share)}">'
            f"<title>rank {rank}: {load / 1e12:.3g} TFLOP, {share:.2f} of the mean</title></rect>"
        )
    height = -(-len(loads) // wide) * step
    labels = ("none", "below 0.9 of the mean", "0.9 to 1.1", "above 1.1")
    key = "".join(
        f'<span style="background:{colour}">&emsp;</span> {label} &emsp;'
        for colour, label in zip(COLOURS, labels, strict=True)
    )
    return (
        f'<svg viewBox="0 0 {wide * step} {height}" style="max-width:{wide * step}px;width:100%" role="img" '
        f'aria-label="FLOPs by rank">{"".join(squares)}</svg><p class="note">A square is a rank, row by row in the '
        f"order of the mesh. FLOPs of its orthogonalisations: {key}</p>"
    )


def _colour(share: float) -> str:
    return COLOURS[0 if share == 0 else 1 if share < 0.9 else 2 if share <= 1.1 else 3]


def _memory(found: dict[str, Any]) -> str:
    """Return one bar of what is stored and, hatched, what a step takes beside it."""
    sizes = {name: found["counted"][f"bytes of {name}"] for name in BARS}
    sizes["a step, modelled"] = found["modelled"]["bytes of the exchange"]
    whole = max(1, sum(sizes.values()))
    x, parts, key = 0.0, [], []
    for name, count in sizes.items():
        width = 768 * count / whole
        fill = BARS.get(name, "#bbb")
        parts.append(f'<rect x="{x:.1f}" y="0" width="{width:.1f}" height="28" fill="{fill}"/>')
        key.append(f'<span style="background:{fill}">&emsp;</span> {html.escape(name)} {size(count)} &emsp;')
        x += width
    return f'<svg viewBox="0 0 768 28" style="width:100%">{"".join(parts)}</svg><p class="note">{"".join(key)}</p>'


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
    if figures["collectives of gradients"]:
        stored = (
            f"before that, gradients to owners: {figures['bytes of gradients sent'] / 1e6:,.4g} MB sent and "
            f"{figures['bytes of gradients received'] / 1e6:,.4g} MB received in {figures['collectives of gradients']} "
            f"collectives; {stored}"
        )
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
