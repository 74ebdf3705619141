import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DModel
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

device = "cuda"
epochs = 50
image_size = 256

tf = transforms.Compose([
    transforms.Resize(image_size), transforms.CenterCrop(image_size),
    transforms.RandomHorizontalFlip(), transforms.ToTensor(), transforms.Normalize([0.5], [0.5])])
dataset = ImageFolder("data/butterflies", tf)
train_dataloader = DataLoader(dataset, batch_size=16, shuffle=True, num_workers=4)

vae = AutoencoderKL.from_pretrained("stabilityai/sd-vae-ft-mse").to(device)
vae.requires_grad_(False)
vae.eval()
unet = UNet2DModel(
    sample_size=image_size // 8, in_channels=4, out_channels=4, layers_per_block=2,
    block_out_channels=(128, 256, 512),
    down_block_types=("DownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D"),
    up_block_types=("AttnUpBlock2D", "AttnUpBlock2D", "UpBlock2D")).to(device)
noise_scheduler = DDPMScheduler(num_train_timesteps=1000)
optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-4)
lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)

for epoch in range(epochs):
    unet.train()
    epoch_loss = 0.0
    for images, _ in train_dataloader:
        images = images.to(device)
        with torch.no_grad():
            latents = vae.encode(images).latent_dist.sample() * vae.config.scaling_factor
        noise = torch.randn_like(latents)
        t = torch.randint(0, noise_scheduler.config.num_train_timesteps, (latents.shape[0],), device=device)
        noisy = noise_scheduler.add_noise(latents, noise, t)

        with torch.autocast(device_type="cuda", dtype=torch.float16):
            pred = unet(noisy, t).sample
            loss = F.mse_loss(pred, noise)

        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
        optimizer.step()
        epoch_loss += loss.item()
    lr_scheduler.step()
    print(f"epoch {epoch}: {epoch_loss / len(train_dataloader):.4f}")
    if (epoch + 1) % 10 == 0:
        unet.save_pretrained(f"ldm-{epoch + 1}")
