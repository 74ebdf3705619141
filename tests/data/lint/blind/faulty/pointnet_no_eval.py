import torch
import torch.nn as nn
from torch.utils.data import DataLoader

from modelnet import PointClouds


class PointNet(nn.Module):
    def __init__(self, classes=40):
        super().__init__()
        self.local = nn.Sequential(
            nn.Conv1d(3, 64, 1), nn.BatchNorm1d(64), nn.ReLU(),
            nn.Conv1d(64, 1024, 1), nn.BatchNorm1d(1024), nn.ReLU())
        self.head = nn.Sequential(
            nn.Linear(1024, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.3), nn.Linear(256, classes))

    def forward(self, pts):
        return self.head(self.local(pts).amax(dim=2))


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    train_loader = DataLoader(PointClouds("train", augment=True), 32, shuffle=True, drop_last=True)
    test_loader = DataLoader(PointClouds("test"), 32)
    net = PointNet().to(device)
    net.train()
    optim = torch.optim.Adam(net.parameters(), lr=1e-3)
    sched = torch.optim.lr_scheduler.StepLR(optim, step_size=20, gamma=0.5)
    ce = nn.CrossEntropyLoss()
    for epoch in range(200):
        for pts, label in train_loader:
            optim.zero_grad()
            loss = ce(net(pts.to(device)), label.to(device))
            loss.backward()
            optim.step()
        sched.step()

        correct = 0
        with torch.no_grad():
            for pts, label in test_loader:
                pred = net(pts.to(device)).argmax(dim=1)
                correct += (pred == label.to(device)).sum().item()
        print(f"epoch {epoch}: test {correct / len(test_loader.dataset):.4f}")


if __name__ == "__main__":
    main()
