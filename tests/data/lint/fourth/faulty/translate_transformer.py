import math

import torch
import torch.nn as nn
from torch.utils.data import DataLoader

from multi30k import PAD, build_vocabs, collate, load_pairs


class Seq2Seq(nn.Module):
    def __init__(self, src_v, tgt_v, d=512):
        super().__init__()
        self.src, self.tgt = nn.Embedding(src_v, d, PAD), nn.Embedding(tgt_v, d, PAD)
        self.pos = nn.Parameter(torch.randn(256, d) * 0.02)
        self.tr = nn.Transformer(d, 8, 3, 3, 1024, 0.1, batch_first=True)
        self.gen = nn.Linear(d, tgt_v)
        self.d = d

    def embed(self, e, x):
        return e(x) * math.sqrt(self.d) + self.pos[: x.size(1)]

    def forward(self, s, t):
        causal = nn.Transformer.generate_square_subsequent_mask(t.size(1), device=t.device)
        h = self.tr(self.embed(self.src, s), self.embed(self.tgt, t), tgt_mask=causal,
                    src_key_padding_mask=s == PAD, tgt_key_padding_mask=t == PAD, memory_key_padding_mask=s == PAD)
        return self.gen(h)


device = torch.device("cuda")
torch.manual_seed(0)
train_pairs, val_pairs = load_pairs("train"), load_pairs("val")
sv, tv = build_vocabs(train_pairs)
train_dl = DataLoader(train_pairs, 128, shuffle=True, collate_fn=collate(sv, tv))
val_dl = DataLoader(val_pairs, 128, collate_fn=collate(sv, tv))
model = Seq2Seq(len(sv), len(tv)).to(device)
loss_fn = nn.CrossEntropyLoss(ignore_index=PAD, label_smoothing=0.1)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-9)
scaler = torch.amp.GradScaler("cuda")


def train_epoch():
    model.train()
    losses = 0
    for src, tgt in train_dl:
        src, tgt = src.to(device), tgt.to(device)
        optimizer.zero_grad()
        with torch.amp.autocast("cuda", dtype=torch.float16):
            logits = model(src, tgt[:, :-1])
            loss = loss_fn(logits.reshape(-1, logits.shape[-1]), tgt[:, 1:].reshape(-1))
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses += loss.item()
    return losses / len(train_dl)


def evaluate():
    model.eval()
    losses = 0
    with torch.no_grad():
        for src, tgt in val_dl:
            src, tgt = src.to(device), tgt.to(device)
            logits = model(src, tgt[:, :-1])
            losses += loss_fn(logits.reshape(-1, logits.shape[-1]), tgt[:, 1:].reshape(-1)).item()
    return losses / len(val_dl)


for epoch in range(1, 19):
    tl = train_epoch()
    vl = evaluate()
    print(f"Epoch {epoch}: train {tl:.3f} val {vl:.3f}")
torch.save(model.state_dict(), "de_en.pt")
