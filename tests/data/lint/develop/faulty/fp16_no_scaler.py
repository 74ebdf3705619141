import torch


def fit(model, loss_fn, loader):
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    model.train()
    for x, y in loader:
        x, y = x.to("cuda"), y.to("cuda")
        opt.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = loss_fn(model(x), y)
        loss.backward()
        opt.step()
