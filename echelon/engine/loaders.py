"""``LoaderFactory``: creates the loaders of a run and counts the samples of the current batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from echelon.base.errors import UsageError
from echelon.data import Loader, Mixture
from echelon.data.hugging_face import has_columns, refuse_whole
from echelon.data.open_source import reads_apart
from echelon.data.order import per_replica
from echelon.data.torch_loader import LoaderRequest, is_torch_loader, loader_request, refuse_unnamed
from echelon.distributed.mesh_groups import MeshGroups
from echelon.distributed.world import World
from echelon.engine.elastic import shares
from echelon.engine.leftover_batches import epoch_leftover, epoch_padding
from echelon.engine.run_context import RunContext
from echelon.hf.document_boundaries import DocumentBoundaryCheck
from echelon.parallel.objective import count_samples, has_rows
from echelon.plan import Plan
from echelon.plan.saved_plan import SavedPlan


def is_data_set(data: Any) -> bool:
    """Return True if ``data`` holds samples, not batches: a dataset or a tuple of tensors."""
    tensors = isinstance(data, tuple) and bool(data) and all(isinstance(part, Tensor) for part in data)
    return isinstance(data, Dataset) or tensors or has_columns(data)


class LoaderFactory:
    """Creates loaders for this rank's replica. Ranks that make up one replica get the same batches."""

    def __init__(
        self, run: RunContext, world: World, plan: Plan, grid: MeshGroups, saved_plan: SavedPlan | None = None
    ) -> None:
        """saved_plan: saved plan, with which batch sizes are given per rank instead of per replica; None without one"""
        self._run, self._elastic = run, run.elastic
        self._world, self._plan, self._grid, self._saved_plan = world, plan, grid, saved_plan
        self._replicas = world.data_size
        self._ranks_per_replica = world.mesh_size // self._replicas if saved_plan is not None else 1
        run.elastic.use_replicas(self._replicas)
        self._said: set[str] = set()
        self._first: Loader | None = None  # the first training loader
        self._share: int | None = None  # samples of the latest batch that count

    def epoch(self) -> int | None:
        """Return the number of epochs of the first loader that have ended; None without a loader."""
        return None if self._first is None else self._first.epoch

    @property
    def total_steps(self) -> int | None:
        """The number of updates until the epochs of the first loader end; None if it is not known."""
        total = None if self._first is None else self._first.total_steps
        return total // self._plan.gradient_merge if total else None

    def evaluation(self, data: Any, batch_size: int | None, collate: Callable[[list[Any]], Any] | None) -> Any:
        """Return the batches of an evaluation.

        A dataset is divided among replicas; every replica gets all of it if replicas cannot combine their results.
        Other ``data`` consists of batches already and is returned as it is.
        """
        refuse_whole(data, self._replicas)
        is_loader = is_torch_loader(data) and not isinstance(data.dataset, IterableDataset)  # a stream may be per rank
        if batch_size is None and collate is None and not is_data_set(data) and not is_loader:
            if not isinstance(data, Iterable):
                raise UsageError(f"evaluate() takes a data set, a DataLoader or batches, got {type(data).__name__}")
            return data
        if isinstance(data, Loader):
            raise UsageError("evaluate() was given a loader, which sets batch_size and collate; leave both out here")
        requested = loader_request(data, batch_size, None, {} if collate is None else {"collate": collate})
        options = {**requested.options, "shuffle": False, "uneven": "join"}
        if "batch_sampler" not in options:
            options["batch_size"] = requested.batch_size or 64
        if requested.options.get("uneven") == "drop":
            self._say_once("evaluate: drop_last=True of the DataLoader is ignored: every sample counts once")
        alone: dict[str, Any] = {"rank": 0, "world_size": 1} if self._replicas != self._plan.replicas else {}
        return self.loader(requested.dataset, **options, **alone)

    def _say_once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self._run.say(line)

    def loader(self, dataset: Any, ahead: Callable[[Any], None] | None = None, **options: Any) -> Loader:
        """Create a loader of this replica's share.

        ahead: callback for each batch, called before the loader yields the previous batch
        """
        is_model_parallel = self._plan.is_model_parallel
        is_shared = options.get("world_size", self._replicas) == self._replicas
        return Loader(
            dataset,
            **{
                "seed": self._world.seed,
                "shares": self._plan.shares,
                "rank": self._world.data_rank,
                "world_size": self._replicas,
                **options,
            },
            device=self._world.device,
            group=self._grid.control(*self._plan.data_axes) if is_model_parallel else self._world.control,
            on_share=self._on_share,
            on_batch=DocumentBoundaryCheck(self._run.model) if getattr(dataset, "has_positions", False) else None,
            ahead=ahead,
            is_shared=is_shared,
        )

    def training(self, request: LoaderRequest) -> Loader:
        """Create a training loader, with the options that the elastic rule sets if one is in force."""
        dataset, batch_size, global_batch, options, _ = request
        if "batch_sampler" not in options:
            size = self.replica_batch(batch_size, global_batch)
            if self._elastic.rule is not None:
                options = {**self._elastic_options(dataset, size, global_batch), **options}
            options = {**options, "batch_size": size}
        loader = self.loader(dataset, self._run.backend.ahead, **options)
        news = self._elastic.made(loader.global_batch)
        self._run.record.settings({"global_batch": (loader.global_batch, "script")})
        self._run.say(news or f"global batch {loader.global_batch} = {self._dealt_out(loader)}")
        self._first = loader if self._first is None else self._first
        self._run.positions.register(loader)
        self._run.checker.register_dataset(loader.fingerprint)
        if isinstance(dataset, Mixture):
            self._run.say(f"mixture: {dataset}")
            self._run.metrics.count_corpora(lambda: loader.corpus_samples or {})
        if (line := loader.reading_line) is not None:
            self._run.say(line)
        for line in (epoch_padding(loader), epoch_leftover(loader, self._plan.gradient_merge)):
            if line is not None:
                self._run.say(line)
        if self._saved_plan is not None and self._saved_plan.draft.batch != loader.global_batch:
            made_for = self._saved_plan.draft.batch
            self._run.say(f"the plan was made for a global batch of {made_for}; another may be quicker here")
        return loader

    def _elastic_options(self, dataset: Any, size: int, global_batch: int | None) -> dict[str, Any]:
        options: dict[str, Any] = {"multiple": self._elastic.multiple, "on_change": self._run.say}
        if global_batch is None or size * self._replicas == global_batch:
            return options
        if not reads_apart(dataset):
            return {**options, "total": global_batch}
        self._run.say(
            f"a global batch of {global_batch} cannot be divided among {self._replicas} replicas that each read "
            "their own "
            f"data; {size} for each make {size * self._replicas}"
        )
        return options

    def _dealt_out(self, loader: Loader) -> str:
        total, replicas = loader.global_batch, self._replicas
        return f"{loader.batch_size} per replica x {replicas}" if total % replicas == 0 else shares(total, replicas)

    def replica_batch(self, batch_size: int | None, global_batch: int | None) -> int:
        """Return the samples per replica from either argument; with an elastic rule, those of the largest share."""
        if (batch_size is None) == (global_batch is None):
            raise UsageError("loader() takes either batch_size (for each replica) or global_batch (for all together)")
        if batch_size is not None:
            return batch_size * self._ranks_per_replica
        assert global_batch is not None
        if self._elastic.rule is not None:
            return -(-global_batch // self._replicas)
        return per_replica(global_batch, self._replicas)

    def rows(self, batch: Any, samples: float | None) -> float:
        """Return the number of samples in a batch, from the loader or from its length; 0 for a stand-in batch.

        samples: count that the loss averages over, given by the user; None if not given
        """
        share = self.taken()
        if share is not None or samples == 0:
            return share or 0
        return count_samples(batch) if samples is None or has_rows(batch) else samples

    def taken(self) -> int | None:
        """Return the samples of the latest batch that count, and forget them; None if no loader has set them."""
        share, self._share = self._share, None
        return share

    def batch_text(self) -> Callable[[], str] | None:
        """Return a function that names this rank's latest batch; None if there is not one loader that knows it."""
        loader = self._run.positions.only
        return None if loader is None or loader.latest is None else partial(loader.describe, loader.latest)

    def is_fed(self, call: str) -> bool:
        """Return True if the batch of this call comes from a loader of this factory, as far as that is known."""
        return self._share is not None if call == "step" else self._first is not None

    def peek(self, batches: Iterable[Any]) -> tuple[Any, Iterator[Any]]:
        """Return the first batch, or None without one, and an iterator over all batches with their samples."""
        rest = iter(batches)
        first = next(rest, None)
        return first, self._put_back(first, self.taken(), rest)

    def _put_back(self, first: Any, share: int | None, rest: Iterator[Any]) -> Iterator[Any]:
        if first is not None:
            self._share = share
            yield first
        yield from rest

    def _on_share(self, samples: int) -> None:
        self._share = samples


def training_request(
    run: RunContext,
    dataset: Any,
    sizes: tuple[Any, ...],
    batch_size: int | None,
    global_batch: int | None,
    options: dict[str, Any],
) -> LoaderRequest:
    """Return what a call of ``engine.loader`` asks for, with the batch sizes that the elastic rule sets."""
    refuse_unnamed(sizes)
    requested = loader_request(dataset, batch_size, global_batch, options)
    if requested.origin:
        run.say(requested.origin)
    batch_size, global_batch = run.elastic.sizes(requested.batch_size, requested.global_batch)
    return requested._replace(batch_size=batch_size, global_batch=global_batch)
