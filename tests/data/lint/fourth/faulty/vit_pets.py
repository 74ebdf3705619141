import torch
import torch.nn as nn
import torchvision
from torch.utils.data import DataLoader
from torchvision.models import ViT_B_16_Weights, vit_b_16


def get_loaders(bs):
    tf = ViT_B_16_Weights.IMAGENET1K_V1.transforms()
    train = torchvision.datasets.OxfordIIITPet("data", split="trainval", download=True, transform=tf)
    test = torchvision.datasets.OxfordIIITPet("data", split="test", download=True, transform=tf)
    return DataLoader(train, bs, shuffle=True, num_workers=8, drop_last=True), DataLoader(test, bs, num_workers=8)


def build(classes):
    model = vit_b_16(weights=ViT_B_16_Weights.IMAGENET1K_V1)
    model.heads.head = nn.Linear(model.heads.head.in_features, classes)
    return model


class Engine:
    def __init__(self, model, lr, epochs, steps):
        self.model = model.cuda()
        self.opt = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.9)
        self.sched = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, epochs * steps)
        self.crit = nn.CrossEntropyLoss(label_smoothing=0.1)
        self.amp_dtype = torch.bfloat16
        self.scaler = torch.amp.GradScaler("cuda")

    def _forward(self, x):
        with torch.autocast("cuda", dtype=self.amp_dtype):
            return self.model(x.cuda(non_blocking=True))

    def step(self, x, y):
        loss = self.crit(self._forward(x).float(), y.cuda(non_blocking=True))
        self.opt.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.opt)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.opt)
        self.scaler.update()
        self.sched.step()
        return loss.item()

    def train_epoch(self, dl):
        self.model.train()
        return sum(self.step(x, y) for x, y in dl) / len(dl)

    @torch.inference_mode()
    def accuracy(self, dl):
        self.model.eval()
        hit = n = 0
        for x, y in dl:
            hit += (self._forward(x).argmax(1).cpu() == y).sum().item()
            n += len(y)
        return hit / n


def main(epochs=10, bs=64, lr=0.01):
    torch.manual_seed(0)
    train_dl, test_dl = get_loaders(bs)
    eng = Engine(build(37), lr, epochs, len(train_dl))
    for e in range(epochs):
        loss = eng.train_epoch(train_dl)
        print(f"epoch {e} loss {loss:.4f} acc {eng.accuracy(test_dl):.4f}")
    torch.save(eng.model.state_dict(), "vit_pets.pt")


if __name__ == "__main__":
    main()
