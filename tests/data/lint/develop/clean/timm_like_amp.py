import logging
from contextlib import suppress

import torch
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV2, dispatch_clip_grad

_logger = logging.getLogger("train")


class NativeScaler:
    state_dict_key = "amp_scaler"

    def __init__(self, device="cuda"):
        self._scaler = torch.amp.GradScaler(device=device)

    def __call__(self, loss, optimizer, clip_grad=None, parameters=None, create_graph=False, need_update=True):
        self._scaler.scale(loss).backward(create_graph=create_graph)
        if need_update:
            if clip_grad is not None:
                assert parameters is not None
                self._scaler.unscale_(optimizer)
                dispatch_clip_grad(parameters, clip_grad, mode="norm")
            self._scaler.step(optimizer)
            self._scaler.update()

    def state_dict(self):
        return self._scaler.state_dict()


def train_one_epoch(epoch, model, loader, optimizer, loss_fn, args, lr_scheduler, loss_scaler, model_ema=None):
    second_order = hasattr(optimizer, "is_second_order") and optimizer.is_second_order
    amp_autocast = torch.autocast("cuda") if loss_scaler is not None else suppress()
    model.train()
    accum_steps = args.grad_accum_steps
    num_updates = epoch * ((len(loader) + accum_steps - 1) // accum_steps)
    optimizer.zero_grad()
    for batch_idx, (input, target) in enumerate(loader):
        need_update = batch_idx == len(loader) - 1 or (batch_idx + 1) % accum_steps == 0
        with amp_autocast:
            output = model(input)
            loss = loss_fn(output, target)
            if accum_steps > 1:
                loss /= accum_steps
        if loss_scaler is not None:
            loss_scaler(
                loss,
                optimizer,
                clip_grad=args.clip_grad,
                parameters=model.parameters(),
                create_graph=second_order,
                need_update=need_update,
            )
        else:
            loss.backward(create_graph=second_order)
            if need_update:
                if args.clip_grad is not None:
                    dispatch_clip_grad(model.parameters(), value=args.clip_grad, mode="norm")
                optimizer.step()
        if not need_update:
            continue
        num_updates += 1
        optimizer.zero_grad()
        if model_ema is not None:
            model_ema.update(model)
        if lr_scheduler is not None:
            lr_scheduler.step_update(num_updates=num_updates)
        _logger.info("loss %.4f", loss.item() * accum_steps)


def main(args, model, loader_train, loader_eval, validate, loss_fn):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9, nesterov=True)
    lr_scheduler = CosineLRScheduler(optimizer, t_initial=args.epochs, warmup_t=5)
    ema = ModelEmaV2(model)
    for epoch in range(args.epochs):
        train_one_epoch(epoch, model, loader_train, optimizer, loss_fn, args, lr_scheduler, NativeScaler(), ema)
        validate(ema.module, loader_eval)
        lr_scheduler.step(epoch + 1)
