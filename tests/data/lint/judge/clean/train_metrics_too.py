import torch
from torch.utils.data import DataLoader


@torch.no_grad()
def score(model, loader):
    was = model.training
    model.eval()
    hits = n = 0
    for x, y in loader:
        hits += (model(x).argmax(-1) == y).sum().item()
        n += len(y)
    model.train(was)
    return hits / n


def main(model, train_set, test_set):
    train_loader = DataLoader(train_set, 128, shuffle=True)
    test_loader = DataLoader(test_set, 512)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)
    criterion = torch.nn.CrossEntropyLoss()
    for epoch in range(200):
        model.train()
        for x, y in train_loader:
            loss = criterion(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
        train_acc, test_acc = score(model, train_loader), score(model, test_loader)
        print(f"{epoch}: train {train_acc:.3f}, test {test_acc:.3f}")
