import torch
import torch.nn.functional as F
from torchvision.models import resnet18, resnet50

from loaders import get_loaders

T, ALPHA, EPOCHS = 4.0, 0.7, 60


def kd_loss(student_logits, teacher_logits, target):
    soft = F.kl_div(F.log_softmax(student_logits / T, dim=1), F.softmax(teacher_logits / T, dim=1),
                    reduction="batchmean") * T * T
    hard = F.cross_entropy(student_logits, target)
    return ALPHA * soft + (1 - ALPHA) * hard


def load_teacher(path, device):
    teacher = resnet50(num_classes=100)
    teacher.load_state_dict(torch.load(path, map_location=device))
    teacher.requires_grad_(False)
    return teacher.to(device).eval()


def main():
    device = torch.device("cuda")
    train_loader, test_loader = get_loaders("cifar100", 128)
    teacher = load_teacher("teacher.pt", device)
    student = resnet18(num_classes=100).to(device)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)

    for epoch in range(EPOCHS):
        student.train()
        loss_sum = 0.0
        for x, y in train_loader:
            x, y = x.to(device), y.to(device)
            with torch.no_grad():
                t_logits = teacher(x)
            loss = kd_loss(student(x), t_logits, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss_sum += loss.item()
        scheduler.step()

        student.eval()
        correct = 0
        with torch.no_grad():
            for x, y in test_loader:
                correct += (student(x.to(device)).argmax(1) == y.to(device)).sum().item()
        print(f"{epoch}: loss {loss_sum / len(train_loader):.3f} acc {correct / len(test_loader.dataset):.4f}")


if __name__ == "__main__":
    main()
