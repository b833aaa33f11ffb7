"""Turn the MODEL argument into a profile: of a described transformer, a zoo model, or a model that a callable makes."""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from echelon.base.errors import EchelonError, UsageError, nearest, one_line
from echelon.base.object_path import callable_at
from echelon.parallel.objective import LossFunction
from echelon.planner.cluster.cluster import Cluster
from echelon.planner.profiling.optimizer_state import Given
from echelon.planner.profiling.profile import Profile, profile
from echelon.strategy import Strategy
from echelon.tools.plan_report.plan_options import PlanOptions

DESCRIBED = ("gpt", "bert", "llama")
ZOO, HF = "zoo", "hf"
_FORMS = (
    "write gpt:layers=12,hidden=768,heads=12,sequence=1024, zoo:resnet_v1_50, hf:DIRECTORY, file.py:callable, "
    "package.module:callable or script.py"
)
#: Samples of a batch made from --input. Two batch sizes are profiled; all others lie on the line through them.
SAMPLES = 8


@dataclass(frozen=True)
class ModelSource:
    """A model to plan for.

    profile:     costs of the model, as the search uses them
    model:       the module itself; None for a model that is only described (``gpt:...``)
    optimizers:  optimizers of the training script; None if MODEL is not a script
    strategy:    strategy of the training script, whose ``fast`` and ``amp=False`` are respected
    """

    profile: Profile
    model: nn.Module | None = None
    optimizers: Given | None = None
    strategy: Strategy | None = None


def is_script(word: str) -> bool:
    return word.endswith(".py")


def find_source(options: PlanOptions, cluster: Cluster) -> ModelSource:
    """Return the model that ``options.model`` names, profiled for the devices of the cluster."""
    kind, _, rest = options.model.partition(":")
    if kind in DESCRIBED:
        if options.batch is None:
            raise UsageError(f"--global-batch is missing: {kind} is only described; write --global-batch 512")
        return ModelSource(_described(kind, rest, _device_type(cluster)))
    if kind == ZOO:
        return _of_the_zoo(options, rest, cluster)
    if kind == HF:
        return _of_the_zoo(options, options.model, cluster)
    if ":" not in options.model:
        raise UsageError(f"MODEL '{options.model}' is no model that is known here; {_FORMS}")
    return _called(options, cluster)


def profile_model(model: nn.Module, batch: Any, loss: LossFunction | None, *, name: str, cluster: Cluster) -> Profile:
    """Call ``profile``; raise UsageError if the model does not run on the batch."""
    try:
        return profile(model, batch, loss=loss, name=name, device=_device_type(cluster))
    except EchelonError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError, KeyError) as error:
        raise UsageError(f"the model does not run on its batch: {one_line(error, 300, typed=True)}") from error


def _device_type(cluster: Cluster) -> typing.Literal["cpu", "cuda"]:
    """Return the device type whose kernels the model would run on this cluster."""
    return "cpu" if all(device.name.startswith("CPU") for device in cluster.kinds) else "cuda"


# ---- described models ----


def _described(kind: str, words: str, device: str) -> Profile:
    from echelon.planner.profiling import builders

    build: Callable[..., Profile] = getattr(builders, kind)
    return build(**_settings(kind, words, build), device=device)


def _settings(kind: str, words: str, build: Callable[..., Profile]) -> dict[str, Any]:
    """Parse ``layers=96,hidden=12288`` into arguments of the builder, by the builder's type hints."""
    parameters = {name: each for name, each in inspect.signature(build).parameters.items() if name not in _OURS}
    types_of = typing.get_type_hints(build)
    found = {}
    for word in filter(None, words.split(",")):
        name, equals, text = (part.strip() for part in word.partition("="))
        if name not in parameters:
            raise UsageError(f"MODEL: {kind} has no '{name}'{nearest(name, parameters)}")
        if not equals or not text:
            raise UsageError(f"MODEL: {kind} needs a value for '{name}'; write {name}=VALUE")
        found[name] = _value(kind, name, text, types_of[name])
    missing = [name for name, each in parameters.items() if each.default is each.empty and name not in found]
    if missing:
        given = [f"{name}={value}" for name, value in found.items()]
        whole = ",".join(given + [f"{name}=NUMBER" for name in missing])
        raise UsageError(f"MODEL '{kind}:{words}' lacks {', '.join(missing)}; write {kind}:{whole}")
    return found


_OURS = ("batch", "device")


def _value(kind: str, name: str, text: str, wanted: Any) -> Any:
    if isinstance(wanted, types.UnionType):
        wanted = next(each for each in typing.get_args(wanted) if each is not type(None))
    try:
        if wanted is bool:
            return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}[text.lower()]
        if wanted is torch.dtype:
            return _dtype(text)
        value = wanted(text)
    except (ValueError, KeyError):
        raise UsageError(f"MODEL: {kind} takes {_TYPES.get(wanted, 'a value')} as {name}, not '{text}'") from None
    if value < 0 or (wanted is int and value < 1):
        raise UsageError(f"MODEL: {kind} takes {_TYPES[wanted]} above 0 as {name}, not {text}")
    return value


_TYPES = {int: "a whole number", float: "a number", bool: "true or false", torch.dtype: "float32, bfloat16 or float16"}


def _dtype(text: str) -> torch.dtype:
    found = getattr(torch, text, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(text)
    return found


# ---- models of the zoo ----


def _of_the_zoo(options: PlanOptions, words: str, cluster: Cluster) -> ModelSource:
    """Return a model such as ``zoo:bert_base,max_seq_length=512`` or ``hf:models/llama,max_seq_length=512``.

    The model is on the meta device, so it takes no memory; its batch is synthetic.
    """
    from echelon.zoo.sample import sample

    name, *settings = words.split(",")
    values = dict(_setting(setting) for setting in settings)
    made = sample(name, values, batch=min(options.batch or SAMPLES, SAMPLES), device="meta")
    return ModelSource(profile_model(made.model, made.batch, made.loss, name=name, cluster=cluster), made.model)


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not value:
        raise UsageError(f"MODEL: '{text}' is no setting; write zoo:NAME,setting=value")
    return name, value


# ---- models made by a callable ----


def _called(options: PlanOptions, cluster: Cluster) -> ModelSource:
    make = callable_at(options.model, "MODEL")
    model, batch, loss = _parts(options.model, _made(make, options.model))
    if batch is None:
        if options.input is None:
            raise UsageError(
                f"MODEL '{options.model}' returns a model without a batch; return (model, batch) or (model, batch, "
                "loss), "
                "or give --input 3x224x224"
            )
        if options.batch is None:
            raise UsageError(
                f"--global-batch is missing: --input {options.input} is one sample; write --global-batch 512"
            )
        batch, loss = described_batch(options.input), loss or mean_of_outputs
    name = options.model.rpartition(":")[2]
    return ModelSource(profile_model(model, batch, loss, name=name, cluster=cluster), model)


def _made(make: Callable[[], Any], place: str) -> Any:
    """Call ``make`` with fake tensors, so that a model of any size takes no memory.

    If that fails, for example because it needs real values, call it again with real tensors.
    """
    from echelon.plan.fake_forward import placeholder_mode

    try:
        with placeholder_mode():
            return make()
    except Exception:
        pass
    try:
        return make()
    except EchelonError:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(f"MODEL '{place}' failed with {one_line(error, 300, typed=True)}") from error


def _parts(place: str, made: Any) -> tuple[nn.Module, Any, LossFunction | None]:
    parts = made if isinstance(made, tuple) else (made,)
    if not 1 <= len(parts) <= 3 or not isinstance(parts[0], nn.Module):
        what = type(parts[0] if parts else made).__name__
        raise UsageError(f"MODEL '{place}' gave {what}; return model, (model, batch) or (model, batch, loss)")
    model, batch, loss = (*parts, None, None)[:3]
    if batch is not None and not any(isinstance(leaf, Tensor) for leaf in tree_leaves(batch)):
        raise UsageError(f"MODEL '{place}' gave a batch without a tensor; return (model, (inputs, targets), loss)")
    if isinstance(batch, Tensor):
        batch = (batch,)
    return model, batch, loss


_INPUT = re.compile(r"(?:(?P<dtype>[a-z]+\d+):)?(?P<shape>\d+(?:x\d+)*)(?::(?P<below>\d+))?")


def described_batch(text: str) -> tuple[Tensor, ...]:
    """Return a batch for a description: ``3x224x224`` (float32), or ``int64:128:30522`` (int64 values below 30522).

    Several tensors are separated by commas.
    """
    return tuple(_described_tensor(word.strip()) for word in text.split(","))


def _described_tensor(word: str) -> Tensor:
    found = _INPUT.fullmatch(word)
    if not found:
        raise UsageError(
            f"--input '{word}' describes no tensor; write 3x224x224, or int64:128:30522 (type:shape:below)"
        )
    try:
        dtype = _dtype(found["dtype"] or "float32")
    except ValueError:
        raise UsageError(f"--input '{word}': torch has no type '{found['dtype']}'; write float32 or int64") from None
    return torch.zeros((SAMPLES, *map(int, found["shape"].split("x"))), dtype=dtype)


def mean_of_outputs(output: Any) -> Tensor:
    """Return the sum of the mean of each output: a loss of negligible cost, for a model without a known loss."""
    found = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if not found:
        raise UsageError("the model returns no tensor that a loss could be made of; return (model, batch, loss)")
    return torch.stack([leaf.float().mean() for leaf in found]).sum()
