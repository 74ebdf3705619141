"""Adversarial auto-encoder with a Gaussian prior."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torchvision import datasets, transforms


def mlp(*sizes, last=None):
    out = []
    for i, (a, b) in enumerate(zip(sizes, sizes[1:])):
        out.append(nn.Linear(a, b))
        if i < len(sizes) - 2:
            out.append(nn.LeakyReLU(0.2))
    return nn.Sequential(*out, *([last] if last is not None else []))


class AAE:
    def __init__(self, z, device, lr=2e-4):
        self.z, self.device = z, device
        self.encoder = mlp(784, 512, 256, z).to(device)
        self.decoder = mlp(z, 256, 512, 784, last=nn.Sigmoid()).to(device)
        self.critic = mlp(z, 256, 256, 1).to(device)
        ae_params = list(self.encoder.parameters()) + list(self.decoder.parameters())
        self.opt_ae = torch.optim.Adam(ae_params, lr=lr)
        self.opt_critic = torch.optim.Adam(self.encoder.parameters(), lr=lr, betas=(0.5, 0.999))
        self.opt_fool = torch.optim.Adam(self.encoder.parameters(), lr=lr, betas=(0.5, 0.999))

    def reconstruct(self, x):
        self.opt_ae.zero_grad()
        loss = F.binary_cross_entropy(self.decoder(self.encoder(x)), x)
        loss.backward()
        self.opt_ae.step()
        return loss.item()

    def discriminate(self, x):
        prior = torch.randn(len(x), self.z, device=self.device)
        with torch.no_grad():
            code = self.encoder(x)
        pr, pf = self.critic(prior), self.critic(code)
        loss = F.binary_cross_entropy_with_logits(pr, torch.ones_like(pr)) + \
            F.binary_cross_entropy_with_logits(pf, torch.zeros_like(pf))
        self.opt_critic.zero_grad()
        loss.backward()
        self.opt_critic.step()
        return loss.item()

    def fool(self, x):
        self.opt_fool.zero_grad()
        p = self.critic(self.encoder(x))
        loss = F.binary_cross_entropy_with_logits(p, torch.ones_like(p))
        loss.backward()
        self.opt_fool.step()
        return loss.item()

    @torch.no_grad()
    def test(self, dl):
        for m in (self.encoder, self.decoder):
            m.eval()
        err = sum(F.mse_loss(self.decoder(self.encoder(x := b.flatten(1).to(self.device))), x).item() for b, _ in dl)
        for m in (self.encoder, self.decoder):
            m.train()
        return err / len(dl)


def main(epochs=60, z=8):
    torch.manual_seed(0)
    dev = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    mk = lambda t: datasets.MNIST("data", t, transforms.ToTensor(), download=True)
    tr, te = DataLoader(mk(True), 128, shuffle=True), DataLoader(mk(False), 512)
    aae = AAE(z, dev)
    for epoch in range(epochs):
        sums = [0.0, 0.0, 0.0]
        for x, _ in tr:
            x = x.flatten(1).to(dev)
            for i, f in enumerate((aae.reconstruct, aae.discriminate, aae.fool)):
                sums[i] += f(x)
        rec, d, g = (s / len(tr) for s in sums)
        print(f"{epoch} rec {rec:.4f} d {d:.4f} g {g:.4f} test mse {aae.test(te):.5f}")
    torch.save({"enc": aae.encoder.state_dict(), "dec": aae.decoder.state_dict()}, "aae.pt")


if __name__ == "__main__":
    main()
