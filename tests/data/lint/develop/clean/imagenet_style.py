import argparse
import time

import torch
import torch.nn as nn
import torch.nn.parallel
import torchvision.models as models
from torch.optim.lr_scheduler import StepLR

parser = argparse.ArgumentParser(description="image classification")
parser.add_argument("-b", "--batch-size", default=256, type=int)
parser.add_argument("--lr", "--learning-rate", default=0.1, type=float, dest="lr")
parser.add_argument("--momentum", default=0.9, type=float)
parser.add_argument("--wd", default=1e-4, type=float)
parser.add_argument("--evaluate", action="store_true")
best_acc1 = 0


def main():
    global best_acc1
    args = parser.parse_args()
    model = models.resnet50()
    model = torch.nn.DataParallel(model).cuda()
    criterion = nn.CrossEntropyLoss().cuda()
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=args.momentum, weight_decay=args.wd)
    scheduler = StepLR(optimizer, step_size=30, gamma=0.1)
    train_loader, val_loader = make_loaders(args)
    if args.evaluate:
        validate(val_loader, model, criterion)
        return
    for epoch in range(90):
        train(train_loader, model, criterion, optimizer, epoch)
        acc1 = validate(val_loader, model, criterion)
        scheduler.step()
        is_best = acc1 > best_acc1
        best_acc1 = max(acc1, best_acc1)
        torch.save({"epoch": epoch + 1, "state_dict": model.state_dict(), "best": is_best}, "checkpoint.pth.tar")


def train(train_loader, model, criterion, optimizer, epoch):
    losses = AverageMeter("Loss", ":.4e")
    model.train()
    end = time.time()
    for i, (images, target) in enumerate(train_loader):
        images = images.cuda(non_blocking=True)
        target = target.cuda(non_blocking=True)
        output = model(images)
        loss = criterion(output, target)
        losses.update(loss.item(), images.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        end = time.time()


def validate(val_loader, model, criterion):
    def run_validate(loader, base_progress=0):
        with torch.no_grad():
            for i, (images, target) in enumerate(loader):
                output = model(images.cuda())
                loss = criterion(output, target.cuda())
                losses.update(loss.item(), images.size(0))
                top1.update(accuracy(output, target), images.size(0))

    losses, top1 = AverageMeter("Loss"), AverageMeter("Acc@1")
    model.eval()
    run_validate(val_loader)
    return top1.avg


class AverageMeter:
    def __init__(self, name, fmt=":f"):
        self.name, self.fmt = name, fmt
        self.val = self.avg = self.sum = self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count


if __name__ == "__main__":
    main()
