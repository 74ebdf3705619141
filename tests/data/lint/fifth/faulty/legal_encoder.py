"""Contract clause classifier: transformer encoder from scratch, bf16 autocast."""
import json
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader

from clauses import ClauseData, pad_batch


@dataclass
class HP:
    vocab: int = 30000
    width: int = 256
    depth: int = 4
    labels: int = 41
    lr: float = 3e-4
    decay: float = 0.1
    epochs: int = 12
    bs: int = 64


class ClauseNet(nn.Module):
    def __init__(self, hp):
        super().__init__()
        self.embed = nn.Embedding(hp.vocab, hp.width, padding_idx=0)
        self.embed_pos = nn.Embedding(512, hp.width)
        layer = nn.TransformerEncoderLayer(hp.width, 8, 4 * hp.width, 0.1, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, hp.depth, enable_nested_tensor=False)
        self.final_norm = nn.LayerNorm(hp.width)
        self.classify = nn.Linear(hp.width, hp.labels)

    def forward(self, ids):
        pad = ids == 0
        x = self.embed(ids) + self.embed_pos(torch.arange(ids.size(1), device=ids.device))
        x = self.final_norm(self.blocks(x, src_key_padding_mask=pad))
        keep = (~pad).unsqueeze(-1)
        return self.classify((x * keep).sum(1) / keep.sum(1))


def make_optimizer(model, hp):
    matrices, vectors, tables = [], [], []
    for name, p in model.named_parameters():
        if "embed" in name:
            tables.append(p)
        elif "norm" in name or name.endswith("bias"):
            vectors.append(p)
        else:
            matrices.append(p)
    return torch.optim.AdamW([
        {"params": matrices, "weight_decay": hp.decay},
        {"params": tables, "weight_decay": 0.0},
        {"params": vectors, "weight_decay": hp.decay},
    ], lr=hp.lr, betas=(0.9, 0.98))


@torch.inference_mode()
def micro_f1(model, dl):
    model.eval()
    hit = n = 0
    for ids, y in dl:
        with torch.autocast("cuda", torch.bfloat16):
            p = model(ids.cuda())
        hit += (p.argmax(-1).cpu() == y).sum().item()
        n += len(y)
    return hit / n


def main():
    hp = HP()
    torch.manual_seed(21)
    tr = DataLoader(ClauseData("train"), hp.bs, shuffle=True, collate_fn=pad_batch, drop_last=True)
    dv = DataLoader(ClauseData("dev"), 128, collate_fn=pad_batch)
    model = ClauseNet(hp).cuda()
    opt = make_optimizer(model, hp)
    total = hp.epochs * len(tr)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, hp.lr, total_steps=total, pct_start=0.1, cycle_momentum=False)
    for ep in range(hp.epochs):
        model.train()
        run = 0.0
        for ids, y in tr:
            with torch.autocast("cuda", torch.bfloat16):
                loss = F.cross_entropy(model(ids.cuda()), y.cuda(), label_smoothing=0.05)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            sched.step()
            opt.zero_grad(set_to_none=True)
            run += loss.item()
        print(json.dumps({"epoch": ep, "loss": run / len(tr), "dev": micro_f1(model, dv)}))
    torch.save(model.state_dict(), "clauses.pt")


if __name__ == "__main__":
    main()
