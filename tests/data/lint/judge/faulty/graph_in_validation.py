import torch
import torch.nn.functional as F


def test(model, device, test_loader):
    model.eval()
    test_loss = 0
    correct = 0
    for data, target in test_loader:
        data, target = data.to(device), target.to(device)
        output = model(data)
        test_loss += F.nll_loss(output, target, reduction="sum").item()
        correct += output.argmax(dim=1).eq(target).sum().item()
    print(test_loss / len(test_loader.dataset), correct)


def train(model, device, train_loader, optimizer):
    model.train()
    for data, target in train_loader:
        optimizer.zero_grad()
        loss = F.nll_loss(model(data.to(device)), target.to(device))
        loss.backward()
        optimizer.step()


def main(model, device, train_loader, test_loader):
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    for _ in range(14):
        train(model, device, train_loader, optimizer)
        test(model, device, test_loader)
