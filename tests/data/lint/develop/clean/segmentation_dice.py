import torch
import torch.nn.functional as F


def dice(logits, target, eps=1.0):
    p = logits.sigmoid()
    inter = (p * target).sum((1, 2, 3))
    return 1 - ((2 * inter + eps) / (p.sum((1, 2, 3)) + target.sum((1, 2, 3)) + eps)).mean()


def train_model(model, train_loader, val_loader, device, epochs=5, amp=True):
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-5, weight_decay=1e-8, momentum=0.999)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=5)
    grad_scaler = torch.cuda.amp.GradScaler(enabled=amp)
    step = 0
    for epoch in range(1, epochs + 1):
        model.train()
        epoch_loss = 0
        for batch in train_loader:
            images, masks = batch["image"].to(device), batch["mask"].to(device)
            with torch.autocast(device.type, enabled=amp):
                pred = model(images)
                loss = F.binary_cross_entropy_with_logits(pred, masks)
                loss += dice(pred, masks)
            optimizer.zero_grad(set_to_none=True)
            grad_scaler.scale(loss).backward()
            grad_scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            grad_scaler.step(optimizer)
            grad_scaler.update()
            step += 1
            epoch_loss += loss.item()
            if step % 200 == 0:
                score = evaluate(model, val_loader, device)
                scheduler.step(score)
        torch.save(model.state_dict(), f"checkpoint_{epoch}.pth")


@torch.inference_mode()
def evaluate(net, dataloader, device):
    net.eval()
    score = 0
    for batch in dataloader:
        logits = net(batch["image"].to(device))
        score += 1 - dice(logits, batch["mask"].to(device))
    net.train()
    return score / max(len(dataloader), 1)
