from __future__ import print_function
import argparse
import torch
import torch.utils.data
from torch import nn, optim
from torch.nn import functional as F
from torchvision import datasets, transforms
from torchvision.utils import save_image

parser = argparse.ArgumentParser(description='Digits VAE')
parser.add_argument('--batch-size', type=int, default=128)
parser.add_argument('--epochs', type=int, default=20)
parser.add_argument('--latent', type=int, default=16)
parser.add_argument('--beta', type=float, default=1.0)
parser.add_argument('--kl-anneal', type=int, default=5, help='epochs for linear KL ramp')
args = parser.parse_args()
torch.manual_seed(1)
device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')

mk = lambda train: datasets.MNIST('../data', train=train, download=True, transform=transforms.ToTensor())
train_loader = torch.utils.data.DataLoader(mk(True), batch_size=args.batch_size, shuffle=True)
test_loader = torch.utils.data.DataLoader(mk(False), batch_size=args.batch_size)


class VAE(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(784, 400), nn.ReLU())
        self.mu, self.lv = nn.Linear(400, d), nn.Linear(400, d)
        self.dec = nn.Sequential(nn.Linear(d, 400), nn.ReLU(), nn.Linear(400, 784))

    def reparam(self, mu, lv):
        if not self.training:
            return mu
        return mu + torch.randn_like(mu) * (0.5 * lv).exp()

    def decode(self, z):
        return torch.sigmoid(self.dec(z))

    def forward(self, x):
        h = self.enc(x.view(-1, 784))
        mu, lv = self.mu(h), self.lv(h)
        return self.decode(self.reparam(mu, lv)), mu, lv


def elbo(recon, x, mu, lv, beta):
    bce = F.binary_cross_entropy(recon, x.view(-1, 784), reduction='sum')
    kld = -0.5 * torch.sum(1 + lv - mu.pow(2) - lv.exp())
    return bce + beta * kld


model = VAE(args.latent).to(device)
optimizer = optim.Adam(model.parameters(), lr=1e-3)


def train(epoch):
    model.train()
    beta = args.beta * min(1.0, epoch / args.kl_anneal)
    train_loss = 0
    for batch_idx, (data, _) in enumerate(train_loader):
        data = data.to(device)
        optimizer.zero_grad()
        recon, mu, lv = model(data)
        loss = elbo(recon, data, mu, lv, beta)
        loss.backward()
        train_loss += loss.item()
        optimizer.step()
        if batch_idx % 100 == 0:
            print('Epoch {} [{}/{}] {:.4f}'.format(epoch, batch_idx, len(train_loader), loss.item() / len(data)))
    print('====> epoch {} avg {:.4f}'.format(epoch, train_loss / len(train_loader.dataset)))


def test(epoch):
    model.eval()
    test_loss = 0
    with torch.no_grad():
        for i, (data, _) in enumerate(test_loader):
            data = data.to(device)
            recon, mu, lv = model(data)
            test_loss += elbo(recon, data, mu, lv, args.beta)
            if i == 0:
                n = min(data.size(0), 8)
                both = torch.cat([data[:n], recon.view(-1, 1, 28, 28)[:n]])
                save_image(both.cpu(), 'recon_%d.png' % epoch, nrow=n)
    print('====> test {:.4f}'.format(test_loss.item() / len(test_loader.dataset)))


if __name__ == '__main__':
    for e in range(1, args.epochs + 1):
        train(e)
        test(e)
        with torch.no_grad():
            s = model.decode(torch.randn(64, args.latent, device=device)).cpu()
            save_image(s.view(64, 1, 28, 28), 'sample_%d.png' % e)
