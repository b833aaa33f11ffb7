"""Read the settings of the model from a file beside the weights, ``--model_config_file_name``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echelon.base.config import describe, fits
from echelon.base.errors import UsageError, first_line, nearest
from echelon.zoo import registry
from echelon.zoo.entry import Model, Request
from echelon.zoo.train.restore.model_dir import named_file


def sizes(request: Request) -> dict[str, Any]:
    """Return the settings in the file by name; empty if no file is given.

    The file is a JSON object of settings, with an optional ``model_name``; for models of runner ``bert`` it may also be
    the config.json of Google or Hugging Face.
    """
    if not request["model_config_file_name"]:
        return {}
    path = named_file(request, "model_config_file_name")
    model = registry.model(request["model_name"])
    result = _read(path)
    if model.runner == "bert" and "num_hidden_layers" in result:
        from echelon.zoo.models.bert_names import sizes_from_config

        result = sizes_from_config(result)
        known = {setting.name for setting in model.settings}
        return _checked({name: value for name, value in result.items() if name in known}, model, path)
    return _checked(_own(result, model, path), model, path)


def _read(path: Path) -> dict[str, Any]:
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"'{path}' cannot be read: {error.strerror}; check the path") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"'{path}' is not JSON ({first_line(error)}); copy it again") from None
    if not isinstance(result, dict):
        raise UsageError(f"'{path}' holds {type(result).__name__}; it must be an object of settings by name")
    return result


def _own(found: Mapping[str, Any], model: Model, path: Path) -> dict[str, Any]:
    values = dict(found)
    name = values.pop("model_name", model.name)
    if name != model.name:
        raise UsageError(f"'{path}' is of model '{name}', and --model_name is '{model.name}'; give the same")
    return values


def _checked(values: dict[str, Any], model: Model, path: Path) -> dict[str, Any]:
    kinds = {setting.name: setting.type for setting in model.settings}
    for name, value in values.items():
        if name not in kinds:
            raise UsageError(f"'{path}': {model.name} has no setting '{name}'{nearest(name, kinds)}")
        if not fits(value, kinds[name]):
            raise UsageError(f"'{path}': {name} is {value!r}; expected {describe(kinds[name])}")
    return values
