"""A servable answers as the model does in evaluation, from files and from servers, and takes deltas while it serves."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import free_port, run
from serving import served
from torch import Tensor, nn

import echelon
from echelon.base.errors import CheckpointError, DataError, UsageError
from echelon.nn import SparseEmbedding
from echelon.parameter_server.servable.export_programs import export_programs
from echelon.parameter_server.servable.servable_head import read_servable_head

DRAW = torch.Generator().manual_seed(1)
IDS, NUMBERS = torch.randint(-40, 40, (96, 3), generator=DRAW), torch.rand(96, 2, generator=DRAW)
#: ids of which most were never trained
ASKED, GIVEN = torch.randint(-90, 90, (11, 3), generator=DRAW), torch.rand(11, 2, generator=DRAW)


class Model(nn.Module):
    """Plain lookups, a shared table, bags with padding, ids computed in the model, batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.ids = SparseEmbedding(4, optimizer="adam", name="ids")
        self.again = SparseEmbedding(4, optimizer="adam", name="ids")
        self.bags = SparseEmbedding(3, combiner="mean", padding_id=0, dtype="int8")
        self.net = nn.Sequential(nn.Linear(21, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))

    def forward(self, ids: Tensor, numbers: Tensor) -> Tensor:
        found = [self.ids(ids).flatten(1), self.again(ids[:, 0] * 7 + 1), self.bags(ids % 5), numbers]
        return self.net(torch.cat(found, 1)).squeeze(1)


def sample() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Model(), (IDS[:4], NUMBERS[:4])


def distributed(strategy: str = "sync") -> tuple[Model, echelon.Engine]:
    echelon.init(seed=0)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    loss = F.mse_loss
    log = echelon.Log(console=False)
    return model, echelon.distribute(
        model, loss=loss, optimizer=optimizer, strategy=echelon.Strategy(ps=strategy), log=log
    )


def output(model: nn.Module) -> Tensor:
    model.eval()
    with torch.no_grad():
        found = model(ASKED, GIVEN)
    model.train()
    return found


def steps(engine: echelon.Engine, first: int, last: int) -> None:
    for at in range(first, last):
        part = slice(at * 8, at * 8 + 8)
        engine.step(IDS[part], NUMBERS[part], NUMBERS[part].sum(1))


def one_process(directory: str) -> dict[str, Any]:
    model, engine = distributed()
    steps(engine, 0, 4)
    engine.save(f"{directory}/ckpt", wait=True)
    wanted = output(model)
    echelon.export_servable(f"{directory}/ckpt", f"{directory}/program", *sample())
    echelon.export_servable(f"{directory}/ckpt", f"{directory}/weights", rows="parquet")
    program = echelon.load_servable(f"{directory}/program")
    weights = echelon.load_servable(f"{directory}/weights", Model())
    alone = torch.cat([program(ASKED[i : i + 1], GIVEN[i : i + 1]) for i in range(len(ASKED))])
    found = {"wanted": wanted, "program": program(ASKED.numpy(), GIVEN.numpy()), "weights": weights(ASKED, GIVEN)}
    with pytest.raises(DataError, match=r"input 1 is float64\[11, 2\]; the servable takes float32\[-1, 2\]"):
        program(ASKED, GIVEN.double())
    engine.close()
    return found | {"alone": alone, "empty": len(program(ASKED[:0], GIVEN[:0]))}


def test_servable_gives_the_models_output_to_the_bit(tmp_path: Path) -> None:
    (found,) = run(one_process, str(tmp_path), ranks=1)
    assert torch.equal(found["program"], found["wanted"])
    assert torch.equal(found["weights"], found["wanted"])
    torch.testing.assert_close(found["alone"], found["wanted"], rtol=0, atol=1e-6)
    assert found["empty"] == 0
    assert len(set(found["wanted"].tolist())) > 5
    with pytest.raises(UsageError, match=r"give the module: load_servable\(..., model=Model\(\)\)"):
        echelon.load_servable(tmp_path / "weights")
    with pytest.raises(UsageError, match="Linear is not the model of"):
        echelon.load_servable(tmp_path / "weights", nn.Linear(1, 1))
    (tmp_path / "program" / "rows-0.safetensors").write_bytes(b"x" * 64)
    with pytest.raises(CheckpointError, match=r"rows-0.safetensors is damaged"):
        echelon.load_servable(tmp_path / "program")


def with_deltas(directory: str) -> list[Any]:
    """Train and write in turns; return the names that were written, and the outputs of the model after each."""
    model, engine = distributed()
    writer = echelon.ServableWriter(engine, directory, *sample(), every=0)
    wrote, outputs = [], []
    for round_ in range(4):
        steps(engine, 2 * round_, 2 * round_ + 2)
        wrote.append(writer.step())
        outputs.append(output(model))
    engine.close()
    return [[path and path.name for path in wrote], outputs]


def test_deltas_lead_a_servable_through_the_versions(tmp_path: Path) -> None:
    """Two workers, two servers; requests that run meanwhile see one version each, and gaps are refused by name."""
    (names, outputs), (others, _) = served(with_deltas, str(tmp_path), servers=2, workers=2)
    assert names == ["servable-00000000", "delta-00000001", "delta-00000002", "delta-00000003"]
    assert others == [None] * 4
    servable = echelon.load_servable(tmp_path / names[0])
    assert torch.equal(servable(ASKED, GIVEN), outputs[0])
    with pytest.raises(UsageError, match=r"apply delta-00000001 first"):
        servable.update(tmp_path / names[2])
    assert servable.version == 0
    seen, stop = [], threading.Event()
    asking = threading.Thread(target=lambda: [seen.append(servable(ASKED, GIVEN)) for _ in iter(stop.is_set, True)])
    asking.start()
    assert servable.update(tmp_path / names[1]) == 1
    assert torch.equal(servable(ASKED, GIVEN), outputs[1])
    assert servable.follow(tmp_path) == 2
    stop.set()
    asking.join()
    assert seen
    assert all(any(torch.equal(each, wanted) for wanted in outputs) for each in seen)
    assert torch.equal(servable(ASKED, GIVEN), outputs[3])
    assert (servable.version, servable.step) == (3, 8)
    with pytest.raises(UsageError, match="leads to version 3; the servable is at version 3 already"):
        servable.update(tmp_path / names[3])
    with pytest.raises(UsageError, match="is a delta; load a whole servable"):
        echelon.load_servable(tmp_path / names[1])


def saved(directory: str) -> Tensor:
    model, engine = distributed()
    steps(engine, 0, 2)
    engine.save(f"{directory}/ckpt", wait=True)
    wanted = output(model)
    engine.close()
    return wanted


def test_rows_by_reference_come_from_read_only_servers(tmp_path: Path) -> None:
    """The rows stay on servers, for a servable that the command writes."""
    (wanted,) = run(saved, str(tmp_path), ranks=1)
    endpoint = f"127.0.0.1:{free_port()}"
    echelon_command = [sys.executable, "-m", "echelon"]
    reading = ["serve", "--read-only", str(tmp_path / "ckpt"), "--endpoint", endpoint]
    serving = subprocess.Popen([*echelon_command, *reading])
    try:
        options = ["--servable", "--rows", endpoint]
        written = subprocess.run(
            [*echelon_command, "export", str(tmp_path / "ckpt"), str(tmp_path / "out"), *options],
            check=True,
            capture_output=True,
            text=True,
        )
        assert f"written to {tmp_path / 'out'}: weights" in written.stdout
        assert f"on {endpoint}" in written.stdout
        assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["dense.safetensors", "servable.json"]
        remote = echelon.load_servable(tmp_path / "out", Model(), timeout=60)
        assert torch.equal(remote(ASKED, GIVEN), wanted)
        remote.close()
    finally:
        serving.terminate()
        serving.wait()


class Chained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = SparseEmbedding(1), SparseEmbedding(2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.second((self.first(ids) * 100).long()).sum((1, 2, 3))


class Branching(Chained):
    def forward(self, ids: Tensor) -> Tensor:
        return self.first(ids) if ids.sum() > 0 else self.second(ids)


def test_models_that_torch_cannot_export_get_one_line() -> None:
    with pytest.raises(UsageError, match=r"table 'second' computes its ids from rows of another lookup.*--model out"):
        export_programs(Chained().eval(), (IDS[:4],))
    with pytest.raises(UsageError, match=r"torch.export cannot trace Branching: .*load_servable\(DIR, model=...\)"):
        export_programs(Branching().eval(), (IDS[:4],))
    with pytest.raises(UsageError, match="give two samples"):
        export_programs(Model().eval(), (IDS[:1], NUMBERS[:1]))


def test_servable_head_is_refused_when_damaged(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no servable at .*: there is no servable.json"):
        read_servable_head(tmp_path)
    for text in ("[]", '{"tables": 3}', '{"tables": [], "lineage": "x", "format": 2}', "{"):
        (tmp_path / "servable.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"servable.json is damaged: .*; export it again"):
            read_servable_head(tmp_path)


def test_layers_cover_and_fold_to_the_same_rows() -> None:
    """A delta above the tables, and the same delta written into them, read the same."""
    from echelon.parameter_server.protocol.job_spec import Initializer
    from echelon.parameter_server.servable.served_rows import LocalRows, RowLayer, ServedTable, put_weights
    from echelon.parameter_server.table import Table

    spec = ServedTable(name="t", dim=2, seed=5, initializer=Initializer())
    draw = np.random.default_rng(0)
    table, ids = Table(spec.spec), np.arange(-50, 50)
    put_weights(table, ids[:60], draw.random((60, 2), np.float32))
    before = table.pull(ids).copy()
    changed, removed = np.array([-3, 44, 2**62]), np.array([-50, 49])
    weights = draw.random((3, 2), np.float32)
    layered = LocalRows({"t": table}, {"t": RowLayer(spec, changed, weights, removed)})
    wanted = before.copy()
    wanted[[47, 94]], wanted[[0, 99]] = weights[:2], Table(spec.spec).pull(removed)
    assert (layered.pull({"t": ids})["t"] == wanted).all()
    folded = layered.fold()
    assert (folded.pull({"t": ids})["t"] == wanted).all()
    assert (folded.pull({"t": changed})["t"] == weights).all()
    assert len(table) == 61
