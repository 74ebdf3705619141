import argparse

import torch
import torch.nn as nn
from torch.utils.data import DataLoader
from torchvision import datasets, transforms
from torchvision.utils import save_image


class AE(nn.Module):
    def __init__(self, code=64):
        super().__init__()
        self.enc = nn.Sequential(nn.Conv2d(3, 32, 4, 2, 1), nn.ReLU(), nn.Conv2d(32, 64, 4, 2, 1), nn.ReLU(),
                                 nn.Conv2d(64, 128, 4, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(2048, code))
        self.dec = nn.Sequential(nn.Linear(code, 2048), nn.ReLU(), nn.Unflatten(1, (128, 4, 4)),
                                 nn.ConvTranspose2d(128, 64, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(64, 32, 4, 2, 1),
                                 nn.ReLU(), nn.ConvTranspose2d(32, 3, 4, 2, 1), nn.Sigmoid())

    def forward(self, x):
        z = self.enc(x)
        return self.dec(z), z


def compute(model, x, l1):
    rec, z = model(x)
    return nn.functional.mse_loss(rec, x) + l1 * z.abs().mean(), rec


def optimise(loss, model, optimizer, max_norm=1.0):
    loss.backward()
    optimizer.zero_grad()
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()


def test(model, loader, args, epoch, dev):
    model.eval()
    tot = 0.0
    with torch.no_grad():
        for i, (x, _) in enumerate(loader):
            loss, rec = compute(model, x.to(dev), args.l1)
            tot += loss.item()
            if i == 0:
                save_image(torch.cat([x[:8], rec[:8].cpu()]), f"ae_{epoch}.png", nrow=8)
    return tot / len(loader)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=40)
    p.add_argument("--batch-size", type=int, default=256)
    p.add_argument("--l1", type=float, default=1e-4)
    p.add_argument("--lr", type=float, default=1e-3)
    args = p.parse_args()
    dev = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ds = lambda t: datasets.CIFAR10("data", t, transforms.ToTensor(), download=True)
    tr = DataLoader(ds(True), args.batch_size, shuffle=True, num_workers=2)
    te = DataLoader(ds(False), args.batch_size, num_workers=2)
    model = AE().to(dev)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        model.train()
        running = 0.0
        for x, _ in tr:
            loss, _ = compute(model, x.to(dev), args.l1)
            optimise(loss, model, optimizer)
            running += loss.item()
        print(f"epoch {epoch} train {running / len(tr):.5f} test {test(model, te, args, epoch, dev):.5f}")
    torch.save(model.state_dict(), "ae.pt")


if __name__ == "__main__":
    main()
