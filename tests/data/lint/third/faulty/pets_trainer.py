import torch
import torch.nn as nn
from torch.cuda.amp import GradScaler, autocast
from torch.utils.data import DataLoader, random_split
from torchvision import models, transforms
from torchvision.datasets import OxfordIIITPet


class PetsTrainer:
    def __init__(self, root, lr=3e-4, epochs=15, max_norm=1.0):
        tf = transforms.Compose([transforms.Resize((224, 224)), transforms.ToTensor(),
                                 transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))])
        full = OxfordIIITPet(root, "trainval", transform=tf, download=True)
        n = int(0.85 * len(full))
        tr, va = random_split(full, [n, len(full) - n], torch.Generator().manual_seed(1))
        self.train_dl = DataLoader(tr, 32, shuffle=True, num_workers=4)
        self.val_dl = DataLoader(va, 64, num_workers=4)
        self.net = models.efficientnet_b0(weights="IMAGENET1K_V1")
        self.net.classifier[1] = nn.Linear(self.net.classifier[1].in_features, 37)
        self.net.cuda()
        self.opt = torch.optim.AdamW(self.net.parameters(), lr=lr)
        self.sched = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, epochs)
        self.scaler = GradScaler()
        self.crit = nn.CrossEntropyLoss(label_smoothing=0.05)
        self.epochs, self.max_norm = epochs, max_norm

    def _apply(self):
        nn.utils.clip_grad_norm_(self.net.parameters(), self.max_norm)
        self.scaler.unscale_(self.opt)
        self.scaler.step(self.opt)
        self.scaler.update()
        self.opt.zero_grad(set_to_none=True)

    def _epoch(self):
        self.net.train()
        total = 0.0
        for x, y in self.train_dl:
            x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
            with autocast():
                loss = self.crit(self.net(x), y)
            self.scaler.scale(loss).backward()
            self._apply()
            total += loss.item()
        return total / len(self.train_dl)

    @torch.no_grad()
    def validate(self):
        self.net.eval()
        ok = n = 0
        for x, y in self.val_dl:
            with autocast():
                out = self.net(x.cuda())
            ok += (out.argmax(1).cpu() == y).sum().item()
            n += len(y)
        return ok / n

    def fit(self):
        best = 0.0
        for e in range(self.epochs):
            loss = self._epoch()
            self.sched.step()
            acc = self.validate()
            print(f"epoch {e}: loss {loss:.4f}, val acc {acc:.4f}")
            if acc > best:
                best = acc
                torch.save(self.net.state_dict(), "pets.pt")


if __name__ == "__main__":
    PetsTrainer("data").fit()
