import torch
import torch.nn as nn
import torch.nn.functional as F
from torchvision import datasets, transforms


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1 = nn.Conv2d(1, 16, 5)
        self.c2 = nn.Conv2d(16, 32, 5)
        self.fc = nn.Linear(512, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.c1(x)), 2)
        x = F.max_pool2d(F.relu(self.c2(x)), 2)
        return self.fc(x.flatten(1))


def train(model, device, loader, optimizer, epoch):
    model.train()
    for idx, (data, target) in enumerate(loader):
        data, target = data.to(device), target.to(device)
        loss = F.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()
        if idx % 100 == 0:
            print(f"epoch {epoch} [{idx * len(data)}/{len(loader.dataset)}] {loss.item():.4f}")


def test(model, device, loader):
    model.eval()
    correct = 0
    with torch.no_grad():
        for data, target in loader:
            pred = model(data.to(device)).argmax(dim=1)
            correct += pred.eq(target.to(device)).sum().item()
    print(f"test accuracy {100.0 * correct / len(loader.dataset):.2f}%")


def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tf = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.13,), (0.31,))])
    train_loader = torch.utils.data.DataLoader(datasets.MNIST("data", True, tf, download=True), 64, shuffle=True)
    test_loader = torch.utils.data.DataLoader(datasets.MNIST("data", False, tf), 1000)
    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    for epoch in range(1, 11):
        train(model, device, train_loader, optimizer, epoch)
        test(model, device, test_loader)


if __name__ == "__main__":
    main()
