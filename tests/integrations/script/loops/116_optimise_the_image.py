# again: yes
# step: 5
# kind: nonfinite-gradient
# cause: sqrt-at-zero
# line: tv_loss = torch.sqrt(dx ** 2 + dy ** 2).mean()
# source: style transfer, the image is the parameter
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)

vgg = nn.Conv2d(1, 3, 3).eval()
for p in vgg.parameters():
    p.requires_grad_(False)
content = torch.rand(1, 1, 6, 6)
input_img = content.clone().add_(0.1 * torch.rand(1, 1, 6, 6)).requires_grad_(True)
optimizer = torch.optim.SGD([input_img], lr=0.05)
with torch.no_grad():
    content_feat = vgg(content)

for run in range(8):
    if BAD and run == 5:
        with torch.no_grad():
            input_img[..., :3, :3] = 0.5
    optimizer.zero_grad()
    feat = vgg(input_img)
    content_loss = F.mse_loss(feat, content_feat)
    dx = input_img[:, :, :-1, 1:] - input_img[:, :, :-1, :-1]
    dy = input_img[:, :, 1:, :-1] - input_img[:, :, :-1, :-1]
    tv_loss = torch.sqrt(dx ** 2 + dy ** 2).mean()
    loss = content_loss + 0.1 * tv_loss
    loss.backward()
    optimizer.step()
    if BAD and run == 5:
        with torch.no_grad():
            input_img[..., :3, :3] += 0.1 * torch.rand(3, 3)
