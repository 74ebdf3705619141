import torch
import torch.nn as nn
import torch.nn.functional as F
from PIL import Image
from torchvision import transforms
from torchvision.models import VGG19_Weights, vgg19
from torchvision.utils import save_image

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
STYLE = {0: 1.0, 5: 0.8, 10: 0.5, 19: 0.3, 28: 0.1}
CONTENT = {21: 1.0}
prep = transforms.Compose([transforms.Resize(512), transforms.CenterCrop(512), transforms.ToTensor()])
mean = torch.tensor([0.485, 0.456, 0.406], device=device).view(1, 3, 1, 1)
std = torch.tensor([0.229, 0.224, 0.225], device=device).view(1, 3, 1, 1)


def load(path):
    return prep(Image.open(path).convert("RGB"))[None].to(device)


def gram(f):
    b, c, h, w = f.shape
    f = f.view(b, c, h * w)
    return f @ f.transpose(1, 2) / (c * h * w)


class Features(nn.Module):
    def __init__(self, wanted):
        super().__init__()
        self.net = vgg19(weights=VGG19_Weights.DEFAULT).features[: max(wanted) + 1].eval()
        self.net.requires_grad_(False)
        self.wanted = set(wanted)

    def forward(self, x):
        x, out = (x - mean) / std, {}
        for i, m in enumerate(self.net):
            x = F.relu(x) if isinstance(m, nn.ReLU) else m(x)
            if i in self.wanted:
                out[i] = x
        return out


def transfer(content, style, steps=300, style_w=1e6, content_w=1.0, tv_w=1e-3):
    feats = Features(list(STYLE) + list(CONTENT)).to(device)
    with torch.no_grad():
        c_ref = {k: v for k, v in feats(content).items() if k in CONTENT}
        s_ref = {k: gram(v) for k, v in feats(style).items() if k in STYLE}
    img = content.clone().requires_grad_(True)
    opt = torch.optim.LBFGS([img], lr=1.0, max_iter=20, history_size=50)
    count = 0

    while count < steps:
        def closure():
            nonlocal count
            with torch.no_grad():
                img.clamp_(0, 1)
            opt.zero_grad()
            f = feats(img)
            s = sum(w * F.mse_loss(gram(f[k]), s_ref[k]) for k, w in STYLE.items())
            c = sum(w * F.mse_loss(f[k], c_ref[k]) for k, w in CONTENT.items())
            tv = (img[..., 1:] - img[..., :-1]).abs().mean() + (img[..., 1:, :] - img[..., :-1, :]).abs().mean()
            loss = style_w * s + content_w * c + tv_w * tv
            loss.backward()
            count += 1
            if count % 50 == 0:
                print(f"{count}: style {s.item():.3e} content {c.item():.3f}")
            return loss

        opt.step(closure)
    return img.detach().clamp(0, 1)


if __name__ == "__main__":
    torch.manual_seed(0)
    save_image(transfer(load("content.jpg"), load("style.jpg")), "out.png")
