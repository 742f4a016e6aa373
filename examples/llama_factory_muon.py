"""LLaMA-Factory with Muon: train with this script in the place of ``llamafactory-cli train``.

python llama_factory_muon.py sft.yaml
"""

from llamafactory.train.sft import trainer  # the stage: sft, pt, dpo, ...
from llamafactory.train.tuner import run_exp

from muonmesh.integrations.transformers import MuonFactory

trainer.create_custom_optimizer = lambda model, args, _: MuonFactory()(model, args=args)
run_exp()
