import torch
import torch.nn.functional as F


def training_step(model, batch, optimizer):
    features, labels = batch
    scores = torch.sigmoid(model(features))
    loss = F.binary_cross_entropy_with_logits(scores, labels.float())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()
