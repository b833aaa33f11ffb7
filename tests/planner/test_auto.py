"""``Strategy(auto=True)``: whatever is chosen equals one process; when it is chosen, what is said, what is refused."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command import processes_with, write
from harness import errors, run
from matrix import MODELS, Transformer, batch_of, loss_of
from torch import Tensor, nn
from zoo import QUIET

import echelon
from echelon import Auto, Checkpoint, Log, Strategy, split
from echelon.base.environment import ALONE
from echelon.base.errors import UsageError
from echelon.distributed.world import World
from echelon.plan.draft import Draft
from echelon.plan.saved_plan import SavedPlan
from echelon.planner.apply import trial
from echelon.planner.apply.auto import PlanTask, find_plans
from echelon.planner.cluster.cluster import Cluster

TOTAL = 12  # samples of a step


def make(name: str = "transformer") -> nn.Module:
    torch.manual_seed(3)
    made: nn.Module = MODELS[name]()
    return made


def data_of(name: str, total: int, steps: int) -> tuple[Tensor, ...]:
    batches = [batch_of(name, step, total) for step in range(steps)]
    return tuple(torch.cat(parts) for parts in zip(*batches, strict=True))


def train(
    name: str,
    auto: Auto | None,
    steps: int = 3,
    *,
    fed: str = "loader",
    log: Log = QUIET,
    checkpoint: Checkpoint | None = None,
    stop: int | None = None,
) -> dict[str, Any]:
    model, data, rank, ranks = make(name), data_of(name, TOTAL, steps), echelon.rank(), echelon.world_size()
    rows = [tuple(part[at * TOTAL :][:TOTAL] for part in data) for at in range(steps)]
    mine = [tuple(part[rank * TOTAL // ranks : (rank + 1) * TOTAL // ranks] for part in row) for row in rows]
    engine = echelon.distribute(
        model,
        loss=loss_of(name),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        strategy=Strategy(auto=auto) if auto else None,
        sample=mine[0] if fed == "sample" else None,
        checkpoint=checkpoint,
        log=log,
    )
    before = {"begun": engine.steps, "decided": engine.plan}
    batches: Any = mine
    if fed != "hand":
        batches = engine.loader(data, batch_size=TOTAL // ranks, shuffle=False)
    losses = [float(engine.step(*batch)) for batch in itertools.islice(batches, stop)]
    foretold = engine._planned.saved_plan.predicted if engine._planned.saved_plan else None
    memory = foretold.memory[0] if foretold else None
    shown = {"losses": losses, "weights": engine.whole_state(), "plan": engine.plan, "memory": memory, **before}
    engine.close()
    return shown


def everything(directory: str) -> dict[str, Any]:
    """All cases in the same processes, to start them once."""
    echelon.init()
    here, quick, slow = (f"{directory}/{name}.yaml" for name in ("here", "quick", "slow"))
    kept = Checkpoint(dir=f"{directory}/kept", every=2)
    written = Log(console=False, dir=directory, every=10)
    plenty = train("transformer", Auto(cluster=here), fed="hand")
    found = {
        "plenty": plenty,
        "quick link": train("transformer", Auto(cluster=quick)),
        "slow link": train("transformer", Auto(cluster=slow)),
        "by hand": train("transformer", Auto(cluster=slow), fed="hand"),
        "with a sample": train("transformer", Auto(cluster=slow), fed="sample"),
        "little memory": train("transformer", Auto(cluster=here, memory=0.97 * plenty["memory"]), fed="hand"),
        "batch norm": train("convnet", Auto(cluster=slow)),
        "long": train("transformer", Auto(cluster=here), 21, log=written),
        "first half": train("transformer", Auto(cluster=here), 4, checkpoint=kept, stop=2),
        "second half": train("transformer", Auto(cluster=here), 4, checkpoint=kept),
    }
    with contextlib.redirect_stdout(io.StringIO()) as out:
        train("transformer", Auto(cluster=here), 1, fed="hand", log=Log())
    return found | {"said": out.getvalue()}


def alone() -> dict[str, Any]:
    echelon.init()
    return {name: train(name, None) for name in ("transformer", "convnet")}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("auto")
    for name, factor in (("here", 1.0), ("quick", 1e4), ("slow", 1e-5)):
        machine = Cluster.parse("2xhere", bench=False)
        machine.with_(link=factor, network=factor).to_yaml(path / f"{name}.yaml")
    return path


@pytest.fixture(scope="module")
def many(directory: Path) -> list[dict[str, Any]]:
    return run(everything, str(directory), ranks=2)


@pytest.fixture(scope="module")
def one() -> dict[str, Any]:
    found: dict[str, Any] = run(alone, ranks=1)[0]
    return found


CASES = ("quick link", "slow link", "by hand", "with a sample", "little memory", "batch norm")


def test_whatever_is_chosen_has_the_numbers_of_one_process(many: list[dict[str, Any]], one: dict[str, Any]) -> None:
    for case, rank in itertools.product(CASES, (0, 1)):
        mine, wanted = many[rank][case], one["convnet" if case == "batch norm" else "transformer"]
        assert mine["losses"] == pytest.approx(wanted["losses"], rel=1e-5), case
        for weight, value in wanted["weights"].items():
            torch.testing.assert_close(mine["weights"][weight], value, rtol=1e-4, atol=1e-5, msg=f"{case} {weight}")


def test_what_is_chosen_depends_on_the_machines(many: list[dict[str, Any]]) -> None:
    quick, slow = (many[0][case]["plan"] for case in ("quick link", "slow link"))
    assert quick.mesh != slow.mesh
    assert slow.mesh == {"replicate": 1, "stage": 2}  # it sends least of all


def test_batches_handed_to_each_rank_stay_its_own(many: list[dict[str, Any]]) -> None:
    assert many[0]["by hand"]["plan"].mesh == {"replicate": 2}


def test_with_a_sample_the_plan_is_there_at_once(many: list[dict[str, Any]]) -> None:
    found = many[0]["with a sample"]
    assert found["decided"].mesh == found["plan"].mesh != {"replicate": 2}


def test_little_memory_makes_ranks_share_or_recompute(many: list[dict[str, Any]]) -> None:
    plenty, little = (many[0][case] for case in ("plenty", "little memory"))
    assert little["memory"] < plenty["memory"]
    assert little["plan"].shard is not None
    assert little["plan"].recompute or little["plan"].pipeline or plenty["plan"].shard is None


def drafts(name: str, own_batches: bool, directory: Path) -> list[Draft]:
    place = dataclasses.replace(ALONE, world_size=2, local_world_size=2)
    world = World(place, torch.device("cpu"), "gloo", 0, 10.0, None)
    model, auto = make(name), Auto(cluster=str(directory / "slow.yaml"), trials=50)
    optimizers = {"main": torch.optim.SGD(model.parameters(), lr=0.1)}
    task = PlanTask(TOTAL, own_batches=own_batches)
    found = find_plans(auto, model, loss_of(name), batch_of(name, 0, 6), task, world, optimizers)
    return [SavedPlan.from_json(text).draft for text in found["plans"]]


def test_micro_batches_are_left_out_for_batch_norm_and_experts(directory: Path) -> None:
    """Drafts have no micro-batches where batch norms or experts would give other results with them."""
    assert {draft.micro_batches for draft in drafts("convnet", False, directory)} == {1}
    assert {draft.micro_batches for draft in drafts("experts", False, directory)} == {1}
    assert {draft.micro_batches for draft in drafts("transformer", False, directory)} != {1}


def test_plans_use_all_ranks_and_leave_batches_where_they_are(directory: Path) -> None:
    for own_batches in (True, False):
        found = drafts("transformer", own_batches, directory)
        assert {draft.ranks for draft in found} == {2}
        assert ({draft.replicate for draft in found} == {2}) == own_batches


def test_what_was_predicted_is_set_against_what_came(many: list[dict[str, Any]], directory: Path) -> None:
    assert len(many[0]["long"]["losses"]) == 21
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    found = [record for record in records if "predicted_step_ms" in record]
    assert [record["step"] for record in found] == [20]
    figures = {"predicted_step_ms", "measured_step_ms", "predicted_memory", "measured_memory"}
    assert found[0].keys() == {"time", "step", *figures}
    steps = next(record for record in records if record.get("step") == 20 and "loss" in record)
    spent = sum(steps[name] for name in ("data", "forward", "backward", "communicate", "update") if name in steps)
    assert found[0]["measured_step_ms"] == pytest.approx(spent, rel=3.0)
    assert found[0]["predicted_memory"] > sum(value.numel() * 4 for value in make().parameters()) / 2


def test_a_run_goes_on_from_its_checkpoint(many: list[dict[str, Any]]) -> None:
    first, second, whole = (many[0][case] for case in ("first half", "second half", "long"))
    assert (first["begun"], second["begun"]) == (0, 2)  # known before there is a plan
    assert first["losses"] + second["losses"] == pytest.approx(whole["losses"][:4], rel=1e-5)


def test_the_choice_is_said_by_the_first_rank_alone(many: list[dict[str, Any]]) -> None:
    lines = [line for line in many[0]["said"].splitlines() if line.startswith("echelon: auto: ")]
    assert lines[0] == "echelon: auto: planned for fp32, not compiled, as a run without a strategy"
    assert "predicted" in lines[1]
    assert "the best of" in lines[1]
    assert any("stages and splits skipped: each rank keeps its own batch" in line for line in lines)
    assert many[1]["said"] == ""


def test_a_trial_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_patience", lambda plan: 1.0)
    sleeper = write(tmp_path / "sleeper.py", "import time\ntime.sleep(600)\n")
    world = World(ALONE, torch.device("cpu"), "none", 0, 10.0, None)
    plan = SavedPlan(draft=Draft(batch=2), units=(("",),))
    with trial._TrialRunner(world, trial.TrialScript("script", str(sleeper), (tmp_path.name,))) as crew:
        assert crew.tried(plan) == trial.TrialOutcome(None, "not finished after 1 s")
    assert processes_with(tmp_path.name) == []


# ---- mistakes ----


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"amp": "bf16", "clip": 1.0}, "amp, clip and auto do not combine: auto decides by itself how the model is"),
        ({"sync_batch_norm": False}, "sync_batch_norm and auto do not combine"),
        ({"auto": Auto, "trials": 0}, "Auto(trials=0): expected 1 or more"),
        ({"auto": Auto, "memory": -1.0}, "Auto(memory=-1.0): expected a number of bytes above 0"),
        ({"auto": Auto, "allow": ("lamb",)}, "Auto(allow=('lamb',)): expected tuple of 'amp'"),
    ],
)
def test_what_auto_cannot_be_with(options: dict[str, Any], line: str) -> None:
    kind = options.pop("auto", None)
    with pytest.raises(UsageError) as caught:
        kind(**options) if kind else Strategy(auto=True, **options)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_words_for_auto() -> None:
    assert Strategy(auto=True).auto == Auto()
    assert Strategy(auto="measure").auto == Auto(measure=True)
    assert Strategy(auto=False).auto is None
    for auto in (True, "measure", Auto(allow=("amp",), memory="60 GB", trials=2)):
        strategy = Strategy(auto=auto)  # type: ignore[arg-type]
        assert Strategy.from_dict(strategy.to_dict()) == strategy


class Curious(Transformer):
    """Leaves torch with its values, which a profile does not have."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.from_numpy(x.numpy().copy()))


def wrong(case: str, path: str) -> None:
    echelon.init()
    torch.manual_seed(3)
    model = Curious() if case == "curious" else make()
    if case == "marks":
        echelon.annotate(model, {"head": split()})
    settings = {"tight": {"memory": 1000.0}, "memory": {"memory": "many"}, "machines": {"cluster": "4xH100"}}
    auto = Auto(**({"cluster": path} | settings.get(case, {})))  # type: ignore[arg-type]
    engine = echelon.distribute(
        model,
        loss=loss_of("transformer"),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        strategy=Strategy(auto=auto),
        cluster=echelon.cluster(average=2) if case == "slices" else None,
        log=QUIET,
    )
    data = data_of("transformer", 12, 1)
    if case == "backward":
        engine.backward(loss_of("transformer")(model(data[0]), data[1]))
    elif case == "evaluate":
        engine.evaluate(torch.utils.data.TensorDataset(*data))
    elif case == "save":
        engine.save(Path(path).parent / "kept")
    else:
        engine.loader(data, global_batch=12)


WRONG = {
    "curious": "cannot be profiled: ",
    "marks": "auto says where parts of the model run, and the model has marks; remove the marks",
    "slices": "auto says which ranks make up a copy of the model; remove cluster= from distribute()",
    "tight": "auto found no plan that fits; the nearest is ",
    "memory": "Auto(memory=...): 'many' is no quantity in bytes",
    "machines": "Auto(cluster='4xH100') has 4 devices, and this job has 2 processes; describe 2, or start 4",
    "backward": "auto finds its plan with the first batch of engine.loader() or engine.step(), and there was none",
    "evaluate": "auto finds its plan with the first batch of engine.loader() or engine.step(), and there was none",
    "save": "auto finds its plan with the first batch of engine.loader() or engine.step(), and there was none",
}


def all_wrong(path: str) -> dict[str, str]:
    found = {}
    for case in WRONG:
        try:
            wrong(case, path)
        except UsageError as error:
            found[case] = str(error)
    return found


def test_mistakes_are_one_line_on_every_rank(directory: Path) -> None:
    for mine in run(all_wrong, str(directory / "here.yaml"), ranks=2):
        assert mine.keys() == WRONG.keys()
        for case, line in WRONG.items():
            assert line in mine[case], case
            assert "\n" not in mine[case], case


def test_an_unfinished_description_of_machines_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("hosts: many\n")
    lines = errors(wrong, "", str(tmp_path / "bad.yaml"), ranks=2)
    assert all("bad.yaml" in line and line.startswith("UsageError") for line in lines)
