import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision.models.segmentation import deeplabv3_resnet50

from cityscapes import Streets, miou

ACCUM_STEPS = 8
MAX_EPOCHS = 80


def poly(step, total):
    return (1 - step / total) ** 0.9


def main():
    device = torch.device("cuda")
    train_dl = DataLoader(Streets("train"), batch_size=2, shuffle=True, num_workers=4, drop_last=True)
    val_dl = DataLoader(Streets("val"), batch_size=2, num_workers=4)
    model = deeplabv3_resnet50(num_classes=19).to(device)
    criterion = nn.CrossEntropyLoss(ignore_index=255)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    total = MAX_EPOCHS * (len(train_dl) // ACCUM_STEPS)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: poly(min(s, total - 1), total))

    for epoch in range(MAX_EPOCHS):
        model.train()
        optimizer.zero_grad()
        for i, (image, label) in enumerate(train_dl):
            out = model(image.to(device))["out"]
            loss = criterion(out, label.to(device))
            loss.backward()
            if (i + 1) % ACCUM_STEPS == 0:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

        model.eval()
        preds, labels = [], []
        with torch.no_grad():
            for image, label in val_dl:
                preds.append(model(image.to(device))["out"].argmax(1).cpu())
                labels.append(label)
        print(f"epoch {epoch} mIoU {miou(preds, labels):.3f}")


if __name__ == "__main__":
    main()
