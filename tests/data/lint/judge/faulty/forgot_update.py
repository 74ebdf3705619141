import torch
import torch.nn.functional as F

model = build_model().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cuda")
for epoch in range(90):
    model.train()
    for image, target in train_loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(image.cuda()), target.cuda())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        scaler.step(optimizer)
