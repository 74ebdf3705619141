import json

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

config = {
    "hidden": 512,
    "dropout": 0.3,
    "lr": 0.5,
    "weight_decay": 0.01,
    "batch_size": 128,
    "epochs": 30,
    "label_smoothing": 0.05,
    "seed": 19,
}


def load_split(name):
    blob = torch.load(f"features/{name}.pt")
    return TensorDataset(blob["x"].float(), blob["y"].long())


def build(n_in, n_out, hidden, p):
    return nn.Sequential(nn.LayerNorm(n_in), nn.Linear(n_in, hidden), nn.GELU(), nn.Dropout(p), nn.Linear(hidden, n_out))


class Fitter:
    def __init__(self, cfg, train, valid):
        self.cfg = cfg
        self.train_dl = DataLoader(train, cfg["batch_size"], shuffle=True)
        self.valid_dl = DataLoader(valid, 1024)
        x, y = train.tensors
        self.model = build(x.size(1), int(y.max()) + 1, cfg["hidden"], cfg["dropout"])
        self.crit = nn.CrossEntropyLoss(label_smoothing=cfg["label_smoothing"])
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=cfg["lr"], weight_decay=cfg["weight_decay"])
        self.sched = torch.optim.lr_scheduler.OneCycleLR(
            self.opt, max_lr=cfg["lr"], epochs=cfg["epochs"], steps_per_epoch=len(self.train_dl))

    def epoch(self):
        self.model.train()
        out = 0.0
        for x, y in self.train_dl:
            self.opt.zero_grad()
            loss = self.crit(self.model(x), y)
            loss.backward()
            self.opt.step()
            self.sched.step()
            out += loss.item()
        return out / len(self.train_dl)

    @torch.no_grad()
    def score(self):
        self.model.eval()
        return sum((self.model(x).argmax(1) == y).sum().item() for x, y in self.valid_dl) / len(self.valid_dl.dataset)

    def run(self):
        log = []
        for e in range(self.cfg["epochs"]):
            log.append({"epoch": e, "loss": self.epoch(), "valid": self.score()})
            print(log[-1])
        with open("log.json", "w") as f:
            json.dump(log, f, indent=1)


if __name__ == "__main__":
    torch.manual_seed(config["seed"])
    Fitter(config, load_split("train"), load_split("valid")).run()
