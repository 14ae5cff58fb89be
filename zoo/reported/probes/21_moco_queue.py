import torch
import torch.nn as nn
import torch.nn.functional as F


class MoCo(nn.Module):
    def __init__(self, registered, dim=24, k=64):
        super().__init__()
        def enc():
            return nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1),
                                 nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, dim))
        self.encoder_q, self.encoder_k = enc(), enc()
        self.encoder_k.load_state_dict(self.encoder_q.state_dict())
        for p in self.encoder_k.parameters():
            p.requires_grad_(False)
        queue = F.normalize(torch.randn(dim, k), dim=0)
        ptr = torch.zeros(1, dtype=torch.long)
        if registered:
            self.register_buffer("queue", queue)
            self.register_buffer("queue_ptr", ptr)
        else:
            self.queue, self.queue_ptr = queue, ptr

    @torch.no_grad()
    def enqueue(self, keys):
        p = int(self.queue_ptr)
        n = keys.size(0)
        self.queue[:, p:p + n] = keys.T
        self.queue_ptr[0] = (p + n) % self.queue.size(1)

    def forward(self, im_q, im_k):
        q = F.normalize(self.encoder_q(im_q), dim=1)
        with torch.no_grad():
            if self.training:
                for a, b in zip(self.encoder_q.parameters(), self.encoder_k.parameters()):
                    b.mul_(0.999).add_(a, alpha=0.001)
            k = F.normalize(self.encoder_k(im_k), dim=1)
        l_pos = (q * k).sum(1, keepdim=True)
        l_neg = q @ self.queue.clone()
        logits = torch.cat([l_pos, l_neg], 1) / 0.07
        loss = F.cross_entropy(logits, torch.zeros(q.size(0), dtype=torch.long))
        if self.training:
            self.enqueue(k)
        return loss


def build(fixed=False, seed=0):
    torch.manual_seed(seed)
    model = MoCo(registered=fixed)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.03, momentum=0.9)
    g = torch.Generator().manual_seed(21)
    x = torch.randn(8, 3, 16, 16, generator=g)
    batch = dict(im_q=x, im_k=x.flip(-1) + 0.05 * torch.randn(x.shape, generator=g))

    def loss_fn(model, batch):
        return model(batch["im_q"], batch["im_k"])

    return dict(model=model, optimizer=optimizer, batch=batch, loss_fn=loss_fn)
