"""The pipeline loop on real ranks: every schedule gives the numbers of one process, whatever travels between stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Raised, errors, run, run_raw
from torch import Tensor, nn

from echelon.base.errors import UsageError
from echelon.parallel.pipeline.schedule_loop import StageTransfer, run_schedule
from echelon.parallel.pipeline.split_backward import WeightGradStore, defer_weight_grads
from echelon.parallel.pipeline.transport import PipelineLinks
from echelon.plan.schedule import forward_only, make_schedule
from echelon.strategy.annotations.marks import ScheduleName

WIDTH = 4
LAST = 3
ROWS = [[3, 3, 3, 3, 3], [2, 2, 2, 1, 1], [3, 3, 3, 3, 3], [1, 2, 3, 4, 5]]  # of each micro-batch, step by step

# Stage s names its outputs "s.name". Everything skips somewhere; "0.skip" has two targets, both in its own dtype.
TRANSFERS = [
    StageTransfer("0.hidden", 0, 1), StageTransfer("1.hidden", 1, 2), StageTransfer("2.hidden", 2, 3),
    StageTransfer("0.skip", 0, 2), StageTransfer("0.skip", 0, 3), StageTransfer("0.ids", 0, 3),
    StageTransfer("0.mask", 0, 2), StageTransfer("0.mask", 0, 3), StageTransfer("0.scale", 0, 1),
    StageTransfer("0.empty", 0, 1), StageTransfer("1.unused", 1, 2),
    StageTransfer("1.images", 1, 3), StageTransfer("0.nothing", 0, 1), StageTransfer("1.sometimes", 1, 2),
]  # fmt: skip


class Stages(nn.Module):
    """Four stages; which one computes what is all there is to a pipeline's model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAST + 1))
        self.mixes = nn.ParameterList(torch.randn(WIDTH) for _ in range(LAST + 1))
        self.extra = nn.Linear(WIDTH, WIDTH)  # in stage 1, for those who want it

    def run(self, stage: int, micro: int, x: Tensor, got: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
        """One stage. ``x`` is the micro-batch; the last stage makes the loss, under "loss"."""
        if stage == 0:
            h = torch.tanh(self.linears[0](x)) * self.mixes[0]
            return {
                "0.hidden": h.t().contiguous().t(),  # not contiguous
                "0.skip": (h * 2).bfloat16(),
                "0.ids": torch.arange(len(x) * 3).reshape(len(x), 3)[:, ::2],
                "0.mask": x > 0,
                "0.scale": h.sum(),
                "0.empty": h[:0],
                "0.nothing": None,
            }
        if stage == 1:
            assert "0.nothing" not in got
            h = torch.tanh(self.linears[1](got["0.hidden"]) * self.mixes[1] + got["0.scale"])
            images = h.reshape(-1, 2, 2, 1).to(memory_format=torch.channels_last) * 1.5
            extra = self.extra(h)
            return {"1.hidden": h + got["0.empty"].sum(), "1.unused": h * 3, "1.images": images, "1.sometimes": extra}
        if stage == 2:
            h = torch.tanh(self.linears[2](got["1.hidden"]) * self.mixes[2])
            if micro % 2:  # the gradient of "1.sometimes" is there for some micro-batches only
                h = h + got["1.sometimes"]
            return {"2.hidden": torch.where(got["0.mask"], h, got["0.skip"].float())}
        assert got["1.images"].stride() == (4, 1, 2, 2)
        h = self.linears[3](got["2.hidden"]) * self.mixes[3] + got["0.skip"].float() * got["0.mask"]
        return {"loss": (h * got["1.images"].reshape(-1, WIDTH)).sum() * (1 + got["0.ids"].float().mean())}


class ToyRunner:
    """Runs stages of it, and keeps their graphs between forward and backward."""

    def __init__(self, model: Stages, batch: Sequence[Tensor]) -> None:
        self.model, self.batch = model, batch
        self.losses: dict[int, float] = {}
        self._made: dict[tuple[int, int], tuple[Mapping[str, Tensor], dict[str, Tensor | None]]] = {}
        self._stores: dict[tuple[int, int], WeightGradStore] = {}

    def forward(self, stage: int, micro: int, received: Mapping[str, Tensor]) -> Mapping[str, Tensor | None]:
        assert all(tensor.is_leaf for tensor in received.values())
        store = self._stores[stage, micro] = WeightGradStore()
        with defer_weight_grads(store):
            made = self.model.run(stage, micro, self.batch[micro], received)
        self._made[stage, micro] = received, made
        if stage == LAST:
            assert made["loss"] is not None
            self.losses[micro] = made["loss"].item()
        return made

    def backward(
        self, stage: int, micro: int, gradients: Mapping[str, Tensor | None], part: str
    ) -> Mapping[str, Tensor | None]:
        store = self._stores[stage, micro]
        if part == "W":
            assert gradients == {}
            store.run()
            return {}
        received, made = self._made.pop((stage, micro))
        roots = [(made[key], gradient) for key, gradient in gradients.items() if gradient is not None]
        roots += [(made["loss"], None)] if stage == LAST else []
        with defer_weight_grads(store):
            torch.autograd.backward([root for root, _ in roots], [gradient for _, gradient in roots])  # type: ignore[arg-type]
        if part == "B":
            store.run()
        return {key: tensor.grad for key, tensor in received.items()}


def batches() -> list[list[Tensor]]:
    source = torch.Generator().manual_seed(1)
    return [[torch.randn(rows, WIDTH, generator=source) for rows in step] for step in ROWS]


def gradients_of(model: nn.Module) -> dict[str, list[Any] | None]:
    return {name: None if p.grad is None else p.grad.tolist() for name, p in model.named_parameters()}


Outcome = list[tuple[dict[str, list[Any] | None], dict[int, float]]]  # gradients and losses of every step


def on_one_process() -> Outcome:
    model, found = Stages(), []
    for step in batches():
        losses = {}
        for micro, x in enumerate(step):
            everything: dict[str, Any] = {}
            for stage in range(LAST + 1):
                given = {k: v for k, v in everything.items() if v is not None}
                everything |= model.run(stage, micro, x, given)
            losses[micro] = everything["loss"].item()
            everything["loss"].backward()
        found.append((gradients_of(model), losses))
        model.zero_grad()
    return found


def make_links(**options: Any) -> PipelineLinks:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    ordered = options.pop("ordered", False)
    links = PipelineLinks(dist.group.WORLD, list(range(dist.get_world_size())), torch.device("cpu"), "gloo", **options)
    links.ordered = ordered
    return links


def pipelined(name: ScheduleName, **options: Any) -> Outcome:
    links = make_links(**options)
    return train(name, len(links.ranks), links)


def train(name: ScheduleName, ranks: int, links: PipelineLinks) -> Outcome:
    model, found = Stages(), []
    for step in batches():
        runner = ToyRunner(model, step)
        schedule = make_schedule(name, LAST + 1, ranks, len(step))
        signature = 0 if links.dynamic_shapes else (lambda micro, step=step: len(step[micro]))
        run_schedule(schedule, runner, TRANSFERS, links, signature)
        found.append((gradients_of(model), runner.losses))
        model.zero_grad()
    return found


def together(ranks: list[Outcome]) -> Outcome:
    """Each parameter's gradient is on the rank whose stage it is in, and on no other."""
    steps: Outcome = []
    for by_rank in zip(*ranks, strict=True):
        gradients: dict[str, Any] = dict.fromkeys(by_rank[0][0])
        losses: dict[int, float] = {}
        for grads, rank_losses in by_rank:
            losses |= rank_losses
            for name, gradient in grads.items():
                assert gradient is None or gradients[name] is None
                gradients[name] = gradient if gradient is not None else gradients[name]
        steps.append((gradients, losses))
    return steps


@pytest.fixture(scope="module")
def reference() -> Outcome:
    return on_one_process()


def assert_same(found: Outcome, reference: Outcome) -> None:
    assert len(found) == len(reference) == len(ROWS)
    for (grads, losses), (wanted_grads, wanted_losses) in zip(found, reference, strict=True):
        assert losses == wanted_losses
        for name, wanted in wanted_grads.items():
            assert (grads[name] is None) == (wanted is None), name
            if wanted is not None:
                torch.testing.assert_close(torch.tensor(grads[name]), torch.tensor(wanted), rtol=1e-6, atol=1e-6)


CASES: list[tuple[ScheduleName, int]] = [("gpipe", 4), ("1f1b", 4), ("zero-bubble", 4), ("interleaved", 2)]


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_every_schedule_gives_the_numbers_of_one_process(name: ScheduleName, ranks: int, reference: Outcome) -> None:
    assert_same(together(run(pipelined, name, ranks=ranks)), reference)


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_messages_matched_by_order_alone_give_the_same(name: ScheduleName, ranks: int, reference: Outcome) -> None:
    assert_same(together(run(pipelined, name, ranks=ranks, ordered=True)), reference)


@pytest.mark.parametrize("ordered", [False, True])
def test_a_header_with_every_message_gives_the_same(ordered: bool, reference: Outcome) -> None:
    found = run(pipelined, "1f1b", ranks=4, dynamic_shapes=True, ordered=ordered)
    assert_same(together(found), reference)


def test_a_pipeline_on_one_rank_needs_no_sockets(reference: Outcome) -> None:
    assert_same(train("interleaved", 1, PipelineLinks(None, [0], torch.device("cpu"), "gloo")), reference)


# ---- evaluation


def evaluated() -> dict[int, float]:
    links, model, (step, *_) = make_links(), Stages(), batches()
    run_schedule(make_schedule("1f1b", 4, 4, len(step)), ToyRunner(model, step), TRANSFERS, links, 3)
    model.zero_grad()
    runner = ToyRunner(model, step)
    with torch.no_grad():
        run_schedule(forward_only(4, 4, len(step)), runner, TRANSFERS, links, 3)
    assert all(p.grad is None for p in model.parameters())
    return runner.losses


def test_forward_only_after_training_gives_losses_no_gradients(reference: Outcome) -> None:
    assert run(evaluated, ranks=4)[LAST] == reference[0][1]


# ---- many keys, and all of them without a gradient


class ManyKeys:
    """Stage 0 makes more than a header holds; stage 1 uses none of it."""

    def __init__(self) -> None:
        self.weight = nn.Parameter(torch.ones(2))
        self.seen: dict[str, list[float]] = {}
        self.gradients: Mapping[str, Tensor | None] = {}

    def forward(self, stage: int, micro: int, received: Mapping[str, Tensor]) -> Mapping[str, Tensor | None]:
        self.seen = {key: tensor.tolist() for key, tensor in received.items()}
        return {f"key {number}": self.weight * number for number in range(300)} if stage == 0 else {}

    def backward(
        self, stage: int, micro: int, gradients: Mapping[str, Tensor | None], part: str
    ) -> Mapping[str, Tensor | None]:
        self.gradients = gradients
        return {}


def many_keys() -> tuple[dict[str, list[float]], Mapping[str, Tensor | None]]:
    runner, transfers = ManyKeys(), [StageTransfer(f"key {number}", 0, 1) for number in range(300)]
    run_schedule(make_schedule("1f1b", 2, 2, 2), runner, transfers, make_links(), "any")
    return runner.seen, runner.gradients


def test_an_edge_with_many_keys_and_no_gradient_at_all() -> None:
    (_, gradients), (seen, _) = run(many_keys, ranks=2)
    assert seen == {f"key {number}": [float(number)] * 2 for number in range(300)}
    assert gradients == {f"key {number}": None for number in range(300)}


# ---- what goes wrong


class Failing(ToyRunner):
    def __init__(self, model: Stages, batch: Sequence[Tensor], error: Exception) -> None:
        super().__init__(model, batch)
        self.error = error

    def backward(
        self, stage: int, micro: int, gradients: Mapping[str, Tensor | None], part: str
    ) -> Mapping[str, Tensor | None]:
        if (stage, micro) == (2, 1):
            raise self.error
        return super().backward(stage, micro, gradients, part)


def failing() -> None:
    links, (step, *_) = make_links(), batches()
    runner = Failing(Stages(), step, ZeroDivisionError("no good"))
    run_schedule(make_schedule("1f1b", 4, 4, 5), runner, TRANSFERS, links, 3)


def test_model_error_keeps_type_and_names_rank_stage_micro_batch() -> None:
    ends = run_raw(failing, ranks=4)
    assert isinstance(ends[2], Raised)
    assert (ends[2].kind, ends[2].line) == ("ZeroDivisionError", "no good")
    assert "echelon: at rank 2, stage 2, micro-batch 1" in ends[2].trace
    assert all(isinstance(end, Raised) for end in ends)  # no rank waits for ever for the one that failed


def test_an_error_of_ours_names_them_in_its_line() -> None:
    runner = Failing(Stages(), batches()[0], UsageError("no good"))
    with pytest.raises(UsageError) as caught:
        run_schedule(
            make_schedule("interleaved", 4, 1, 5),
            runner,
            TRANSFERS,
            PipelineLinks(None, [7], torch.device("cpu"), "gloo"),
            3,
        )
    assert str(caught.value) == "rank 7, stage 2, micro-batch 1: no good"


def reshaping() -> None:
    links, steps = make_links(), batches()
    for step in steps[:2]:  # the same signature, but other shapes
        run_schedule(make_schedule("gpipe", 4, 4, 5), ToyRunner(Stages(), step), TRANSFERS, links, "constant")


def test_shape_change_under_one_signature_refused_with_hint() -> None:
    """Shapes that change under one batch signature are refused, and the error says which option allows them."""
    assert errors(reshaping, ranks=4)[0] == (
        "UsageError: rank 0, stage 0, micro-batch 0: pipeline: '0.hidden' goes from stage 0 to stage 1 as "
        "float32 [2, 4] with gradient, but for a batch of this shape it was float32 [3, 4] with gradient before; "
        "use pipeline(dynamic_shapes=True)"
    )
