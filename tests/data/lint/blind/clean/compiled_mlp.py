import torch
import torch.nn as nn

from tables import Standardizer, read_csv_tensors


def build(d_in, width=512, depth=4, p=0.1):
    blocks = [nn.Linear(d_in, width), nn.GELU()]
    for _ in range(depth - 1):
        blocks += [nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Dropout(p)]
    return nn.Sequential(*blocks, nn.Linear(width, 1))


def iterate(x, y, bs, shuffle):
    order = torch.randperm(len(x)) if shuffle else torch.arange(len(x))
    for idx in order.split(bs):
        yield x[idx].cuda(), y[idx].cuda()


torch.set_float32_matmul_precision("high")
x_train, y_train = read_csv_tensors("train.csv")
x_test, y_test = read_csv_tensors("test.csv")
scale = Standardizer().fit(x_train)
x_train, x_test = scale(x_train), scale(x_test)

raw_model = build(x_train.shape[1]).cuda()
model = torch.compile(raw_model)
opt = torch.optim.AdamW(raw_model.parameters(), lr=1e-3, weight_decay=1e-2, fused=True)
sched = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=3)


@torch.compile
def train_step(xb, yb):
    loss = nn.functional.mse_loss(model(xb).squeeze(-1), yb)
    loss.backward()
    return loss.detach()


for epoch in range(60):
    model.train()
    running = torch.zeros((), device="cuda")
    for xb, yb in iterate(x_train, y_train, 1024, True):
        opt.zero_grad(set_to_none=True)
        running += train_step(xb, yb)
        opt.step()
    model.eval()
    with torch.no_grad():
        sq = sum((model(xb).squeeze(-1) - yb).square().sum().item() for xb, yb in iterate(x_test, y_test, 4096, False))
    rmse = (sq / len(x_test)) ** 0.5
    sched.step(rmse)
    print(epoch, running.item(), rmse)
