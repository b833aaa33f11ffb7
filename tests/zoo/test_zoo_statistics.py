"""Statistics are those one counts by hand, and cost nothing to find."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from echelon.nn import SparseEmbedding
from echelon.zoo.entry import Request
from echelon.zoo.train.parameters import PARAMETERS
from echelon.zoo.train.statistics import LayerStatistics, show, statistics


def three_layers() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 4 * 4, 10)
    )


BATCH = (torch.zeros(6, 3, 4, 4), torch.zeros(6, dtype=torch.long))


def test_figures_are_those_counted_by_hand() -> None:
    model = three_layers()
    adam = torch.optim.Adam(model.parameters())
    found = statistics(model, BATCH, adam)
    assert found.rows == (
        LayerStatistics("0", "Conv2d", "[n, 8, 4, 4]", 8 * 3 * 9 + 8, 16 * 8 * 3 * 9),
        LayerStatistics("2", "BatchNorm2d", "[n, 8, 4, 4]", 16, 0),
        LayerStatistics("4", "Linear", "[n, 10]", 1290, 1280),
    )
    parameters = 224 + 16 + 1290
    assert (found.parameters, found.trained, found.multiply_adds) == (parameters, parameters, 3456 + 1280)
    buffers = 4 * (8 + 8) + 8  # running mean and variance, and a counter
    assert (found.weights, found.gradients, found.state) == (4 * parameters + buffers, 4 * parameters, 8 * parameters)
    # kept: the input, what the ReLU gave (to it and to the norm), the norm's output (viewed by the linear layer)
    kept = 4 * (3 * 16 + 128 + 128)
    assert found.activations == pytest.approx(kept, abs=4 * 2 * 8)  # and a mean and a deviation for each channel
    rest = found.weights + found.gradients + 8 * parameters
    assert found.memory == rest + 6 * (found.activations or 0)
    assert statistics(model, BATCH, adam, samples=64).memory == rest + 64 * (found.activations or 0)


def test_the_model_and_the_random_numbers_are_left_alone() -> None:
    model = three_layers()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    statistics(model, BATCH)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert model.training
    assert not model[0]._forward_hooks  # type: ignore[index, union-attr]


def test_tied_parameters_count_once_and_frozen_have_no_gradients() -> None:
    words, out = nn.Embedding(50, 4), nn.Linear(4, 50, bias=False)
    out.weight = words.weight
    between = nn.Linear(4, 4).requires_grad_(False)
    model = nn.Sequential(words, between, out)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = statistics(model, (torch.zeros(2, 7, dtype=torch.long), None), optimizer)
    assert [row.parameters for row in found.rows] == [200, 20, 0]
    assert [row.multiply_adds for row in found.rows] == [0, 7 * 16, 7 * 200]
    assert (found.parameters, found.trained, found.gradients, found.state) == (220, 200, 800, 0)
    assert "parameters: 220, of which 20 are not trained" in show(found)


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (2, 12)).transpose(1, 2).chunk(3, -1)
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def test_attention_counts_for_the_module_that_does_it() -> None:
    found = statistics(Attends(), (torch.zeros(2, 5, 8), None))
    assert [(row.name, row.multiply_adds) for row in found.rows] == [("(model)", 2 * 5 * 5 * 8), ("qkv", 5 * 8 * 24)]


def test_parameter_server_tables_give_rows_without_a_server() -> None:
    """Tables of parameter servers are listed with their output shapes, without a request to a server."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = SparseEmbedding(4), nn.Linear(3 * 4, 1)

        def forward(self, ids: Tensor) -> Tensor:
            out: Tensor = self.head(self.table(ids).flatten(1))
            return out

    found = statistics(Wide(), (torch.zeros(2, 3, dtype=torch.long), None))
    assert found.rows == (
        LayerStatistics("table", "SparseEmbedding", "[n, 3, 4]", 0, 0),
        LayerStatistics("head", "Linear", "[n, 1]", 13, 12),
    )


def test_model_that_reads_values_has_its_parameters_listed() -> None:
    """A model whose forward reads values has its parameters counted, and its operations are not known."""

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(x)
            return out * 2 if float(x.sum()) > 0 else out

    model = Looks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = statistics(model, (torch.zeros(2, 3), None), optimizer)
    assert (found.parameters, found.multiply_adds, found.activations, found.state) == (8, None, None, 32)
    assert "multiply-adds: not known" in show(found)


def test_resnet_50_has_the_multiply_adds_that_are_known_of_it() -> None:
    from echelon.zoo import registry
    from echelon.zoo.models import resnet  # noqa: F401

    model = registry._models["resnet_v1_50"]
    values = {one.name: one.default for one in (*PARAMETERS, *model.settings)} | dict(model.defaults)
    with torch.device("meta"):
        built = model.build(Request(values | {"num_classes": 1000}, "classify_images"))
    found = statistics(built, (torch.empty(4, 3, 224, 224, device="meta"), None))
    assert (found.parameters, found.multiply_adds) == (25_557_032, 4_089_184_256)


def test_the_table_is_aligned() -> None:
    head, *rows = show(statistics(model := three_layers(), BATCH, torch.optim.Adam(model.parameters()))).splitlines()
    assert head.split() == ["layer", "kind", "output", "parameters", "multiply-adds", "share"]
    assert rows[0].split() == ["0", "Conv2d", "[n,", "8,", "4,", "4]", "224", "3,456", "73.0%"]
    assert rows[-1].startswith("memory: weights 6.19 kB, gradients 6.12 kB, optimizer state 12.2 kB, activations of 6")
    assert {len(head), *map(len, rows[:3])} == {len(head)}
