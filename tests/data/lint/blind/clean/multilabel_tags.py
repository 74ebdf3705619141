import torch
import torch.nn as nn
from sklearn.metrics import f1_score
from torch.utils.data import DataLoader
from torchvision import models

from tagset import TagDataset, pos_weights

cfg = dict(lr=1e-4, head_lr=1e-3, bs=64, epochs=15, threshold=0.5)
device = "cuda" if torch.cuda.is_available() else "cpu"

train_dl = DataLoader(TagDataset("train"), cfg["bs"], shuffle=True, num_workers=4)
dev_dl = DataLoader(TagDataset("dev"), cfg["bs"] * 2, num_workers=4)

model = models.efficientnet_b0(weights="DEFAULT")
model.classifier[1] = nn.Linear(model.classifier[1].in_features, 80)
model = model.to(device)

criterion = nn.BCEWithLogitsLoss(pos_weight=pos_weights().to(device))
optimizer = torch.optim.AdamW([
    {"params": model.features.parameters(), "lr": cfg["lr"]},
    {"params": model.classifier.parameters(), "lr": cfg["head_lr"]},
], weight_decay=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=cfg["epochs"])


def train_epoch():
    model.train()
    meter = 0.0
    for images, tags in train_dl:
        logits = model(images.to(device))
        loss = criterion(logits, tags.float().to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        meter += loss.item()
    return meter / len(train_dl)


@torch.no_grad()
def dev_f1():
    model.eval()
    preds, truth = [], []
    for images, tags in dev_dl:
        probs = torch.sigmoid(model(images.to(device)))
        preds.append((probs > cfg["threshold"]).cpu())
        truth.append(tags.bool())
    return f1_score(torch.cat(truth).numpy(), torch.cat(preds).numpy(), average="micro")


if __name__ == "__main__":
    for ep in range(cfg["epochs"]):
        tr = train_epoch()
        scheduler.step()
        print(f"{ep} {tr:.4f} f1={dev_f1():.4f}")
