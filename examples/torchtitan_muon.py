"""torchtitan's own trainer with Muon in the place of whatever optimizer a configuration has.

torchrun --nproc-per-node 8 examples/torchtitan_muon.py --module llama3 --config llama3_8b

Everything else is torchtitan's command line. The same without this script, on that command line:
--override.imports 'muonmesh.integrations.torchtitan.muon={"lr": 8e-4}' muonmesh.integrations.torchtitan.metrics
"""

import json
import sys

from torchtitan.train import main

SETTINGS = {"lr": 8e-4, "weight_decay": 0.1}

here = "muonmesh.integrations.torchtitan"
sys.argv += ["--override.imports", f"{here}.muon={json.dumps(SETTINGS)}", f"{here}.metrics"]
main()
