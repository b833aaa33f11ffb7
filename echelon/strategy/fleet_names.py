"""Translate strategies in Paddle Fleet's spelling: ``lars=True, lars_configs={"lars_coeff": 0.001}``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from echelon.base.errors import UsageError, nearest

#: option -> {Fleet's key: echelon's setting}. Keys that are equal in both are not listed.
_KEYS: dict[str, dict[str, str]] = {
    "amp": {
        "init_loss_scaling": "init_scale",
        "incr_every_n_steps": "growth_interval",
        "incr_ratio": "growth",
        "decr_every_n_nan_or_inf": "backoff_after",
        "decr_ratio": "backoff",
    },
    "recompute": {"enable_offload": "offload"},
    "lars": {"lars_coeff": "coeff", "lars_weight_decay": "weight_decay", "epsilon": "eps"},
    "lamb": {"lamb_weight_decay": "weight_decay", "epsilon": "eps"},
    "shard": {"stage": "level"},
    "ps": {},
    "dgc": {},
    "localsgd": {},
    "adaptive_localsgd": {},
    "gradient_merge": {},
}

#: Keys without a counterpart, and the remedy. A key that is False, 0, empty or None has no effect and is ignored.
_WITHOUT: dict[str, dict[str, str]] = {
    "amp": dict.fromkeys(
        ("custom_white_list", "custom_black_list", "custom_black_varnames", "use_fp16_guard"),
        "torch.autocast chooses by operation; torch.autocast(..., enabled=False) in a forward keeps it in fp32",
    )
    | dict.fromkeys(("use_pure_fp16", "use_optimizer_fp16"), "weights and optimizer stay in fp32; leave it out"),
    "recompute": {"checkpoint_shape": "shapes are detected automatically; leave it out"},
    "shard": dict.fromkeys(
        ("segment_broadcast_MB", "sharding_segment_strategy", "segment_anchors", "gradient_merge_acc_step"),
        "the size of gathers is chosen automatically; leave it out",
    )
    | dict.fromkeys(
        ("sharding_degree", "dp_degree", "mp_degree", "pp_degree", "hybrid_dp"),
        "degrees follow from 'echelon run --procs N' and the marks on the model; leave it out",
    ),
    "ps": dict.fromkeys(
        (
            "max_merge_var_num",
            "send_queue_size",
            "thread_pool_size",
            "send_wait_times",
            "min_send_grad_num_before_recv",
        ),
        "queues and threads are sized automatically; leave it out",
    )
    | dict.fromkeys(
        ("independent_recv_thread", "runtime_split_send_recv", "launch_barrier", "heter_worker_device_guard"),
        "it is done automatically; leave it out",
    ),
}

#: Keys that are translated together with other keys, or that describe what echelon always does.
_SPECIAL = {"amp": ("use_dynamic_loss_scaling", "use_pure_bf16"), "gradient_merge": ("k_steps", "avg")}

_SWITCHES = {"shard": "sharding", "ps": "a_sync"}  #: options that have another name in Fleet
_REDUCTION = {
    "fuse_grad_size_in_MB": "bucket_mb",
    "last_comm_group_size_MB": "first_bucket_mb",
    "nccl_comm_num": "communicators",
}
_DONE_ANYWAY = ("fuse_all_reduce_ops", "sync_nccl_allreduce")


def translate(given: Mapping[Any, Any], label: str, known: Mapping[str, Iterable[str]]) -> dict[Any, Any]:
    """Return ``given`` with echelon's names.

    label: prefix of error messages
    known: the setting names of each option
    """
    values = {name: value for name, value in given.items() if name not in _DONE_ANYWAY}
    _move_reduction(values, label)
    if values.get("gradient_merge") is False:
        values = {name: value for name, value in values.items() if not name.startswith("gradient_merge")}
    for option, keys in _KEYS.items():
        place, configs = _take(values, option, label)
        if configs is None:
            continue
        if place.endswith("_configs"):
            names = {*known.get(option, ()), *keys, *_WITHOUT.get(option, ()), *_SPECIAL.get(option, ())}
            _refuse_unknown(configs, f"{label}.{place}", names)
        is_fleets = place != option or any(key in keys or key in _SPECIAL.get(option, ()) for key in configs)
        values[option] = _settings(option, configs, f"{label}.{place}", is_fleets)
    return values


def _take(values: dict[Any, Any], option: str, label: str) -> tuple[str, Mapping[Any, Any] | None]:
    """Return the key of an option's settings, and the settings, or None if the option is off or has no dict."""
    switch = _SWITCHES.get(option, option)
    place, is_fleets = f"{switch}_configs", switch != option and switch in values
    if is_fleets:
        if option in values:
            raise UsageError(f"{label} has both '{switch}' and '{option}', which are one option; keep one")
        values[option] = values.pop(switch)
    configs, is_on = values.pop(place, None), values.get(option)
    if configs is None:
        return _take_without_configs(values, option, is_fleets, label)
    if not isinstance(configs, Mapping):
        raise UsageError(f"{label}.{place}: expected options by name, got {configs!r}")
    if is_on not in (True, False):
        do = f"write {switch}=True beside it" if is_on is None else f"keep one of it and {switch}={is_on!r}"
        raise UsageError(f"{label}.{place}: these are settings of '{switch}', which is not True; {do}")
    return place, configs if is_on else None


def _take_without_configs(
    values: dict[Any, Any], option: str, is_fleets: bool, label: str
) -> tuple[str, Mapping[Any, Any] | None]:
    is_on, switch = values.get(option), _SWITCHES.get(option, option)
    if isinstance(is_on, Mapping):
        return switch if is_fleets else option, is_on
    if option == "gradient_merge" and is_on is True:
        raise UsageError(f"{label}(gradient_merge=True): expected the number of steps, as in gradient_merge=4")
    return f"{switch}_configs", {} if is_fleets and is_on else None


def _move_reduction(values: dict[Any, Any], label: str) -> None:
    """Move Fleet's top-level reduction settings into ``reduction``."""
    found = {ours: values.pop(name) for name, ours in _REDUCTION.items() if name in values}
    if found and "reduction" in values:
        raise UsageError(f"{label}: {', '.join(_REDUCTION)} are settings of 'reduction', which is given too; keep one")
    if found:
        values["reduction"] = found


def _refuse_unknown(configs: Mapping[Any, Any], place: str, names: Iterable[str]) -> None:
    for key in configs:
        if key not in names:
            raise UsageError(f"{place} has no option '{key}'{nearest(str(key), names)}")


def _settings(option: str, configs: Mapping[Any, Any], place: str, is_fleets: bool) -> Any:
    """Return the settings with echelon's names, as plain values; raise UsageError for a key without a counterpart."""
    settings = {}
    for key, value in configs.items():
        remedy = _WITHOUT.get(option, {}).get(key)
        if remedy is None:
            settings[_KEYS[option].get(key, key)] = value
        elif value:
            raise UsageError(f"{place}: '{key}' has no counterpart here: {remedy}")
    if option == "gradient_merge":
        return _merged_steps(settings, place)
    of_fleet = {"amp": _amp, "ps": _servers, "shard": _shard}.get(option)
    return of_fleet(settings) if of_fleet and is_fleets else settings


def _amp(settings: dict[str, Any]) -> dict[str, Any]:
    """Translate the settings of ``amp``; Fleet's default is fp16 with a dynamic loss scale."""
    is_bf16, is_dynamic = settings.pop("use_pure_bf16", False), settings.pop("use_dynamic_loss_scaling", True)
    dtype = settings.get("dtype", "bf16" if is_bf16 else "fp16")
    settings["dtype"] = {"float16": "fp16", "bfloat16": "bf16"}.get(dtype, dtype)
    if not is_dynamic:
        settings["loss_scale"] = settings.pop("init_scale", 32768.0)
    return settings


def _shard(settings: dict[str, Any]) -> dict[str, Any]:
    """Translate the settings of ``sharding``: Fleet's default is stage 1, and its ``offload`` is a bool."""
    settings.setdefault("level", 1)
    if isinstance(settings.get("offload"), bool):
        settings["offload"] = "optimizer" if settings["offload"] else None
    return settings


def _servers(settings: dict[str, Any]) -> dict[str, Any]:
    """Translate the settings of ``a_sync``: mode "geo" if ``k_steps`` is above 0, else "async"."""
    steps = settings.pop("k_steps", 0)
    return {**settings, "mode": "geo", "k_steps": steps} if steps > 0 else {**settings, "mode": "async"}


def _merged_steps(settings: dict[str, Any], place: str) -> Any:
    if settings.get("avg", True) is False:
        raise UsageError(f"{place}: avg=False adds gradients up; they are averaged here: multiply the rate instead")
    if settings.keys() - {"avg"} != {"k_steps"}:
        raise UsageError(f"{place}: expected k_steps, the number of steps to merge, got {sorted(map(str, settings))}")
    return settings["k_steps"]
