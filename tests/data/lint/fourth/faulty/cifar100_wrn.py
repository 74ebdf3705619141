import torch
import torch.nn as nn
import torch.optim as optim
import torchvision
import torchvision.transforms as transforms

from wideresnet import WideResNet

device = "cuda" if torch.cuda.is_available() else "cpu"
stats = ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
transform_train = transforms.Compose([
    transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip(),
    transforms.ToTensor(), transforms.Normalize(*stats)])
transform_test = transforms.Compose([transforms.ToTensor(), transforms.Normalize(*stats)])

trainset = torchvision.datasets.CIFAR100("./data", train=True, download=True, transform=transform_train)
trainloader = torch.utils.data.DataLoader(trainset, batch_size=128, shuffle=True, num_workers=2)
testset = torchvision.datasets.CIFAR100("./data", train=False, download=True, transform=transform_test)
testloader = torch.utils.data.DataLoader(testset, batch_size=100, shuffle=False, num_workers=2)

net = WideResNet(depth=28, widen_factor=10, num_classes=100).to(device)
criterion = nn.CrossEntropyLoss()
optimizer = optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
epochs = 200
scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs * len(trainloader))


def train(epoch):
    net.train()
    train_loss, correct, total = 0, 0, 0
    for inputs, targets in trainloader:
        inputs, targets = inputs.to(device), targets.to(device)
        optimizer.zero_grad()
        outputs = net(inputs)
        loss = criterion(outputs, targets)
        loss.backward()
        scheduler.step()
        optimizer.step()

        train_loss += loss.item()
        correct += outputs.argmax(1).eq(targets).sum().item()
        total += targets.size(0)
    print("Epoch %d | loss %.3f | acc %.3f%%" % (epoch, train_loss / len(trainloader), 100.0 * correct / total))


def test():
    net.eval()
    correct = 0
    with torch.no_grad():
        for inputs, targets in testloader:
            outputs = net(inputs.to(device))
            correct += outputs.argmax(1).cpu().eq(targets).sum().item()
    return 100.0 * correct / len(testset)


best_acc = 0
for epoch in range(epochs):
    train(epoch)
    acc = test()
    print("test acc %.2f" % acc)
    if acc > best_acc:
        best_acc = acc
        torch.save({"net": net.state_dict(), "acc": acc, "epoch": epoch}, "ckpt.pth")
