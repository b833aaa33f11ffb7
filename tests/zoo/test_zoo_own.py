"""Models, data sets, losses and parameters of the user in ``echelon train``, as docs/zoo.md shows them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run
from training import train_here

import echelon
from echelon.base.errors import UsageError
from echelon.cli.launcher_options import launcher_options
from echelon.distributed.world import seed_everything
from echelon.zoo.registry import dataset, model
from echelon.zoo.tasks import loss_of
from echelon.zoo.train.resolve import TrainConfig, resolve
from echelon.zoo.train.train_arguments import sort_words
from echelon.zoo.zoo_tables import show_zoo_entry

PAGE = Path(__file__).parent.parent.parent / "docs" / "zoo.md"

OWN = ("--model_name", "my.py:Net", "--dataset_name", "my.py:rows", "--rows", "48", "--width", "12")
TUNED = ("--task_type", "finetune", "--ckpt_file_name", "one/checkpoints", "--max_gradient_norm", "1e-30")
BRIEF = (
    "--weight_decay",
    "0",
    "--learning_rate",
    "0.05",
    "--optimizer",
    "momentum",
    "--learning_rate_decay_type",
    "fixed",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the file that the page shows."""
    made = tmp_path_factory.mktemp("own")
    found = re.search(r"```python\n# my\.py\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    (made / "my.py").write_text(found[1])
    return made


def trained(all_words: list[tuple[str, ...]], directory: str) -> list[dict[str, Any]]:
    """Return the last line of each of these runs, on the rank that says it."""
    found = []
    echelon.init()
    for words in all_words:
        seed_everything(0)  # as a process of its own begins
        lines = train_here((*words, *BRIEF), directory).splitlines()
        found.append(json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {})
    return found


def steps(count: int, batch: int, where: str) -> tuple[str, ...]:
    return ("--stop_at_step", str(count), "--batch_size", str(batch), "--output_dir", where)


def test_own_model_and_data_on_two_ranks_equal_one_process(folder: Path) -> None:
    """Replicas with a resume between, stages, and a finetuning that begins where the run of one process ended."""
    (one,) = run(trained, [(*OWN, *steps(6, 8, "one"))], str(folder), ranks=1)[0]
    found = run(
        trained,
        [
            (*OWN, *steps(3, 4, "two")),
            (*OWN, *steps(6, 4, "two"), "--eval_every_n_iters", "3"),
            (*OWN, *steps(6, 8, "staged"), "--stages", "2", "--micro-batches", "2"),
            (*OWN, *steps(1, 4, "tuned"), *TUNED),
        ],
        str(folder),
        ranks=2,
    )[0]
    assert one["model"] == "my.py:Net"
    assert [each["steps"] for each in found] == [3, 6, 6, 1]
    for name in ("final_loss", "test_loss", "accuracy"):
        assert found[1][name] == pytest.approx(one[name], rel=1e-5), name
        assert found[2][name] == pytest.approx(one[name], rel=1e-5), name
    assert found[3]["test_loss"] == pytest.approx(one["test_loss"], rel=1e-6)


# ---- their parameters ----


def resolved(*words: str) -> TrainConfig:
    return resolve(sort_words(words, launcher_options()))


def written(path: Path, source: str) -> str:
    path.write_text("from typing import Literal\n\nimport torch\nfrom torch import nn\n\n\n" + source)
    return str(path)


SEVERAL = """
class Net(nn.Module):
    def __init__(self, depth: int, width=8, rate: float | None = None, widths=(4, 2), kind: Literal["a", "b"] = "a",
                 num_classes=7, act=nn.ReLU, **rest):
        super().__init__()
        self.got = depth, width, rate, widths, kind, num_classes, act, rest

class Staged(nn.Module):
    def __init__(self, stages=4):
        super().__init__()

class Judged(nn.Module):
    task = "regress"
    @staticmethod
    def loss(output, target):
        return (output - target).abs().mean()

class Bound(nn.Module):
    def loss(self, output, target):
        return output

class Lost(nn.Module):
    task = "regres"

def floats():
    return torch.zeros(4, 2), torch.zeros(4)

class Parts(torch.utils.data.Dataset):
    classes = ("x", "y")
    def __init__(self, train=True, size=3):
        self.size = size if train else 1
    def __len__(self):
        return self.size
    def __getitem__(self, index):
        return torch.zeros(2), 1

def nothing():
    return 3
"""


def test_arguments_become_typed_parameters(tmp_path: Path) -> None:
    place = written(tmp_path / "nets.py", SEVERAL)
    asked = ("--depth", "3", "--width", "16", "--rate", "0.5", "--widths", "8,4", "--kind", "b")
    found = resolved("--model_name", f"{place}:Net", *asked)
    got = found.model.build(found.request).got
    assert got == (3, 16, 0.5, (8, 4), "b", 7, torch.nn.ReLU, {})
    assert found.values["num_classes"].origin == "model"
    data = resolved("--model_name", f"{place}:Judged", "--dataset_name", f"{place}:Parts", "--size", "5")
    opened = data.dataset.open(data.request)
    assert (len(opened.train), len(opened.test), opened.facts) == (5, 1, {"num_classes": 2})
    assert loss_of("regress", "example", data.model.loss)(torch.ones(2), torch.zeros(2)) == 1.0
    assert "--depth" in show_zoo_entry(f"{place}:Net", as_json=False)
    assert "--size" in show_zoo_entry(f"{place}:Parts", as_json=False)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--model_name {0}:Net", "--depth is missing: of .*nets.py:Net, which has no default; give it"),
        ("--model_name {0}:Net --depth 1 --widht 3", "there is no parameter 'widht' .*; did you mean 'width'"),
        ("--model_name {0}:Net --depth many", "--depth many: expected int"),
        ("--model_name {0}:Net --depth 1 --kind c", "--kind c: expected 'a' or 'b'"),
        ("--model_name {0}:Nett", "there is no callable 'Nett' in .*nets.py; did you mean 'Net'?"),
        ("--model_name nowhere.py:Net", "--model_name: no file at 'nowhere.py'"),
        (
            "--model_name {0}:Staged",
            "its argument 'stages' has the name of --stages, which is the run's own; rename it",
        ),
        ("--model_name {0}:Bound", r"Bound.loss: a loss is called with \(output, target\).* @staticmethod"),
        ("--model_name {0}:Lost", "there is no task 'regres'; did you mean 'regress'?"),
        ("--model_name lenot", "the nearest are lenet, .* one of your own is file.py:Name"),
        ("--model_name resnet50", "the nearest are resnet_v1_50, "),
        ("--model_name vgg", "the nearest are vgg_1"),
        ("--model_name lenet --dataset_name digitz", "did you mean 'digits'"),
    ],
)
def test_a_mistake_with_own_parts_is_one_line(words: str, line: str, tmp_path: Path) -> None:
    place = written(tmp_path / "nets.py", SEVERAL)
    with pytest.raises(UsageError, match=line) as caught:
        resolved(*words.format(place).split())
    assert "\n" not in str(caught.value)


def test_own_data_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    place = written(tmp_path / "nets.py", SEVERAL)
    for name, line in (("floats", "its targets are floats"), ("nothing", "gave int; it must make a torch Dataset")):
        found = resolved("--model_name", f"{place}:Net", "--depth", "1", "--dataset_name", f"{place}:{name}")
        with pytest.raises(UsageError, match=line):
            found.dataset.open(found.request)
    with pytest.raises(UsageError, match=r"it must make a torch\.nn\.Module"):
        model(f"{place}:floats").build(resolved("--model_name", "lenet").request)
    assert dataset("mock_image") is dataset("mock")
