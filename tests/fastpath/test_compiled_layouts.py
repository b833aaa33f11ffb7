"""Blocks stay compiled where weights are sharded or other blocks are on other ranks, with the same numbers."""

from __future__ import annotations

import functools
import io
from contextlib import redirect_stderr
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from harness import run
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import echelon
from echelon import Fast, Strategy
from echelon.fastpath import compile as compiled

WIDTH, ROWS = 32, 8


class Gate(nn.Module):
    """A block whose scale is shared by all blocks, and so is unsharded for longer than the block."""

    def __init__(self, scale: nn.Parameter) -> None:
        super().__init__()
        self.norm, self.scale = nn.LayerNorm(WIDTH), scale
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x)))) * self.scale


class Gates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        scale = nn.Parameter(torch.ones(WIDTH))
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Gate(scale) for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


MODELS = {"gates": Gates}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "shard 3": ("gates", {"shard": 3}),
    "stages 2": ("gates", {"stages": 2}),
}


class Trained(NamedTuple):
    losses: list[float]
    weights: dict[str, Tensor]
    said: str
    programs: int


def batch(step: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, WIDTH, generator=g), torch.randint(3, (ROWS,), generator=g)


def compile_for_memory(programs: list[Any], program: Any, inputs: Any) -> Any:
    """Compile a program that, as kernels do, needs the memory of what it is given."""
    from torch._dynamo.backends.registry import lookup_backend

    made = lookup_backend("aot_eager")(program, inputs)
    programs.append(program)

    def run(*given: Any) -> Any:
        assert not any(isinstance(value, FakeTensor) for value in given)
        return made(*given)

    return run


def train(name: str, fast: Any, options: dict[str, Any]) -> Trained:
    programs: list[Any] = []
    compiled.backend = functools.partial(compile_for_memory, programs)
    torch._dynamo.reset()
    with redirect_stderr(io.StringIO()) as said:
        model = MODELS[name]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        engine = echelon.distribute(
            model, optimizer, loss=F.cross_entropy, strategy=Strategy(fast=fast, **options), sample=batch(0)
        )
        first, count = engine.world.data_rank, engine.plan.replicas
        losses = [float(engine.step(*(part.chunk(count)[first] for part in batch(step)))) for step in range(4)]
        weights = engine.whole_state()
        engine.close()
    return Trained(losses, weights, said.getvalue(), len(programs))


def both_ways(cases: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, tuple[Trained, Trained]]:
    echelon.init()
    fast = Fast(compile=True)
    return {case: (train(name, False, given), train(name, fast, given)) for case, (name, given) in cases.items()}


def test_compiled_blocks_equal_uncompiled_without_breaks() -> None:
    results = run(both_ways, CASES, ranks=2, timeout=200)
    for case in CASES:
        for rank, (plain, quick) in enumerate(each[case] for each in results):
            rounding = 1e-6
            assert quick.losses == pytest.approx(plain.losses, rel=rounding), case
            for name, value in plain.weights.items():
                torch.testing.assert_close(
                    quick.weights[name], value, rtol=rounding, atol=rounding, msg=f"{case} {name}"
                )
            assert 1 <= quick.programs <= 4, (case, quick.programs)  # for inputs with and without gradients; the loss
            assert "graph break" not in quick.said
            assert "compile disabled" not in quick.said
            if rank == 0:
                assert "fast: compiled 4 blocks of blocks.*" in quick.said, case
