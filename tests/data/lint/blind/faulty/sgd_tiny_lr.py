import torch
from torch import nn, optim
from torch.optim import lr_scheduler
from torchvision import models

from xrays import chest_loaders

CONFIG = {"epochs": 40, "batch": 48, "classes": 5}


def build_model():
    m = models.densenet121()
    m.classifier = nn.Linear(m.classifier.in_features, CONFIG["classes"])
    return m.cuda()


def train_one(model, dl, crit, opt):
    model.train()
    for img, lab in dl:
        opt.zero_grad(set_to_none=True)
        out = model(img.cuda())
        loss = crit(out, lab.cuda())
        loss.backward()
        opt.step()


def eval_one(model, dl, crit):
    model.eval()
    loss, ok, n = 0.0, 0, 0
    with torch.inference_mode():
        for img, lab in dl:
            lab = lab.cuda()
            out = model(img.cuda())
            loss += crit(out, lab).item() * len(lab)
            ok += (out.argmax(1) == lab).sum().item()
            n += len(lab)
    return loss / n, ok / n


if __name__ == "__main__":
    train_dl, val_dl = chest_loaders(CONFIG["batch"])
    model = build_model()
    crit = nn.CrossEntropyLoss()
    opt = optim.SGD(model.parameters(), lr=1e-7, momentum=0.9, nesterov=True)
    sch = lr_scheduler.CosineAnnealingLR(opt, T_max=CONFIG["epochs"])
    for ep in range(CONFIG["epochs"]):
        train_one(model, train_dl, crit, opt)
        loss, acc = eval_one(model, val_dl, crit)
        sch.step()
        print(f"{ep} {loss:.4f} {acc:.4f}")
