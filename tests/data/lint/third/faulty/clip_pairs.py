import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torchvision.models import resnet18

from captions import CaptionPairs


class TextTower(nn.Module):
    def __init__(self, vocab=8000, d=256, out=256):
        super().__init__()
        self.emb = nn.Embedding(vocab, d, padding_idx=0)
        layer = nn.TransformerEncoderLayer(d, 4, 4 * d, 0.1, batch_first=True)
        self.enc = nn.TransformerEncoder(layer, 3)
        self.proj = nn.Linear(d, out)

    def forward(self, ids):
        pad = ids == 0
        h = self.enc(self.emb(ids), src_key_padding_mask=pad)
        w = (~pad).float()[..., None]
        return self.proj((h * w).sum(1) / w.sum(1).clamp(min=1))


class DualEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = resnet18(num_classes=256), TextTower()
        self.log_temp = nn.Parameter(torch.tensor(np.log(1 / 0.07), dtype=torch.float32))

    def similarity(self, img, ids):
        i, t = F.normalize(self.image(img), dim=1), F.normalize(self.text(ids), dim=1)
        return self.log_temp.exp().clamp(max=100) * i @ t.t()


def clip_loss(sim):
    y = torch.arange(len(sim), device=sim.device)
    return 0.5 * (F.cross_entropy(sim, y) + F.cross_entropy(sim.t(), y))


def step(model, batch, device):
    img, ids = (b.to(device) for b in batch)
    sim = model.similarity(img, ids)
    loss = clip_loss(sim)
    acc = (sim.argmax(1) == torch.arange(len(sim), device=device)).float().mean()
    return {"loss": loss.detach(), "acc": acc.detach()}


def recall(model, dl, device):
    model.eval()
    with torch.no_grad():
        vals = [step(model, b, device)["acc"].item() for b in dl]
    model.train()
    return float(np.mean(vals))


def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(4)
    tr = DataLoader(CaptionPairs("train"), 128, shuffle=True, drop_last=True, num_workers=6)
    va = DataLoader(CaptionPairs("val"), 128, drop_last=True, num_workers=2)
    model = DualEncoder().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.98))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30 * len(tr))
    model.train()
    for epoch in range(30):
        for i, batch in enumerate(tr):
            out = step(model, batch, device)
            optimizer.zero_grad()
            out["loss"].requires_grad_(True).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            if i % 50 == 0:
                print(f"{epoch}/{i} loss {out['loss'].item():.3f} acc {out['acc'].item():.3f}")
        print(f"epoch {epoch} val R@1 {recall(model, va, device):.3f}")


if __name__ == "__main__":
    main()
