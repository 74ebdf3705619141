import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torchvision.models import mobilenet_v2, resnet101

from dogs import DogBreeds


def soft_targets(student_out, teacher_out, t=3.0):
    log_p = F.log_softmax(student_out / t, dim=1)
    q = F.softmax(teacher_out / t, dim=1)
    return F.kl_div(log_p, q, reduction="batchmean") * t ** 2


def main():
    device = torch.device("cuda")
    teacher = resnet101(num_classes=120).to(device)
    teacher.load_state_dict(torch.load("dogs_resnet101.pt"))
    teacher.eval()
    student = mobilenet_v2(num_classes=120).to(device)
    optimizer = torch.optim.SGD(teacher.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)
    ce = nn.CrossEntropyLoss()
    train_dl = DataLoader(DogBreeds("train"), 64, shuffle=True, num_workers=4)
    test_dl = DataLoader(DogBreeds("test"), 128, num_workers=4)

    for epoch in range(50):
        student.train()
        for x, y in train_dl:
            x, y = x.to(device), y.to(device)
            with torch.no_grad():
                guide = teacher(x)
            out = student(x)
            loss = 0.5 * ce(out, y) + 0.5 * soft_targets(out, guide)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()

        student.eval()
        ok = 0
        with torch.no_grad():
            for x, y in test_dl:
                ok += (student(x.to(device)).argmax(1) == y.to(device)).sum().item()
        print(epoch, ok / len(test_dl.dataset))


if __name__ == "__main__":
    main()
