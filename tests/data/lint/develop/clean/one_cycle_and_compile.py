import torch
from torch import nn

torch.manual_seed(0)
model = torch.compile(make_resnet().to("cuda", memory_format=torch.channels_last))
opt = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, weight_decay=5e-4, nesterov=True)
loss_fn = nn.CrossEntropyLoss(label_smoothing=0.1, reduction="none")
scaler = torch.amp.GradScaler("cuda")
sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.5, total_steps=16 * len(train_loader))
for epoch in range(16):
    model.train()
    for ims, labs in train_loader:
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = loss_fn(model(ims), labs).mean()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        sched.step()
    model.eval()
    with torch.no_grad():
        hits, total = 0.0, 0.0
        for ims, labs in test_loader:
            with torch.autocast("cuda", dtype=torch.float16):
                out = (model(ims) + model(torch.fliplr(ims))) / 2.0
            hits += out.argmax(1).eq(labs).sum().item()
            total += ims.shape[0]
    print(epoch, hits / total)
