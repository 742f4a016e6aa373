"""install: Megatron-LM's own scripts, such as pretrain_gpt.py, with this optimizer."""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

from megatron.core import optimizer as megatrons

from muonmesh.integrations.arguments import check_settings
from muonmesh.integrations.megatron.build import get_megatron_optimizer

_MEGATRONS = tuple(inspect.signature(megatrons.get_megatron_optimizer).parameters)


def install(**settings: Any) -> None:
    """Put `get_megatron_optimizer` in the place of Megatron's, in every module that has imported that, for good.

    Two lines at the top of pretrain_gpt.py, whose arguments stay ``--optimizer adam``, with or without
    ``--use-distributed-optimizer``::

        from muonmesh.integrations.megatron import install
        install(muon={"lr": 0.02})

    Args:
        settings: The arguments that Megatron's function does not have: ``muon``, ``adamw``, ``overrides``,
            ``policy``, ``per_head``.

    Raises:
        TypeError: another argument.
    """
    check_settings("install", settings, get_megatron_optimizer, decided=_MEGATRONS)
    theirs = getattr(megatrons.get_megatron_optimizer, "__wrapped_by_muonmesh__", megatrons.get_megatron_optimizer)
    before = megatrons.get_megatron_optimizer
    ours = functools.wraps(get_megatron_optimizer)(functools.partial(get_megatron_optimizer, **settings))
    ours.__wrapped_by_muonmesh__ = theirs  # type: ignore[attr-defined]
    for module in list(sys.modules.values()):
        # Not getattr, which makes modules that import on demand import.
        if getattr(module, "__dict__", {}).get("get_megatron_optimizer") in (theirs, before):
            module.get_megatron_optimizer = ours  # type: ignore[attr-defined]
