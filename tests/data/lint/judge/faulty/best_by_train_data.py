import torch


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    hits = sum((model(x).argmax(-1) == y).sum().item() for x, y in loader)
    return hits / len(loader.dataset)


def main(model, train_loader, val_loader, optimizer, criterion):
    for epoch in range(10):
        model.train()
        for x, y in train_loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        val_acc = evaluate(model, train_loader)
        print(f"epoch {epoch}: validation accuracy {val_acc:.3f}")
