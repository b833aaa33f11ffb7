"""Marks as scopes and by name: what is tagged, what is read back, and what is refused with which words."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from echelon.base.errors import UsageError
from echelon.strategy.annotations.annotate import annotate, collect, pipeline, replicate, set_default, split, stage
from echelon.strategy.annotations.marks import Pipeline, Replicate, Split, Stage


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.attn = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


class Hybrid(nn.Module):
    """Every kind of scope, nested as a user would."""

    def __init__(self) -> None:
        super().__init__()
        with pipeline(micro_batches=8, schedule="gpipe"):
            with stage():
                with replicate():
                    self.embed = nn.Embedding(10, 4)
                self.lower = nn.ModuleList(Block() for _ in range(2))
            with stage():
                self.upper = nn.Sequential(Block(), Block())
                with split("column", weights=[1, 2]):
                    self.head = nn.Linear(4, 10)
        self.loose = nn.Linear(4, 4)


class HuggingLike(nn.Module):
    """Names as a BERT has: encoder.layer.N.attention.self.query."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embeddings = nn.Module()
        self.embeddings.word_embeddings = nn.Embedding(20, 4)
        self.encoder = nn.Module()
        self.encoder.layer = nn.ModuleList()
        for _ in range(layers):
            layer, inner = nn.Module(), nn.Module()
            inner.query, inner.value = nn.Linear(4, 4), nn.Linear(4, 4)
            layer.attention = nn.Module()
            layer.attention.self = inner
            layer.output = nn.Linear(4, 4)
            self.encoder.layer.append(layer)
        self.pooler = nn.Linear(4, 4)


class TimmLike(nn.Module):
    """Names as a vision transformer has: patch_embed.proj, blocks.N.attn, head."""

    def __init__(self) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 4))
        self.patch_embed = nn.Sequential()
        self.patch_embed.add_module("proj", nn.Conv2d(3, 4, 2))
        self.blocks = nn.Sequential(*(Block() for _ in range(12)))
        self.head = nn.Linear(4, 10)


@pytest.fixture(autouse=True)
def _no_default() -> Iterator[None]:
    yield
    set_default(None)


def hooks() -> int:
    return len(torch_module._global_module_registration_hooks) + len(torch_module._global_parameter_registration_hooks)


def test_scopes_mark_what_is_assigned_inside() -> None:
    marks = collect(Hybrid())
    assert marks.units == {"embed": 0, "lower": 0, "upper": 1, "head": 1}
    assert marks.splits == {"head": Split(how="column", weights=(1, 2))}
    assert marks.replicates == ("embed",)
    assert marks.pipeline == Pipeline(micro_batches=8, schedule="gpipe")
    assert marks.default is None


def test_marks_survive_deepcopy_and_keep_state_dict_unchanged() -> None:
    model = Hybrid()
    assert collect(copy.deepcopy(model)) == collect(model)
    plain = nn.Linear(4, 10)
    assert list(model.head.state_dict()) == list(plain.state_dict())
    model.load_state_dict(copy.deepcopy(model).state_dict())


def test_children_of_containers_are_marked() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList()
    with pipeline():
        for _ in range(3):
            with stage():
                model.layers.append(Block())
    assert collect(model).units == {"layers.0": 0, "layers.1": 1, "layers.2": 2}


def test_a_module_in_a_local_variable_is_marked_whole() -> None:
    with pipeline():
        with stage():
            lower = Block()
        with stage():
            upper = nn.Linear(4, 4)
            with split():
                head = nn.Linear(4, 9)
    marks = collect(nn.Sequential(lower, upper, nn.ReLU(), head))
    assert marks.units == {"0": 0, "1": 1, "3": 1}
    assert marks.splits == {"3": Split()}


def test_module_opening_scope_in_constructor_is_not_marked() -> None:
    """A module whose constructor opens a scope is not marked itself."""

    class Opens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with split():
                self.scale = nn.Parameter(torch.ones(3))
                self.inner = nn.Linear(3, 3)

    assert collect(Opens()).splits == {"inner": Split()}
    existing = nn.Sequential()
    with split():
        existing.add_module("late", nn.Linear(2, 2))
    assert collect(existing).splits == {"late": Split()}


def test_a_model_built_inside_a_scope_is_marked_as_a_whole() -> None:
    with pipeline(stages=2), replicate():
        model = Block()
    marks = collect(model)
    assert marks.replicates == ("",)
    assert marks.pipeline == Pipeline(stages=2)


def test_explicit_stage_numbers_move_the_count_on() -> None:
    model = nn.Module()
    with pipeline():
        with stage(1):
            model.b = Block()
        with stage():
            model.c = Block()
        with stage(0):
            model.a = Block()
    assert collect(model).units == {"b": 1, "c": 2, "a": 0}


def test_stages_without_a_pipeline_imply_the_plain_one() -> None:
    model = annotate(nn.Sequential(Block(), Block()), {"0": stage(0), "1": stage(1)})
    assert collect(model).pipeline == Pipeline()


def test_split_scope_leaves_no_hook_and_ignores_other_threads() -> None:
    before, made = hooks(), []
    with split():
        thread = threading.Thread(target=lambda: made.append(Block()))
        thread.start()
        thread.join()
        mine = Block()
    with pytest.raises(ZeroDivisionError), split():
        _ = 1 / 0
    assert hooks() == before
    assert not collect(made[0]).splits
    assert collect(mine).splits == {"": Split()}
    assert not collect(Block()).splits


def test_names_ranges_and_patterns() -> None:
    model = annotate(
        HuggingLike(),
        {
            "embeddings": stage(0),
            "encoder.layer.0-1": stage(0),
            "encoder.layer.2-3": stage(1),
            "pooler": [stage(1), split("row")],
            "encoder.layer.*.attention.self.[qv]*": split(),
            "": pipeline(micro_batches=2),
        },
    )
    marks = collect(model)
    assert marks.units == {
        "embeddings": 0, "encoder.layer.0": 0, "encoder.layer.1": 0, "encoder.layer.2": 1, "encoder.layer.3": 1,
        "pooler": 1,
    }  # fmt: skip
    attention = [f"encoder.layer.{i}.attention.self.{part}" for i in range(4) for part in ("query", "value")]
    assert marks.splits == {**dict.fromkeys(attention, Split()), "pooler": Split(how="row")}
    assert marks.pipeline == Pipeline(micro_batches=2)


def test_a_vision_transformer_by_name() -> None:
    model = TimmLike()
    same = annotate(model, {"patch_embed": stage(0), "blocks.0-5": stage(0), "blocks.6-11": stage(1), "head": stage(1)})
    assert same is model
    numbers = collect(model).units
    assert [numbers[f"blocks.{i}"] for i in range(12)] == [0] * 6 + [1] * 6
    with torch.no_grad():
        assert model.blocks[0].attn(torch.ones(1, 4)).shape == (1, 4)


def test_scopes_and_names_together() -> None:
    model = Hybrid()
    annotate(model, {"loose": [stage(1), replicate()]})
    assert collect(model).units["loose"] == 1
    assert collect(model).replicates == ("embed", "loose")


def test_a_shared_module_keeps_one_mark_under_its_first_name() -> None:
    model = nn.Module()
    with stage(0):
        model.first = Block()
    model.second = model.first
    with stage(0):
        model.third = model.first
    assert collect(model).units == {"first": 0}


def test_of_nested_equal_marks_the_outermost_is_kept() -> None:
    model = annotate(HuggingLike(), {"encoder": split(), "encoder.layer.1.output": split()})
    assert collect(model).splits == {"encoder": Split()}


def test_the_default_for_the_rest() -> None:
    set_default(split("row"))
    assert collect(Block()).default == Split(how="row")
    set_default(replicate())
    assert collect(Block()).default == Replicate()


@pytest.mark.parametrize(
    ("outer", "inner", "line"),
    [
        (stage(0), stage(1), "stage(1) inside stage(0): a module runs in one stage"),
        (split(), stage(0), "stage(0) inside split(): a stage has the devices that a split is over"),
        (split(), replicate(), "replicate() inside split(): the parts of a split module are on different devices"),
        (split(), split("row"), "split(how='row') inside split(): a part is split in one way"),
        (stage(0), pipeline(), "pipeline() inside stage(0): a pipeline consists of stages"),
        (split(), pipeline(), "pipeline() inside split(): a stage has the devices"),
        (pipeline(), pipeline(), "pipeline() inside pipeline(): a model has one pipeline"),
    ],
)
def test_nesting_that_makes_no_sense(outer: Any, inner: Any, line: str) -> None:
    def nested() -> None:
        with outer, inner:
            pass

    assert line in one_line(nested)
    model = nn.Sequential(nn.Sequential(Block()))
    by_name = one_line(lambda: collect(annotate(model, {"0": outer, "0.0": inner})))
    assert by_name.startswith(f"'0.0' ({inner}) is inside '0' ({outer}): {line.partition(': ')[2]}")


def test_a_scope_that_marks_nothing_says_so() -> None:
    line = one_line(lambda: _empty(split("row")))
    assert line.startswith("nothing was marked by split(how='row'): ")
    assert "echelon.annotate" in line


def _empty(mark: Any) -> None:
    with mark:
        pass


@pytest.mark.parametrize(
    ("marks", "line"),
    [
        ({"blocks.0-12": stage(0)}, "no module is called 'blocks.12'; 'blocks' has 0 to 11"),
        ({"hed": split()}, "no module is called 'hed'; did you mean 'head'?"),
        ({"zzz.*": split()}, "no module is called 'zzz.*'; the model has patch_embed, blocks, head"),
        ({"blocks.5-0": stage(0)}, "the range 5-0 in 'blocks.5-0' is empty"),
        ({"head": stage()}, "'head' has stage() without a number"),
        ({"head": "split"}, "'head' has 'split'; expected replicate(), split(...)"),
        ({"head": [stage(0), stage(1)]}, "'head' is marked stage(0) and stage(1): a module has one stage"),
        ({"head": split(), "he*": split("row")}, "'head' is marked split() and split(how='row'): a module has one"),
    ],
)
def test_names_that_do_not_fit(marks: dict[str, Any], line: str) -> None:
    assert line in one_line(lambda: annotate(TimmLike(), marks))


@pytest.mark.parametrize(
    ("marks", "line"),
    [
        ({"head": stage(2), "blocks.0": stage(0)}, "stages 0, 2 are marked and 1 is not"),
        ({"": pipeline(stages=2), "head": stage(0)}, "pipeline(stages=2) cuts the model by itself, but 1 stages"),
        ({"blocks": pipeline(), "head": pipeline()}, "there are 2 pipelines, at 'blocks' and 'head'"),
        ({"head": stage(0), "": pipeline(weights=[1, 2])}, "has 2 weights for 1 stages; give one for each stage"),
    ],
)
def test_marks_that_do_not_fit_together(marks: dict[str, Any], line: str) -> None:
    assert line in one_line(lambda: collect(annotate(TimmLike(), marks)))


def test_a_module_in_two_stages_is_refused() -> None:
    model = nn.Module()
    with stage(0):
        model.first = Block()

    def again() -> None:
        with stage(1):
            model.second = model.first

    assert "'second' is marked stage(0) and stage(1)" in one_line(again)


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        (lambda: stage().__enter__(), "stage() counts the stages of a pipeline and none is open"),
        (lambda: stage(-1), "Stage(index=-1): expected 0 or more"),
        (lambda: split("colum"), "Split(how='colum'): expected 'auto', 'column', 'row' or 'sequence'"),
        (lambda: split(weights=[1, 0]), "Split(weights=(1, 0)): expected numbers above 0"),
        (lambda: pipeline(micro_batches=0), "Pipeline(micro_batches=0): expected 1 or more"),
        (lambda: set_default(stage(0)), "set_default(stage(0)): expected replicate(), split(...) or None"),
    ],
)
def test_values_that_do_not_fit(wrong: Callable[[], Any], line: str) -> None:
    assert line in one_line(wrong)


def test_two_equal_pipelines_are_still_two() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with pipeline(), stage():
                self.body = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x)

    assert "there are 2 pipelines" in one_line(lambda: collect(copy.deepcopy(nn.Sequential(Half(), Half()))))
    assert collect(Half()).units == {"body": 0}


def test_a_mark_is_a_value() -> None:
    assert stage(3) == Stage(index=3)
    assert split() == Split()
    assert pipeline(dynamic_shapes=True) == Pipeline(dynamic_shapes=True)
    assert hash(split()) == hash(Split())


def one_line(call: Callable[[], Any]) -> str:
    with pytest.raises(UsageError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)
