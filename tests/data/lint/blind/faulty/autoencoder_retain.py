import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision import datasets, transforms


class ConvAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 32, 4, 2, 1), nn.ReLU(), nn.Conv2d(32, 64, 4, 2, 1), nn.ReLU(), nn.Conv2d(64, 16, 1))
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(16, 64, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(64, 3, 4, 2, 1))

    def forward(self, x):
        return self.decoder(self.encoder(x))


class Session:
    def __init__(self, lr=1e-3):
        self.model = ConvAE().cuda()
        self.loss_fn = nn.MSELoss()
        self.optim = torch.optim.Adam(self.model.parameters(), lr=lr)

    def train_step(self, x):
        self.optim.zero_grad()
        loss = self.loss_fn(self.model(x), x)
        loss.backward(retain_graph=True)
        self.optim.step()
        return loss.item()

    @torch.no_grad()
    def eval_step(self, x):
        return self.loss_fn(self.model(x), x).item()

    def run(self, train, test, epochs):
        for epoch in range(epochs):
            self.model.train()
            tr = [self.train_step(x.cuda()) for x, _ in train]
            self.model.eval()
            te = [self.eval_step(x.cuda()) for x, _ in test]
            print(f"{epoch} train {sum(tr) / len(tr):.4f} test {sum(te) / len(te):.4f}")


if __name__ == "__main__":
    tf = transforms.ToTensor()
    train_dl = DataLoader(datasets.STL10("data", "train", transform=tf, download=True), 64, shuffle=True)
    test_dl = DataLoader(datasets.STL10("data", "test", transform=tf), 64)
    Session().run(train_dl, test_dl, epochs=50)
