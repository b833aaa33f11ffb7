"""Models of other libraries, as entries of the zoo: ``timm:NAME`` for images, ``hf:NAME`` for text.

Nothing is downloaded and no code but the library's runs: weights are drawn, or restored from a file of the user. The
modules keep the library's names, so its weight files fit.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from echelon.base.errors import EchelonError, UsageError, nearest
from echelon.zoo.entry import Model, Request, Setting

T = TypeVar("T")

#: the package that has the models of a library's short name
PACKAGES = {"timm": "timm", "hf": "transformers"}

#: attributes by which a config says that a position may see only those before it
CAUSAL = ("is_decoder", "causal")

#: in transformers' list of causal models, but each position sees all others unless it gets a mask of its own
NOT_CAUSAL = {"xlnet"}


def borrow(library: str, name: str) -> Model:
    """The entry of ``library:name``."""
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
    except Exception as error:  # an installation that does not fit this torch fails in ways of its own
        line = str(error).strip().partition("\n")[0]
        raise UsageError(
            f"{library}:{name} needs the library {package}, which cannot be imported here ({line}); reinstall it"
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
        asked = request["image_size"]
        # Networks for images of one size are made for another; the others take any and know no such argument.
        resized = {"img_size": asked} if config.fixed_input_size and asked != size else {}
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
    """What ``make`` gives; what the library says against it, in one line."""
    try:
        return make()
    except EchelonError:
        raise
    except (TypeError, ValueError, KeyError, AssertionError, RuntimeError, ImportError) as error:
        line = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UsageError(f"{name} cannot be built with these settings: {line}; change them or take another") from error


# ---- transformers ----


def _from_transformers(transformers: Any, name: str) -> Model:
    config = _config(transformers, name)
    tasks = _learnable(config.model_type)
    if getattr(config, "is_encoder_decoder", False):  # as classifiers they want an end-of-text token in each sequence
        tasks = tuple(task for task in tasks if task != "classify_text")
    if not tasks:
        raise UsageError(f"hf:{name} can neither classify text nor continue it; take a model that can, e.g. hf:bert")

    def build(request: Request) -> nn.Module:
        return _made(f"hf:{name}", lambda: _text_model(transformers, name, request))

    return Model(
        name=f"hf:{name}",
        runner="bert" if "classify_text" in tasks else "gpt",
        build=build,
        tasks={"pretrain": tasks[::-1], "finetune": tasks},
        about=f"{config.model_type} of transformers, of the sizes in its config",
        settings=_text_settings(config),
        defaults={"optimizer": "adamw", "learning_rate": 5e-5, "weight_decay": 0.01, "max_gradient_norm": 1.0},
    )


def _config(transformers: Any, name: str) -> Any:
    """The defaults of a kind of model, or what the config.json in a folder says."""
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
    """Tasks of a kind of model, those of finetuning first."""
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


def _text_model(transformers: Any, name: str, request: Request) -> nn.Module:
    config = _config(transformers, name)
    for key, value in {**_changes(config, request.get("config_changes")), "vocab_size": request["vocab_size"]}.items():
        setattr(config, key, value)
    _check_length(name, config, request["max_seq_length"])
    config.use_cache = False
    if config.pad_token_id is None:  # classifiers that judge by the last word find it by the padding behind it
        config.pad_token_id = getattr(config, "eos_token_id", None) or 0
    if not 0 <= config.pad_token_id < config.vocab_size:
        config.pad_token_id = 0
    if request.task == "language_model":
        for attribute in CAUSAL:
            if hasattr(config, attribute):
                setattr(config, attribute, True)
        return _fed(transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False), _continue)
    config.num_labels = request["num_classes"]
    return _fed(transformers.AutoModelForSequenceClassification.from_config(config, trust_remote_code=False), _classify)


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


# ---- how a model of transformers eats the zoo's batches ----

Feed = Callable[[Any, Callable[..., Any], tuple[Tensor, ...]], Tensor]


def _fed(model: Any, feed: Feed) -> nn.Module:
    """The model as an instance of a class whose forward takes a batch of ours and returns logits.

    A module around it would put a prefix before the names of its weights, and files of weights would no longer fit.
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
