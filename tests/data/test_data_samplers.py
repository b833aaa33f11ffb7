"""Orders drawn by samplers, and torch DataLoaders in place of data sets: one process's, on any number of ranks."""

from __future__ import annotations

import contextlib
import io
import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import run
from torch import nn
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import echelon
from echelon.base.errors import DataError, EchelonError, UsageError
from echelon.data import Loader
from echelon.data.torch_loader import loader_request


class Numbers(Dataset[Any]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.size:
            raise IndexError(index)
        return index


class Pairs(Sampler[int]):
    """A user's sampler: draws from Python and numpy, and knows no length."""

    def __iter__(self) -> Iterator[int]:
        order = np.random.permutation(20)
        for at in order:
            yield int(at)
            if random.random() < 0.5:
                yield int(at)


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield int(torch.randint(50, ()))


class Growing(Sampler[list[int]]):
    """Batches of 1, 2, 3, ... in another order each epoch."""

    def __init__(self, batches: int) -> None:
        self.batches, self.epoch = batches, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[list[int]]:
        order = iter(torch.randperm(50, generator=torch.Generator().manual_seed(self.epoch)).tolist())
        for size in range(1, self.batches + 1):
            yield list(itertools.islice(order, size))


def seeded(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


DATA = Numbers(50)
SAMPLERS: dict[str, Any] = {
    "weighted": lambda: WeightedRandomSampler(torch.arange(50.0), 37),
    "weighted, seeded": lambda: WeightedRandomSampler(torch.arange(50.0), 37, generator=seeded()),
    "replacement": lambda: RandomSampler(DATA, replacement=True, num_samples=61),
    "replacement, seeded": lambda: RandomSampler(DATA, replacement=True, num_samples=61, generator=seeded()),
    "subset": lambda: SubsetRandomSampler([3, 1, 4, 15, 9, 2, 6, 5, 35, 8, 49]),
    "some": lambda: RandomSampler(DATA, num_samples=30, generator=seeded()),
    "list": lambda: [4, 4, 2, 0, 49, 7, 7],
    "own": Pairs,
}


def drawn(world_size: int, global_batch: int = 6, epochs: int = 2, **options: Any) -> list[tuple[list[int], ...]]:
    """Each rank's samples in every step; a rank that has none left counts for nothing."""
    ranks = []
    for rank in range(world_size):
        shares: list[int] = []
        made = {name: make() for name, make in options.items() if name in ("sampler", "batch_sampler")}
        size = {} if "batch_sampler" in made else {"batch_size": global_batch // world_size}
        loader = Loader(
            DATA,
            **{"uneven": "join", "on_share": shares.append, **options, **made, **size},
            rank=rank,
            world_size=world_size,
            seed=5,
        )
        steps = [(batch.tolist(), shares[-1]) for _ in loader.epochs(epochs) for batch in loader]
        ranks.append([numbers[:share] for numbers, share in steps])
    return list(zip(*ranks, strict=True))


def joined(steps: list[tuple[list[int], ...]]) -> list[list[int]]:
    return [list(itertools.chain(*step)) for step in steps]


@pytest.mark.parametrize("kind", SAMPLERS)
def test_sampler_gives_every_number_of_ranks_the_same_steps(kind: str) -> None:
    alone = joined(drawn(1, sampler=SAMPLERS[kind]))
    assert alone
    for ranks in (2, 3):
        assert joined(drawn(ranks, sampler=SAMPLERS[kind])) == alone
    assert joined(drawn(2, sampler=SAMPLERS[kind], workers=2)) == alone
    if kind not in ("list",):
        half = len(alone) // 2
        assert alone[:half] != alone[half : 2 * half], "each epoch is drawn anew"


@pytest.mark.parametrize("kind", ["weighted, seeded", "replacement, seeded", "some"])
def test_seeded_sampler_gives_torchs_own_order(kind: str) -> None:
    """The generator runs on from epoch to epoch, as in torch's DataLoader of one process."""
    sampler = SAMPLERS[kind]()
    torchs = [batch.tolist() for _ in range(2) for batch in DataLoader(DATA, batch_size=6, sampler=sampler)]
    assert joined(drawn(2, sampler=SAMPLERS[kind])) == torchs


def test_sampler_leaves_the_process_its_randomness() -> None:
    generator = seeded()
    loader = Loader(DATA, batch_size=4, sampler=RandomSampler(DATA, generator=generator))
    torch.manual_seed(1)
    before, own = torch.get_rng_state(), generator.get_state()
    first = [batch.tolist() for batch in loader]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(generator.get_state(), own)
    torch.rand(9, generator=generator)  # the user's own draw shifts nothing
    again = Loader(DATA, batch_size=4, sampler=RandomSampler(DATA, generator=seeded()))
    assert first == [batch.tolist() for batch in again]


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize("uneven", ["pad", "drop"])
def test_sampler_end_of_epoch_holds_only_what_was_drawn(kind: str, uneven: str) -> None:
    alone = joined(drawn(1, sampler=SAMPLERS[kind]))
    for steps in (drawn(2, sampler=SAMPLERS[kind], uneven=uneven), drawn(3, sampler=SAMPLERS[kind], uneven=uneven)):
        assert all(len({len(share) for share in step}) == 1 for step in steps)
        full = [batch for batch in alone if uneven == "pad" or len(batch) == 6]
        for whole, step in zip(full, joined(steps), strict=True):
            assert step[: len(whole)] == whole
            assert set(step) <= {number for batch in alone for number in batch}


@pytest.mark.parametrize("kind", [*SAMPLERS, "batches"])
@pytest.mark.parametrize("epochs", [0, 1])
def test_sampler_goes_on_after_a_stop(kind: str, epochs: int) -> None:
    def loader() -> Loader:
        if kind == "batches":
            return Loader(DATA, batch_sampler=Growing(6))
        return Loader(DATA, batch_size=3, sampler=SAMPLERS[kind]())

    whole = [batch.tolist() for one in [loader()] for _ in one.epochs(3) for batch in one]
    stopped, found = loader(), []
    for epoch in stopped.epochs(3):
        for batch in stopped:
            found.append(batch.tolist())
            if epoch == epochs and stopped.position == 2:
                break
        if epoch == epochs:
            break
    fresh = loader()
    fresh.load_state_dict(stopped.state_dict())
    found += [batch.tolist() for _ in fresh.epochs(3) for batch in fresh]
    assert found == whole


def test_sampler_after_break_draws_the_next_epoch() -> None:
    loader = Loader(DATA, batch_size=4, sampler=RandomSampler(DATA, generator=seeded()))
    whole = [[batch.tolist() for batch in loader] for _ in range(3)]
    loader = Loader(DATA, batch_size=4, sampler=RandomSampler(DATA, generator=seeded()))
    next(iter(loader))
    assert [batch.tolist() for batch in loader] == whole[1]


@pytest.mark.parametrize("sampler", [Endless(), RandomSampler(DATA, replacement=True, num_samples=10**10)])
def test_sampler_without_end_is_read_as_needed(sampler: Any) -> None:
    ranks = [Loader(DATA, batch_size=2, sampler=sampler, rank=rank, world_size=2) for rank in (0, 1)]
    alone = Loader(DATA, batch_size=4, sampler=sampler)
    found = []
    for _ in range(2):
        steps = zip(*map(iter, ranks), iter(alone), strict=True)
        for one, two, whole in itertools.islice(steps, 600):
            assert [*one.tolist(), *two.tolist()] == whole.tolist()
            found.append(whole.tolist())
            torch.rand(1)  # what the model draws in between is its own
    again = Loader(DATA, batch_size=4, sampler=sampler)
    assert found == [whole.tolist() for _ in range(2) for whole in itertools.islice(again, 600)]
    if isinstance(sampler, Endless):
        with pytest.raises(DataError, match="Endless is not known before it is read"):
            len(alone)
    else:
        assert len(alone) == 25 * 10**8


def test_batch_sampler_deals_out_global_batches() -> None:
    growing = [batch for epoch in range(2) for one in [Growing(7)] for _ in [one.set_epoch(epoch)] for batch in one]
    for ranks in (1, 2, 3):
        steps = drawn(ranks, batch_sampler=lambda: Growing(7))
        assert joined(steps) == growing
        assert all(max(map(len, step)) - min(map(len, step)) <= 1 for step in steps)
    loader = Loader(DATA, batch_sampler=Growing(7), rank=1, world_size=3)
    assert (len(loader), loader.global_batch) == (7, 1)
    assert len(Loader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 8, True))) == 6


def test_sampler_serves_buckets_and_tensors() -> None:
    lengths = [1 + n % 7 for n in range(50)]
    picked = [
        Loader(DATA, batch_size=5, sampler=SAMPLERS["subset"](), lengths=lengths),
        Loader(DATA, batch_size=5, sampler=SAMPLERS["subset"]()),
    ]
    first, second = (sorted(n for batch in loader for n in batch.tolist()) for loader in picked)
    assert first == second
    tensors = Loader((torch.arange(50),), batch_size=5, sampler=SAMPLERS["subset"]())
    assert sorted(n for (batch,) in tensors for n in batch.tolist()) == second


class Moved(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(23))


class Prefetcher:
    def __init__(self) -> None:
        self.inner = DataLoader(DATA, batch_size=4)

    def __iter__(self) -> Iterator[Any]:
        yield from self.inner


def requested(data: Any, *sizes: int | None, **options: Any) -> dict[str, Any]:
    batch_size, global_batch = sizes or (None, None)
    asked = loader_request(data, batch_size, global_batch, options)
    return {"batch_size": asked.batch_size, "global_batch": asked.global_batch, **asked.options}


def test_generator_given_here_gives_torchs_order() -> None:
    torchs = [batch.tolist() for batch in DataLoader(DATA, 6, shuffle=True, generator=seeded())]
    for data in (DATA, (torch.arange(50),), TensorDataset(torch.arange(50))):
        found = requested(data, 6, None, generator=seeded(), drop_last=False)
        found.pop("global_batch")
        batches = list(Loader(data, **found))
        assert [(batch if data is DATA else batch[0]).tolist() for batch in batches] == torchs
    with pytest.raises(UsageError, match="Moved is read in its own"):
        requested(Moved(), 6, None, generator=seeded())


def named(batch: list[Any]) -> list[Any]:
    return batch


@pytest.mark.parametrize(
    ("loader", "options", "expected"),
    [
        (DataLoader(DATA, 8), {}, {"batch_size": 8, "shuffle": False, "uneven": "join", "workers": 0}),
        (DataLoader(DATA, 8, shuffle=True, drop_last=True), {}, {"shuffle": True, "uneven": "drop"}),
        (DataLoader(DATA, 8, num_workers=2, prefetch_factor=5), {}, {"workers": 2, "prefetch": 5}),
        (DataLoader(DATA, 8, num_workers=2), {"num_workers": 1, "drop_last": True}, {"workers": 1, "uneven": "drop"}),
        (DataLoader(DATA, 8, collate_fn=named), {}, {"collate": named}),
        (DataLoader(DATA, 8, shuffle=True), {"shuffle": False, "seed": 4}, {"shuffle": False, "seed": 4}),
        (DataLoader(Moved(), 8, num_workers=2), {}, {"batch_size": 8, "shuffle": False, "uneven": "join"}),
    ],
)
def test_torch_loader_options_are_taken(loader: Any, options: dict[str, Any], expected: dict[str, Any]) -> None:
    found = requested(loader, **options)
    assert {name: found[name] for name in expected} == expected


def test_torch_loader_batch_sizes_given_here_prevail() -> None:
    assert requested(DataLoader(DATA, 8), 4, None)["batch_size"] == 4
    found = requested(DataLoader(DATA, 8), None, 16)
    assert (found["batch_size"], found["global_batch"]) == (None, 16)
    own = requested(DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 8, True)), None, 16)
    assert (own["uneven"], own["shuffle"], "batch_sampler" in own) == ("drop", True, False)
    options = {"pin_memory": True, "persistent_workers": True, "collate_fn": None, "sampler": None}
    assert requested(DATA, 8, None, **options) == {"batch_size": 8, "global_batch": None}


TORCHS: dict[str, Any] = {
    "plain": lambda g: DataLoader(DATA, 6),
    "shuffle": lambda g: DataLoader(DATA, 6, shuffle=True, generator=g),
    "drop": lambda g: DataLoader(DATA, 6, shuffle=True, generator=g, drop_last=True),
    "workers": lambda g: DataLoader(DATA, 6, shuffle=True, generator=g, num_workers=1),
    "weighted": lambda g: DataLoader(DATA, 6, sampler=WeightedRandomSampler(torch.arange(50.0), 37, generator=g)),
    "both": lambda g: DataLoader(DATA, 6, sampler=RandomSampler(DATA, num_samples=20, generator=g), generator=g),
    "batches": lambda g: DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA, generator=g), 6, False)),
    "grown": lambda g: DataLoader(DATA, batch_sampler=Growing(5)),
    "part": lambda g: DataLoader(DATA, 6, sampler=SequentialSampler(range(13))),
    "stream": lambda g: DataLoader(Moved(), 6),
}


@pytest.mark.parametrize("kind", TORCHS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_torch_loader_is_one_processes_on_any_number_of_ranks(kind: str, ranks: int) -> None:
    """With the global batch kept, an unmodified DataLoader of one process is the reference."""
    plain = TORCHS[kind](seeded())
    epochs = [
        [batch.tolist() for batch in plain]
        for epoch in range(2)
        for _ in [kind == "grown" and plain.batch_sampler.set_epoch(epoch)]
    ]
    found = []
    for rank in range(ranks):
        has_batches = kind in ("batches", "grown")
        asked = loader_request(TORCHS[kind](seeded()), None, None if has_batches else 6, {})
        shares: list[int] = []
        size = {} if has_batches else {"batch_size": 6 // ranks}
        place = {"rank": rank, "world_size": ranks, "on_share": shares.append}
        loader = Loader(asked.dataset, **size, **place, **asked.options)
        found.append([(batch.tolist(), shares[-1]) for _ in loader.epochs(2) for batch in loader])
    steps = [[n for numbers, share in step for n in numbers[:share]] for step in zip(*found, strict=True)]
    assert steps == [batch for epoch in epochs for batch in epoch]
    if kind != "stream":
        assert len(loader) == len(plain) == len(epochs[0])


@pytest.mark.parametrize("drop_last", [True, False])
def test_distributed_sampler_is_dealt_out_as_it_was(drop_last: bool) -> None:
    """Each global batch holds what the ranks of a DDP job held together in that step."""
    ddp = []
    for rank in range(2):
        sampler = DistributedSampler(DATA, num_replicas=2, rank=rank, seed=4, drop_last=drop_last)
        loader = DataLoader(DATA, 5, sampler=sampler)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            ddp.append([batch.tolist() for batch in loader])
    expected = [sorted(one + two) for one, two in zip([*ddp[0], *ddp[1]], [*ddp[2], *ddp[3]], strict=True)]
    mine = DistributedSampler(DATA, num_replicas=2, rank=1, seed=4, drop_last=drop_last)
    asked = loader_request(DataLoader(DATA, 5, sampler=mine), None, None, {})
    whole = Loader(asked.dataset, batch_size=10, **asked.options)
    assert [sorted(batch.tolist()) for _ in range(2) for batch in whole] == expected
    inside = DataLoader(DATA, batch_sampler=BatchSampler(mine, 5, True))
    asked = loader_request(inside, None, None, {})
    assert (asked.batch_size, asked.options["sampler"].num_replicas) == (5, 1)
    kept = loader_request(DataLoader(DATA, 5, sampler=mine), None, None, {"rank": 0, "world_size": 1})
    assert kept.options["sampler"] is mine


class OfRanks(Sampler[int]):
    num_replicas, rank = 2, 0


class Own(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter([])


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: requested(DATA, 8, None, num_workers=1, workers=2), "num_workers= and workers= are one option"),
        (lambda: requested(DATA, 8, None, drop_last=True, uneven="pad"), "drop_last= and uneven= are one option"),
        (
            lambda: requested(DATA, 8, None, sampler=[1], shuffle=True),
            "sampler= and shuffle=True both decide the order",
        ),
        (lambda: requested(DATA, 8, None, batch_sampler=Growing(3)), "leave batch_size= out"),
        (lambda: requested(DataLoader(DATA, batch_sampler=Growing(3)), 4, None), "batch_sampler=Growing of the"),
        (lambda: requested(DataLoader(DATA, batch_size=None)), "DataLoader(batch_size=None) hands out its samples"),
        (lambda: requested(Own(DATA)), "Own has an __iter__ of its own"),
        (
            lambda: requested(Prefetcher(), 8, None),
            "Prefetcher iterates the DataLoader in its 'inner'",
        ),
        (
            lambda: requested(DataLoader(DATA, sampler=OfRanks())),
            "OfRanks and engine.loader() both distribute samples over ranks",
        ),
        (lambda: Loader(DATA, batch_size=4, num_workers=3), "no option 'num_workers'; it is called workers= here"),
        (lambda: Loader(DATA, batch_size=4, drop_last=True), "no option 'drop_last'; it is called uneven='drop' here"),
        (lambda: Loader(DATA, batch_size=4, pin_memory=True), "no option 'pin_memory'; leave it out"),
        (lambda: Loader(DATA), "the loader needs batch_size=, or batch_sampler="),
        (lambda: Loader(Moved(), batch_size=4, sampler=[1]), "Moved is read in its own order"),
        (lambda: Loader(DATA, batch_size=4, sampler=[]), "list yields no samples"),
        (lambda: Loader(DATA, batch_size=4, sampler=3), "int is no sampler"),
        (lambda: Loader(DATA, batch_sampler=Growing(3), sampler=[1]), "leave sampler= out"),
        (lambda: list(Loader(DATA, batch_size=4, sampler=["a"])), "sampler=list yields str as an index"),
        (lambda: list(Loader(DATA, batch_size=1, sampler=Growing(3))), "pass it as batch_sampler="),
        (lambda: list(Loader(DATA, batch_sampler=[1, 2])), "batch_sampler=list yields int"),
        (lambda: Loader(DATA, batch_sampler=Growing(3), lengths=[1] * 50), "leave one of them out"),
        (lambda: list(Loader(DATA, batch_size=4, sampler=Endless(), lengths=[1] * 50)), "leave it out"),
        (lambda: Loader({"x": torch.ones(3)}, batch_size=1), "a dict was passed as the data set"),
    ],
)
def test_mistakes_are_one_line(make: Any, line: str) -> None:
    with pytest.raises(EchelonError) as caught:
        make()
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, UsageError | DataError)


def images(size: int = 203) -> TensorDataset:
    g = seeded(9)
    return TensorDataset(torch.randn(size, 1, 8, 8, generator=g), torch.randint(4, (size,), generator=g))


class Noisy(Dataset[Any]):
    """A user's class with augmentation."""

    def __init__(self) -> None:
        self.data = images()

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        x, y = self.data[index]
        return x + 0.1 * torch.randn_like(x), y


def net() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))


def mnist(kind: str) -> tuple[list[float], dict[str, float], list[Any], str]:
    """A port of torch's mnist example: its DataLoaders stay; losses, evaluation, counts of steps, and the console."""
    made: dict[str, Any] = {
        "tensors": lambda: DataLoader(images(), batch_size=16, shuffle=True, generator=seeded()),
        "own": lambda: DataLoader(Noisy(), batch_size=16, shuffle=True, drop_last=True, pin_memory=False),
        "weighted": lambda: DataLoader(
            images(), 16, sampler=WeightedRandomSampler(torch.linspace(1, 2, 203), 150, generator=seeded())
        ),
        "batches": lambda: DataLoader(images(), batch_sampler=Growing(7)),
    }
    with contextlib.redirect_stdout(io.StringIO()) as said:
        echelon.init(device="cpu", seed=1)
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        size = {} if kind == "batches" else {"global_batch": 48}
        foretold = echelon.steps(made[kind](), epochs=2, **size)
        engine = echelon.distribute(model, loss=F.cross_entropy, optimizer=optimizer, log=echelon.Log(lines=False))
        loader = engine.loader(made[kind](), **size)
        losses = [float(engine.step(x, y)) for _ in loader.epochs(2) for x, y in loader]
        part = DataLoader(images(), 10, sampler=SubsetRandomSampler(range(3, 50)))
        found = [engine.evaluate(part, metrics=["accuracy"]), engine.evaluate(Noisy(), collate=first_half)]
        counts = [foretold, len(losses), 2 * len(loader), engine.steps]
        engine.close()
    return losses, {**found[0], "half": found[1]["loss"]}, counts, said.getvalue()


def first_half(samples: list[Any]) -> Any:
    """A collate function that leaves its mark: the lower half of each image is dark."""
    x, y = torch.utils.data.default_collate(samples)
    return x * (torch.arange(8) < 4).view(8, 1), y


def plain_mnist() -> list[float]:
    model, losses = net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(images(), batch_size=48, shuffle=True, generator=seeded())
    for _ in range(2):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("kind", ["tensors", "own", "weighted", "batches"])
def test_mnist_port_gives_one_processes_losses(kind: str) -> None:
    """With a generator in the DataLoader even the order is that of the script before it was ported."""
    losses, results, counts, _ = run(mnist, kind, ranks=1)[0]
    if kind == "tensors":
        assert losses == pytest.approx(plain_mnist(), rel=1e-5)
    assert len(set(counts)) == 1
    for ranks in (2, 3):
        for mine, judged, counted, said in run(mnist, kind, ranks=ranks):
            assert mine == pytest.approx(losses, rel=1e-5)
            assert judged == pytest.approx(results, rel=1e-5)
            assert counted == counts
            assert said.count("loader: from the DataLoader: ") in (0, 1)


class Opened(Numbers):
    """Reads from what ``worker_init_fn`` opens, as data sets on files do."""

    file = 0

    def __getitem__(self, index: int) -> int:
        return self.file + index


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(11))


def test_a_chain_of_streams_without_length_is_read() -> None:
    chain = DataLoader(ChainDataset([Numbers(), Numbers()]), batch_size=4)
    with pytest.raises(TypeError):
        len(chain.dataset)  # type: ignore[arg-type]
    steps = zip(*(requested_loader(chain, rank) for rank in range(2)), strict=True)
    found = [torch.cat(step).tolist() for step in steps]
    assert [n for step in found for n in step] == [*range(11), *range(11)]


def requested_loader(data: Any, rank: int) -> Loader:
    made = loader_request(data, None, 4, {})
    return Loader(made.dataset, batch_size=2, rank=rank, world_size=2, **made.options)


def opening(worker: int) -> None:
    info = torch.utils.data.get_worker_info()
    assert info is not None
    info.dataset.file = 100 * (worker + 1)  # type: ignore[attr-defined]


def test_torch_loader_worker_init_is_called_with_the_data_set() -> None:
    asked = loader_request(DataLoader(Opened(4), 2, num_workers=1, worker_init_fn=opening), None, None, {})
    loader = Loader(asked.dataset, batch_size=2, **asked.options)
    assert [batch.tolist() for _ in range(2) for batch in loader] == [[100, 101], [102, 103]] * 2
