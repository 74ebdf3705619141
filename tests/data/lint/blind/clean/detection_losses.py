import torch
from torch.utils.data import DataLoader
from torchvision.models.detection import fasterrcnn_resnet50_fpn
from torchvision.ops import box_iou

from pets import PetBoxes, collate


def train_one_epoch(model, loader, optimizer, warmup, device):
    model.train()
    for step, (images, targets) in enumerate(loader):
        images = [im.to(device) for im in images]
        targets = [{k: v.to(device) for k, v in t.items()} for t in targets]
        loss_dict = model(images, targets)
        losses = sum(loss_dict.values())
        if not torch.isfinite(losses):
            raise RuntimeError(f"loss is {losses.item()}: {loss_dict}")
        optimizer.zero_grad()
        losses.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        if warmup is not None:
            warmup.step()
        if step % 50 == 0:
            print("  ".join(f"{k} {v.item():.3f}" for k, v in loss_dict.items()))


@torch.inference_mode()
def mean_iou(model, loader, device):
    model.eval()
    ious = []
    for images, targets in loader:
        outputs = model([im.to(device) for im in images])
        for out, tgt in zip(outputs, targets):
            if len(out["boxes"]):
                ious.append(box_iou(out["boxes"][:1].cpu(), tgt["boxes"]).max().item())
            else:
                ious.append(0.0)
    return sum(ious) / max(len(ious), 1)


def main():
    device = torch.device("cuda")
    train_loader = DataLoader(PetBoxes("trainval"), 4, shuffle=True, collate_fn=collate)
    test_loader = DataLoader(PetBoxes("test"), 4, collate_fn=collate)
    model = fasterrcnn_resnet50_fpn(num_classes=38).to(device)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(params, lr=0.005, momentum=0.9, weight_decay=5e-4)
    steps = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.1)
    for epoch in range(12):
        warmup = None
        if epoch == 0:
            warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 1e-3, total_iters=500)
        train_one_epoch(model, train_loader, optimizer, warmup, device)
        steps.step()
        print(epoch, mean_iou(model, test_loader, device))


if __name__ == "__main__":
    main()
