"""Ranks are forked from a process that has imported Megatron-Core, which takes ten seconds of a core."""

from __future__ import annotations

import multiprocessing

import tests.workers

# Replaces what tests/workers.py asks for, before the first ranks are started.
multiprocessing.set_forkserver_preload(
    [tests.workers.__name__, "muonmesh.build", "muonmesh.integrations.qk_clip", "tests.megatron.host"]
)
