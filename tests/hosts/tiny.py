"""Tiny models from configurations, and data for them: nothing is downloaded."""

from __future__ import annotations

import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.distributed.configuration_utils import DistributedConfig

VOCABULARY = 64
MATRICES = 14  # what Muon trains in `llama()`: seven a layer


def llama(**settings: object) -> LlamaForCausalLM:
    """Return a Llama of two layers, the same at every call and on every rank."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(**{"vocab_size": VOCABULARY, "tie_word_embeddings": False, **sizes, **settings})
    return LlamaForCausalLM(config)


def tensor_parallel_llama(folder: str) -> LlamaForCausalLM:
    """Return `llama` cut by `transformers` itself over all ranks as it loads the weights, from a folder made here."""
    if dist.get_rank() == 0:
        llama().save_pretrained(folder)
    dist.barrier()
    split = DistributedConfig(tp_size=dist.get_world_size(), tp_plan="auto")
    return LlamaForCausalLM.from_pretrained(folder, distributed_config=split)


class Tokens(Dataset[dict[str, Tensor]]):
    """Random sequences of eight tokens, as `transformers` names them."""

    def __init__(self, count: int = 32) -> None:
        self.tokens = torch.randint(VOCABULARY, (count, 8), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of words, one token each, that knows `llama`'s vocabulary."""
    words = {f"w{number}": number for number in range(VOCABULARY - 3)}
    words |= {name: VOCABULARY - 3 + number for number, name in enumerate(("<unk>", "<pad>", "<eos>"))}
    words_only = Tokenizer(WordLevel(words, unk_token="<unk>"))
    words_only.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words_only, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>")


def sentences(count: int = 32, length: int = 6) -> list[str]:
    """Return random sentences of words that `tokenizer` knows."""
    numbers = torch.randint(VOCABULARY - 3, (count, length), generator=torch.Generator().manual_seed(1))
    return [" ".join(f"w{number}" for number in row) for row in numbers.tolist()]
