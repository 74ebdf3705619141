import torch
import torch.nn.functional as F
from torch.func import functional_call


def adapt(model, params, x, y, inner_lr):
    loss = F.cross_entropy(functional_call(model, params, (x,)), y)
    grads = torch.autograd.grad(loss, tuple(params.values()), create_graph=True)
    return {name: p - inner_lr * g for (name, p), g in zip(params.items(), grads)}


def meta_train(model, tasks, iterations, inner_lr=0.4, inner_steps=1):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for iteration in range(iterations):
        optimizer.zero_grad()
        batch = tasks.sample(16)
        outer = 0.0
        for support, query in batch:
            params = dict(model.named_parameters())
            for _ in range(inner_steps):
                params = adapt(model, params, *support, inner_lr)
            outer = outer + F.cross_entropy(functional_call(model, params, (query[0],)), query[1])
        outer = outer / len(batch)
        outer.backward()
        optimizer.step()
        if iteration % 100 == 0:
            print(iteration, outer.item())
