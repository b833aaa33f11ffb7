"""Models of transformers in pipelines, beside one process; and what they cannot do there, in a line."""

from __future__ import annotations

import functools

import pytest
import tiny
import torch
from beside import Case, check, optimizer_of
from harness import run
from zoo import QUIET

import echelon
from echelon.base.errors import UsageError
from echelon.plan.stage_trace import record

HALVES = tiny.in_stages("model.layers")
CODERS = tiny.in_stages("model.encoder.layers", "model.decoder.layers")


def test_expert_and_layerdrop_models_in_two_stages_match_one() -> None:
    """Models with experts or layerdrop, trained in two stages, equal one process."""
    cases = [
        Case(tiny.mixtral, tiny.words, HALVES),
        Case(tiny.qwen3_moe, tiny.words, HALVES),
        Case(tiny.bart, tiny.words, CODERS),
        Case(tiny.mbart, tiny.words, CODERS),
        Case(tiny.whisper, tiny.sound, CODERS),
        Case(tiny.wav2vec2, tiny.waves, tiny.in_stages("wav2vec2.encoder.layers")),
        Case(tiny.mixtral, tiny.words, {}, {"auto": True}),
    ]
    check(cases, ranks=2)


def test_two_stages_times_replicas_equal_one_process() -> None:
    cases = [
        Case(tiny.llama_with_states, tiny.words, HALVES),
        Case(tiny.mixtral, tiny.words, HALVES),
        Case(tiny.bart, tiny.words, CODERS),
    ]
    check(cases, ranks=4)


def test_layerdrop_in_a_pipeline_names_what_to_set() -> None:
    model = tiny.bart(encoder_layerdrop=0.5).train()
    units = {"model.encoder.layers.0": 0, "model.encoder.layers.1": 0, "model.decoder.layers": 1}
    with pytest.raises(UsageError, match=r"config\.encoder_layerdrop"):
        record(functools.partial(_loss, model), model, tiny.words(0), units)


def test_router_loss_in_a_pipeline_names_what_to_set() -> None:
    """Transformers collects the logits of routers with hooks: those of other stages would silently be left out."""
    model = tiny.mixtral()
    model.config.output_router_logits = True
    units = {f"model.layers.{layer}": layer // 2 for layer in range(4)}
    with pytest.raises(UsageError, match=r"made inside 'model\.layers\.0' .* config\.output_router_logits=False"):
        record(functools.partial(_loss, model), model, tiny.words(0), units)


def _loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**batch).loss


def generated() -> str:
    echelon.init()
    model = echelon.annotate(tiny.llama(), HALVES)
    engine = echelon.distribute(model, optimizer=optimizer_of(model), log=QUIET)
    engine.step(**tiny.words(0))
    try:
        model.generate(tiny.words(1)["input_ids"], max_new_tokens=2, do_sample=False)
    except UsageError as error:
        return str(error)
    return ""


def test_generate_in_a_pipeline_is_one_line() -> None:
    for line in run(generated, ranks=2):
        assert line.startswith("the model was called past the engine: 'model.layers.")
