"""Loops that users bring: what is left of the old one is right, or refused in one line."""

from __future__ import annotations

import contextlib
import io
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import errors, run
from torch import Tensor, nn
from zoo import QUIET, sgd

import echelon
from echelon import Strategy
from echelon.base.errors import CheckpointError, LossError, UsageError
from echelon.observability.runlog.run_reader import read
from echelon.tools.report.sections.training import charts


def mlp() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


PLANS: dict[str, dict[str, Any]] = {
    "dp": {},
    "merge": {"gradient_merge": 2},
    "shard 3": {"shard": 3},
    "lars": {"lars": True},
    "split": {},
    "pipeline": {},
}


def build(plan: str, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, echelon.Engine]:
    net = mlp()
    if plan == "split":
        echelon.annotate(net, {"0": echelon.split(), "2": echelon.split()})
    if plan == "pipeline":
        echelon.annotate(net, {"0": echelon.stage(0), "2": echelon.stage(1)})
        options.setdefault("sample", (torch.zeros(4, 4), torch.zeros(4, 2)))
    optimizer = options.pop("optimizer", None) or sgd(net)
    options = {"loss": F.mse_loss, "strategy": Strategy(**PLANS[plan]), "log": QUIET} | options
    return net, optimizer, echelon.distribute(net, optimizer=optimizer, **options)


# ---- optimizer.step() left in place ----


def refused(act: Any) -> str:
    try:
        act()
    except UsageError as error:
        return str(error)
    return "no error"


def left_in_place() -> dict[str, list[str]]:
    """By plan, what a step from outside is answered before and after a step of the engine."""
    echelon.init()
    lines = {}
    for plan in PLANS:
        _, optimizer, engine = build(plan)
        first = refused(optimizer.step)
        engine.step(torch.ones(4, 4), torch.ones(4, 2))
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        lines[plan] = [first, refused(lambda o=optimizer, s=scaler: s.step(o))]
        if plan == "dp":
            other = sgd(nn.Linear(2, 2))
            other.step()  # an optimizer that no engine was given
            engine.close()
            optimizer.step()  # the engine trains no more
    return lines


def test_step_outside_of_the_engine_is_refused_on_ranks() -> None:
    for lines in run(left_in_place, ranks=2):
        for plan, said in lines.items():
            for line in said:
                assert line.startswith("optimizer.step() outside of the engine: gradients of other ranks"), plan
                assert "engine.step(batch), or engine.backward(loss) and engine.update()" in line


def test_step_outside_of_the_engine_alone_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    _, optimizer, engine = build("dp", log=echelon.Log(progress=False))
    for _ in range(2):
        optimizer.step()
    assert capsys.readouterr().out.count("optimizer.step() was called outside of the engine") == 1
    engine.step(torch.randn(4, 4), torch.randn(4, 2))
    for _ in range(2):
        optimizer.step()
    assert capsys.readouterr().out.count("gradients of engine.step() that are still there are applied twice") == 1


def test_step_guard_follows_the_newest_engine() -> None:
    net, optimizer, first = build("dp")
    first.step(torch.randn(4, 4), torch.randn(4, 2))
    second = echelon.distribute(net, loss=F.mse_loss, optimizer=optimizer, log=QUIET)
    second.step(torch.randn(4, 4), torch.randn(4, 2))
    assert len(optimizer._optimizer_step_pre_hooks) == 1


# ---- models that return (logits, loss) ----


class TinyGpt(nn.Module):
    """A forward like nanoGPT's and minGPT's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        logits = self.head(torch.tanh(self.block(self.embed(idx))))
        loss = None if targets is None else F.cross_entropy(logits.view(-1, 11), targets.view(-1))
        return logits, loss


GPT_MARKS: dict[str, dict[str, Any]] = {
    "dp": {},
    "shard 3": {},
    "split": {"block": echelon.split(), "head": echelon.split()},
    "pipeline": {"embed": echelon.stage(0), "block": echelon.stage(0), "head": echelon.stage(1)},
}


def tokens(step: int) -> tuple[Tensor, Tensor]:
    """A global batch of 8 rows."""
    drawn = torch.randint(11, (8, 7), generator=torch.Generator().manual_seed(step))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def tiny_gpt(plan: str, strategy: Strategy | None = None) -> tuple[TinyGpt, echelon.Engine]:
    torch.manual_seed(5)
    net = TinyGpt()
    if echelon.world_size() > 1 and GPT_MARKS[plan]:
        echelon.annotate(net, GPT_MARKS[plan])
    strategy = strategy or Strategy(**PLANS[plan])
    return net, echelon.distribute(net, optimizer=sgd(net), strategy=strategy, log=QUIET)


def share(plan: str, batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    replicas = 1 if GPT_MARKS.get(plan) else echelon.world_size()
    at = echelon.rank() if replicas > 1 else 0
    return tuple(part[at * len(part) // replicas : (at + 1) * len(part) // replicas] for part in batch)


def own_losses(plans: tuple[str, ...]) -> dict[str, list[float]]:
    echelon.init()
    found = {}
    for plan in plans:
        for named in (False, True):
            _, engine = tiny_gpt(plan)
            batches = [share(plan, tokens(step)) for step in range(4)]
            losses = [engine.step(idx=x, targets=y) if named else engine.step(x, y) for x, y in batches]
            found[f"{plan} {named}"] = [*map(float, losses), engine.evaluate(batches[:1])["loss"]]
    return found


def test_models_that_return_logits_and_loss_equal_one_process() -> None:
    expected = run(own_losses, ("dp",), ranks=1)[0]["dp False"]
    for found in run(own_losses, tuple(GPT_MARKS), ranks=2):
        for case, losses in found.items():
            assert losses == pytest.approx(expected, rel=1e-5), case


def test_outputs_without_one_loss_are_shown() -> None:
    _, engine = tiny_gpt("dp")
    with pytest.raises(LossError, match=r"returned \(tensor \[8, 6, 11\], None\), of which nothing is one number"):
        engine.step(tokens(0)[0])
    net = nn.Linear(2, 2)
    net.forward = lambda x: (x, x.mean(), x.sum())  # type: ignore[method-assign]
    engine = echelon.distribute(net, optimizer=sgd(net), log=QUIET)
    with pytest.raises(LossError, match="of which 2 may be the loss; return the loss first"):
        engine.step(torch.ones(3, 2))


# ---- gradients between backward and update ----

CLIP = 0.05


def clipped_loop(how: str, plan: str = "dp", steps: int = 3) -> dict[str, Any]:
    """Two backwards and an update, a few times, with gradients clipped in between; norms and weights."""
    echelon.init()
    torch.manual_seed(5)
    net = TinyGpt()
    if echelon.world_size() > 1 and GPT_MARKS.get(plan):
        echelon.annotate(net, GPT_MARKS[plan])
    strategies = {"shard 1": Strategy(shard=1), "shard 2": Strategy(shard=2), "shard 3": Strategy(shard=3)}
    strategy = Strategy() if echelon.world_size() == 1 else strategies.get(plan, Strategy())
    engine = echelon.distribute(net, optimizer=sgd(net), strategy=strategy, log=QUIET)
    norms: list[float] = []
    for step in range(steps):
        for part in range(2):
            x, y = share(plan, tokens(2 * step + part))
            engine.backward(net(x, y)[1] / 2)
        if how == "engine":
            norms += [float(engine.grad_norm()), float(engine.clip_grad_norm_(CLIP)), float(engine.grad_norm())]
        elif how == "torch":
            norms.append(float(nn.utils.clip_grad_norm_(net.parameters(), CLIP)))
        elif how == "value":
            engine.clip_grad_value_(0.003)
        elif how == "torch value":
            nn.utils.clip_grad_value_(net.parameters(), 0.003)
        elif how == "by hand":
            engine.reduce()
            for parameter in net.parameters():
                parameter.grad.clamp_(-0.003, 0.003)
        engine.update()
    return {"norms": norms, "weights": engine.whole_state(), "after": float(engine.grad_norm())}


def clipped_loops(cases: tuple[tuple[str, str], ...]) -> list[dict[str, Any]]:
    return [clipped_loop(*case) for case in cases]


CLIPPED = (
    *(("engine", plan) for plan in ("dp", "shard 1", "shard 2", "shard 3", "split")),
    *(("value", plan) for plan in ("shard 3", "split")),
    *((how, "dp") for how in ("torch", "value", "torch value", "by hand")),
)


def test_gradients_clipped_in_an_own_loop_equal_one_process() -> None:
    expected = {how: clipped_loop(how) for how in ("engine", "torch", "value")}
    expected |= {"torch value": expected["value"], "by hand": expected["value"]}
    torch.testing.assert_close(expected["engine"]["weights"], expected["torch"]["weights"])
    assert expected["engine"]["norms"][0] > 2 * CLIP
    for found in run(clipped_loops, CLIPPED, ranks=2):
        for case, mine in zip(CLIPPED, found, strict=True):
            theirs = expected[case[0]]
            assert mine["norms"] == pytest.approx(theirs["norms"], rel=1e-5), case
            assert mine["after"] == pytest.approx(theirs["after"], rel=1e-5), case
            torch.testing.assert_close(mine["weights"], theirs["weights"], rtol=1e-5, atol=1e-6, msg=str(case))


def misused_gradients() -> list[str]:
    echelon.init()
    lines = []
    _, _, whole = build("dp")
    for plan in ("shard 3", "split"):
        net, _, engine = build(plan)
        engine.backward(net(torch.ones(4, 4)).square().mean())
        lines.append(refused(lambda n=net: nn.utils.clip_grad_norm_(n.parameters(), 1.0)))
        engine.update()
    net = whole.model
    whole.backward(net(torch.ones(4, 4)).square().mean())
    grads = [p.grad for p in net.parameters()]
    lines.append(refused(lambda: nn.utils.get_total_norm(grads)))
    whole.reduce()
    lines.append(refused(lambda: whole.update(samples=3)))
    lines.append(refused(lambda: whole.backward(net(torch.ones(4, 4)).square().mean())))
    whole.update()
    lines.append(refused(lambda: whole.clip_grad_norm_(1.0)))
    stranger = nn.Linear(2, 2)
    stranger(torch.ones(1, 2)).sum().backward()
    nn.utils.clip_grad_norm_(stranger.parameters(), 1.0)  # of a model without an engine
    return lines


def test_gradients_that_are_not_whole_are_refused_by_name() -> None:
    for lines in run(misused_gradients, ranks=2):
        for line in lines[:2]:
            assert line == (
                "clip_grad_norm_() on the engine's gradients: a rank holds only parts of them; call "
                "engine.clip_grad_norm_(max_norm), or give Strategy(clip=max_norm)"
            )
        assert lines[2].endswith("until engine.update() they are each rank's own; call engine.grad_norm()")
        assert lines[3].startswith("samples=3 comes too late")
        assert lines[4].startswith("engine.backward() was called after the gradients of this update were reduced")
        assert lines[5].startswith("clip_grad_norm_(): no gradients wait for update()")


def hand_made(how: str) -> list[str]:
    echelon.init()
    said: list[str] = []
    net, _, engine = build("dp")
    engine._local_gradients._say = said.append
    for _ in range(4):
        if how == "step":
            engine.step(torch.ones(4, 4), torch.ones(4, 2))
            nn.utils.clip_grad_norm_(net.parameters(), max_norm=0.1)
            continue
        engine.backward(net(torch.ones(4, 4)).square().mean())
        if how == "changed":
            net[0].weight.grad.mul_(0.5)
        engine.update()
    return said


def test_gradients_changed_by_hand_are_told_once() -> None:
    for said in run(hand_made, "changed", ranks=2):
        assert len(said) == 1
        assert "call engine.reduce() before the change" in said[0]
    assert hand_made("untouched") == []
    assert [line[:43] for line in hand_made("step")] == ["gradients: clip_grad_norm_() after engine.s"]


# ---- outputs of a step ----


def outputs_of(plans: tuple[str, ...], rows: int = 8) -> dict[str, tuple[Any, float]]:
    """By plan, what the model returned in the second of three steps, and its loss."""
    echelon.init()
    found = {}
    for plan in plans:
        _, engine = tiny_gpt(plan)
        batch = tuple(part[:rows] for part in share(plan, tokens(0)))
        engine.step(*batch)
        assert engine.output is None
        loss = engine.step(*batch, outputs=True)
        output = engine.output
        assert output is None or not output[0].requires_grad
        engine.evaluate([batch])
        assert engine.output is output
        engine.step(*batch)
        assert engine.output is None  # what was not asked for is not kept
        found[plan] = output, float(loss)
    return found


def test_outputs_of_a_step_are_those_of_one_process() -> None:
    expected = {rows: outputs_of(("dp",), rows)["dp"] for rows in (8, 7, 3)}
    ranks = run(outputs_of, ("dp", "shard 3", "split"), ranks=2)
    for rank, found in enumerate(ranks):
        for plan, (output, _) in found.items():
            mine = slice(None) if plan == "split" else slice(4 * rank, 4 * rank + 4)
            torch.testing.assert_close(output[0], expected[8][0][0][mine], rtol=1e-5, atol=1e-6, msg=plan)
    for rows in (7, 3):  # in micro-batches of 2, 2, 2 and 1 rows; of 1, 1, 1 and a stand-in
        first, last = run(outputs_of, ("pipeline",), rows, ranks=2)
        assert first["pipeline"][0] is None
        (logits, loss), _ = last["pipeline"]
        torch.testing.assert_close(logits, expected[rows][0][0], rtol=1e-5, atol=1e-6)
        assert float(loss) == pytest.approx(float(expected[rows][0][1]), rel=1e-5)


def test_outputs_as_the_name_of_an_entry_are_refused() -> None:
    _, _, engine = build("dp")
    with pytest.raises(UsageError, match="outputs=Tensor: step"):
        engine.step(inputs=torch.ones(4, 4), outputs=torch.ones(4, 2))  # type: ignore[arg-type]


# ---- models and optimizers that cannot be distributed ----


def test_lazy_modules_and_closures_are_refused_in_a_line() -> None:
    lazy = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
    optimizer = sgd(lazy)
    with pytest.raises(UsageError, match=r"'0\.weight' of a LazyLinear has no shape before the first batch; run one"):
        echelon.distribute(lazy, loss=F.mse_loss, optimizer=optimizer, log=QUIET)
    lazy(torch.ones(2, 3))
    engine = echelon.distribute(lazy, loss=F.mse_loss, optimizer=optimizer, log=QUIET)
    engine.step(torch.ones(2, 3), torch.ones(2, 2))
    net = nn.Linear(2, 2)
    with pytest.raises(UsageError, match="optimizer 'main' is LBFGS, whose step\\(\\) calls a closure"):
        echelon.distribute(net, loss=F.mse_loss, optimizer=torch.optim.LBFGS(net.parameters()), log=QUIET)


# ---- the main process ----


def take_turns(directory: str, fails: bool) -> tuple[bool, list[str]]:
    """Each process lists the files that it finds in its turn, and leaves one."""
    echelon.init()
    found = []
    for local in (False, True):
        with echelon.main_process_first(local=local):
            found.append(",".join(sorted(path.name for path in Path(directory).iterdir())))
            if echelon.rank() == 0:
                time.sleep(0.3)
                assert not fails, "rank 0 fails"
                Path(directory, f"made {local}").touch()
    return echelon.is_main_process(), found


def test_main_process_goes_first_and_others_find_its_files(tmp_path: Path) -> None:
    first, second = run(take_turns, str(tmp_path), fails=False, ranks=2)
    assert first == (True, ["", "made False"])
    assert second == (False, ["made False", "made False,made True"])
    lines = errors(take_turns, str(tmp_path), fails=True, ranks=2)
    assert lines[0].startswith("AssertionError: rank 0 fails")
    assert lines[1].startswith("PeerLost: main_process_first(): rank 0 failed, so the other processes stop too")


# ---- schedules ----


def scheduled(directory: str, kind: str, stop: int | None, late: bool) -> tuple[list[float], Any]:
    """Rates of every update of three epochs of five batches, and the weights; ``stop`` after so many updates."""
    echelon.init()
    net = mlp()
    optimizer = sgd(net, 0.1)

    def made() -> Any:
        if kind == "epoch":
            return echelon.per_epoch(torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5))
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    options = {} if late else {"scheduler": made()}
    keep = echelon.Checkpoint(dir=directory, every=1) if directory else None
    engine = echelon.distribute(net, loss=F.mse_loss, optimizer=optimizer, checkpoint=keep, log=QUIET, **options)
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(1))
    loader = engine.loader((x, x[:, :2]), global_batch=4)
    if late:
        engine.scheduler = made()
    rates = []
    for _ in loader.epochs(3):
        for batch in loader:
            engine.step(*batch)
            rates.append(optimizer.param_groups[0]["lr"])
            if engine.steps == stop:
                engine.close()
                return rates, None
    engine.close()
    return rates, engine.model.state_dict()


def resumed_schedules(directory: str) -> dict[str, Any]:
    """By kind and by when it is attached: all at once, and in two runs."""
    found = {}
    for kind in ("epoch", "update"):
        for late in (False, True):
            whole = scheduled("", kind, None, late)
            for stop in (5, 7):  # at the end of an epoch, and inside one
                room = f"{directory}/{kind} {late} {stop}"
                first, _ = scheduled(room, kind, stop, late)
                second, weights = scheduled(room, kind, None, late)
                found[f"{kind} {late} {stop}"] = [whole, (first + second, weights)]
    return found


def test_schedules_by_epoch_and_late_are_exact_when_resumed(tmp_path: Path) -> None:
    rates = {
        "epoch": [0.1] * 5 + [0.05] * 5 + [0.025] * 5,
        "update": [0.1 / (2 + step) for step in range(15)],
    }
    for found in run(resumed_schedules, str(tmp_path), ranks=2):
        for case, (whole, in_two) in found.items():
            assert whole[0] == pytest.approx(rates[case.split()[0]], rel=1e-6), case
            assert in_two[0] == whole[0], case
            for name, weight in whole[1].items():
                assert torch.equal(weight, in_two[1][name]), (case, name)


def test_schedules_that_cannot_be_followed_are_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    net = mlp()
    optimizer, stranger = sgd(net), sgd(nn.Linear(2, 2))
    made = torch.optim.lr_scheduler.StepLR
    with pytest.raises(UsageError, match="the StepLR was made for another optimizer than distribute"):
        echelon.distribute(net, loss=F.mse_loss, optimizer=optimizer, scheduler=made(stranger, 1), log=QUIET)
    spoken = echelon.Log(progress=False)
    epochs = echelon.per_epoch(made(optimizer, 1))
    engine = echelon.distribute(net, loss=F.mse_loss, optimizer=optimizer, scheduler=epochs, log=spoken)
    for _ in range(2):
        engine.step(torch.ones(4, 4), torch.ones(4, 2))
    assert capsys.readouterr().out.count("scheduler: the StepLR is for epochs, and without engine.loader()") == 1
    with pytest.raises(UsageError, match=r"engine\.scheduler is set once, before the first step"):
        engine.scheduler = made(optimizer, 1)
    engine.save(tmp_path, wait=True)
    engine = echelon.distribute(net, loss=F.mse_loss, optimizer=optimizer, log=QUIET)
    engine.load(tmp_path)
    with pytest.raises(CheckpointError, match="the checkpoint has 1 schedulers, this run has 0; build the same"):
        engine.step(torch.ones(4, 4), torch.ones(4, 2))


# ---- batches that are left over ----


def left_over(batches: int, own_loop: bool) -> str:
    echelon.init()
    net = mlp()
    strategy = Strategy() if own_loop else Strategy(gradient_merge=4)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        log = echelon.Log(progress=False)
        engine = echelon.distribute(net, loss=F.mse_loss, optimizer=sgd(net), strategy=strategy, log=log)
        loader = engine.loader((torch.ones(4 * batches, 4), torch.ones(4 * batches, 2)), global_batch=4)
        for x, y in loader:
            if own_loop:
                engine.backward(F.mse_loss(net(x), y))
            else:
                engine.step(x, y)
        assert engine.steps == (0 if own_loop else batches // 4)
        engine.close()
    return said.getvalue()


def last_batch(rows: int, **options: Any) -> tuple[str, list[Tensor]]:
    echelon.init(seed=0)
    net = mlp()
    with contextlib.redirect_stdout(io.StringIO()) as said:
        engine = echelon.distribute(net, loss=F.mse_loss, optimizer=sgd(net), log=echelon.Log(progress=False))
        data = torch.randn(rows, 4, generator=torch.Generator().manual_seed(1)), torch.ones(rows, 2)
        for x, y in engine.loader(data, global_batch=4, **options):
            engine.step(x, y)
        engine.close()
    return said.getvalue(), [p.detach().clone() for p in net.parameters()]


def test_samples_drawn_again_are_said_and_join_needs_none() -> None:
    line = "data: 1 sample is drawn again to fill up an epoch's last batch"
    assert line in run(last_batch, 21, ranks=2)[0][0]
    assert "drawn again" not in run(last_batch, 22, ranks=2)[0][0]
    said, weights = run(last_batch, 21, uneven="join", ranks=2)[0]
    assert "drawn again" not in said
    for ours, alone in zip(weights, last_batch(21)[1], strict=True):
        torch.testing.assert_close(ours, alone, rtol=1e-5, atol=1e-7)


def test_batches_left_over_are_told_at_the_start_and_the_end() -> None:
    said, nothing = run(left_over, 9, own_loop=False, ranks=2)
    assert "an epoch has 9 batches, and 4 make an update; 1 left over at its end counts in the first update" in said
    assert said.count("the run has ended after 1 of the 4 batches of an update; their gradients were not applied") == 1
    assert "gradient_merge:" not in nothing  # rank 0 speaks
    assert "left over" not in left_over(8, own_loop=False)
    assert "engine.backward() was called after the last engine.update()" in left_over(2, own_loop=True)


# ---- numbers of the script's own ----


def logged(directory: str) -> str:
    echelon.init()
    with contextlib.redirect_stdout(io.StringIO()) as said:
        _, _, engine = build("dp", log=echelon.Log(dir=directory, progress=False, every=2))
        for step in range(4):
            engine.step(torch.ones(4, 4), torch.ones(4, 2))
            engine.log({"perplexity": torch.tensor(step + 0.5)})
            engine.log({"accuracy": 1})
        engine.close()
    return said.getvalue()


def test_numbers_that_a_script_logs_are_in_files_and_report(tmp_path: Path) -> None:
    said, nothing = run(logged, str(tmp_path), ranks=2)
    assert "step 4  perplexity 3.5  accuracy 1\n" in said
    assert "perplexity" not in nothing
    found = read(tmp_path)
    assert [one.results for one in found.logged] == [{"perplexity": i + 0.5, "accuracy": 1.0} for i in range(4)]
    assert [each.title for each in charts(found) if each.title.startswith("Logged")] == [
        "Logged: perplexity",
        "Logged: accuracy",
    ]
    _, _, engine = build("dp")
    for wrong, line in (("high", "'x' is a str; give numbers"), (torch.ones(3), "'x' is not one number")):
        with pytest.raises(UsageError, match=line):
            engine.log({"x": wrong})


class Classifier(nn.Module):
    """Returns logits and loss, one before the other."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: Tensor, y: Tensor) -> Any:
        logits = self.body(x)
        return logits, F.cross_entropy(logits, y)


def test_metrics_find_the_logits_beside_the_loss() -> None:
    net, y = Classifier(), torch.tensor([0, 1, 1, 0])
    engine = echelon.distribute(net, optimizer=sgd(net), log=QUIET)
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    found = engine.evaluate([(x, y)], metrics=["accuracy", "auc"])
    assert found["accuracy"] == float((net.body(x).argmax(1) == y).float().mean())
    net.forward = lambda x, y: (x, y, x.sum())  # type: ignore[method-assign]
    with pytest.raises(UsageError, match="a tuple with 2 possible tensors"):
        engine.evaluate([(x, y)], metrics=["accuracy"])
