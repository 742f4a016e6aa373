"""TRL's SFTTrainer with PEFT's adapters, which Muon trains: a tiny Llama on random words.

python examples/trl_sft.py
"""

import random

from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from muonmesh.integrations.transformers import MuonCallback, MuonFactory

names = [f"word{number}" for number in range(62)]
words = Tokenizer(
    WordLevel({name: number for number, name in enumerate([*names, "<pad>", "<eos>"])}, unk_token="<pad>")
)
words.pre_tokenizer = WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
draw = random.Random(0)
data = Dataset.from_dict({"text": [" ".join(draw.choices(names, k=12)) for _ in range(32)]})
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, head_dim=8
)
args = SFTConfig(
    "tuned",
    max_steps=6,
    per_device_train_batch_size=4,
    learning_rate=1e-2,
    max_length=16,
    logging_steps=2,
    report_to=[],
    disable_tqdm=True,
    use_cpu=True,
    bf16=False,
)
trainer = SFTTrainer(
    LlamaForCausalLM(config),
    args,
    train_dataset=data,
    processing_class=tokenizer,
    peft_config=LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    # Without the override the adapters are AdamW's: Muon's update is meant for their product.
    optimizer_cls_and_kwargs=(MuonFactory, {"args": args, "overrides": {"lora_[AB]": "muon"}}),
    callbacks=[MuonCallback(metrics=True)],
)
trainer.train()
trainer.save_model()
print(trainer.state.log_history[-2]["loss"])
