import schedulefree
import torch
import torch.nn.functional as F


def train(model, device, train_loader, optimizer):
    model.train()
    optimizer.train()
    for data, target in train_loader:
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()


def test(model, device, test_loader, optimizer):
    model.eval()
    optimizer.eval()
    loss = 0
    with torch.no_grad():
        for data, target in test_loader:
            loss += F.cross_entropy(model(data.to(device)), target.to(device), reduction="sum")
    return loss.item() / len(test_loader.dataset)


def main(model, loaders, device="cuda"):
    model.to(device)
    optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.0025, warmup_steps=2000)
    for epoch in range(14):
        train(model, device, loaders[0], optimizer)
        print(epoch, test(model, device, loaders[1], optimizer))
