import torch
import torch.nn.functional as F
import torch.optim as optim


def update(actor, qf1, qf2, qf1_t, qf2_t, buffer, steps, gamma=0.99, tau=0.005):
    q_optimizer = optim.Adam(list(qf1.parameters()) + list(qf2.parameters()), lr=1e-3)
    actor_optimizer = optim.Adam(actor.parameters(), lr=3e-4)
    log_alpha = torch.zeros(1, requires_grad=True)
    a_optimizer = optim.Adam([log_alpha], lr=1e-3)
    target_entropy = -6.0
    for global_step in range(steps):
        data = buffer.sample(256)
        alpha = log_alpha.exp().item()
        with torch.no_grad():
            next_a, next_logp = actor.get_action(data.next_obs)
            q_next = torch.min(qf1_t(data.next_obs, next_a), qf2_t(data.next_obs, next_a)) - alpha * next_logp
            target = data.rewards + (1 - data.dones) * gamma * q_next.view(-1)
        q1, q2 = qf1(data.obs, data.actions).view(-1), qf2(data.obs, data.actions).view(-1)
        qf_loss = F.mse_loss(q1, target) + F.mse_loss(q2, target)
        q_optimizer.zero_grad()
        qf_loss.backward()
        q_optimizer.step()
        if global_step % 2 == 0:
            for _ in range(2):
                pi, log_pi = actor.get_action(data.obs)
                actor_loss = (alpha * log_pi - torch.min(qf1(data.obs, pi), qf2(data.obs, pi))).mean()
                actor_optimizer.zero_grad()
                actor_loss.backward()
                actor_optimizer.step()
                with torch.no_grad():
                    _, log_pi = actor.get_action(data.obs)
                alpha_loss = (-log_alpha.exp() * (log_pi + target_entropy)).mean()
                a_optimizer.zero_grad()
                alpha_loss.backward()
                a_optimizer.step()
        for p, t in zip(qf1.parameters(), qf1_t.parameters()):
            t.data.copy_(tau * p.data + (1 - tau) * t.data)
