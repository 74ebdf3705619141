import torch
from torch.utils.data import DataLoader, random_split


def run(dataset, model, criterion):
    train_set, val_set = random_split(dataset, [0.9, 0.1])
    train_loader = DataLoader(train_set, batch_size=64, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    best = float("inf")
    for epoch in range(20):
        model.train()
        for x, y in train_loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
        model.eval()
        val_loss = 0.0
        with torch.no_grad():
            for x, y in train_loader:
                val_loss += criterion(model(x), y).item()
        if val_loss < best:
            best = val_loss
            torch.save(model.state_dict(), "best.pt")
