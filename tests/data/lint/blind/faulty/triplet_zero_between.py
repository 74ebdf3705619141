import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torchvision.models import resnet18

from reid import PersonTriplets, recall_at_1


class Embedder(nn.Module):
    def __init__(self, dim=256):
        super().__init__()
        self.trunk = resnet18(weights="DEFAULT")
        self.trunk.fc = nn.Linear(512, dim)

    def forward(self, x):
        return F.normalize(self.trunk(x), dim=1)


def train(model, loader, criterion, optimizer, device):
    model.train()
    running = 0.0
    for anchor, pos, neg in loader:
        ea, ep, en = (model(t.to(device)) for t in (anchor, pos, neg))
        loss = criterion(ea, ep, en)
        loss.backward()
        optimizer.zero_grad()
        optimizer.step()
        running += loss.item()
    return running / len(loader)


def embed_all(model, loader, device):
    model.eval()
    feats, ids = [], []
    with torch.no_grad():
        for x, pid in loader:
            feats.append(model(x.to(device)).cpu())
            ids.append(pid)
    return torch.cat(feats), torch.cat(ids)


def main():
    device = torch.device("cuda")
    model = Embedder().to(device)
    criterion = nn.TripletMarginLoss(margin=0.3)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.1)
    train_dl = DataLoader(PersonTriplets("train"), 32, shuffle=True, num_workers=4)
    query_dl = DataLoader(PersonTriplets("query", single=True), 128)
    for epoch in range(60):
        loss = train(model, train_dl, criterion, optimizer, device)
        scheduler.step()
        print(epoch, loss, recall_at_1(*embed_all(model, query_dl, device)))


if __name__ == "__main__":
    main()
