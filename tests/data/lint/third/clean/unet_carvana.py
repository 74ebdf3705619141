import logging

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, random_split
from tqdm import tqdm

from carvana import CarvanaDataset

log = logging.getLogger("unet")


def double(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(True),
                         nn.Conv2d(o, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(True))


class UNet(nn.Module):
    def __init__(self, c=(32, 64, 128, 256)):
        super().__init__()
        self.downs = nn.ModuleList([double(i, o) for i, o in zip((3,) + c[:-1], c)])
        self.ups = nn.ModuleList([nn.ConvTranspose2d(i, o, 2, 2) for i, o in zip(c[:0:-1], c[-2::-1])])
        self.convs = nn.ModuleList([double(2 * o, o) for o in c[-2::-1]])
        self.head = nn.Conv2d(c[0], 1, 1)

    def forward(self, x):
        skips = []
        for i, d in enumerate(self.downs):
            x = d(x if i == 0 else F.max_pool2d(x, 2))
            skips.append(x)
        skips.pop()
        for up, conv in zip(self.ups, self.convs):
            x = conv(torch.cat([up(x), skips.pop()], 1))
        return self.head(x).squeeze(1)


def soft_dice(prob, mask, eps=1.0):
    inter = (prob * mask).sum((1, 2))
    return 1 - ((2 * inter + eps) / (prob.sum((1, 2)) + mask.sum((1, 2)) + eps)).mean()


@torch.inference_mode()
def evaluate(net, loader, device, amp):
    net.eval()
    total = 0.0
    with torch.autocast(device.type, enabled=amp):
        for img, mask in loader:
            pred = (torch.sigmoid(net(img.to(device))) > 0.5).float()
            total += 1 - soft_dice(pred, mask.to(device).float()).item()
    net.train()
    return total / max(len(loader), 1)


def train_net(root, epochs=20, bs=4, lr=1e-5, amp=True):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = CarvanaDataset(root)
    n_val = len(data) // 10
    tr, va = random_split(data, [len(data) - n_val, n_val], generator=torch.Generator().manual_seed(0))
    train_dl = DataLoader(tr, bs, shuffle=True, num_workers=4, pin_memory=True)
    val_dl = DataLoader(va, bs, drop_last=True, num_workers=4)
    net = UNet().to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.RMSprop(net.parameters(), lr=lr, weight_decay=1e-8, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=5)
    grad_scaler = torch.cuda.amp.GradScaler(enabled=amp)
    bce = nn.BCEWithLogitsLoss()
    step = 0
    for epoch in range(1, epochs + 1):
        net.train()
        with tqdm(total=len(tr), desc=f"{epoch}/{epochs}") as bar:
            for img, mask in train_dl:
                img = img.to(device, memory_format=torch.channels_last)
                mask = mask.to(device).float()
                with torch.autocast(device.type, enabled=amp):
                    logits = net(img)
                    loss = bce(logits, mask)
                    loss = loss + soft_dice(torch.sigmoid(logits), mask)
                optimizer.zero_grad(set_to_none=True)
                grad_scaler.scale(loss).backward()
                grad_scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                grad_scaler.step(optimizer)
                grad_scaler.update()
                step += 1
                bar.update(len(img))
                bar.set_postfix(loss=loss.item())
                if step % 500 == 0:
                    dice = evaluate(net, val_dl, device, amp)
                    scheduler.step(dice)
                    log.info("step %d val dice %.4f", step, dice)
        torch.save(net.state_dict(), f"unet_{epoch}.pth")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    train_net("data/carvana")
