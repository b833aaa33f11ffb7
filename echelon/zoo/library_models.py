"""Models of other libraries as entries of the zoo: ``timm:NAME`` for images, ``hf:NAME`` for text.

Nothing is downloaded, and no code other than the library's is executed: weights are random, those of the directory that
``hf:DIR`` names, or restored from a user's file. The modules keep the library's names, so its weight files can be
loaded.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from echelon.base.errors import EchelonError, UsageError, first_line, nearest
from echelon.checkpoint.safetensors_source import SafetensorsSource
from echelon.hf import from_pretrained
from echelon.zoo.entry import Model, Request, Setting

T = TypeVar("T")

#: short name of a library -> its package
PACKAGES = {"timm": "timm", "hf": "transformers"}

#: ends of the names of files with weights
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth")

#: config attributes that turn on causal attention
CAUSAL = ("is_decoder", "causal")

#: model types in transformers' list of causal models whose attention is not causal without an explicit mask
NOT_CAUSAL = {"xlnet"}


def borrow(library: str, name: str) -> Model:
    """Return the entry of ``library:name``."""
    if library not in PACKAGES:
        known = " or ".join(f"{short}:NAME" for short in PACKAGES)
        raise UsageError(
            f"'{library}:{name}': there is no library '{library}'; models of others are {known}, your own file.py:Name"
        )
    package = _imported(library, name)
    return _from_timm(package, name) if library == "timm" else _from_transformers(package, name)


def _imported(library: str, name: str) -> Any:
    package = PACKAGES[library]
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        missing = (error.name or package).partition(".")[0]
        state = "which is not installed" if missing == package else f"which lacks '{missing}'"
        raise UsageError(f"{library}:{name} needs the library {package}, {state}; pip install {missing}") from None
    except Exception as error:  # an installation that does not match this torch may raise anything
        raise UsageError(
            f"{library}:{name} needs the library {package}, which cannot be imported here "
            f"({first_line(error)}); reinstall it"
        ) from None


def _unknown(library: str, name: str, known: Iterable[str]) -> UsageError:
    close = ", ".join(f"{library}:{near}" for near in difflib.get_close_matches(name, list(known), n=3, cutoff=0.0))
    return UsageError(f"{PACKAGES[library]} has no model '{name}'; the nearest are {close}")


# ---- timm ----


def _from_timm(timm: Any, name: str) -> Model:
    if not timm.is_model(name):
        raise _unknown("timm", name, timm.list_models())
    config = timm.get_pretrained_cfg(name, allow_unregistered=True)
    channels, size = config.input_size[0], config.input_size[-1]

    def build(request: Request) -> nn.Module:
        requested = request["image_size"]
        # Only networks with a fixed input size accept img_size; the others take images of any size.
        resized = {"img_size": requested} if config.fixed_input_size and requested != size else {}
        make = {"num_classes": request["num_classes"], "in_chans": request["channels"], **resized}
        network: nn.Module = _made(f"timm:{name}", lambda: timm.create_model(name, pretrained=False, **make))
        return network

    return Model(
        name=f"timm:{name}",
        runner="images",
        build=build,
        tasks={"pretrain": ("classify_images",), "finetune": ("classify_images",)},
        about=f"{name} of timm, for images of {size} x {size}",
        settings=(
            Setting(name="image_size", default=size, meaning="height and width of the images"),
            Setting(name="channels", default=channels, meaning="of the images"),
        ),
    )


def _made(name: str, make: Callable[[], T]) -> T:
    """Return the result of ``make``; raise UsageError with one line if the library raises an error."""
    try:
        return make()
    except EchelonError:
        raise
    except (TypeError, ValueError, KeyError, AssertionError, RuntimeError, ImportError) as error:
        raise UsageError(
            f"{name} cannot be built with these settings: {first_line(error)}; change them or take another"
        ) from error


# ---- transformers ----


def _from_transformers(transformers: Any, name: str) -> Model:
    config = _config(transformers, name)
    tasks = _learnable(config.model_type)
    if getattr(config, "is_encoder_decoder", False):  # as classifiers they need an end-of-text token in each sequence
        tasks = tuple(task for task in tasks if task != "classify_text")
    if not tasks:
        raise UsageError(f"hf:{name} can neither classify text nor continue it; take a model that can, e.g. hf:bert")

    def build(request: Request) -> nn.Module:
        return _made(f"hf:{name}", lambda: _text_model(transformers, name, request))

    stored = _has_weights(name)
    return Model(
        name=f"hf:{name}",
        pretrained=stored,
        runner="bert" if "classify_text" in tasks else "gpt",
        build=build,
        tasks={"pretrain": tasks[::-1], "finetune": tasks},
        about=f"{config.model_type} of transformers, of the sizes in its config",
        settings=_text_settings(config),
        defaults={"optimizer": "adamw", "learning_rate": 5e-5, "weight_decay": 0.01, "max_gradient_norm": 1.0},
    )


def _config(transformers: Any, name: str) -> Any:
    """Return the default config of a model type, or the config.json of a folder."""
    if name.startswith((".", "/", "~")) or Path(name).is_dir():
        folder = Path(name).expanduser()
        if not (folder / "config.json").is_file():
            raise UsageError(f"hf:{name}: there is no config.json in that folder; name the folder of a saved model")
        return _made(
            f"hf:{name}",
            lambda: transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False),
        )
    known = [kind for kind in transformers.CONFIG_MAPPING if _learnable(kind)]
    if name not in known:
        raise _unknown("hf", name, known)
    return transformers.CONFIG_MAPPING[name]()


def _learnable(kind: str) -> tuple[str, ...]:
    """Return the tasks of a model type, those of finetuning first."""
    lists = importlib.import_module("transformers.models.auto.modeling_auto")
    classifies = kind in lists.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    continues = kind in lists.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind not in NOT_CAUSAL
    return ("classify_text",) * classifies + ("language_model",) * continues


def _text_settings(config: Any) -> tuple[Setting, ...]:
    longest = getattr(config, "max_position_embeddings", None) or 128
    return (
        Setting(name="vocab_size", default=config.vocab_size, meaning="words of the vocabulary"),
        Setting(name="max_seq_length", default=min(longest, 128), meaning="tokens of a sequence"),
        Setting(
            name="config_changes",
            default=None,
            meaning="of the model's sizes: 'n_layer=2,n_embd=64', or a mapping in the file",
            kind=Any,
        ),
    )


def _has_weights(name: str) -> bool:
    """Return True for a directory with weights. Raise CheckpointError if it has some that cannot be read."""
    folder = Path(name).expanduser()
    if not folder.is_dir() or not any(path.name.endswith(_WEIGHTS) for path in folder.iterdir()):
        return False
    SafetensorsSource(folder)
    return True


def _text_model(transformers: Any, name: str, request: Request) -> nn.Module:
    config = _config(transformers, name)
    keeps = _has_weights(name) and not request.get("ckpt_file_name")
    vocabulary = _kept_vocabulary(name, config, request) if keeps else request["vocab_size"]
    for key, value in {**_changes(config, request.get("config_changes")), "vocab_size": vocabulary}.items():
        setattr(config, key, value)
    _check_length(name, config, request["max_seq_length"])
    config.use_cache = False
    if config.pad_token_id is None:  # classifiers that use the last token find it by the padding after it
        config.pad_token_id = getattr(config, "eos_token_id", None) or 0
    if not 0 <= config.pad_token_id < config.vocab_size:
        config.pad_token_id = 0
    if request.task == "language_model":
        for attribute in CAUSAL:
            if hasattr(config, attribute):
                setattr(config, attribute, True)
        kind, feed = transformers.AutoModelForCausalLM, _continue
    else:
        config.num_labels = request["num_classes"]
        kind, feed = transformers.AutoModelForSequenceClassification, _classify
    if keeps and torch.get_default_device().type != "meta":  # there only sizes are wanted
        return _fed(from_pretrained(name, cls=kind, config=config), feed)
    return _fed(kind.from_config(config, trust_remote_code=False), feed)


def _kept_vocabulary(name: str, config: Any, request: Request) -> int:
    """Return the words of the embedding in the files. Raise UsageError if the data has more."""
    if request["vocab_size"] > config.vocab_size:
        raise UsageError(
            f"hf:{name} has {config.vocab_size} words, and the data {request['vocab_size']}; encode it with the "
            "vocabulary of this model (--vocab_file_name)"
        )
    return int(config.vocab_size)


def _changes(config: Any, given: Mapping[str, Any] | str | None) -> dict[str, Any]:
    import yaml

    if isinstance(given, str):
        pairs = [pair.partition("=") for pair in given.split(",")]
        given = {key.strip(): yaml.safe_load(value) for key, _, value in pairs}
    known = config.to_dict()
    for key in given or {}:
        if key not in known and not hasattr(config, key):
            raise UsageError(f"--config_changes {key}: {config.model_type} has no such setting{_near(key, known)}")
    return dict(given or {})


def _near(key: str, known: Iterable[str]) -> str:
    said = nearest(key, known)
    return said if said.startswith("; did") else "; see the config.json of such a model"


def _check_length(name: str, config: Any, length: int) -> None:
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and length > longest:
        raise UsageError(f"--max_seq_length {length}: hf:{name} has {longest} positions; take {longest} or less")


# ---- adapters from batches of the zoo to models of transformers ----

Feed = Callable[[Any, Callable[..., Any], tuple[Tensor, ...]], Tensor]


def _fed(model: Any, feed: Feed) -> nn.Module:
    """Change the model's class to one whose forward takes a batch of the zoo and returns logits; return the model.

    A wrapper module would add a prefix to the names of its weights, so that weight files would no longer match.
    """
    kind = type(model)

    def forward(self: Any, *batch: Tensor) -> Tensor:
        return feed(self, kind.forward.__get__(self), batch)

    model.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
    assert isinstance(model, nn.Module)
    return model


def _continue(model: Any, forward: Callable[..., Any], batch: tuple[Tensor, ...]) -> Tensor:
    logits: Tensor = forward(input_ids=batch[0]).logits
    return logits


def _classify(model: Any, forward: Callable[..., Any], batch: tuple[Tensor, ...]) -> Tensor:
    tokens, segments, mask = batch
    padded = tokens.masked_fill(mask == 0, model.config.pad_token_id)
    more = {"token_type_ids": segments} if _knows_segments(model, forward) else {}
    logits: Tensor = forward(input_ids=padded, attention_mask=mask, **more).logits
    return logits


def _knows_segments(model: Any, forward: Callable[..., Any]) -> bool:
    kinds = getattr(model.config, "type_vocab_size", None) or 0
    return kinds >= 2 and "token_type_ids" in inspect.signature(forward).parameters
