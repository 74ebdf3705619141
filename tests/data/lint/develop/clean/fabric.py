import lightning as L
import torch


def main():
    fabric = L.Fabric(accelerator="cuda", devices=2, precision="16-mixed")
    fabric.launch()
    fabric.seed_everything(3)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(make_loader())
    model.train()
    for i, batch in enumerate(loader):
        accumulating = i % 8 != 7
        with fabric.no_backward_sync(model, enabled=accumulating):
            loss = model(batch).loss
            fabric.backward(loss / 8)
        if not accumulating:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
        if i % 1000 == 0:
            fabric.save("state.ckpt", {"model": model, "optimizer": optimizer})
