import logging
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, random_split
from tqdm import tqdm

from dataset import MaskDataset
from unet import UNet

dir_img, dir_mask, dir_ckpt = Path("data/imgs"), Path("data/masks"), Path("checkpoints")


def dice_loss(probs, target, eps=1e-6):
    inter = 2 * (probs * target).sum(dim=(-1, -2))
    union = probs.sum(dim=(-1, -2)) + target.sum(dim=(-1, -2))
    return 1 - ((inter + eps) / (union + eps)).mean()


@torch.inference_mode()
def evaluate(net, loader, device, amp):
    net.eval()
    score = 0.0
    with torch.autocast(device.type, enabled=amp):
        for batch in loader:
            img, mask = batch["image"].to(device), batch["mask"].to(device).float()
            pred = (torch.sigmoid(net(img)).squeeze(1) > 0.5).float()
            score += 1 - dice_loss(pred, mask).item()
    net.train()
    return score / max(len(loader), 1)


def train_model(model, device, epochs=5, batch_size=4, lr=1e-4, val_percent=0.1, amp=True):
    dataset = MaskDataset(dir_img, dir_mask, scale=0.5)
    n_val = int(len(dataset) * val_percent)
    train_set, val_set = random_split(dataset, [len(dataset) - n_val, n_val], generator=torch.Generator().manual_seed(0))
    train_loader = DataLoader(train_set, batch_size, shuffle=True, num_workers=4, pin_memory=True)
    val_loader = DataLoader(val_set, batch_size, num_workers=4, pin_memory=True)

    optimizer = torch.optim.RMSprop(model.parameters(), lr=lr, weight_decay=1e-8, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=3)
    grad_scaler = torch.cuda.amp.GradScaler(enabled=amp)
    criterion = nn.BCEWithLogitsLoss()

    for epoch in range(1, epochs + 1):
        model.train()
        epoch_loss = 0.0
        for batch in tqdm(train_loader, desc=f"Epoch {epoch}/{epochs}"):
            images = batch["image"].to(device)
            masks = batch["mask"].to(device).float()
            with torch.autocast(device.type, enabled=amp):
                logits = model(images).squeeze(1)
                loss = criterion(logits, masks)
                loss = loss + dice_loss(torch.sigmoid(logits), masks)

            optimizer.zero_grad(set_to_none=True)
            grad_scaler.scale(loss).backward()
            grad_scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            grad_scaler.step(optimizer)
            grad_scaler.update()
            epoch_loss += loss.item()

        val_score = evaluate(model, val_loader, device, amp)
        scheduler.step(val_score)
        logging.info("epoch %d loss %.4f dice %.4f", epoch, epoch_loss / len(train_loader), val_score)
        dir_ckpt.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), dir_ckpt / f"epoch{epoch}.pth")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    net = UNet(n_channels=3, n_classes=1).to(device)
    train_model(net, device, amp=device.type == "cuda")
