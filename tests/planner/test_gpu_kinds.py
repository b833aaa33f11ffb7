"""Kernels that a GPU is slower at than at a sum: how they are told apart, measured figures, and what they cost."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.planner.cluster.cluster import Device
from echelon.planner.cost.compute import kernel_seconds, unit_seconds
from echelon.planner.cost.system import ECHELON
from echelon.planner.model_costs import Kernel, ModelUnit, UnitPass
from echelon.planner.profiling.profile import profile
from echelon.tools.bench.gpu_figures import gpu_figures

DEVICE = Device("D", {"float32": 1e12, "bfloat16": 1e13}, 1e9, 1e11, floor=0.0, streams=((1.0, 0.5),))


class Rearranged(nn.Module):
    """Heads are moved before the tokens and back, as attention does it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        samples, tokens, _ = x.shape
        heads = self.up(x).view(samples, tokens, 4, 8).transpose(1, 2).contiguous()
        return self.down(heads.flatten(2).view(samples, tokens, 32))[:, 0]


def kernels(model: nn.Module, batch: tuple[Tensor, ...], amp: str | None = None) -> list[Kernel]:
    found = profile(model, batch, loss=F.cross_entropy, device="cuda")
    units = found.sheet(4, 1, amp).units
    return [kernel for unit in units for way in (unit.forward, unit.backward) for kernel in way.kernels]


def test_copies_into_another_order_are_a_kind_of_their_own() -> None:
    found = kernels(Rearranged(), (torch.randn(4, 16, 32), torch.randint(8, (4,))))
    moved = [kernel for kernel in found if kernel.kind == "layout"]
    assert 4 * 16 * 32 * 4 * 2 in [kernel.bytes for kernel in moved]


def test_batch_norms_tell_channels_and_convolutions_inputs() -> None:
    model = nn.Sequential(nn.Conv2d(3, 12, 3), nn.BatchNorm2d(12), nn.Flatten(), nn.Linear(12 * 36, 8))
    found = kernels(model, (torch.randn(4, 3, 8, 8), torch.randint(8, (4,))))
    assert {kernel.shape for kernel in found if kernel.kind == "batch_norm"} == {(4.0, 12.0)}
    assert {kernel.shape[4] for kernel in found if kernel.kind == "convolution"} == {3.0}


def test_cross_entropy_under_autocast_has_softmax_in_16_bits() -> None:
    """Cross-entropy under autocast has its softmax in 16 bits and the rest in 32."""
    found = kernels(nn.Linear(32, 64), (torch.randn(4, 32), torch.randint(64, (4,))), "bf16")
    softmax = [kernel for kernel in found if kernel.kind == "reduction" and kernel.bytes >= 4 * 64 * 2]
    assert softmax
    assert all(kernel.dtype == "bfloat16" for kernel in softmax)
    assert any(kernel.kind == "copy" and kernel.dtype == "float32" and kernel.bytes == 4 * 64 * 6 for kernel in found)


def test_recompute_runs_the_module_again_and_not_the_loss() -> None:
    found = profile(nn.Linear(32, 64), (torch.randn(4, 32), torch.randint(64, (4,))), loss=F.cross_entropy)
    (unit,) = found.sheet(4, 1, None).units
    assert unit.again is not None
    assert [kernel.kind for kernel in unit.again.kernels] == ["product"]
    assert unit.forward.launches > unit.again.launches


def test_a_kind_reaches_its_part_of_the_bandwidth() -> None:
    device = replace(DEVICE, parts={"layout bfloat16": 0.25}, batch_norms_by={"bfloat16": ((64.0, 0.1), (256.0, 0.5))})
    plain = kernel_seconds(Kernel("copy", 0.0, 1e6, dtype="bfloat16"), device)
    assert plain == pytest.approx(1e6 / 0.5e11)
    assert kernel_seconds(Kernel("layout", 0.0, 1e6, dtype="bfloat16"), device) == pytest.approx(4 * plain)
    assert kernel_seconds(Kernel("layout", 0.0, 1e6), device) == pytest.approx(plain)
    norm = Kernel("batch_norm", 0.0, 1e6, (4.0, 128.0), "bfloat16")
    assert kernel_seconds(norm, device) == pytest.approx(plain / 0.3)


def test_attention_and_convolutions_reach_what_their_sort_does() -> None:
    curves = {"bfloat16": ((64.0, 0.2),), "bfloat16 causal": ((64.0, 0.4),)}
    parts = {"bfloat16": ((1.0, 0.5),), "bfloat16 1x1": ((1.0, 0.25),), "bfloat16 few": ((1.0, 0.1),)}
    device = replace(DEVICE, attentions_by=curves, convolutions=((1.0, 0.5),), convolutions_by=parts)
    for causal, part in ((0.0, 0.2), (1.0, 0.4)):
        attention = Kernel("attention", 1e9, 1.0, (8.0, 64.0, 64.0, 64.0, causal), "bfloat16")
        assert kernel_seconds(attention, device) == pytest.approx(1e9 / (1e13 * part))
    for entries, channels, part in ((144.0, 16.0, 0.5), (16.0, 16.0, 0.25), (147.0, 3.0, 0.1)):
        convolution = Kernel("convolution", 1e9, 1.0, (1.0, 100.0, 64.0, entries, channels), "bfloat16")
        assert kernel_seconds(convolution, device) == pytest.approx(1e9 / (1e13 * part))


def test_recomputed_batch_norms_have_their_buffers_put_back() -> None:
    norm = UnitPass((Kernel("batch_norm", 0.0, 1e6, (4.0, 64.0)),))
    found = unit_seconds(ModelUnit("n", norm, norm, again=norm), DEVICE, ECHELON)
    assert found.replay_host == pytest.approx((1 + 6) * DEVICE.launch)


def test_figures_of_what_was_measured() -> None:
    rows = {
        "kinds": [
            {"kind": "layout", "dtype": "float32", "bytes": 1e6, "kernels": 1, "seconds": 1e6 / 0.25e11},
            {"kind": "batch_norm", "dtype": "float32", "channels": 64, "bytes": 1e6, "kernels": 2, "seconds": 2e-4},
        ],
        "functions": [{"entries": 1000, "seconds": 1e-6}],
        "attention float32": [
            {"dtype": "float32", "shape": [1, 2, 64, 8], "flops": 1e9, "seconds": 4e-3, "causal": way} for way in (0, 1)
        ],
        "convolutions float32": [
            {"dtype": "float32", "shape": [1, 16, 8, 8, 1], "flops": 1e9, "seconds": seconds}
            for seconds in (2e-3, 6e-3)
        ],
    }
    found = gpu_figures(rows, ((1.0, 0.5),), 1e11, {"float32": 1e12})
    assert found["parts"] == {"layout float32": pytest.approx(0.5)}
    assert found["batch_norms_by"]["float32"] == ((64.0, pytest.approx(0.1)),)
    assert found["attentions_by"]["float32 causal"] == ((512.0, pytest.approx(0.25)),)
    assert found["convolutions_by"] == {"float32 1x1": ((1e9, pytest.approx(0.25)),)}  # as long as both on average
    assert found["function"] == pytest.approx(1e-9)
