"""Configs and classes of the installed ``transformers``; its errors become one line."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from echelon.base.errors import CheckpointError, UsageError, first_line, one_line


def transformers_library(purpose: str) -> Any:
    """Return the module ``transformers``.

    purpose: what needs it, as the beginning of the message if it is missing
    """
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        missing = (error.name or "transformers").partition(".")[0]
        state = "which is not installed" if missing == "transformers" else f"which lacks '{missing}'"
        raise UsageError(f"{purpose} needs the library transformers, {state}; pip install {missing}") from None
    except Exception as error:  # an installation that does not match this torch may raise anything
        raise UsageError(
            f"{purpose} needs the library transformers, which cannot be imported here ({first_line(error)}); "
            "reinstall it"
        ) from None


@contextlib.contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """Leave out the progress bars, reports and notes of the library, of which each rank would print its own."""
    logging = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def read_config(transformers: Any, path: Path) -> Any:
    """Return the config of the model in a directory."""
    if not path.exists():
        raise CheckpointError(
            f"{path}: there is no such directory; give the directory of a downloaded model "
            "('hf download NAME --local-dir DIR' makes one)"
        )
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{path} has no config.json; give the directory of a saved model")
    try:
        return transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a damaged file, an unknown kind of model, values that a config refuses
        raise CheckpointError(
            f"{path / 'config.json'} is no config that transformers {transformers.__version__} knows: "
            f"{one_line(error)}; take a newer version of it, or another model"
        ) from None


def model_class(transformers: Any, config: Any, cls: Any, path: Path) -> tuple[Any, Any]:
    """Return the class of the model and its config.

    cls: class of a model, or an Auto class such as ``AutoModelForCausalLM``; None for the class that saved the model
    """
    if cls is None:
        saved = [getattr(transformers, name, None) for name in getattr(config, "architectures", None) or ()]
        cls = next((each for each in saved if each is not None), transformers.AutoModelForCausalLM)
    mapping = getattr(cls, "_model_mapping", None)
    if mapping is None:
        return cls, config
    if type(config) not in mapping:
        raise UsageError(
            f"{path} is a {config.model_type}, for which {cls.__name__} has no class; give cls=, such as "
            "cls=transformers.AutoModel"
        )
    found = mapping[type(config)]
    if isinstance(found, list | tuple):
        names = getattr(config, "architectures", None) or ()
        found = next((each for each in found if each.__name__ in names), found[0])
    text = config.sub_configs.get("text_config")
    if text is not None and getattr(found, "config_class", None) is text:  # the text part of a model of several
        config = config.get_text_config()
    return found, config


def name_origin(transformers: Any, model: Any, folder: Path) -> None:
    """Let the model know its directory, and take its generation settings from there."""
    model.name_or_path = model.config._name_or_path = str(folder)
    if (folder / "generation_config.json").is_file() and getattr(model, "generation_config", None) is not None:
        try:
            model.generation_config = transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)
        except Exception as error:
            raise CheckpointError(
                f"{folder / 'generation_config.json'}: {one_line(error)}; repair or remove it"
            ) from None
