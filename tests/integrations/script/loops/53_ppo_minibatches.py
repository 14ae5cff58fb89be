# again: yes
# step: 5
# kind: nonfinite-loss
# cause: exp-overflow, nonfinite-batch, outlier-batch
# sample: 3
# line: ratio = logratio.exp()
# source: CleanRL style PPO, minibatches of a stored rollout
import sys
import numpy as np
import torch
import torch.nn as nn
from torch.distributions import Categorical

BAD = "bad" in sys.argv
np.random.seed(0)
torch.manual_seed(0)


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.actor = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def get_value(self, x):
        return self.critic(x)

    def get_action_and_value(self, x, action=None):
        probs = Categorical(logits=self.actor(x))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


agent = Agent()
optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
batch_size, minibatch_size, clip_coef, ent_coef, vf_coef = 32, 8, 0.2, 0.01, 0.5

for update in range(2):
    b_obs = torch.randn(batch_size, 4)
    with torch.no_grad():
        b_actions, b_logprobs, _, b_values = agent.get_action_and_value(b_obs)
    b_values = b_values.view(-1)
    b_advantages = torch.randn(batch_size)
    b_returns = b_advantages + b_values
    b_inds = np.arange(batch_size)
    np.random.shuffle(b_inds)
    if BAD and update == 1:
        b_logprobs[b_inds[8 + 3]] = -250.0
        b_advantages[b_inds[8 + 3]] = -1.0
    clipfracs = []
    for start in range(0, batch_size, minibatch_size):
        end = start + minibatch_size
        mb_inds = b_inds[start:end]

        _, newlogprob, entropy, newvalue = agent.get_action_and_value(b_obs[mb_inds], b_actions.long()[mb_inds])
        logratio = newlogprob - b_logprobs[mb_inds]
        ratio = logratio.exp()

        with torch.no_grad():
            approx_kl = ((ratio - 1) - logratio).mean()
            clipfracs += [((ratio - 1.0).abs() > clip_coef).float().mean().item()]

        mb_advantages = b_advantages[mb_inds]
        pg_loss1 = -mb_advantages * ratio
        pg_loss2 = -mb_advantages * torch.clamp(ratio, 1 - clip_coef, 1 + clip_coef)
        pg_loss = torch.max(pg_loss1, pg_loss2).mean()
        v_loss = 0.5 * ((newvalue.view(-1) - b_returns[mb_inds]) ** 2).mean()
        entropy_loss = entropy.mean()
        loss = pg_loss - ent_coef * entropy_loss + v_loss * vf_coef

        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        optimizer.step()
