import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModel, get_linear_schedule_with_warmup

from ranking import Comparisons, collate


class RewardModel(nn.Module):
    def __init__(self, name="roberta-base"):
        super().__init__()
        self.backbone = AutoModel.from_pretrained(name)
        self.value = nn.Linear(self.backbone.config.hidden_size, 1)

    def forward(self, ids, att):
        return self.value(self.backbone(ids, attention_mask=att).last_hidden_state[:, 0]).squeeze(-1)


def layerwise_groups(model, lr, decay=0.9):
    n = len(model.backbone.encoder.layer)
    groups = [{"params": model.value.parameters(), "lr": 10 * lr}]
    for k, layer in enumerate(model.backbone.encoder.layer):
        scale = lr * decay ** (n - k)
        groups.append({"params": [p for p in layer.parameters() if p.ndim > 1], "lr": scale})
        groups.append({"params": [p for p in layer.parameters() if p.ndim <= 1], "lr": scale, "weight_decay": 0.0})
    groups.append({"params": model.backbone.embeddings.parameters(), "lr": lr * decay ** (n + 1), "weight_decay": 0.0})
    return groups


class Worker:
    def __init__(self, rank, lr=2e-5, epochs=2):
        self.rank, self.epochs = rank, epochs
        self.device = torch.device("cuda", rank)
        raw = RewardModel().to(self.device)
        for p in raw.backbone.pooler.parameters():
            p.requires_grad_(False)
        self.optimizer = torch.optim.AdamW(layerwise_groups(raw, lr), lr=lr, weight_decay=0.01)
        self.model = DistributedDataParallel(raw, device_ids=[rank])
        train, dev = Comparisons("train"), Comparisons("dev")
        self.sampler = DistributedSampler(train)
        self.train_dl = DataLoader(train, 16, sampler=self.sampler, collate_fn=collate)
        self.dev_dl = DataLoader(dev, 32, sampler=DistributedSampler(dev, shuffle=False), collate_fn=collate)
        total = len(self.train_dl) * epochs
        self.scheduler = get_linear_schedule_with_warmup(self.optimizer, int(0.1 * total), total)
        self.scaler = torch.cuda.amp.GradScaler()

    def margins(self, batch):
        good, bad = ({k: v.to(self.device) for k, v in part.items()} for part in batch)
        with torch.cuda.amp.autocast():
            ids = torch.cat([good["ids"], bad["ids"]])
            att = torch.cat([good["att"], bad["att"]])
            r = self.model(ids, att).float()
        return r.chunk(2)[0] - r.chunk(2)[1]

    def optimize(self, loss):
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()

    def accuracy(self):
        self.model.eval()
        tally = torch.zeros(2, device=self.device)
        with torch.no_grad():
            for batch in self.dev_dl:
                m = self.margins(batch)
                tally += torch.stack([(m > 0).sum(), torch.tensor(len(m), device=self.device)])
        dist.all_reduce(tally)
        return (tally[0] / tally[1]).item()

    def run(self):
        for epoch in range(self.epochs):
            self.sampler.set_epoch(epoch)
            self.model.train()
            for batch in self.train_dl:
                self.optimize(-F.logsigmoid(self.margins(batch)).mean())
            acc = self.accuracy()
            if self.rank == 0:
                print(f"epoch {epoch} pairwise accuracy {acc:.4f}")
                torch.save(self.model.module.state_dict(), "reward.pt")


if __name__ == "__main__":
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    Worker(local_rank).run()
    dist.destroy_process_group()
