import torch
from torch import nn

device = "cuda"
dtype = torch.bfloat16
model = nn.TransformerEncoderLayer(256, 8).to(device)
opt = torch.optim.Adam(model.parameters(), lr=1e-4)
scaler = torch.cuda.amp.GradScaler()
for x, y in data():
    opt.zero_grad()
    with torch.amp.autocast(device, dtype=dtype):
        loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
