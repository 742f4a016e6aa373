"""tests/megatron/arguments.md has every field of Megatron's configurations, and says of each what is so."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer_param_scheduler import ParamGroupOverride

from muonmesh.integrations.megatron import refusals

PAGE = (Path(__file__).parent / "arguments.md").read_text()
KINDS = (OptimizerConfig, DistributedDataParallelConfig)
STATES = ("works", "works for `adam`", "works for `torch_dist`", "refused", "Megatron's", "untested")


def states_of_fields() -> dict[tuple[str, str], str]:
    """Return the state of each argument and field on the page, by "" or the field's class, and the field's name."""
    states: dict[tuple[str, str], str] = {}
    seen: set[tuple[str, str]] = set()
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("| `"):
            continue
        state = next(cell for cell in cells[1:] if cell in STATES)
        of = cells[1].strip("`") if state != cells[1] else ""
        for name in re.findall(r"`(?:--)?([\w-]+)`", cells[0]):
            assert (of, name) not in seen, f"{name} is on the page twice"
            seen.add((of, name))
            states.setdefault((of, name.replace("-", "_").removeprefix("no_")), state)
    return states


def fields() -> dict[tuple[str, str], str | None]:
    """Return the state of each field of Megatron's configurations; None if the page does not have it."""
    states = states_of_fields()
    names = {kind: [field.name for field in dataclasses.fields(kind)] for kind in KINDS}
    return {
        (kind.__name__, name): states.get((kind.__name__, name), states.get(("", name)))
        for kind in KINDS
        for name in names[kind]
    }


def test_the_page_has_every_field() -> None:
    """A field that is new in Megatron fails here until somebody has decided what it means."""
    assert [key for key, state in fields().items() if state is None] == []
    of_groups = {name for of, name in states_of_fields() if of == "config_overrides"}
    assert of_groups == {*ParamGroupOverride.__annotations__, "lr", "weight_decay", "lr_mult", "optimizer", "eps"}


def test_the_page_and_the_refusals_agree() -> None:
    """Whatever version of Megatron is installed: no version has all fields that are refused."""
    states, tables = (
        states_of_fields(),
        {"OptimizerConfig": refusals._OPTIMIZER, "DistributedDataParallelConfig": refusals._DDP},
    )
    refused = {(of, name) for of, table in tables.items() for name in table} - {("OptimizerConfig", "optimizer")}
    assert {key for key in refused if states.get(key, states.get(("", key[1]))) != "refused"} == set()
    # use_torch_fsdp2 and others are no fields; those of both configurations are refused in one of them.
    on_page = {name for (_, name), state in fields().items() if state == "refused"}
    assert on_page <= {name for _, name in refused}
