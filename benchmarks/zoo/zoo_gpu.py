"""``echelon train`` on one GPU: ResNet-50 on made-up images and on image files, BERT-large; examples a second.

    python benchmarks/zoo/zoo_gpu.py [--only NAME] [--out results.json]

Each row is the last line of the command it names. Image files are 341 x 256 JPEGs, made here. Needs a GPU and Pillow.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import ROOT
from benchmarks.zoo.input_images import write

COMMANDS = {
    "resnet50": "--model_name resnet_v1_50 --batch_size 256 --stop_at_step 150",
    "resnet50_eager": "--model_name resnet_v1_50 --batch_size 256 --stop_at_step 100 --compile false",
    "resnet50_files": "--model_name resnet_v1_50 --batch_size 256 --stop_at_step 400 "
    "--dataset_name image_folder --dataset_dir {files} --num_parallel_batches 16 --num_sample_per_epoch 128000",
    "bert_large": "--model_name bert_large --batch_size 256 --stop_at_step 60",
    "bert_large_eager": "--model_name bert_large --batch_size 256 --stop_at_step 60 --compile false",
}


def run(words: list[str], folder: Path) -> dict[str, object]:
    """The JSON that the command ends with; its lines go to stderr as they come."""
    command = [sys.executable, "-c", "from echelon.cli import main; main()", "train", "--procs", "1", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, check=True)
    lines = done.stdout.splitlines()
    print("\n".join(lines[-5:-1]), file=sys.stderr)
    return dict(json.loads(lines[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=list(COMMANDS), action="append")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for key in args.only or COMMANDS:
            if "{files}" in COMMANDS[key]:
                (folder / "files").mkdir()
                write(folder / "files", 341, 256)
            words = COMMANDS[key].format(files=folder / "files").split()
            results[key] = {"command": f"echelon train {COMMANDS[key]}", **run(words, folder)}
            print(json.dumps({key: results[key]["examples_per_s"]}), flush=True)
    if {"resnet50", "resnet50_files"} <= results.keys():
        files, mock = (float(str(results[key]["examples_per_s"])) for key in ("resnet50_files", "resnet50"))
        print(json.dumps({"files_against_mock": round(files / mock, 3)}))
    if args.out:
        args.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
