import torch


def dice(pred, mask):
    pred = torch.relu(pred) + pred.pow(2)
    inter = (pred * mask).sum(1)
    total = pred.sum(1) + mask.sum(1)
    return 1.0 - 2.0 * inter / total


def compute_loss(pred, mask, alpha=0.5):
    d = dice(pred, mask)
    b = torch.nn.functional.binary_cross_entropy_with_logits(pred, mask)
    return alpha * d.mean() + (1 - alpha) * b, {"dice": d.mean().item(), "bce": b.item()}
