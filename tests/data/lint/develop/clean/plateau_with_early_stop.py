import copy

import torch
from torch import nn


def fit(model, loaders, lr=1e-3, patience=10, max_epochs=200):
    criterion = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=3)
    best, best_state, waited = float("inf"), None, 0
    for epoch in range(max_epochs):
        for phase in ("train", "val"):
            model.train(phase == "train")
            running = 0.0
            for x, y in loaders[phase]:
                optimizer.zero_grad()
                with torch.set_grad_enabled(phase == "train"):
                    logits = model(x).squeeze(-1)
                    loss = criterion(logits, y)
                    if phase == "train":
                        loss.backward()
                        optimizer.step()
                running += loss.item() * x.size(0)
            epoch_loss = running / len(loaders[phase].dataset)
            if phase == "val":
                scheduler.step(epoch_loss)
                if epoch_loss < best:
                    best, best_state, waited = epoch_loss, copy.deepcopy(model.state_dict()), 0
                else:
                    waited += 1
        if waited >= patience:
            break
    model.load_state_dict(best_state)
    return model
