"""Every model class of `transformers`, built on `meta` from its own default configuration with two layers, and run."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

_DEPTH = re.compile(r"num_.*(layers|blocks)|n_layers?|.*_layers|encoder_depth|n_layer")
_WIDTH = re.compile(
    "hidden|embed|dim|size|channel|width|inner|intermediate|ffn|d_model|d_ff|d_kv|n_embd|rank|units|filters|d_state"
)
_NO_WIDTH = re.compile(
    "image|patch|vocab|window|kernel|stride|max_|position|^num_(?!channels_|filters)|token|type_|chunk|block_size|pad|sample"
    "|factor|img|_id$|mult|frame|batch|group_size|grid|pool_size|fft|hop|bins|downscale|queue|layers|context_length"
    "|prediction_length|input_size|spatial|crop|temporal|box|class|label|resolution|feature_size"
)
INTERNAL = re.compile(
    "hidden|attention|past|cross|embeds|states|features|encoder|pooler|conv|mems|cache|router|intermediate|init_ref|_model_output"
)
_VIDEO = re.compile("Video|Vivit|Timesformer|VJEPA")


@contextmanager
def numbers_on_meta() -> Iterator[None]:
    """Inside, a check of a mask, such as `if mask.all()`, is told yes, or one; `meta` has no number of its own."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_local_scalar_dense", lambda tensor: True if tensor.dtype == torch.bool else 1, "Meta")
        yield


def names() -> list[str]:
    """What `transformers` exports that may be a class of models, by its name; nothing is imported."""
    model_names = (
        name for name in sorted(dir(transformers)) if re.search("Model|For|Head", name) and name[0].isupper()
    )
    return [name for name in model_names if not name.endswith(("Config", "PreTrainedModel", "Output", "Processor"))]


def is_model(name: str) -> bool:
    """Whether it is a class of models with a configuration of its own."""
    try:
        kind = getattr(transformers, name)
    except (ImportError, AttributeError):  # needs a package that is not here
        return False
    of_transformers = inspect.isclass(kind) and issubclass(kind, PreTrainedModel)
    return of_transformers and getattr(kind, "config_class", None) is not None


def build(name: str) -> nn.Module:
    """A model of this class with two layers in each stack, or, where that cannot be, with as many as it has."""
    kind: Any = getattr(transformers, name)
    config = kind.config_class()
    _shorten(config)
    if getattr(config, "pad_token_id", 0) is None:
        config.pad_token_id = 0
    try:
        with torch.device("meta"):
            return ready(kind(config))
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, RuntimeError):
        with torch.device("meta"):
            return ready(kind(kind.config_class()))


def small_config(name: str, factor: int) -> Any:
    """The configuration of a class with two layers in each stack, and widths divided by a factor."""
    config = getattr(transformers, name).config_class()
    _shorten(config)
    if factor > 1:
        _narrow(config, factor)
    if getattr(config, "pad_token_id", 0) is None:
        config.pad_token_id = 0
    return config


def _narrow(config: Any, factor: int) -> None:
    for key, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            _narrow(value, factor)
        elif key in ("chunk_size", "mamba_chunk_size") and isinstance(value, int):
            setattr(config, key, min(value, 8))
        elif key == "vocab_size" and isinstance(value, int) and value > 384:
            config.vocab_size = 384
        elif key.endswith("token_id") and isinstance(value, int) and value >= 384:
            setattr(config, key, 300 + value % 80)  # none of those that `drawn` draws
        elif _WIDTH.search(key) and not _NO_WIDTH.search(key):
            many = value if isinstance(value, list | tuple) else [value]
            divided = [v // factor if type(v) is int and v >= 32 and v % factor == 0 else v for v in many]
            if divided != list(many):
                setattr(config, key, type(value)(divided) if many is value else divided[0])


def drawn(model: Any) -> Iterator[dict[str, Tensor]]:
    """Inputs for a forward of a model on the CPU, drawn at random; then only its text, or also what it insists on."""
    generator = torch.Generator().manual_seed(0)

    def draw(key: str, like: Tensor) -> Tensor:
        if like.is_floating_point():
            return torch.randn(like.shape, generator=generator)
        if key == "timesteps":
            return torch.arange(like.shape[-1]).expand(like.shape)
        return torch.randint(3, 20, like.shape, generator=generator)

    random_inputs = {key: draw(key, like) for key, like in inputs(model).items()}
    yield random_inputs
    if text := {key: value for key, value in random_inputs.items() if key in ("input_ids", "decoder_input_ids")}:
        yield text
    width = _setting(model.config, "hidden_size", "d_model", "hidden_dim", "embed_dim") or 32
    more: dict[str, Tensor] = {}
    for key, parameter in inspect.signature(model.forward).parameters.items():
        if (
            key in random_inputs
            or parameter.default is not inspect.Parameter.empty
            or parameter.kind is not parameter.POSITIONAL_OR_KEYWORD
        ):
            continue
        if "grid" in key:
            more[key] = torch.tensor([[1, 4, 4]])
        else:
            more[key] = (
                torch.ones(2, 8, dtype=torch.long) if "mask" in key or "ids" in key else torch.randn(2, 8, width)
            )
    if more:
        yield {**random_inputs, **more}


def ready(model: Any) -> nn.Module:
    model.config.use_cache = False
    ready: nn.Module = model.float().eval()
    return ready


def _shorten(config: Any) -> None:
    for key, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            _shorten(value)
        elif isinstance(value, int) and not isinstance(value, bool) and _DEPTH.fullmatch(key) and value > 2:
            setattr(config, key, 2)
        elif key in ("layer_types", "mlp_layer_types") and isinstance(value, list | tuple) and len(value) > 2:
            setattr(config, key, (list(dict.fromkeys(value)) * 2)[:2])


def _setting(config: Any, *names: str) -> Any:
    """What a configuration, or one inside it, says under the first of these names that it has."""
    values = [value for name in names if (value := getattr(config, name, None)) is not None]
    inner = (_setting(value, *names) for value in vars(config).values() if isinstance(value, PreTrainedConfig))
    return values[0] if values else next((value for value in inner if value is not None), None)


def inputs(model: Any) -> dict[str, Tensor]:
    """Tensors of the shapes that its forward reads, as far as its configuration tells them."""
    config, name = model.config, type(model).__name__
    size = _setting(config, "image_size", "img_size")
    height, width = size if isinstance(size, list | tuple) else (size, size) if isinstance(size, int) else (224, 224)
    colours = _setting(config, "num_channels", "in_channels") or 3
    frames = _setting(config, "num_frames", "frames_per_clip") or 16
    mels = _setting(config, "num_mel_bins", "input_dim", "mel_dim") or 80
    ids = torch.ones(2, 8, dtype=torch.long)
    video = torch.empty(2, frames, colours, height, width)
    tensors = {
        "input_ids": ids,
        "decoder_input_ids": ids,
        "pixel_values": video if _VIDEO.search(name) else torch.empty(2, colours, height, width),
        "pixel_values_videos": video,
        "bbox": ids[..., None].expand(-1, -1, 4),
        "input_features": torch.empty(2, mels, 3000) if "Whisper" in name else torch.empty(2, 128, mels),
        "input_values": torch.empty(2, 16000),
        "decoder_input_values": torch.empty(2, 8, mels),
        "past_values": torch.empty(
            2, _setting(config, "context_length") or 32, _setting(config, "num_input_channels", "input_size") or 1
        ),
        "states": torch.empty(2, 8, _setting(config, "state_dim") or 17),
        "actions": torch.empty(2, 8, _setting(config, "act_dim") or 4),
        "rewards": torch.empty(2, 8, 1),
        "returns_to_go": torch.empty(2, 8, 1),
        "timesteps": ids,
    }
    if name.startswith("AST"):
        tensors["input_values"] = torch.empty(2, _setting(config, "max_length") or 128, mels)
    if "Wav2Vec2Bert" in name:
        tensors["input_features"] = torch.empty(2, 128, 160)
    accepted = {key: tensors[key] for key in inspect.signature(model.forward).parameters if key in tensors}
    if "states" not in accepted or "actions" not in accepted:  # a decision transformer's, and nobody else's
        accepted = {
            key: value for key, value in accepted.items() if key not in ("states", "actions", "rewards", "timesteps")
        }
    if "MultipleChoice" in name:
        accepted = {key: value[:, None].expand(2, 3, *value.shape[1:]) for key, value in accepted.items()}
    return {key: value.to("meta") for key, value in accepted.items()}


def run(model: nn.Module) -> tuple[Any, Any]:
    """All outputs of a forward, and those that are results."""
    example = inputs(model)
    with torch.device("meta"):
        try:
            outputs = model(**example)
        except RuntimeError as error:
            if "BF16" not in str(error):  # what grouped products of experts take alone
                raise
            example = {k: v.bfloat16() if v.is_floating_point() else v for k, v in example.items()}
            outputs = model.bfloat16()(**example)
    if not hasattr(outputs, "items"):
        return outputs, outputs
    return outputs, {key: value for key, value in outputs.items() if not INTERNAL.search(key)}
