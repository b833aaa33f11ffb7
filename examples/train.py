import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import echelon

echelon.init(seed=0)  # 1: join the job
x = torch.randn(512, 8)
data = TensorDataset(x, x.argmax(1) % 3)
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
engine = echelon.distribute(model, loss=F.cross_entropy, optimizer=optimizer)  # 2: distribute the model
loader = engine.loader(data, global_batch=32)  # 3: each rank loads its share of 32 samples
for _ in loader.epochs(2):
    for inputs, labels in loader:
        loss = engine.step(inputs, labels)  # 4: forward, backward, all-reduce, update
