import os

import pandas as pd
import torch
import torch.nn as nn
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms as T


class Galaxies(Dataset):
    def __init__(self, csv, root, augment):
        self.df, self.root = pd.read_csv(csv), root
        ops = [T.CenterCrop(224), T.Resize(96)]
        if augment:
            ops += [T.RandomRotation(180), T.RandomHorizontalFlip()]
        self.t = T.Compose(ops + [T.ToTensor()])
        self.cols = [c for c in self.df.columns if c.startswith("Class")]

    def __len__(self):
        return len(self.df)

    def __getitem__(self, i):
        row = self.df.iloc[i]
        img = Image.open(os.path.join(self.root, f"{int(row.GalaxyID)}.jpg"))
        return self.t(img), torch.tensor(row[self.cols].values.astype("float32"))


class MorphNet(nn.Module):
    def __init__(self, n_out):
        super().__init__()
        chans = [3, 32, 64, 128, 256]
        self.conv = nn.Sequential(*[m for i, o in zip(chans, chans[1:])
                                    for m in (nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(), nn.MaxPool2d(2))])
        self.fc = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(256 * 36, 512), nn.ReLU(), nn.Dropout(0.5),
                                nn.Linear(512, n_out), nn.Sigmoid())

    def forward(self, x):
        return self.fc(self.conv(x))


class Experiment:
    def __init__(self):
        self.dev = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        tr = Galaxies("gz_train.csv", "images", True)
        self.train_dl = DataLoader(tr, 128, shuffle=True, num_workers=8)
        self.val_dl = DataLoader(Galaxies("gz_val.csv", "images", False), 256, num_workers=8)
        self.net = MorphNet(len(tr.cols)).to(self.dev)
        self.opt = torch.optim.Adam(self.net.parameters(), lr=4e-4)
        self.sched = torch.optim.lr_scheduler.ReduceLROnPlateau(self.opt, patience=3)
        self.mse = nn.MSELoss()

    def loss_on(self, batch):
        x, y = batch
        return self.mse(self.net(x.to(self.dev)), y.to(self.dev))

    def train(self):
        self.net.train()
        s = 0.0
        for batch in self.train_dl:
            loss = self.loss_on(batch)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            s += loss.item()
        return (s / len(self.train_dl)) ** 0.5

    def validate(self):
        s = 0.0
        with torch.no_grad():
            for batch in self.val_dl:
                s += self.loss_on(batch).item()
        return (s / len(self.val_dl)) ** 0.5

    def run(self, epochs=60):
        best = 1.0
        for ep in range(epochs):
            tr, va = self.train(), self.validate()
            self.sched.step(va)
            print(f"{ep:02d} rmse train {tr:.5f} val {va:.5f}")
            if va < best:
                best = va
                torch.save(self.net.state_dict(), "morph.pt")


if __name__ == "__main__":
    torch.manual_seed(42)
    Experiment().run()
