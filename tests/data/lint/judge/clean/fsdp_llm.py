import functools

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy


def main(rank, world, model, layer, loader, val_loader, epochs=2):
    dist.init_process_group("nccl", rank=rank, world_size=world)
    torch.cuda.set_device(rank)
    torch.manual_seed(17)
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={layer})
    bf16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    model = FSDP(model, auto_wrap_policy=policy, mixed_precision=bf16, device_id=rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.85)
    for epoch in range(epochs):
        train_loss = train(model, loader, optimizer, rank)
        curr_val = validation(model, val_loader, rank)
        scheduler.step()
        if rank == 0:
            print(epoch, train_loss, curr_val)


def train(model, loader, optimizer, rank):
    model.train()
    seen = torch.zeros(2, device=rank)
    for batch in loader:
        batch = {k: v.to(rank) for k, v in batch.items()}
        optimizer.zero_grad()
        loss = model(**batch)["loss"]
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        seen[0] += loss.item()
        seen[1] += len(batch["input_ids"])
    dist.all_reduce(seen)
    return seen[0] / seen[1]


def validation(model, loader, rank):
    model.eval()
    seen = torch.zeros(2, device=rank)
    with torch.no_grad():
        for batch in loader:
            seen[0] += model(**{k: v.to(rank) for k, v in batch.items()})["loss"].item()
            seen[1] += 1
    dist.all_reduce(seen)
    return seen[0] / seen[1]
