"""Tables in device memory by their Triton kernels, against torch's operations and the table in host memory.

Without a GPU (ECHELON_TEST_GPU=cpu) Triton's interpreter runs the kernels, where Triton can be imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

if os.environ.get("ECHELON_TEST_GPU") == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

import numpy as np
import pytest

pytest.importorskip("triton", reason="the kernels need Triton")

import torch
from plain import DEVICE, ON_GPU
from test_device_table import RULES, assert_same, push_both, zipf
from test_table import EXTREMES, noise, some, spec

from echelon.parameter_server.device_table.device_index import FREE_KEY, DeviceIndex
from echelon.parameter_server.device_table.device_rows import ROWS, USED, DeviceRows
from echelon.parameter_server.device_table.device_table import DeviceTable
from echelon.parameter_server.device_table.first_rows import FirstRows
from echelon.parameter_server.device_table.segments import PIECE
from echelon.parameter_server.device_table.torch_operations import TorchOperations
from echelon.parameter_server.device_table.triton_operations import TritonOperations
from echelon.parameter_server.protocol.hashing import owned_by
from echelon.parameter_server.protocol.job_spec import BUCKETS, Initializer, TableSpec
from echelon.parameter_server.table import Table
from echelon.strategy.sparse_update_rules import NAMED, Rule, Sgd

COUNT = 40_000 if ON_GPU else 400  #: positions in a batch


def device_table(chosen: TableSpec, kernels: Any = TritonOperations, **options: Any) -> DeviceTable:
    operations = kernels(FirstRows.of(chosen), chosen.rule)
    return DeviceTable(chosen, torch.device(DEVICE), operations=operations, **options)


def on_device(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array).to(DEVICE)


class OnDevice:
    """A table that takes its batches from the host, for ``push_both``."""

    def __init__(self, table: DeviceTable) -> None:
        self.table = table

    def update(self, ids: torch.Tensor, grads: torch.Tensor, **options: Any) -> None:
        self.table.update(ids.to(DEVICE), grads.to(DEVICE), **options)


@pytest.mark.parametrize("dim", [1, 3, 16, 37])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_kernels_have_the_bits_of_the_host_table(rule: Rule, dim: int) -> None:
    chosen = spec(rule=rule, dim=dim)
    host, device = Table(chosen), device_table(chosen)
    for step in range(3):
        ids = zipf(COUNT, step)
        ids[:8] = [*EXTREMES, FREE_KEY]
        push_both(host, OnDevice(device), ids, noise((COUNT, dim), step), lr=0.1 / (1 + step))  # type: ignore[arg-type]
    if rule == NAMED["ftrl"]:
        np.testing.assert_allclose(host.pull_state(ids), device.pull_state(ids), rtol=1e-5, atol=1e-5)
    else:
        assert_same(host, device)


@pytest.mark.parametrize("name", ["sgd", "row_adagrad", "adam"])
def test_long_runs_equal_those_of_torch(name: str) -> None:
    chosen = spec(rule=NAMED[name], dim=5)
    ids = on_device(np.repeat(some(4), [PIECE, PIECE + 1, 3 * PIECE, 1500]))
    ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0)).to(DEVICE)]
    tables = [device_table(chosen, kernels) for kernels in (TritonOperations, TorchOperations)]
    for table in tables:
        table.update(ids, on_device(noise((len(ids), 5))), scale=0.5)
    found, expected = (table.pull_state(some(4)) for table in tables)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("kind", ["uniform", "normal", "constant"])
@pytest.mark.parametrize("dim", [1, 6])
def test_initial_values_are_those_of_the_host_table(kind: Any, dim: int) -> None:
    chosen = spec(dim=dim, seed=-3, rule=NAMED["adagrad"], initializer=Initializer(kind=kind, low=-0.25, high=0.75))
    ids = np.concatenate([some(COUNT), EXTREMES])
    tolerance = {"rtol": 2e-7, "atol": 1e-8} if kind == "normal" else {"rtol": 0}
    np.testing.assert_allclose(device_table(chosen).pull_state(ids), Table(chosen).pull_state(ids), **tolerance)  # type: ignore[arg-type]


def test_claims_of_repeated_ids_share_a_place() -> None:
    """Ids that race for places get one each, however often they occur, and the others find them there."""
    index, rows = DeviceIndex(range(BUCKETS), torch.device(DEVICE)), DeviceRows(1, torch.device(DEVICE))
    ids = on_device(np.concatenate([np.repeat(some(60), 5), EXTREMES, [FREE_KEY] * 3]))
    kernels = TritonOperations(FirstRows.of(spec(dim=1)), Sgd())
    places = kernels.claim(index, rows, ids)
    assert len(places.unique()) == len(ids.unique()) == 67
    assert rows.counters[USED] == 66, "the place of FREE_KEY is no place of the index"
    torch.testing.assert_close(index.keys[places], ids)
    torch.testing.assert_close(kernels.locate(index, ids), places)
    torch.testing.assert_close(TorchOperations(FirstRows.of(spec(dim=1)), Sgd()).locate(index, ids), places)
    assert (kernels.locate(index, on_device(some(50, 3))) == index.nowhere).all()


@pytest.mark.parametrize("on_full", ["lru", "lfu"])
def test_eviction_and_admission_equal_the_host_table(on_full: Any) -> None:
    chosen = spec(rule=NAMED["row_adagrad"], capacity=COUNT, on_full=on_full, admit_after=2)
    host, device = Table(chosen), device_table(chosen)
    for step in range(6):
        ids = zipf(COUNT, step // 2, 1.1)
        push_both(host, OnDevice(device), ids, noise((COUNT, 3), step))  # type: ignore[arg-type]
    assert_same(host, device)


def test_a_worker_holds_its_buckets_only() -> None:
    chosen = spec(rule=NAMED["adam"])
    buckets = owned_by(1, BUCKETS, 3)
    host, device = Table(chosen, buckets=buckets), device_table(chosen, buckets=buckets)
    ids = np.concatenate([some(3 * COUNT, seed) for seed in range(2)])
    ids = ids[np.isin(np.asarray(owners(ids)), buckets)]
    for table in (host, device):
        table.push(ids, noise((len(ids), 3)))
    for bucket in range(buckets.start, buckets.stop, 16):
        np.testing.assert_array_equal(host.rows_of(bucket).records, device.rows_of(bucket).records)


def owners(ids: np.ndarray) -> np.ndarray:
    from echelon.parameter_server.protocol.hashing import bucket_of

    return bucket_of(ids, BUCKETS)


def test_growth_does_not_change_rows() -> None:
    chosen = spec(dim=2)
    host, device = Table(chosen), device_table(chosen)
    for step in range(5):
        push_both(host, OnDevice(device), some(COUNT, step), noise((COUNT, 2), step))  # type: ignore[arg-type]
    assert device._rows.exact()[ROWS] == 5 * COUNT
    assert_same(host, device)


def test_a_step_waits_for_nothing() -> None:
    """Between growths neither a read nor an update reads a number of the device."""
    if not ON_GPU:
        pytest.skip("only a GPU can be waited for")
    device = device_table(spec(rule=NAMED["row_adagrad"], dim=16))
    ids, grads = on_device(zipf(COUNT, 0)), torch.randn(COUNT, 16, device=DEVICE)
    for _ in range(3):
        device.update(ids, grads)
    torch.cuda.set_sync_debug_mode("error")
    try:
        device.update(device_ids := ids.clone(), grads)
        device.read(device_ids)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_kernels_compile_for_an_h200_without_fused_sums() -> None:
    """Machine code of the right kind of arithmetic: no multiplication is fused with an addition, roots are exact."""
    script = Path(__file__).with_name("compile_table_kernels.py")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = str(script.parents[2])
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert all(counts["fma.rn.f32"] == 0 for counts in found.values())
    assert found["row_adagrad"]["sqrt.rn.f32"] > 0
    assert found["adam"]["sqrt.rn.f32"] > 0
    assert found["claim"]["atom.global"] > 0
