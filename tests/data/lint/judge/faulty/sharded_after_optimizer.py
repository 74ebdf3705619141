import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def main(rank, model, loader):
    torch.cuda.set_device(rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model = FSDP(model)
    model.train()
    for batch in loader:
        optimizer.zero_grad()
        loss = model(batch).mean()
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
