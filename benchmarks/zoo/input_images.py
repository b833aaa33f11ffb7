"""Pictures per second that the input alone can deliver: JPEG files, cut and resized to 224 pixels for training.

    python benchmarks/zoo/input_images.py --workers 16 --seconds 15

Writes pictures whose frequencies fall off as those of photographs do, so that decoding them costs what photographs
cost: 500 x 375 at quality 90 (as ImageNet has them) and 341 x 256 (ImageNet made smaller beforehand). Measures the
loader of the data set ``image_folder``, with nothing else going on, and what one core needs for each step of the work.
"""

from __future__ import annotations

import argparse
import io
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, features

from echelon.data import Loader, Repeated
from echelon.zoo.datasets.image_folder import open_folder
from echelon.zoo.entry import Request
from echelon.zoo.preprocessing import PREPROCESSINGS, EncodedPicture

SIZES = ((341, 256), (500, 375))
CLASSES, PER_CLASS = 8, 64


def photograph(width: int, height: int, random: np.random.RandomState) -> bytes:
    """A JPEG of a picture with a 1/f spectrum, its three colours alike."""
    down, across = np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None]
    frequency = np.hypot(down, across)
    frequency[0, 0] = 1 / max(width, height)

    def waves() -> np.ndarray:
        return random.randn(*frequency.shape) + 1j * random.randn(*frequency.shape)

    shared = waves()
    planes = [np.fft.irfft2((shared + 0.3 * waves()) / frequency**1.2, (height, width)) for _ in range(3)]
    scaled = [118 + 55 * (plane - plane.mean()) / plane.std() for plane in planes]
    file = io.BytesIO()
    Image.fromarray(np.clip(np.stack(scaled, -1), 0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()


def write(folder: Path, width: int, height: int) -> float:
    """Fill the folder; the mean size of a file. Each picture is there eight times, in files of its own."""
    random = np.random.RandomState(0)
    pictures = [photograph(width, height, random) for _ in range(CLASSES * PER_CLASS // 8)]
    for number in range(CLASSES * PER_CLASS):
        path = folder / f"class{number % CLASSES}" / f"{number:04}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(pictures[number % len(pictures)])
    return sum(map(len, pictures)) / len(pictures)


@dataclass(frozen=True)
class InputThroughput:
    """The number of examples read in ``seconds`` without training."""

    examples: int
    seconds: float

    @property
    def rate(self) -> float:
        return self.examples / self.seconds


def measure_input(loader: Loader, seconds: float) -> InputThroughput:
    """Measure the throughput of the input alone: read batches of this rank and discard them.

    The first batch of each worker is not counted (processes start, files are opened). Batches prefetched in that time
    make the result too high, so measure for many times the duration of a batch.
    """
    left, examples, begin, now = max(loader.workers, 1), 0, 0.0, 0.0
    while True:
        for batch in loader:
            now = time.perf_counter()
            if left:
                left -= 1
                begin = now
                continue
            examples += len(batch[-1])
            if now - begin >= seconds:
                return InputThroughput(examples, now - begin)


def pipeline(folder: Path, name: str, workers: int, seconds: float, batch: int) -> float:
    values = {
        "dataset_dir": str(folder),
        "preprocessing_name": name,
        "image_size": 224,
    }
    data = open_folder(Request(values, "classify_images"), "image_folder")
    loader = Loader(Repeated(data.train, 1_000_000), batch_size=batch, workers=workers, prefetch=2, **data.loader)
    return measure_input(loader, seconds).rate


def milliseconds(work: Callable[[], object], seconds: float = 1.0) -> float:
    work()
    begin, rounds = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        work()
        rounds += 1
    return 1e3 * (time.perf_counter() - begin) / rounds


def one_core(folder: Path) -> dict[str, float]:
    data = next(folder.glob("*/*.jpg")).read_bytes()
    decoded = Image.open(io.BytesIO(data))
    decoded.load()
    recipes = {name: PREPROCESSINGS[name].train for name in ("resnet", "inception", "vgg")}
    parts = {
        "decode": milliseconds(lambda: Image.open(io.BytesIO(data)).load()),
        "resize a crop": milliseconds(
            lambda: decoded.resize((224, 224), Image.Resampling.BILINEAR, box=(20, 20, 220, 220))
        ),
    }
    for name, recipe in recipes.items():
        parts[name] = milliseconds(lambda r=recipe: r(EncodedPicture(data, 3, "picture"), 224))
    return parts | _torchvision(data)


def _torchvision(data: bytes) -> dict[str, float]:
    try:
        from torchvision.io import ImageReadMode, decode_jpeg
    except (ImportError, RuntimeError):
        return {}
    raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return {"torchvision's decode": milliseconds(lambda: decode_jpeg(raw, mode=ImageReadMode.RGB))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--batch", type=int, default=256)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"libjpeg-turbo {features.version_feature('libjpeg_turbo')}, Pillow {Image.__version__}", flush=True)
    for width, height in SIZES:
        with tempfile.TemporaryDirectory() as directory:
            folder = Path(directory)
            print(f"{width} x {height}, {write(folder, width, height) / 1024:.0f} KiB a file", flush=True)
            for part, spent in one_core(folder).items():
                print(f"  one core: {part} {spent:.2f} ms", flush=True)
            for name in ("resnet", "inception"):
                rate = pipeline(folder, name, args.workers, args.seconds, args.batch)
                print(f"  {name}, {args.workers} workers: {rate:,.0f} images/s", flush=True)


if __name__ == "__main__":
    main()
