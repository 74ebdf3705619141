import torch
from torch.cuda.amp import GradScaler


class Task:
    def train_step(self, sample, model, criterion, optimizer, update_num, ignore_grad=False):
        model.train()
        model.set_num_updates(update_num)
        with torch.autograd.profiler.record_function("forward"):
            loss, sample_size, logging_output = criterion(model, sample)
        if ignore_grad:
            loss *= 0
        with torch.autograd.profiler.record_function("backward"):
            optimizer.backward(loss)
        return loss, sample_size, logging_output

    def valid_step(self, sample, model, criterion):
        model.eval()
        with torch.no_grad():
            loss, sample_size, logging_output = criterion(model, sample)
        return loss, sample_size, logging_output


class FP16Optimizer:
    def __init__(self, inner):
        self.inner = inner
        self.scaler = GradScaler()

    def backward(self, loss):
        self.scaler.scale(loss).backward()

    def clip_grad_norm(self, params, max_norm):
        self.scaler.unscale_(self.inner)
        return torch.nn.utils.clip_grad_norm_(params, max_norm)

    def step(self):
        self.scaler.step(self.inner)
        self.scaler.update()

    def zero_grad(self):
        self.inner.zero_grad()


class Trainer:
    def __init__(self, task, model, criterion, optimizer, lr_scheduler, update_freq):
        self.task, self.model, self.criterion = task, model, criterion
        self.optimizer, self.lr_scheduler = optimizer, lr_scheduler
        self.update_freq, self.num_updates = update_freq, 0

    def train_step(self, samples):
        self.optimizer.zero_grad()
        sample_size = 0
        for sample in samples:
            loss, size, _ = self.task.train_step(sample, self.model, self.criterion, self.optimizer, self.num_updates)
            sample_size += size
        for p in self.model.parameters():
            p.grad.div_(sample_size)
        norm = self.optimizer.clip_grad_norm(self.model.parameters(), 0.1)
        self.optimizer.step()
        self.num_updates += 1
        self.lr_scheduler.step_update(self.num_updates)
        return norm
