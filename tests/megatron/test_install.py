"""install: scripts that import Megatron's function, before or after, get ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from muonmesh.integrations.megatron import install

SCRIPT = """
import warnings; warnings.filterwarnings("ignore")
from megatron.core.optimizer import get_megatron_optimizer as theirs
from megatron.core.optimizer import get_megatron_optimizer  # as megatron.training imports it
from megatron.core.optimizer.muon import get_megatron_muon_optimizer
from muonmesh.integrations.megatron import install
install(muon={"lr": 0.5})
import megatron.core.optimizer
assert get_megatron_optimizer is not theirs
assert megatron.core.optimizer.get_megatron_optimizer is get_megatron_optimizer
assert get_megatron_optimizer.keywords == {"muon": {"lr": 0.5}}
install(policy="all")  # again, with other settings
assert megatron.core.optimizer.get_megatron_optimizer is get_megatron_optimizer
assert get_megatron_optimizer.keywords == {"policy": "all"}

import tests.megatron.host as host
import torch.distributed as dist
dist.init_process_group("gloo", init_method="file://{store}", rank=0, world_size=1)
shape = host.Shape()
host.begin(shape)
chunks = host.chunks_of(shape)
optimizer = get_megatron_optimizer(host.optimizer_config(shape), chunks, None, use_gloo_process_groups=False)
host.backward(shape, chunks, optimizer, 0)
assert optimizer.step()[0]
assert type(optimizer.optimizer).__name__ == "Muon"

from megatron.core.optimizer import muon
for function in (muon.get_megatron_muon_optimizer, get_megatron_muon_optimizer):
    try:
        function(host.optimizer_config(shape, optimizer="dist_muon"), chunks)
    except ValueError as error:
        assert "found optimizer='dist_muon'; needed 'adam'. Set optimizer='adam'" in str(error), error
    else:
        raise AssertionError("Megatron's own Muon was built")
"""


def test_a_script_that_imports_megatrons_function(tmp_path: Path) -> None:
    script = SCRIPT.replace("{store}", str(tmp_path / "store"))
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr


def test_what_is_no_setting_is_refused() -> None:
    with pytest.raises(TypeError, match="install: found the setting 'lr'; needed one of muon, adamw, overrides"):
        install(lr=0.1)
