import torch
import torch.nn as nn
from torch.utils.data import DataLoader
from torchvision.models.segmentation import lraspp_mobilenet_v3_large

from street import StreetScenes

NUM_CLASSES, IGNORE = 19, 255


def confusion(pred, target, n=NUM_CLASSES):
    k = target != IGNORE
    return torch.bincount(n * target[k] + pred[k], minlength=n * n).view(n, n)


class Engine:
    def __init__(self, model, optimizer, accum_steps, device):
        self.model, self.optimizer, self.accum_steps, self.device = model, optimizer, accum_steps, device
        self.criterion = nn.CrossEntropyLoss(ignore_index=IGNORE)
        self.scaler = torch.amp.GradScaler("cuda")
        self.iters = 0

    def forward_backward(self, img, lbl):
        with torch.amp.autocast("cuda", dtype=torch.float16):
            loss = self.criterion(self.model(img)["out"], lbl)
        self.scaler.scale(loss).backward()
        return loss.item()

    def optimizer_step(self):
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def train_epoch(self, loader, scheduler):
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for i, (img, lbl) in enumerate(loader, 1):
            total += self.forward_backward(img.to(self.device), lbl.to(self.device))
            if i % self.accum_steps == 0 or i == len(loader):
                self.optimizer_step()
                scheduler.step()
                self.iters += 1
        return total / len(loader)

    @torch.no_grad()
    def miou(self, loader):
        self.model.eval()
        m = torch.zeros(NUM_CLASSES, NUM_CLASSES, dtype=torch.long, device=self.device)
        for img, lbl in loader:
            m += confusion(self.model(img.to(self.device))["out"].argmax(1), lbl.to(self.device))
        d = m.diag().float()
        return (d / (m.sum(0) + m.sum(1) - d).clamp(min=1)).mean().item()


def main(epochs=80, accum=8):
    device = torch.device("cuda")
    tr = DataLoader(StreetScenes("train"), 2, shuffle=True, num_workers=4, drop_last=True)
    va = DataLoader(StreetScenes("val"), 2, num_workers=4)
    model = lraspp_mobilenet_v3_large(num_classes=NUM_CLASSES).to(device)
    opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    total = epochs * (-(-len(tr) // accum))
    sched = torch.optim.lr_scheduler.PolynomialLR(opt, total, power=0.9)
    eng = Engine(model, opt, accum, device)
    best = 0.0
    for e in range(epochs):
        loss, score = eng.train_epoch(tr, sched), eng.miou(va)
        print(f"{e} loss {loss:.3f} mIoU {score:.4f} updates {eng.iters}")
        if score > best:
            best = score
            torch.save(model.state_dict(), "seg.pt")


if __name__ == "__main__":
    main()
