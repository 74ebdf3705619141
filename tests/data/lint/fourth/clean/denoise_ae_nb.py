#!/usr/bin/env python
# coding: utf-8

# In[1]:
import matplotlib.pyplot as plt
import torch
import torch.nn as nn
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

# In[2]:
tf = transforms.ToTensor()
train_data = datasets.MNIST("data", train=True, download=True, transform=tf)
test_data = datasets.MNIST("data", train=False, download=True, transform=tf)
train_loader = DataLoader(train_data, batch_size=64, shuffle=True)
test_loader = DataLoader(test_data, batch_size=64)

# In[3]:
class DenoiseAE(nn.Module):
    def __init__(self):
        super(DenoiseAE, self).__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(16, 16, 2, stride=2), nn.ReLU(),
            nn.ConvTranspose2d(16, 32, 2, stride=2), nn.ReLU(),
            nn.Conv2d(32, 1, 3, padding=1))

    def forward(self, x):
        return torch.sigmoid(self.decoder(self.encoder(x)))


model = DenoiseAE()
print(model)

# In[4]:
criterion = nn.MSELoss()
optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
noise_factor = 0.5


def add_noise(x):
    return torch.clamp(x + noise_factor * torch.randn_like(x), 0.0, 1.0)


# In[5]:
n_epochs = 20
history = []
for epoch in range(1, n_epochs + 1):
    train_loss = 0.0
    for images, _ in train_loader:
        noisy = add_noise(images)
        optimizer.zero_grad()
        outputs = model(noisy)
        loss = criterion(outputs, images)
        loss.backward()
        optimizer.step()
        train_loss += loss.item() * images.size(0)
    train_loss = train_loss / len(train_loader.dataset)
    history.append(train_loss)
    print("Epoch: {} \tTraining Loss: {:.6f}".format(epoch, train_loss))

# In[6]:
plt.plot(history)
plt.savefig("loss.png")

# In[7]:
model.eval()
images, _ = next(iter(test_loader))
noisy = add_noise(images)
with torch.no_grad():
    output = model(noisy)
fig, axes = plt.subplots(2, 10, figsize=(20, 4))
for row, batch in zip(axes, (noisy, output)):
    for ax, im in zip(row, batch):
        ax.imshow(im.squeeze().numpy(), cmap="gray")
        ax.axis("off")
plt.savefig("denoised.png")
