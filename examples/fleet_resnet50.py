"""Paddle Fleet's ResNet-50 with amp, recompute and LARS, ported line by line; Fleet's own lines are beside ours.

    echelon run --gpus 0,1,2,3,4,5,6,7 --log-dir log examples/fleet_resnet50.py --fs-yaml URL

``fleetrun --gpus 0,1,2,3,4,5,6,7 --log_dir log train.py`` was the command there. The yaml has Fleet's keys (bos_path),
and the folder it names Fleet's files: filelist.txt, meta.txt, train.txt and tar files. Without --fs-yaml the images are
made up.
"""

from __future__ import annotations

import argparse
import time

import torch

import echelon
from echelon import Strategy
from echelon.data import Downloader


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fs-yaml", help="the yaml with bos_path, a file or a URL")
    parser.add_argument("--local-path", default="./data")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--width", type=int, default=64, help="channels of the first blocks; 64 is ResNet-50's")
    parser.add_argument("--num-classes", type=int, help="1000 for made-up images; read from the data else")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--workers", type=int, default=4, help="processes of a rank that read images")
    parser.add_argument("--auto", action="store_true", help="let the planner choose, in place of the three strategies")
    args = parser.parse_args()

    echelon.init(seed=0)  # fleet.init(is_collective=True)

    # downloader.download_from_bos(fs_yaml=..., local_path='./data')
    if args.fs_yaml:
        Downloader(args.fs_yaml, args.local_path).fetch()
    # model = X.applications.Resnet50(); the data is opened with it, and says how many classes there are
    app = echelon.zoo.load(
        "resnet_v1_50",
        dataset_dir=args.local_path if args.fs_yaml else None,
        num_classes=args.num_classes or (None if args.fs_yaml else 1000),
        image_size=args.image_size,
        width=args.width,
    )

    # dist_strategy.amp = True, and so on; 'auto' stands alone
    strategy = Strategy(
        amp=True,
        recompute=True,
        recompute_configs={"checkpoints": app.checkpoints},
        lars=True,
        lars_configs={
            "lars_coeff": 0.001,
            "lars_weight_decay": 0.0005,
            "exclude_from_weight_decay": ["batch_norm", ".b_0"],
        },
    )

    # fluid.optimizer.Momentum, fleet.distributed_optimizer(optimizer, dist_strategy), optimizer.minimize(model.loss)
    engine = echelon.distribute(
        app.model,
        loss=app.loss,
        optimizer=torch.optim.SGD(app.model.parameters(), lr=0.01, momentum=0.9),
        strategy=Strategy(auto=True) if args.auto else strategy,
    )
    # loader = model.get_train_dataloader(local_path, batch_size=32)
    loader = app.loader(engine, batch_size=args.batch_size, workers=args.workers if args.fs_yaml else 0)

    step, start = 0, time.time()
    for _ in loader.epochs(1000):
        for batch in loader:
            cost = float(engine.step(*batch))  # exe.run(model.main_prog, feed=data, fetch_list=[model.loss.name])
            now = time.time()
            print(
                f"worker_index: {echelon.worker_index()}, step{step} cost = {cost:f}, "
                f"speed: {args.batch_size / (now - start):f}"
            )
            step, start = step + 1, now
            if step == args.steps:
                return


if __name__ == "__main__":
    main()
