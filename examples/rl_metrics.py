"""Reinforcement-learning metrics are logged and monitored.

Run it: `python examples/rl_metrics.py`. Look at the warning: REINFORCE on eight arms with equal rewards, where the
loss is not informative. With a learning rate far too high the policy settles on one arm and the entropy collapses,
which is reported. With `lr=0.03` nothing is.
"""

import torch
from torch import Tensor, nn
from torch.distributions import Categorical

import steadystep


def main(lr: float = 10.0) -> list[str]:
    """Train and return what was noticed."""
    torch.manual_seed(0)
    model = nn.Linear(1, 8, bias=False)  # the logits of a policy over eight arms
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    guard = steadystep.Guard(model, optimizer)
    noticed = []

    def loss_of(batch: list[Tensor]) -> Tensor:
        actions, rewards = batch
        advantages = rewards - rewards.mean()
        return -(Categorical(logits=model(torch.ones(len(actions), 1))).log_prob(actions) * advantages).mean()

    for _ in range(150):
        with torch.no_grad():
            policy = Categorical(logits=model(torch.ones(16, 1)))
            actions = policy.sample()
            rewards = 1.0 + torch.randn(16)
        metrics = {"reward": rewards.mean(), "entropy": policy.entropy().mean()}
        outcome = guard.step(loss_of, batch=[actions, rewards], metrics=metrics)
        for finding in outcome.findings:
            if finding.severity != "info":
                noticed.append(finding.detector)
                print(f"step {finding.step}: {finding.what}\n  {outcome.diagnosis.advice}")

    print(f"{guard.updates} updates, entropy {metrics['entropy']:.3f}")
    return noticed


if __name__ == "__main__":
    main()
