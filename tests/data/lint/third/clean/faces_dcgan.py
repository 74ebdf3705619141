import torch
from torch import nn, optim
from torch.utils.data import DataLoader
from torchvision import datasets, transforms, utils

torch.manual_seed(999)
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
nz, ngf, ndf, image_size, batch_size = 100, 64, 64, 64, 128

tfm = transforms.Compose([transforms.Resize(image_size), transforms.CenterCrop(image_size),
                          transforms.ToTensor(), transforms.Normalize((0.5,) * 3, (0.5,) * 3)])
loader = DataLoader(datasets.ImageFolder("data/celeba", tfm), batch_size, shuffle=True, num_workers=2)


def up(i, o, k=4, s=2, p=1):
    return [nn.ConvTranspose2d(i, o, k, s, p, bias=False), nn.BatchNorm2d(o), nn.ReLU(True)]


def down(i, o):
    return [nn.Conv2d(i, o, 4, 2, 1, bias=False), nn.BatchNorm2d(o), nn.LeakyReLU(0.2, True)]


netG = nn.Sequential(*up(nz, ngf * 8, 4, 1, 0), *up(ngf * 8, ngf * 4), *up(ngf * 4, ngf * 2), *up(ngf * 2, ngf),
                     nn.ConvTranspose2d(ngf, 3, 4, 2, 1, bias=False), nn.Tanh()).to(device)
netD = nn.Sequential(nn.Conv2d(3, ndf, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, True), *down(ndf, ndf * 2),
                     *down(ndf * 2, ndf * 4), *down(ndf * 4, ndf * 8),
                     nn.Conv2d(ndf * 8, 1, 4, 1, 0, bias=False), nn.Flatten(0)).to(device)


def weights_init(m):
    if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(m.weight, 0.0, 0.02)
    elif isinstance(m, nn.BatchNorm2d):
        nn.init.normal_(m.weight, 1.0, 0.02)
        nn.init.zeros_(m.bias)


netG.apply(weights_init)
netD.apply(weights_init)

bce = nn.BCEWithLogitsLoss()
optD = optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
optG = optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
fixed = torch.randn(64, nz, 1, 1, device=device)
G_hist, D_hist = [], []

for epoch in range(25):
    for i, (real, _) in enumerate(loader):
        real = real.to(device)
        b = real.size(0)
        ones, zeros = torch.ones(b, device=device), torch.zeros(b, device=device)

        # discriminator: two separate backward passes add up
        netD.zero_grad()
        out_real = netD(real)
        errD_real = bce(out_real, ones * 0.9)
        errD_real.backward()
        fake = netG(torch.randn(b, nz, 1, 1, device=device))
        errD_fake = bce(netD(fake.detach()), zeros)
        errD_fake.backward()
        optD.step()

        # generator
        netG.zero_grad()
        out = netD(fake)
        errG = bce(out, ones)
        errG.backward()
        optG.step()

        G_hist.append(errG.item())
        D_hist.append((errD_real + errD_fake).item())
        if i % 50 == 0:
            d_x = torch.sigmoid(out_real).mean().item()
            d_g = torch.sigmoid(out).mean().item()
            print(f"[{epoch}/{i}] D {D_hist[-1]:.3f} G {G_hist[-1]:.3f} D(x) {d_x:.3f} D(G(z)) {d_g:.3f}")

    netG.eval()
    with torch.no_grad():
        utils.save_image(netG(fixed), f"fake_{epoch:03d}.png", normalize=True)
    netG.train()
