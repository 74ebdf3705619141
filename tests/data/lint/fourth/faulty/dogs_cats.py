import torch
import torch.nn as nn
import torch.optim as optim
import torchvision
from torchvision import transforms

data_dir = "data/dogs_vs_cats"
num_epochs = 15
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

train_tf = transforms.Compose([
    transforms.Resize((128, 128)), transforms.RandomHorizontalFlip(),
    transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.5] * 3)])
val_tf = transforms.Compose([transforms.Resize((128, 128)), transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.5] * 3)])
train_ds = torchvision.datasets.ImageFolder(data_dir + "/train", transform=train_tf)
val_ds = torchvision.datasets.ImageFolder(data_dir + "/val", transform=val_tf)
train_dl = torch.utils.data.DataLoader(train_ds, batch_size=64, shuffle=True, num_workers=4)
val_dl = torch.utils.data.DataLoader(val_ds, batch_size=64, num_workers=4)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(64, 128, 3, padding=1), nn.BatchNorm2d(128), nn.ReLU(), nn.AdaptiveAvgPool2d(4))
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(2048, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 2))

    def forward(self, x):
        return self.head(self.conv(x))


model = Net().to(device)
criterion = nn.CrossEntropyLoss()
optimizer = optim.Adam(model.parameters(), lr=1e-3)
best_val = float("inf")

model.train()
for epoch in range(num_epochs):
    running_loss = 0.0
    for inputs, labels in train_dl:
        inputs, labels = inputs.to(device), labels.to(device)
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = criterion(outputs, labels)
        loss.backward()
        optimizer.step()
        running_loss += loss.item() * inputs.size(0)

    model.eval()
    val_loss, correct = 0.0, 0
    with torch.no_grad():
        for inputs, labels in val_dl:
            inputs, labels = inputs.to(device), labels.to(device)
            outputs = model(inputs)
            val_loss += criterion(outputs, labels).item() * inputs.size(0)
            correct += (outputs.argmax(1) == labels).sum().item()
    val_loss /= len(val_ds)
    print("epoch %d train %.4f val %.4f acc %.4f" % (epoch, running_loss / len(train_ds), val_loss, correct / len(val_ds)))
    if val_loss < best_val:
        best_val = val_loss
        torch.save(model.state_dict(), "dogs_cats.pt")
