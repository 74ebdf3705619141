import torch
import torch.nn as nn
import torchvision
import torchvision.transforms as T
from torch.utils.data import DataLoader

EPOCHS = 30
BATCH = 512
MAX_LR = 0.4
WD = 5e-4

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

mean, std = (0.4914, 0.4822, 0.4465), (0.247, 0.243, 0.261)
train_tf = T.Compose([T.RandomCrop(32, padding=4), T.RandomHorizontalFlip(), T.ToTensor(), T.Normalize(mean, std)])
test_tf = T.Compose([T.ToTensor(), T.Normalize(mean, std)])
trainset = torchvision.datasets.CIFAR10("./data", train=True, download=True, transform=train_tf)
testset = torchvision.datasets.CIFAR10("./data", train=False, download=True, transform=test_tf)
trainloader = DataLoader(trainset, BATCH, shuffle=True, num_workers=4, drop_last=True)
testloader = DataLoader(testset, 1000, num_workers=4)

net = torchvision.models.resnet18(num_classes=10)
net.conv1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
net.maxpool = nn.Identity()
net = net.to(device)

criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
optimizer = torch.optim.SGD(net.parameters(), lr=MAX_LR / 10, momentum=0.9, nesterov=True, weight_decay=WD)
scheduler = torch.optim.lr_scheduler.OneCycleLR(
    optimizer, max_lr=MAX_LR, epochs=EPOCHS, steps_per_epoch=len(trainloader))

best = 0.0
for epoch in range(EPOCHS):
    net.train()
    running = 0.0
    for x, y in trainloader:
        x, y = x.to(device), y.to(device)
        loss = criterion(net(x), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        scheduler.step()
        running += loss.item()

    net.eval()
    right = 0
    with torch.no_grad():
        for x, y in testloader:
            probs = torch.softmax(net(x.to(device)), dim=1)
            right += (probs.argmax(1).cpu() == y).sum().item()
    acc = right / len(testset)
    print("epoch %d loss %.3f acc %.4f lr %.4f" % (epoch, running / len(trainloader), acc, scheduler.get_last_lr()[0]))
    if acc > best:
        best = acc
        torch.save(net.state_dict(), "best.pth")
print("best", best)
