"""Checks of the fast path on a GPU: the same losses as plain PyTorch, and no step that waits for the device.

    python benchmarks/gpu/fast_gpu.py ["convolutions" ...]

One line of JSON a check; exit code 1 where one fails. Needs a GPU without other jobs: where the device is busy with
other things, no graph is made.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import echelon
from echelon import Fast, Strategy

STEPS = 56  #: some 44 until a graph is kept
Batches = list[tuple[Tensor, Tensor]]


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, 2)
        self.body = nn.Sequential(*(self._block(32, 32) for _ in range(3)), self._block(32, 64))
        self.head = nn.Linear(64, 10)

    @staticmethod
    def _block(inside: int, out: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inside, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x)).mean((2, 3)))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 128)
        layers = [nn.TransformerEncoderLayer(128, 4, 256, dropout, batch_first=True) for _ in range(4)]
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(128, 100)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


class Asking(Transformer):
    """Does something else when it is captured, as transformers does with masks."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        mask = torch.zeros(64, 64, device=x.device) if torch.cuda.is_current_stream_capturing() else None
        for layer in self.layers:
            x = layer(x, src_mask=mask)
        return self.head(x)  # type: ignore[no-any-return]


class Waiting(Transformer):
    """Reads a value of the device in forward."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * (1.0 if int(ids.max()) >= 0 else 2.0)


class Careful(Transformer):
    """Reads a value of the device, unless it is captured."""

    def forward(self, ids: Tensor) -> Tensor:
        if not torch.cuda.is_current_stream_capturing():
            int(ids.max())
        return super().forward(ids)


class Odd(Transformer):
    """With an output layer of an odd size, large enough to be padded."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(128, 8197)


class Spoiling(Transformer):
    """Does what no capture outlives, once it is really captured; dropout shows whether random numbers go on."""

    def __init__(self) -> None:
        super().__init__(dropout=1e-6)

    def forward(self, ids: Tensor) -> Tensor:
        if torch._C._cuda_isCurrentStreamCapturing():
            torch.cuda.synchronize()
        return super().forward(ids)


class Borrowed(nn.Module):
    """A model of transformers, with dropout; ``kind``: "bert" or "gpt2"."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

        if kind == "bert":
            sizes = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 256}
            self.inner: nn.Module = BertForMaskedLM(BertConfig(vocab_size=100, attn_implementation="sdpa", **sizes))
        else:
            sizes = {"n_embd": 128, "n_layer": 4, "n_head": 4}
            config = GPT2Config(vocab_size=100, use_cache=False, attn_implementation="sdpa", **sizes)
            self.inner = GPT2LMHeadModel(config)

    def forward(self, ids: Tensor) -> Tensor:
        return self.inner(ids).logits  # type: ignore[no-any-return]


class Averaging(Convolutions):
    """Puts another tensor in place of a buffer in every step, which a graph would not."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(10))

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        self.mean = 0.9 * self.mean + 0.1 * output.detach().mean(0)
        return output - self.mean


class Annealed(list[tuple[Tensor, Tensor]]):
    """Batches that come with a number outside model and batch, another one in every step."""

    weight = 1.0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for at, batch in enumerate(super().__iter__()):
            Annealed.weight = 1.0 + 0.1 * at
            yield batch


class SetOnce(list[tuple[Tensor, Tensor]]):
    """Batches of which the last ones come with another number outside model and batch."""

    weight = 1.0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for at, batch in enumerate(super().__iter__()):
            SetOnce.weight = 1.0 if at < STEPS - 6 else 2.0
            yield batch


def weighted_loss(output: Tensor, target: Tensor) -> Tensor:
    return token_loss(output, target) * SetOnce.weight


def annealed_loss(output: Tensor, target: Tensor) -> Tensor:
    return token_loss(output, target) * Annealed.weight


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def images(sizes: Iterator[int]) -> Batches:
    return [(torch.randn(n, 3, 32, 32, device="cuda"), torch.randint(10, (n,), device="cuda")) for n in sizes]


def tokens(sizes: Iterator[int]) -> Batches:
    found = [torch.randint(100, (n, 64), device="cuda") for n in sizes]
    return [(ids, ids) for ids in found]


def train(
    model: nn.Module, loss: Callable[..., Tensor], batches: Batches, strategy: Strategy
) -> tuple[list[float], str]:
    """Losses, and what was said."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        engine = echelon.distribute(
            model, loss=loss, optimizer=optimizer, strategy=strategy, log=echelon.Log(lines=False, every=10)
        )
        losses = [engine.step(*batch) for batch in batches]
        values = [float(one) for one in losses]
        engine.close()
    return values, said.getvalue()


def compared(
    name: str,
    build: Callable[[], nn.Module],
    loss: Any,
    batches: Batches,
    graph: bool = True,
    within: float = 0.05,
    **options: Any,
) -> bool:
    """Return True if the fast path gives the losses of the same options without it, and ends with
    a graph as it should."""
    if sys.argv[1:] and name not in sys.argv[1:]:
        return True
    runs, compile = [], options.pop("compile", None)
    for fast in (False, Fast(compile=compile)):
        torch.manual_seed(0)
        amp = options.get("amp", "bf16" if fast is False else None)
        strategy = Strategy(fast=fast, **{**options, "amp": amp})
        torch.manual_seed(1)
        runs.append(train(build().cuda(), loss, batches, strategy))
    (plain, _), (quick, said) = runs
    apart = max(abs(a - b) / (abs(a) + 1e-3) for a, b in zip(plain, quick, strict=True))
    captured = "are one CUDA graph" in said
    fine = apart < within and captured == graph and "compiling failed" not in said
    lines = [line for line in said.splitlines() if "fast:" in line]
    print(
        json.dumps({"check": name, "fine": fine, "apart": round(apart, 5), "graph": captured, "said": lines}),
        flush=True,
    )
    return fine


def replayed_dropout() -> bool:
    """Replays draw new random numbers: with one batch again and again, losses of a frozen model differ."""
    torch.manual_seed(0)
    model = Transformer(dropout=0.5).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    strategy = Strategy()
    engine = echelon.distribute(
        model, loss=token_loss, optimizer=optimizer, strategy=strategy, log=echelon.Log(console=False)
    )
    batch = tokens(iter([8]))[0]
    losses = [float(engine.step(*batch)) for _ in range(STEPS)]
    fine = len({round(loss, 6) for loss in losses[-8:]}) > 4
    print(json.dumps({"check": "dropout in replays", "fine": fine, "losses": losses[-4:]}), flush=True)
    return fine


def without_waiting(name: str, **options: Any) -> bool:
    """Steps under torch's own watch for synchronization."""
    torch.manual_seed(0)
    model = Transformer().cuda()
    engine = echelon.distribute(
        model,
        loss=token_loss,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        strategy=Strategy(**options),
        log=echelon.Log(console=False, every=5),
    )
    batches = tokens(iter([16] * STEPS))
    for batch in batches:
        engine.step(*batch)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    found = ""
    try:
        for batch in batches[:12]:
            engine.step(*batch)
    except RuntimeError as error:
        import traceback

        frames = [
            f for f in traceback.extract_tb(error.__traceback__) if "echelon" in f.filename or "optim" in f.filename
        ]
        found = f"{frames[-1].filename}:{frames[-1].lineno} {str(error).splitlines()[0]}"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    print(json.dumps({"check": name, "fine": not found, "found": found}), flush=True)
    return not found


def in_general() -> Iterator[bool]:
    if not sys.argv[1:]:
        yield replayed_dropout()
        yield without_waiting("no waiting")
        yield without_waiting("no waiting, clip, no graph", clip=1.0, fast=Fast(graphs=False))
        yield without_waiting("no waiting, merged, eager", gradient_merge=2, fast=False, amp="bf16")


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/gpu/fast_gpu.py needs a GPU; torch sees none here")
    echelon.init()
    even, uneven = [32] * STEPS, [32] * (STEPS - 6) + [20, 32, 7, 32, 13, 32]
    results = [
        compared("transformer", Transformer, token_loss, tokens(iter(even))),
        compared("it waits unless it is captured", Careful, token_loss, tokens(iter(even))),
        compared("an odd output layer", Odd, token_loss, tokens(iter(even))),
        compared("an odd output layer, fp16", Odd, token_loss, tokens(iter(even)), amp="fp16"),
        compared("transformers' gpt2", lambda: Borrowed("gpt2"), token_loss, tokens(iter(even)), within=0.3),
        compared("transformers' bert", lambda: Borrowed("bert"), token_loss, tokens(iter(even)), within=0.3),
        compared("transformer, uneven, clip", Transformer, token_loss, tokens(iter(uneven)), clip=0.5),
        compared("transformer, merged", Transformer, token_loss, tokens(iter(even)), gradient_merge=2),
        compared("transformer, fp16", Transformer, token_loss, tokens(iter(even)), amp="fp16"),
        compared("transformer, recomputed", Transformer, token_loss, tokens(iter(even)), recompute=True),
        compared("convolutions", Convolutions, F.cross_entropy, images(iter(even))),
        compared("convolutions, merged, uneven", Convolutions, F.cross_entropy, images(iter(uneven)), gradient_merge=3),
        compared("it asks whether it is captured", Asking, token_loss, tokens(iter(even))),
        compared(
            "it asks, with dropout", lambda: Asking(dropout=0.1), token_loss, tokens(iter(even)), within=0.3
        ),  # other random numbers
        compared("it waits for the device", Waiting, token_loss, tokens(iter(even)), graph=False),
        compared("it replaces a buffer", Averaging, F.cross_entropy, images(iter(even)), graph=False),
        compared("a global is annealed", Transformer, annealed_loss, Annealed(tokens(iter(even))), graph=False),
        compared(
            "a global is annealed, not compiled",
            Transformer,
            annealed_loss,
            Annealed(tokens(iter(even))),
            graph=False,
            compile=False,
        ),
        compared("a global is set once", Transformer, weighted_loss, SetOnce(tokens(iter(even)))),
        compared("its capture fails", Spoiling, token_loss, tokens(iter(even)), graph=False),
        *in_general(),
    ]
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
