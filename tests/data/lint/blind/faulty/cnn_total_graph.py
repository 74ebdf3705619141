import torch
import torch.nn as nn
from torchvision import datasets, models, transforms

data_root = "plants"
phases = ("train", "val")
tfs = {
    "train": transforms.Compose([transforms.RandomResizedCrop(224), transforms.ToTensor()]),
    "val": transforms.Compose([transforms.Resize(256), transforms.CenterCrop(224), transforms.ToTensor()]),
}
sets = {p: datasets.ImageFolder(f"{data_root}/{p}", tfs[p]) for p in phases}
loaders = {p: torch.utils.data.DataLoader(sets[p], batch_size=32, shuffle=(p == "train")) for p in phases}
device = torch.device("cuda:0")


def train_epoch(model, criterion, optimizer):
    model.train()
    total_loss = 0
    for inputs, labels in loaders["train"]:
        inputs, labels = inputs.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = criterion(model(inputs), labels)
        loss.backward()
        optimizer.step()
        total_loss += loss
    return total_loss / len(loaders["train"])


def val_epoch(model, criterion):
    model.eval()
    loss_sum, hits = 0.0, 0
    with torch.no_grad():
        for inputs, labels in loaders["val"]:
            inputs, labels = inputs.to(device), labels.to(device)
            out = model(inputs)
            loss_sum += criterion(out, labels).item()
            hits += (out.argmax(1) == labels).sum().item()
    return loss_sum / len(loaders["val"]), hits / len(sets["val"])


model = models.resnet34(weights="DEFAULT")
model.fc = nn.Linear(model.fc.in_features, len(sets["train"].classes))
model = model.to(device)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.1)
for epoch in range(25):
    train_loss = train_epoch(model, criterion, optimizer)
    val_loss, acc = val_epoch(model, criterion)
    scheduler.step()
    print(f"{epoch}: {float(train_loss):.3f} {val_loss:.3f} {acc:.3f}")
