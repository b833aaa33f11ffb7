"""Records of runs in Weights & Biases and MLflow, offline, with the real libraries in processes of their own."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import sys, time
import torch
import echelon

echelon.init()
directory, way = sys.argv[1:]
torch.manual_seed(0)
net = torch.nn.Linear(3, 1)
engine = echelon.distribute(
    net,
    loss=torch.nn.functional.mse_loss,
    optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
    checkpoint=directory + "/saved",
    log=echelon.Log(every=2, dir=directory, grad_norm=True, to=["{library}"]),
)
for step in range(4):
    engine.step(torch.ones(4, 3), torch.full((4, 1), float(step)))
    engine.log({{"own number, scaled": step}})
    while way == "open" and engine.steps == 2 and not __import__("pathlib").Path(directory, "trackers.json").exists():
        time.sleep(0.1)  # so that the library is open, and has its exit handlers, long before the end
engine.evaluate([(torch.ones(1, 3), torch.ones(1, 1))])
if way == "close":
    engine.save(wait=True)
    engine.close()
if way == "fail":
    raise ValueError("it failed")
"""


def train(library: str, directory: Path, way: str) -> None:
    """Run the script, which ends by ``engine.close()``, by its last line or by an error."""
    environment = os.environ | {
        "WANDB_MODE": "offline", "WANDB_DIR": str(directory.parent), "WANDB_PROJECT": "digits", "WANDB_SILENT": "true",
        "MLFLOW_TRACKING_URI": (directory.parent / "ml").as_uri(), "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_RUN_NAME": "first", "MLFLOW_EXPERIMENT_NAME": "digits", "SOME_TOKEN": "secret", "NCCL_KEY": "secret",
    }  # fmt: skip
    words = [sys.executable, "-c", SCRIPT.format(library=library), str(directory), way]
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == (way == "fail"), ended.stderr
    assert "training goes on" not in ended.stdout


def losses(directory: Path) -> list[float]:
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if "loss" in record]


# ---- Weights & Biases ----


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of an offline run: protobuf messages in a log of LevelDB's form."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, message = path.read_bytes(), b""
    assert data.startswith(b":W&B")
    at = 7
    while at + 7 <= len(data):
        if 2**15 - at % 2**15 < 7:  # padding at the end of a block
            at += 2**15 - at % 2**15
            continue
        size, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        message += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last piece
            yield Record.FromString(message)
            message = b""


def wandb_runs(directory: Path) -> list[dict[str, Any]]:
    found = []
    for path in sorted(directory.glob("wandb/offline-run-*/*.wandb")):
        run: dict[str, Any] = {"config": {}, "rows": [], "exit": None}
        for record in wandb_records(path):
            if record.HasField("run"):
                run |= {"id": record.run.run_id, "project": record.run.project}
            for item in [*record.run.config.update, *record.config.update]:
                run["config"]["/".join([item.key, *item.nested_key])] = json.loads(item.value_json)
            if record.HasField("history"):
                items = record.history.item
                run["rows"].append({"".join([i.key, *i.nested_key]): json.loads(i.value_json) for i in items})
            if record.HasField("exit"):
                run["exit"] = record.exit.exit_code
        found.append(run)
    return found


@pytest.mark.parametrize("way", ["open", "fail"])
def test_wandb_has_the_run_however_it_ends(way: str, tmp_path: Path) -> None:
    train("wandb", tmp_path / "run", way)
    (found,) = wandb_runs(tmp_path)
    assert found["project"] == "digits"
    assert found["exit"] == (way == "fail")
    assert "secret" not in str(found["config"])
    assert "mse" not in found["config"]
    settings = [value for name, value in found["config"].items() if name.startswith("settings")]
    assert "gradient_merge" in str(found["config"])
    assert settings
    rows = found["rows"]
    assert [row["own number, scaled"] for row in rows if "own number, scaled" in row] == [0, 1, 2, 3]
    assert [row["train/loss"] for row in rows if "train/loss" in row] == pytest.approx(losses(tmp_path / "run"))
    assert len([row for row in rows if row.get("train/gradient_norm", 0) > 0]) == 2
    assert [row["step"] for row in rows if "train/eval_loss" in row] == [4]


def test_wandb_goes_on_with_the_run_of_a_checkpoint(tmp_path: Path) -> None:
    for way in ("close", "close"):
        train("wandb", tmp_path / "run", way)
    first, second = wandb_runs(tmp_path)
    assert first["id"] == second["id"]
    assert [row["step"] for row in second["rows"] if "train/loss" in row] == [6, 8]
    assert (first["exit"], second["exit"]) == (0, 0)


# ---- MLflow ----


@pytest.mark.parametrize(("way", "status"), [("close", "FINISHED"), ("fail", "FAILED")])
def test_mlflow_has_the_run_and_goes_on_with_it(
    way: str, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    train("mlflow", tmp_path / "run", way)
    client = MlflowClient((tmp_path / "ml").as_uri())
    experiment = client.get_experiment_by_name("digits")
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.run_name, found.info.status) == ("first", status)
    assert found.data.params["plan.mesh.replicate"] == "1"
    assert "secret" not in str(found.data.params)

    def history(name: str) -> list[tuple[int, float]]:
        return [(metric.step, metric.value) for metric in client.get_metric_history(found.info.run_id, name)]

    assert sorted(history("own number_ scaled")) == [(1, 0.0), (2, 1.0), (3, 2.0), (4, 3.0)]
    assert [value for _, value in history("train/loss")] == pytest.approx(losses(tmp_path / "run"))
    if way == "close":
        train("mlflow", tmp_path / "run", way)
        (found,) = client.search_runs([experiment.experiment_id])
        assert [step for step, _ in history("train/loss")] == [2, 4, 6, 8]
        assert found.info.status == "FINISHED"
