"""Phone classifier with an accent adversary on the encoder."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader

from accents import PhoneFrames


def mlp(*sizes):
    layers = []
    for i, o in zip(sizes[:-1], sizes[1:]):
        layers += [nn.Linear(i, o), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class System:
    def __init__(self, device, n_phones=42, n_accents=8, lam=0.1):
        self.device, self.lam = device, lam
        self.encoder = mlp(440, 1024, 1024, 256).to(device)
        self.phones = mlp(256, 512, n_phones).to(device)
        self.accent = mlp(256, 256, n_accents).to(device)
        main = list(self.encoder.parameters()) + list(self.phones.parameters())
        self.opts = {
            "main": torch.optim.Adam(main, lr=5e-4),
            "adv": torch.optim.Adam(self.accent.parameters(), lr=1e-3),
        }

    def modules(self):
        return self.encoder, self.phones, self.accent

    def mode(self, training):
        for m in self.modules():
            m.train(training)

    def update_adversary(self, x, a):
        with torch.no_grad():
            h = F.relu(self.encoder(x))
        self.opts["adv"].zero_grad()
        loss = F.cross_entropy(self.accent(h), a)
        self.opts["adv"].step()
        return loss.item()

    def update_main(self, x, y, a):
        h = F.relu(self.encoder(x))
        confusion = -F.log_softmax(self.accent(h), dim=-1).mean()
        loss = F.cross_entropy(self.phones(h), y) + self.lam * confusion
        self.opts["main"].zero_grad()
        loss.backward()
        self.opts["main"].step()
        return loss.item()

    @torch.no_grad()
    def error_rates(self, loader):
        self.mode(False)
        wrong, n = 0, 0
        for x, y, _ in loader:
            pred = self.phones(F.relu(self.encoder(x.to(self.device)))).argmax(-1).cpu()
            wrong += (pred != y).sum().item()
            n += len(y)
        return wrong / n


def main():
    torch.manual_seed(21)
    system = System("cuda" if torch.cuda.is_available() else "cpu")
    train = DataLoader(PhoneFrames("train"), 512, shuffle=True, num_workers=2)
    dev = DataLoader(PhoneFrames("dev"), 2048)
    for epoch in range(25):
        system.mode(True)
        la = lm = 0.0
        for x, y, a in train:
            x, y, a = x.to(system.device), y.to(system.device), a.to(system.device)
            la += system.update_adversary(x, a)
            lm += system.update_main(x, y, a)
        print(f"{epoch} main {lm / len(train):.4f} adv {la / len(train):.4f} FER {system.error_rates(dev):.4f}")


if __name__ == "__main__":
    main()
