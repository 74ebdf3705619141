import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from captions import CaptionPairs
from clipnet import DualEncoder


def contrastive(img, txt, scale):
    logits = scale * img @ txt.t()
    target = torch.arange(len(img), device=img.device)
    return 0.5 * (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target))


def main():
    dist.init_process_group("nccl")
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    data = CaptionPairs("train")
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 256, sampler=sampler, num_workers=8, drop_last=True)
    model = DistributedDataParallel(DualEncoder().cuda(), device_ids=[rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, betas=(0.9, 0.98), weight_decay=0.2)
    model.train()
    for epoch in range(32):
        sampler.set_epoch(epoch)
        for step, (images, texts) in enumerate(loader):
            images, texts = images.cuda(non_blocking=True), texts.cuda(non_blocking=True)
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device_type="cuda", dtype=torch.float16):
                img, txt, scale = model(images, texts)
                loss = contrastive(img, txt, scale)
            loss.backward()
            optimizer.step()
            if rank == 0 and step % 100 == 0:
                print(f"{epoch}:{step} {loss.item():.4f}")
        if rank == 0:
            torch.save(model.module.state_dict(), f"clip_{epoch}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
