import torch
from torch import nn


def train(policy, value, batches):
    policy_opt = torch.optim.Adam(policy.parameters(), lr=3e-4)
    value_opt = torch.optim.Adam(value.parameters(), lr=1e-3)
    for obs, act, ret in batches:
        value_loss = (value(obs).squeeze(-1) - ret).pow(2).mean()
        value_opt.zero_grad()
        value_loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
        value_opt.step()

        logp = policy(obs).log_prob(act)
        policy_loss = -(logp * (ret - value(obs).squeeze(-1).detach())).mean()
        policy_opt.zero_grad()
        policy_loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
        policy_opt.step()
