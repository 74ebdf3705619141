import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torchvision import datasets, transforms
from torchvision.utils import save_image

image_size = 64
latent_dim = 128
epochs = 20
learning_rate = 0.5
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

transform = transforms.Compose([transforms.CenterCrop(148), transforms.Resize(image_size), transforms.ToTensor()])
train_loader = DataLoader(datasets.CelebA("data", split="train", transform=transform), batch_size=128, shuffle=True, num_workers=4)
valid_loader = DataLoader(datasets.CelebA("data", split="valid", transform=transform), batch_size=128, num_workers=4)


class ConvVAE(nn.Module):
    def __init__(self):
        super().__init__()
        ch = [3, 32, 64, 128, 256]
        self.encoder = nn.Sequential(*[
            nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.BatchNorm2d(b), nn.LeakyReLU()) for a, b in zip(ch, ch[1:])])
        self.fc_mu = nn.Linear(256 * 16, latent_dim)
        self.fc_var = nn.Linear(256 * 16, latent_dim)
        self.fc_up = nn.Linear(latent_dim, 256 * 16)
        rev = [256, 128, 64, 32]
        self.decoder = nn.Sequential(*[
            nn.Sequential(nn.ConvTranspose2d(a, b, 4, 2, 1), nn.BatchNorm2d(b), nn.LeakyReLU()) for a, b in zip(rev, rev[1:])],
            nn.ConvTranspose2d(32, 3, 4, 2, 1), nn.Sigmoid())

    def decode(self, z):
        return self.decoder(self.fc_up(z).view(-1, 256, 4, 4))

    def forward(self, x):
        h = self.encoder(x).flatten(1)
        mu, log_var = self.fc_mu(h), self.fc_var(h)
        z = mu + torch.randn_like(mu) * (0.5 * log_var).exp()
        return self.decode(z), mu, log_var


def loss_function(recon, x, mu, log_var, kld_weight=0.00025):
    recons_loss = F.mse_loss(recon, x)
    kld = torch.mean(-0.5 * torch.sum(1 + log_var - mu ** 2 - log_var.exp(), dim=1))
    return recons_loss + kld_weight * kld


model = ConvVAE().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.95)

for epoch in range(epochs):
    model.train()
    train_loss = 0.0
    for x, _ in train_loader:
        x = x.to(device)
        optimizer.zero_grad()
        recon, mu, log_var = model(x)
        loss = loss_function(recon, x, mu, log_var)
        loss.backward()
        optimizer.step()
        train_loss += loss.item()
    scheduler.step()

    model.eval()
    valid_loss = 0.0
    with torch.no_grad():
        for x, _ in valid_loader:
            x = x.to(device)
            recon, mu, log_var = model(x)
            valid_loss += loss_function(recon, x, mu, log_var).item()
        save_image(model.decode(torch.randn(64, latent_dim, device=device)), f"vae_{epoch}.png")
    print(f"epoch {epoch} train {train_loss / len(train_loader):.4f} valid {valid_loss / len(valid_loader):.4f}")
torch.save(model.state_dict(), "vae.pt")
