import torch
import torchvision
from torch import nn
from torchvision.transforms import v2

device = "cuda" if torch.cuda.is_available() else "cpu"
tf_train = v2.Compose([v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip(), v2.ToImage(),
                       v2.ToDtype(torch.float32, scale=True)])
tf_test = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
train_ds = torchvision.datasets.CIFAR10("data", train=True, transform=tf_train, download=True)
test_ds = torchvision.datasets.CIFAR10("data", train=False, transform=tf_test)
train_dl = torch.utils.data.DataLoader(train_ds, batch_size=128, shuffle=True, num_workers=4)
test_dl = torch.utils.data.DataLoader(test_ds, batch_size=500, num_workers=4)

epochs = 24
model = torchvision.models.resnet18(num_classes=10).to(device)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs * len(train_dl))

for epoch in range(epochs):
    model.train()
    for inputs, labels in train_dl:
        inputs, labels = inputs.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = criterion(model(inputs), labels)
        loss.backward()
        lr_scheduler.step()
        optimizer.step()

    model.eval()
    correct = 0
    with torch.no_grad():
        for inputs, labels in test_dl:
            preds = model(inputs.to(device)).argmax(dim=1)
            correct += (preds == labels.to(device)).sum().item()
    print(f"epoch {epoch + 1}: {correct / len(test_ds):.4f}")
