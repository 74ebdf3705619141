import torch
import torch.nn.functional as F


def kd_loss(student_logits, teacher_logits, labels, T=4.0, alpha=0.7):
    soft = F.kl_div(
        F.log_softmax(student_logits / T, dim=1), F.softmax(teacher_logits / T, dim=1), reduction="batchmean"
    ) * (T * T)
    hard = F.cross_entropy(student_logits, labels)
    return alpha * soft + (1 - alpha) * hard


def train(student, teacher, train_loader, val_loader, epochs, device):
    teacher.eval()
    for p in teacher.parameters():
        p.requires_grad_(False)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[150, 180, 210], gamma=0.1)
    for epoch in range(epochs):
        student.train()
        for x, y in train_loader:
            x, y = x.to(device), y.to(device)
            with torch.no_grad():
                t = teacher(x)
            s = student(x)
            loss = kd_loss(s, t, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
        print(epoch, accuracy(student, val_loader, device))


@torch.no_grad()
def accuracy(net, loader, device):
    net.eval()
    good = total = 0
    for x, y in loader:
        probs = net(x.to(device)).softmax(dim=1)
        good += (probs.argmax(1).cpu() == y).sum().item()
        total += len(y)
    return good / total
