import torch
import torch.nn.functional as F

from loaders import cifar_loaders
from wrn import WideResNet

EPS, ALPHA, K = 8 / 255, 2 / 255, 7


def attack(model, x, y, steps=K):
    was_training = model.training
    model.eval()
    delta = torch.empty_like(x).uniform_(-EPS, EPS)
    for _ in range(steps):
        delta.requires_grad_(True)
        loss = F.cross_entropy(model((x + delta).clamp(0, 1)), y)
        grad, = torch.autograd.grad(loss, delta)
        delta = (delta.detach() + ALPHA * grad.sign()).clamp(-EPS, EPS)
    model.train(was_training)
    return (x + delta).clamp(0, 1).detach()


def robust_accuracy(model, loader):
    model.eval()
    clean = robust = n = 0
    for x, y in loader:
        x, y = x.cuda(), y.cuda()
        x_adv = attack(model, x, y, steps=20)
        with torch.no_grad():
            clean += (model(x).argmax(1) == y).sum().item()
            robust += (model(x_adv).argmax(1) == y).sum().item()
        n += y.numel()
    return clean / n, robust / n


def main():
    train_loader, test_loader = cifar_loaders(128)
    model = WideResNet(34, 10).cuda()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    sched = torch.optim.lr_scheduler.MultiStepLR(opt, [75, 90], gamma=0.1)
    for epoch in range(100):
        model.train()
        for x, y in train_loader:
            x, y = x.cuda(), y.cuda()
            x_adv = attack(model, x, y)
            loss = F.cross_entropy(model(x_adv), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
        sched.step()
        if epoch % 5 == 4:
            print(epoch, robust_accuracy(model, test_loader))


if __name__ == "__main__":
    main()
