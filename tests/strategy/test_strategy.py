"""Strategies: which combine, how they are written down and read back, and what ``explain`` says of them."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import zoo
from command import echelon, here
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from echelon.base.config import build, strict
from echelon.base.errors import UsageError
from echelon.cli.commands.explain import run_explain
from echelon.strategy import (
    AdaptiveLocalSgd,
    Amp,
    Dgc,
    Fast,
    Lamb,
    Lars,
    LocalSgd,
    LrScaling,
    Outer,
    Recompute,
    Reduction,
    Shard,
    Strategy,
)
from echelon.strategy.combine import TABLE, CombinationChange, Conflict, refuse_conflicts, verdicts

ROOT = Path(__file__).parents[2]

#: One value that switches each option on, and the values that some rows of the table are about.
ON = {
    "amp": {"amp": True},
    "amp=fp16": {"amp": "fp16"},
    "recompute": {"recompute": True},
    "lars": {"lars": True},
    "lamb": {"lamb": True},
    "dgc": {"dgc": True},
    "localsgd": {"localsgd": True},
    "adaptive_localsgd": {"adaptive_localsgd": True},
    "shard": {"shard": True},
    "ps": {"ps": True},
    "ps=collective": {"ps": "collective"},
    "low_memory": {"low_memory": True},
    "lora": {"lora": 4},
    "gradient_merge": {"gradient_merge": 4},
    "fp16_allreduce": {"fp16_allreduce": True},
    "clip": {"clip": 1.0},
    "lr_scaling": {"lr_scaling": True},
    "sync_batch_norm": {"sync_batch_norm": True},
    "split": {"split": 2},
    "stages": {"stages": 2},
    "reduction": {"reduction": Reduction(bucket_mb=5.0)},
    "reduction.op=sum": {"reduction": Reduction(op="sum")},
    "auto": {"auto": True},
}
MARKS = ("pipeline",)  # not an option: the marks on a model imply it
PAIRS = [pair for pair in itertools.combinations(ON, 2) if not ON[pair[0]].keys() & ON[pair[1]].keys()]


def verdict_on(first: str, second: str) -> CombinationChange | Conflict | None:
    return TABLE.get((first, second)) or TABLE.get((second, first))


# ---- which combine ----


def test_the_table_knows_every_strategy_and_no_other() -> None:
    options = {field.name for field in dataclasses.fields(Strategy)} - {"fast"}  # which goes with everything
    assert {name for name in ON if "=" not in name} == options
    for first, second in TABLE:
        assert {first, second} <= {*ON, *MARKS}
        assert (second, first) not in TABLE
        assert first != second


@pytest.mark.parametrize(("first", "second"), PAIRS, ids=lambda name: name)
def test_every_pair_is_accepted_or_refused_as_the_table_says(first: str, second: str) -> None:
    expected = verdict_on(first, second)
    if isinstance(expected, Conflict):
        with pytest.raises(UsageError, match="do not combine") as caught:
            Strategy(**ON[first], **ON[second])
        line = str(caught.value)
        assert expected.why in line
        assert expected.do in line
        assert "\n" not in line
    else:
        found = dict(verdicts(Strategy(**ON[first], **ON[second])))
        found = {pair: verdict for pair, verdict in found.items() if {first, second} == set(pair)}
        assert list(found.values()) == ([expected] if expected else [])


@pytest.mark.parametrize("mark", MARKS)
@pytest.mark.parametrize("name", [name for name in ON if name != "reduction"])
def test_marks_on_a_model_are_in_the_table_too(name: str, mark: str) -> None:
    expected, strategy = verdict_on(name, mark), Strategy(**ON[name])  # type: ignore[arg-type]
    if expected is None:
        refuse_conflicts(strategy, [mark])
        return
    assert isinstance(expected, Conflict)
    with pytest.raises(UsageError, match=f"^{name} and {mark} do not combine: {expected.why}; {expected.do}$"):
        refuse_conflicts(strategy, [mark])


def test_switched_off_options_have_no_part_in_it() -> None:
    assert Strategy(lars=False, dgc=True, localsgd=None, sync_batch_norm=False) == Strategy(
        dgc=Dgc(), sync_batch_norm=False
    )
    assert list(verdicts(Strategy(dgc=True, gradient_merge=1))) == []
    Strategy(localsgd=True, sync_batch_norm=False)  # per replica is what localsgd does anyway


def test_what_holds_for_fp16_is_not_said_of_bf16() -> None:
    assert list(verdicts(Strategy(amp="bf16", dgc=True))) == []
    assert [pair for pair, _ in verdicts(Strategy(amp=Amp(dtype="fp16", growth=4.0), dgc=True))] == [
        ("amp=fp16", "dgc")
    ]


# ---- written down and read back ----

parts = {
    "amp": st.sampled_from(
        [None, False, "bf16", "fp16", Amp(dtype="fp16", loss_scale=128.0), Amp(loss_scale="dynamic", min_scale=1e-5)]
    ),
    "recompute": st.sampled_from(
        [None, True, Recompute(checkpoints=("layers.*", "no: 'yaml' #trick")), Recompute(offload=True)]
    ),
    "lars": st.sampled_from([None, True, Lars(coeff=1e-30, exclude_from_weight_decay=("bias",))]),
    "localsgd": st.sampled_from([None, True, LocalSgd(outer=True), LocalSgd(k_steps=3, outer=Outer(lr=1 / 3))]),
    "gradient_merge": st.integers(1, 10**6),
    "fp16_allreduce": st.sampled_from([None, True, "bf16"]),
    "clip": st.none() | st.floats(min_value=1e-300, allow_nan=False),
    "sync_batch_norm": st.sampled_from([None, False]),
    "fast": st.sampled_from([None, True, False, Fast(compile="whole", graphs=False), Fast(bf16=False)]),
    "reduction": st.builds(Reduction, bucket_mb=st.floats(0.001, 1e9), communicators=st.integers(1, 9)),
}


@given(values=st.fixed_dictionaries({}, optional=parts), suffix=st.sampled_from([".yaml", ".yml", ".json", ".JSON"]))
def test_files_give_back_exactly_what_was_saved(
    values: dict[str, object], suffix: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / f"round{suffix}"
    strategy = Strategy(**values)  # type: ignore[arg-type]
    strategy.save(path)
    assert Strategy.load(path) == strategy
    assert Strategy.from_dict(strategy.to_dict()) == strategy


OTHERS = [
    Strategy(dgc=Dgc(sparsity=(0.75, 0.9375, 0.999), hierarchical=True), lr_scaling="sqrt"),
    Strategy(lamb=Lamb(eps=1e-8), lr_scaling=LrScaling(warmup_steps=0)),
    Strategy(adaptive_localsgd=AdaptiveLocalSgd(rule="fleet", average_momentum=True)),
    Strategy(sync_batch_norm=True),
    Strategy(shard=2),
    Strategy(shard=Shard(level=1, offload="optimizer")),
]


@pytest.mark.parametrize("strategy", OTHERS, ids=lambda strategy: next(iter(strategy.to_dict())))
def test_every_other_option_survives_too(strategy: Strategy, tmp_path: Path) -> None:
    for name in ("a.yaml", "a.json"):
        strategy.save(tmp_path / name)
        assert Strategy.load(tmp_path / name) == strategy


def test_only_what_differs_is_written_and_as_a_person_would() -> None:
    assert Strategy().to_dict() == {}
    strategy = Strategy(
        amp="bf16", dgc=Dgc(sparsity=(0.75, 0.999)), lr_scaling=True, sync_batch_norm=False, recompute=True, clip=2
    )
    assert strategy.to_dict() == {
        "amp": "bf16",
        "recompute": True,
        "dgc": {"sparsity": [0.75, 0.999]},
        "clip": 2,
        "lr_scaling": "linear",
        "sync_batch_norm": False,
    }


def test_yaml_as_people_write_it(tmp_path: Path) -> None:
    path = tmp_path / "strategy.yaml"
    path.write_text(
        "amp: fp16   # half floats\nclip: 1e-3\ndgc: {sparsity: [0.75, 0.999], rampup_begin_step: 500}\n"
        "recompute: yes\nlars: off\nlocalsgd: null\nreduction:\n  communicators: 2\n"
    )
    assert Strategy.load(path) == Strategy(
        amp="fp16",
        clip=0.001,
        dgc=Dgc(sparsity=(0.75, 0.999), rampup_begin_step=500),
        recompute=True,
        reduction=Reduction(communicators=2),
    )
    path.write_text("{}\n")
    assert Strategy.load(path) == Strategy()


BAD_FILES = {
    "clip: 1\namp: [": "cannot be read: line 2: ",
    "- amp": "holds a list; write options by name ('amp: bf16'), or {} for none",
    "# nothing": "is empty; write options by name ('amp: bf16'), or {} for none",
    "7": "holds a int; write options by name",
    "dgc: true\namp: bf16\ndgc: false": "'dgc' is given twice; keep one",
    "dgc: {min_size: 4, min_size: 5}": "'min_size' is given twice; keep one",
    "amp: !!python/object/apply:os.system [exit]": "could not determine a constructor for the tag",
    "dcg: true": "Strategy has no option 'dcg'; did you mean 'dgc'?",
    "dgc: {sparsty: [0.9]}": "Strategy.dgc has no option 'sparsty'; did you mean 'sparsity'?",
    "on: true": "Strategy has no option 'True'; known: ",
    "dgc: {sparsity: 0.9}": "Strategy.dgc(sparsity=0.9): expected tuple of float",
    "dgc: {sparsity: [0.9, high]}": "Strategy.dgc(sparsity=(0.9, 'high')): expected tuple of float",
    "dgc: {sparsity: [1.5]}": "Strategy.dgc(sparsity=(1.5,)): expected parts between 0 and 1",
    "localsgd: {outer: {lr: 0}}": "Strategy.localsgd.outer(lr=0): expected a rate above 0",
    "localsgd: {k_steps: 1e3}": "Strategy.localsgd(k_steps='1e3'): expected int",
    "clip: true": "Strategy(clip=True): expected float or None",
    "amp: fp8": "Strategy(amp='fp8'): expected bool, 'bf16', 'fp16', Amp or None",
    "dgc: on\nlars: on": "lars and dgc do not combine",
    "a: &a [*a]": "Strategy has no option 'a'",
    "amp: &a [*a]": "Strategy(amp=[[...]]): expected bool",
}


@pytest.mark.parametrize("text", BAD_FILES, ids=lambda text: text.replace("\n", " ")[:40])
def test_a_file_that_is_wrong_is_answered_in_one_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "strategy.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        Strategy.load(path)
    line = str(caught.value)
    assert BAD_FILES[text] in line
    assert str(path) in line
    assert "\n" not in line


def test_files_that_are_not_there_or_not_of_a_kind_we_know(tmp_path: Path) -> None:
    Strategy().save(tmp_path / "strategy.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "twice.json").write_text('{"clip": 1, "clip": 2}')
    (tmp_path / "half.json").write_text('{"clip": 1')
    (tmp_path / "folder.yaml").mkdir()
    for name, said in {
        "stratgy.yaml": "no strategy file at '.*stratgy.yaml'; did you mean '.*strategy.yaml'",
        "nowhere/x.json": "no strategy file at '.*x.json'$",
        "strategy.toml": "is of no known kind; name it .yaml, .yml, .json",
        "bytes.yaml": "is not text in UTF-8",
        "deep.json": "nests too deeply",
        "twice.json": "'clip' is given twice",
        "half.json": "cannot be read: Expecting",
        "folder.yaml": "cannot be read: Is a directory",
    }.items():
        with pytest.raises(UsageError, match=said) as caught:
            Strategy.load(tmp_path / name)
        assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="cannot be written: No such file or directory; give another path"):
        Strategy().save(tmp_path / "nowhere" / "x.yaml")
    with pytest.raises(UsageError, match="of no known kind"):
        Strategy().save(tmp_path / "x.txt")


# ---- any strict dataclass from plain values ----


@strict
class Leaf:
    name: str
    sizes: tuple[int, ...] = ()


@strict
class Round:
    k: int = 1
    shared: int = 0


@strict
class AdaptiveRound:
    init_k: int = 1
    shared: int = 0


@strict
class Tree:
    mesh: dict[str, int]
    leaves: tuple[Leaf, ...]
    segments: tuple[tuple[str, ...], ...] = ()
    betas: tuple[float, float] = (0.9, 0.999)
    rounds: Round | AdaptiveRound | None = None
    by_name: dict[str, Leaf] = dataclasses.field(default_factory=dict)


def test_build_gives_back_what_went_through_json() -> None:
    tree = Tree(
        mesh={"replicate": 4},
        leaves=(Leaf(name="a", sizes=(3, 4)), Leaf(name="b")),
        segments=(("a", "b"), ("c",), ()),
        betas=(0.8, 1e-9),
        rounds=AdaptiveRound(init_k=7, shared=2),
        by_name={"x": Leaf(name="x")},
    )
    assert build(Tree, json.loads(json.dumps(dataclasses.asdict(tree)))) == tree
    other = dataclasses.replace(tree, rounds=Round(k=3))
    assert build(Tree, json.loads(json.dumps(dataclasses.asdict(other)))) == other


BAD_TREES = [
    ({"leaves": []}, "Tree needs the option 'mesh'"),
    ({"mesh": {}, "leaves": [{"name": "a"}, {"nam": "b"}]}, "Tree.leaves[1] has no option 'nam'; did you mean 'name'?"),
    ({"mesh": {}, "leaves": [{"name": "a"}, {}]}, "Tree.leaves[1] needs the option 'name'"),
    ({"mesh": {}, "leaves": [{"name": 3}]}, "Tree.leaves[0](name=3): expected str"),
    ({"mesh": {}, "leaves": [3]}, "Tree(leaves=(3,)): expected tuple of Leaf"),
    ({"mesh": {"a": "4"}, "leaves": []}, "Tree(mesh={'a': '4'}): expected dict[str, int]"),
    ({"mesh": {}, "leaves": [], "segments": [["a"], "b"]}, "(segments=(('a',), 'b')): expected tuple of tuple of str"),
    ({"mesh": {}, "leaves": [], "betas": [1.0]}, "Tree(betas=[1.0]): expected tuple[float, float]"),
    ({"mesh": {}, "leaves": [], "rounds": {"init_k": 1, "kk": 2}}, "Tree.rounds has no option 'kk'"),
    ([], "Tree: expected options by name, got []"),
    (None, "Tree: expected options by name, got None"),
]


@pytest.mark.parametrize(("plain", "line"), BAD_TREES, ids=[line for _, line in BAD_TREES])
def test_build_names_the_place_of_a_mistake(plain: object, line: str) -> None:
    with pytest.raises(UsageError, match=re.escape(line)):
        build(Tree, plain)


def test_a_wrong_value_of_any_size_makes_one_short_line() -> None:
    with pytest.raises(UsageError) as caught:
        build(Tree, {"mesh": ["x"] * 10_000, "leaves": []})
    assert len(str(caught.value)) < 200


# ---- shown ----


def test_strategy_str_line_per_active_option_marks_set_values() -> None:
    """Printing shows each active option on one line and marks the values that were set."""
    lines = str(Strategy(amp="fp16", clip=1.0, localsgd=LocalSgd(k_steps=4, outer=True))).splitlines()
    rows = {line.split()[0]: line for line in lines}
    assert list(rows) == ["strategy", "amp", "localsgd", "clip", "sync_batch_norm", "reduction", "fast", "off"]
    assert "dtype=fp16*  loss_scale=None  init_scale=32768  growth=2 " in rows["amp"]
    assert "k_steps=4*  begin_step=0 " in rows["localsgd"]
    assert rows["clip"].endswith(" 1*")
    assert "*" not in rows["reduction"]
    assert rows["off"].split(maxsplit=1)[1] == (
        "recompute, lars, lamb, dgc, adaptive_localsgd, shard, ps, low_memory, lora, gradient_merge, "
        "fp16_allreduce, lr_scaling, split, stages, auto"
    )
    assert len({len(line) - len(line.split(maxsplit=1)[1]) for line in lines}) == 1  # one column


# ---- explained ----


def section(text: str, title: str) -> dict[str, str]:
    """The lines of one section, by their first column."""
    body = next(part for part in text.split("\n\n") if part.startswith(title))
    return dict(re.split(r"  +", line.strip(), maxsplit=1) for line in body.splitlines()[1:] if "  " in line.strip())


def order_of(strategy: Strategy, ranks: int = 2) -> list[str]:
    return [line.split()[1] for line in section(strategy.explain(ranks=ranks), "One step")]


def test_the_order_within_a_step() -> None:
    everything = {"amp": "fp16", "recompute": True, "gradient_merge": 2, "clip": 1.0}
    first = ["autocast", "forward", "scale", "backward", "merge"]
    assert order_of(Strategy()) == ["forward", "backward", "reduce", "update"]
    together = order_of(Strategy(**everything, lr_scaling=True, lars=True))
    assert together == [*first, "reduce", "unscale", "clip", "rate", "update"]
    compressed = order_of(Strategy(**everything, dgc=True))
    assert compressed == [*first, "reduce", "unscale", "clip", "compress", "exchange", "clip", "update"]
    alone = order_of(Strategy(**everything, localsgd=True))
    assert alone == [*first, "unscale", "clip", "update", "average"]
    assert order_of(Strategy(localsgd=True), ranks=1) == ["forward", "backward", "update"]
    assert order_of(Strategy(shard=3), ranks=1) == ["forward", "backward", "update"]
    once = order_of(Strategy(**everything, shard=1, lamb=True))
    assert once == [*first, "scatter", "unscale", "clip", "update", "gather"]
    often = [*first[:-1], "scatter", "merge", "unscale", "clip", "update"]
    assert order_of(Strategy(**everything, shard=2)) == [*often, "gather"]
    assert order_of(Strategy(**everything, shard=3)) == ["fetch", *often]


def network() -> nn.Module:
    """Tensors of 40,000, 200, 20,000 and 100 entries: two above DGC's usual bound, two below; one more is frozen."""
    model = nn.Sequential(nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 100), nn.Linear(100, 1000))
    model[3].requires_grad_(False)
    return model


def amount(text: str) -> float:
    number, unit = text.removeprefix("+ ").removeprefix("- ").split()[:2]
    return float(number) * {"bytes": 1, "kB": 1e3, "MB": 1e6}[unit.rstrip(",")]


def sent(ranks: int, per_host: int | None = None, **options: object) -> dict[str, float]:
    text = Strategy(**options).explain(network(), ranks=ranks, ranks_per_host=per_host)  # type: ignore[arg-type]
    return {name: amount(value) for name, value in section(text, "Sent").items()}


def ring(sizes: list[int], ranks: int, width: int = 4) -> float:
    """An all-reduce counted hop by hop: in two phases each rank passes on a part of 1 / ranks, ranks - 1 times."""
    return float(np.sum([np.array(sizes) * width / ranks for _ in range(2 * (ranks - 1))]))


NUMELS = [40_000, 200, 20_000, 100]


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_bytes_sent_by_each_rank(ranks: int) -> None:
    dense = ring(NUMELS, ranks)
    close = {"rel": 5e-3}  # three digits are shown
    assert sent(ranks) == pytest.approx({"gradients": dense, "without any strategy": dense}, **close)
    assert sent(ranks, fp16_allreduce=True)["gradients"] == pytest.approx(dense / 2, **close)
    assert sent(ranks, fp16_allreduce="bf16", gradient_merge=5)["gradients"] == pytest.approx(dense / 10, **close)
    assert sent(ranks, localsgd=LocalSgd(k_steps=4))["weights"] == pytest.approx(dense / 4, **close)
    assert sent(ranks, adaptive_localsgd=True, gradient_merge=2)["weights"] == pytest.approx(dense / 16, **close)
    pairs = (40 + 20) * (ranks - 1)
    small = ring([200, 100], ranks)
    whole = {
        "largest gradient entries": pairs * 8,
        "gradients under 16,384 entries": small,
        "in all": pairs * 8 + small,
    }
    assert sent(ranks, dgc=True) == pytest.approx({**whole, "without any strategy": dense}, **close)
    assert sent(ranks, dgc=True, fp16_allreduce=True)["in all"] == pytest.approx(pairs * 6 + small / 2, **close)
    all_large = sent(ranks, dgc=Dgc(min_size=1, sparsity=(0.75, 0.995)), gradient_merge=2)
    assert all_large["largest gradient entries"] == pytest.approx((200 + 1 + 100 + 1) * 8 * (ranks - 1) / 2, **close)


def test_bytes_sent_between_and_inside_hosts() -> None:
    found = sent(8, 4, dgc=Dgc(hierarchical=True), fp16_allreduce=True)
    assert found["gradients inside the host"] == pytest.approx(ring([40_000, 20_000], 4), rel=5e-3)
    assert found["largest entries between hosts, by one rank a host"] == pytest.approx(60 * 6, rel=5e-3)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_bytes_sent_by_replicas_that_share_out(ranks: int) -> None:
    """Scattering and gathering are the two halves of an all-reduce; frozen weights are only gathered."""
    close = {"rel": 5e-3}
    half = ring(NUMELS, ranks) / 2
    everything = half + ring([100_000, 1000], ranks) / 2
    for level in (1, 2):
        found = sent(ranks, shard=level)
        assert found["in all"] == pytest.approx(ring(NUMELS, ranks), **close)
        assert found["gradients, scattered"] == found["weights, gathered after the update"]
    assert sent(ranks, shard=1, gradient_merge=4)["in all"] == pytest.approx(2 * half / 4, **close)
    assert sent(ranks, shard=2, gradient_merge=4)["in all"] == pytest.approx(half + half / 4, **close)
    for merge in (1, 4):
        assert sent(ranks, shard=3, gradient_merge=merge)["in all"] == pytest.approx(half + 2 * everything, **close)


def test_memory_of_replicas_that_share_out() -> None:
    trained, frozen = 4 * sum(NUMELS), 4 * 101_000

    def held(**options: object) -> list[list[float]]:
        text = Strategy(**options).explain(network(), ranks=4)  # type: ignore[arg-type]
        lines = text[text.index("Memory") :].splitlines()[2:6]
        return [[amount(cell) for cell in re.split("  +", line.strip())[1:]] for line in lines]

    part, whole = trained / 4, trained + frozen
    expected = [[whole, trained, trained], [whole, part, part], [whole, part, part], [whole / 4, part, part]]
    np.testing.assert_allclose(held(shard=3), expected, rtol=5e-3)
    expected[1][1] = trained  # level 1 keeps what it merges whole
    np.testing.assert_allclose(held(shard=1, gradient_merge=2), expected, rtol=5e-3)
    said = Strategy(shard=Shard(offload="parameters")).explain(network())
    assert "level 3 *" in said
    assert f"the largest takes {4 * 101_000 / 1000:.0f} kB" in said
    assert "all three of the chosen level are in host memory" in said
    assert "Memory" not in Strategy(shard=2).explain(network(), ranks=1)


def test_what_is_done_by_itself_is_told_in_full() -> None:
    (said,) = [line for line in Strategy().explain().splitlines() if line.strip().startswith("fast")]
    assert {"compile", "bf16", "pad", "graphs"} <= set(said.replace(",", "").split())


def test_without_a_model_figures_are_per_parameter() -> None:
    text = Strategy(dgc=True, fp16_allreduce=True).explain(ranks=5)
    assert section(text, "Sent") == {
        "largest gradient entries": "0.024 bytes per parameter",  # 0.001 x 6 bytes x 4 others
        "without any strategy": "6.4 bytes per parameter, 267 times as much",
    }
    assert section(text, "Memory")["dgc"].startswith("+ 8 bytes per parameter")


def test_memory_that_strategies_add() -> None:
    def added(**options: object) -> list[float]:
        text = Strategy(**options).explain(network())  # type: ignore[arg-type]
        lines = text[text.index("Memory") :].splitlines()[1:] if "Memory" in text else []
        return [amount(re.split("  +", line.strip())[1]) for line in lines]

    weights = 4 * sum(NUMELS)
    assert added() == []
    assert added(dgc=True) == pytest.approx([8 * 60_000], rel=5e-3)
    assert added(localsgd=True) == pytest.approx([weights], rel=5e-3)
    assert added(adaptive_localsgd=AdaptiveLocalSgd(outer=True)) == pytest.approx([weights, weights], rel=5e-3)


def test_memory_that_recompute_saves_is_counted_on_the_sample() -> None:
    """If four equal blocks are recomputed, only their inputs stay; otherwise also the outputs of their layers."""
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.Sigmoid(), nn.Linear(64, 64), nn.Sigmoid()) for _ in range(4)]
    model, sample = nn.Sequential(*blocks), torch.randn(32, 64, requires_grad=True)
    row = 32 * 64 * 4
    without = section(Strategy().explain(model, sample=sample), "Memory")["activations"]
    assert amount(without) == pytest.approx(9 * row, rel=5e-3)  # the sample, and what each sigmoid gave
    saved = section(Strategy(recompute=True).explain(model, sample=(sample,)), "Memory")["recompute"]
    assert amount(saved) == pytest.approx((9 - 4) * row, rel=5e-3)
    assert model[0][0].weight.grad is None


def test_explain_mentions_combinations_given_models_batch_norm() -> None:
    """explain() says where options act differently in combination, depending on the model's batch norm."""
    conv, _ = zoo.build("convnet")
    clause = TABLE[("recompute", "sync_batch_norm")].how  # type: ignore[union-attr]
    assert clause in Strategy(recompute=True).explain(conv)
    assert clause not in Strategy(recompute=True).explain(conv, ranks=1)
    assert clause not in Strategy(recompute=True, localsgd=True).explain(conv)
    assert clause not in Strategy(recompute=True).explain()
    assert "statistics of 2 batch norms: 320 bytes in 4 exchanges" in Strategy().explain(conv)


@pytest.mark.parametrize("name", ON)
def test_every_strategy_says_what_it_changes(name: str) -> None:
    if name == "reduction":
        return  # other sizes of buckets change nothing
    text = section(Strategy(**ON[name]).explain(), "What each changes")  # type: ignore[arg-type]
    exact = name in (
        "recompute",
        "shard",
        "ps",
        "ps=collective",
        "gradient_merge",
        "sync_batch_norm",
        "split",
        "stages",
        "auto",
    )
    other = name in ("lars", "lamb", "clip", "lora", "lr_scaling", "reduction.op=sum")
    kind = "exact" if exact else "optimizer" if other else "approximate"
    assert text["ps" if name.startswith("ps=") else name.removesuffix("=fp16")].startswith(kind)


def test_explain_says_what_matters_beyond_figures() -> None:
    sparse, _ = zoo.build("sparse")
    assert "the rows that a batch uses of bags.weight, words.weight" in Strategy().explain(sparse)
    assert "dgc compresses nothing: no parameter has 16,384 entries" in Strategy(dgc=True).explain(sparse)
    assert "give ranks_per_host=" in Strategy(dgc=Dgc(hierarchical=True)).explain(ranks=4)
    assert "the learning rate x 16" in Strategy(lr_scaling=True, gradient_merge=4).explain(ranks=4)
    assert f"x {math.sqrt(6):g}, reached over 500 steps" in Strategy(lr_scaling="sqrt").explain(ranks=6)
    assert "nothing: there is one rank" in Strategy(dgc=True).explain(ranks=1)


def test_explain_refuses_what_it_cannot_explain() -> None:
    for said, model, options in [
        ("ranks=0: expected 1 or more", None, {"ranks": 0}),
        ("ranks_per_host=3: expected a number that divides ranks=8", None, {"ranks": 8, "ranks_per_host": 3}),
        ("takes a torch.nn.Module as model, got str", "model", {}),
        ("give the model too", None, {"sample": torch.ones(1)}),
        ("the model does not run on the sample: ", nn.Linear(3, 3), {"sample": torch.ones(1, 4)}),
    ]:
        with pytest.raises(UsageError, match=said) as caught:
            Strategy().explain(model, **options)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)


# ---- the command ----


def test_the_command_explains_a_file_settings_and_both(tmp_path: Path) -> None:
    Strategy(amp="fp16", clip=1.0).save(tmp_path / "strategy.yaml")
    (tmp_path / "net.py").write_text("import torch\n\n\ndef small():\n    return torch.nn.Linear(9, 1)\n")
    options = ["--procs", 4, "--procs-per-host", 2, "--model", "net.py:small"]
    end = echelon("explain", "strategy.yaml", "amp.growth=4", "dgc={min_size: 1}", *options, cwd=tmp_path)
    expected = Strategy(amp=Amp(dtype="fp16", growth=4), clip=1.0, dgc=Dgc(min_size=1))
    assert (end.code, end.err) == (0, "")
    assert end.out == expected.explain(nn.Linear(9, 1), ranks=4, ranks_per_host=2) + "\n"


def test_settings_are_enough_and_a_package_may_hold_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "netting").mkdir()
    (tmp_path / "netting" / "nets.py").write_text("import torch\n\n\ndef small():\n    return torch.nn.Linear(9, 1)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    said = run_explain(["clip=1e-3", "localsgd.k_steps=4", "localsgd.outer.lr=0.5"], "netting.nets:small", 3, None)
    expected = Strategy(clip=0.001, localsgd=LocalSgd(k_steps=4, outer=Outer(lr=0.5)))
    assert said == expected.explain(nn.Linear(9, 1), ranks=3)
    assert run_explain([], None, 2, None) == Strategy().explain()


MISTAKES = {
    "dgc": "'dgc' is neither a file (.yaml, .yml, .json) nor a setting such as dgc=true",
    "a.yaml b.yaml": "'a.yaml' and 'b.yaml' are two strategies; give one file, and settings as name=value",
    "dgc.sparsty=[0.9]": "Strategy.dgc has no option 'sparsty'; did you mean 'sparsity'?",
    "dgc.sparsity=[0.9": "'dgc.sparsity=[0.9' cannot be read: line 1: ",
    "bad.yaml": "bad.yaml: Strategy(clip='high'): expected float or None",
    "=1": "Strategy has no option ''",
    "clip.norm=1": "Strategy(clip={'norm': 1}): expected float or None",
    "--model nothere:x": "--model: no module 'nothere'; a file is written with its .py",
    "--model nothere.py:x": "--model: no file at 'nothere.py'",
    "--model net.py": "--model 'net.py' names no callable; write package.module:callable or file.py:callable",
    "--model net.py:smal": "--model: there is no callable 'smal' in net.py; did you mean 'small'?",
    "--model net.py:broken": "--model 'net.py:broken' failed with ZeroDivisionError: division by zero",
    "--model net.py:small": "--model 'net.py:small' gave int; it must return a torch.nn.Module",
    "--model script.py:main": "--model 'script.py:main' failed with SystemExit: 3",
}


@pytest.fixture
def bad_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "bad.yaml").write_text("clip: high\n")
    (tmp_path / "net.py").write_text("def small():\n    return 1\n\n\ndef broken():\n    return 1 / 0\n")
    (tmp_path / "script.py").write_text("raise SystemExit(3)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


@pytest.mark.parametrize("words", MISTAKES)
@pytest.mark.usefixtures("bad_files")
def test_a_mistake_on_the_command_line_is_one_line(words: str) -> None:
    settings, _, model = words.partition("--model ")
    with pytest.raises(UsageError, match=re.escape(MISTAKES[words])) as caught:
        run_explain(settings.split(), model or None, 2, None)
    assert "\n" not in str(caught.value)


def test_the_command_itself_says_it_with_exit_code_2(bad_files: Path) -> None:
    end = here("explain", "bad.yaml", "--procs", 4, cwd=bad_files)
    assert (end.code, end.out, end.err) == (2, "", f"echelon: {MISTAKES['bad.yaml']}\n")


def test_importing_echelon_brings_neither_yaml_nor_rich() -> None:
    code = "import sys, echelon; print([name for name in ('yaml', 'rich') if name in sys.modules])"
    end = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert end.stdout == "[]\n"


# ---- the documentation ----


def documented() -> str:
    return (ROOT / "docs" / "strategies.md").read_text()


def matrix() -> str:
    """The table as documentation: what stands in a cell is the strictest verdict on the two options."""
    options = [field.name for field in dataclasses.fields(Strategy) if field.name not in ("reduction", "auto")]
    names = [*options, "reduction.op=sum", "auto"]
    names.insert(names.index("ps") + 1, "ps=collective")
    lines = [f"| | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for row in names:
        cells = ["" if row.partition("=")[0] == column.partition("=")[0] else _mark(row, column) for column in names]
        lines.append(f"| **{row}** | {' | '.join(cells)} |")
    return "\n".join(lines)


def _mark(row: str, column: str) -> str:
    pairs = {frozenset(name.removesuffix("=fp16") for name in pair): verdict for pair, verdict in TABLE.items()}
    found = pairs.get(frozenset((row, column)))
    return "**no**" if isinstance(found, Conflict) else "note" if found else "yes"


def test_the_documented_table_is_the_table() -> None:
    assert matrix() in documented()


def test_the_documented_clauses_are_the_tables() -> None:
    text = documented()
    for (first, second), verdict in TABLE.items():
        both = f"`{first}` + `{second}`"
        said = verdict.how if isinstance(verdict, CombinationChange) else f"{verdict.why}; {verdict.do}"
        if second == "adaptive_localsgd" and (first, "localsgd") in TABLE:
            continue  # said once for both
        if second == "auto":  # said once for all
            assert f"- anything + `auto`: {said}." in text
            continue
        if second in ("pipeline", "stages"):
            assert TABLE[(first, "split")] == verdict
            continue
        assert f"- {both}: {said}." in text


def test_the_documented_explanation_is_what_explain_says() -> None:
    strategy = Strategy(amp="fp16", dgc=Dgc(sparsity=(0.75, 0.999)), clip=1.0)
    model = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024))
    for line in strategy.explain(model, ranks=8).splitlines():
        assert f"    {line}".rstrip() in documented().splitlines()


def test_the_documented_file_is_a_strategy(tmp_path: Path) -> None:
    found = re.findall(r"```yaml\n(.*?)```", documented(), re.DOTALL)
    assert found
    for text in found:
        (tmp_path / "a.yaml").write_text(text)
        assert Strategy.load(tmp_path / "a.yaml") != Strategy()
    assert Strategy.load(ROOT / "examples" / "strategy.yaml") != Strategy()
