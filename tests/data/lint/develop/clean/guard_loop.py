import torch
from torch import nn

import steadystep

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
guard = steadystep.Guard(model, optimizer, run_dir="runs/a", config={"training": {"max_grad_norm": 1.0}})
for epoch in range(guard.epoch, 5):
    for x, y in guard.batches(loader):
        guard.step(lambda x=x, y=y: nn.functional.mse_loss(model(x), y))
    model.eval()
    with torch.no_grad():
        val = sum(nn.functional.mse_loss(model(x), y).item() for x, y in val_loader) / len(val_loader)
    model.train()
    guard.validate(val)
    if guard.should_stop:
        break
guard.close()
