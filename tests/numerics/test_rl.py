"""Pieces of policy-gradient losses, against loops over Python floats, with anything at all at masked positions."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanproof import UsageError
from nanproof.numerics.rl import Signals, clamped_kl, group_advantages, kl, log_ratio, masked_mean, ratio

NAN, INF = math.nan, math.inf
ordinary = st.floats(-60, 0, width=32)
anything = st.sampled_from([NAN, INF, -INF, 3e38, -3e38, -1e4, 0.0])


@st.composite
def tokens(draw, counting=ordinary):
    """(new, old, mask): log-probabilities that are in order where they count, and anything where they do not."""
    rows, length = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    mask = [[draw(st.booleans()) for _ in range(length)] for _ in range(rows)]
    made = [[[draw(counting if keep else anything) for keep in row] for row in mask] for _ in range(2)]
    return made[0], made[1], mask


def tensor(rows, **kwargs):
    return torch.tensor(rows, dtype=torch.float32, **kwargs)


def slow(function, new, old, mask, elsewhere):
    return [
        [function(n, o) if keep else elsewhere for n, o, keep in zip(*rows, strict=True)]
        for rows in zip(new, old, mask, strict=True)
    ]


SLOW = {
    "k1": lambda n, r: n - r,
    "k2": lambda n, r: (n - r) ** 2 / 2,
    "k3": lambda n, r: math.exp(r - n) - (r - n) - 1,
}


@settings(max_examples=60)
@given(tokens())
def test_masked_positions_reach_neither_the_loss_nor_the_gradient(drawn):
    """Value and gradient are those of a loop that never looks at masked positions."""
    new, old, mask = drawn
    keep, other = torch.tensor(mask), tensor(old)
    cases = {
        "ratio": (lambda x: ratio(x, other, keep).value, lambda n, o: math.exp(n - o), lambda n, o: math.exp(n - o), 1.0),
        "log_ratio": (lambda x: log_ratio(x, other, keep), lambda n, o: n - o, lambda n, o: 1.0, 0.0),
        "k1": (lambda x: kl(x, other, keep, "k1"), SLOW["k1"], lambda n, o: 1.0, 0.0),
        "k2": (lambda x: kl(x, other, keep, "k2"), SLOW["k2"], lambda n, o: n - o, 0.0),
        "k3": (lambda x: kl(x, other, keep), SLOW["k3"], lambda n, o: 1 - math.exp(o - n), 0.0),
        "clamped k3": (lambda x: clamped_kl(x, other, keep, 1e3).value, SLOW["k3"], lambda n, o: 1 - math.exp(o - n), 0.0),
    }
    for name, (fast, value, slope, elsewhere) in cases.items():
        x = tensor(new).requires_grad_()
        out = fast(x)
        wanted = tensor(slow(value, new, old, mask, elsewhere))
        torch.testing.assert_close(out.detach(), wanted, rtol=1e-4, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}")
        masked_mean(out, keep).backward()
        count = max(1, sum(map(sum, mask)))
        wanted = tensor(slow(slope, new, old, mask, 0.0)) / count
        torch.testing.assert_close(x.grad, wanted, rtol=1e-4, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}")
        assert bool((x.grad[~keep] == 0).all())


@settings(max_examples=60)
@given(tokens(), st.integers(0, 100), st.sampled_from([NAN, INF, -INF]), st.booleans(), st.sampled_from([None, 5.0]))
def test_what_is_not_finite_and_counts_stays_not_finite(drawn, at, bad, in_new, limit):
    """No piece hides it: neither a clamp nor an exp of -inf makes a number of it."""
    new, old, mask = drawn
    row, column = at % len(mask), at % len(mask[0])
    (new if in_new else old)[row][column] = bad
    (old if in_new else new)[row][column] = -1.0
    mask[row][column] = True
    new, old, mask = tensor(new), tensor(old), torch.tensor(mask)
    pieces = [ratio(new, old, mask, limit).value, log_ratio(new, old, mask), *(kl(new, old, mask, k) for k in SLOW)]
    pieces += [clamped_kl(new, old, mask, limit or 1.0, k).value for k in SLOW]
    for piece in pieces:
        assert not math.isfinite(piece[row, column])
        assert not math.isfinite(masked_mean(piece, mask))
        assert not math.isfinite(masked_mean(piece, mask, -1)[row])


def test_the_usual_way_does_overflow_there():
    """The case this file is about: one masked token whose log-probability fell by 120."""
    new, old, mask = torch.tensor([[-1.0, -120.0]], requires_grad=True), torch.zeros(1, 2), torch.tensor([[1, 0]])
    d = old - new
    assert math.isnan(((d.exp() - d - 1) * mask).sum().item())
    kl(new, old, mask).sum().backward()
    assert new.grad.tolist() == [[pytest.approx(1 - math.e), 0.0]]


@settings(max_examples=50)
@given(tokens(), st.floats(0.5, 30))
def test_a_limit_is_reported_with_every_ratio_it_changes(drawn, limit):
    new, old, mask = drawn
    out = ratio(tensor(new), tensor(old), torch.tensor(mask), limit)
    exact = [n - o for rows in zip(new, old, mask, strict=True) for n, o, keep in zip(*rows, strict=True) if keep]
    fast = [float(x) for x, keep in zip(out.value.flatten(), torch.tensor(mask).flatten(), strict=True) if keep]
    assert fast == pytest.approx([math.exp(min(max(d, -limit), limit)) for d in exact], rel=1e-3)
    changed = sum(abs(tensor([d]).item()) > tensor([limit]).item() for d in exact)
    assert abs(out.clamped.item() - changed) <= sum(abs(abs(d) - limit) < 1e-4 for d in exact)
    assert out.share.item() == pytest.approx(out.clamped.item() / max(1, len(exact)))


@settings(max_examples=50)
@given(tokens(), st.floats(0.5, 30), st.sampled_from(sorted(SLOW)))
def test_a_limit_is_reported_with_every_divergence_it_changes(drawn, limit, kind):
    """Value, gradient and count are those of a loop that holds the log-ratio first; a token that was held has no gradient."""
    new, ref, mask = drawn
    x, keep = tensor(new).requires_grad_(), torch.tensor(mask)
    out = clamped_kl(x, tensor(ref), keep, limit, kind)
    held = lambda n, r: min(max(r - n, -limit), limit)  # noqa: E731
    wanted = tensor(slow(lambda n, r: SLOW[kind](0.0, held(n, r)), new, ref, mask, 0.0))
    torch.testing.assert_close(out.value.detach(), wanted, rtol=1e-3, atol=1e-4)
    out.value.sum().backward()
    beyond = tensor(slow(lambda n, r: float(abs(r - n) > limit + 1e-4), new, ref, mask, 0.0)).bool()
    edge = tensor(slow(lambda n, r: float(abs(abs(r - n) - limit) <= 1e-4), new, ref, mask, 0.0)).bool()
    assert bool((x.grad[~keep | beyond] == 0).all())
    assert beyond.sum() <= out.clamped <= beyond.sum() + edge.sum()
    assert out.share.item() == pytest.approx(out.clamped.item() / max(1, sum(map(sum, mask))))


def test_half_precision_is_widened_before_exp():
    """fp16 ends at 65504: a log-ratio of 12 would be Inf."""
    new, old, mask = torch.tensor([12.0]).half(), torch.tensor([0.0]).half(), torch.tensor([True])
    assert ratio(new, old, mask).value.item() == pytest.approx(math.exp(12))
    assert kl(old, new, mask).item() == pytest.approx(math.exp(12) - 13)
    assert ratio(new.double(), old, mask).value.dtype == torch.float64


@settings(max_examples=60)
@given(tokens(counting=st.floats(-1e3, 1e3, width=32)))
def test_masked_means_are_those_of_a_loop(drawn):
    values, _, mask = drawn
    kept = [[v for v, keep in zip(*rows, strict=True) if keep] for rows in zip(values, mask, strict=True)]
    flat = [v for row in kept for v in row]
    x, m = tensor(values), torch.tensor(mask)
    assert masked_mean(x, m).item() == pytest.approx(sum(flat) / len(flat) if flat else 0.0, rel=1e-4, abs=1e-2)
    rows = [sum(row) / len(row) if row else 0.0 for row in kept]
    assert masked_mean(x, m.long(), -1).tolist() == pytest.approx(rows, rel=1e-4, abs=1e-2)


def slow_advantages(rewards, size, scale, floor, valid=None):
    """In float64, a loop over groups; rows that are not valid are not looked at."""
    valid = [True] * len(rewards) if valid is None else valid

    def deviation(numbers):
        mean = math.fsum(numbers) / len(numbers)
        return math.sqrt(math.fsum((x - mean) ** 2 for x in numbers) / (len(numbers) - 1))

    everyone = [x for x, good in zip(rewards, valid, strict=True) if good]
    out, zero, floored, short = [], 0, 0, 0
    for i in range(0, len(rewards), size):
        rows = [(x, good) for x, good in zip(rewards[i : i + size], valid[i : i + size], strict=True)]
        group = [x for x, good in rows if good]
        if len(group) < 2 or len(set(group)) == 1:
            short += len(group) < 2
            zero += len(group) >= 2
            out += [0.0] * size
            continue
        divisor = {"group": deviation(group), "batch": deviation(everyone), "none": 1.0}[scale]
        if scale != "none" and divisor < floor:
            divisor, floored = floor, floored + 1
        mean = math.fsum(group) / len(group)
        out += [(x - mean) / divisor if good else 0.0 for x, good in rows]
    return out, zero, floored, short


@settings(max_examples=150)
@given(
    st.integers(2, 5).flatmap(
        lambda n: st.tuples(
            st.just(n),
            st.lists(
                st.lists(st.sampled_from([0.0, 0.1, 0.3, 1.0, -2.5, 1e-3, 40.0]), min_size=n, max_size=n), min_size=1, max_size=4
            ),
        )
    ),
    st.sampled_from(["group", "batch", "none"]),
    st.sampled_from([0.0, 0.05, 1.5]),
    st.sampled_from([1.0, 1e-20, 1e20]),
    st.data(),
)
def test_advantages_are_those_of_a_loop(drawn, scale, floor, size, data):
    """Also of rewards whose squares leave fp32, and of groups that are equal: exactly 0, and counted. With rows that are not
    valid: those of the loop over the others, whatever their own rewards are."""
    group, made = drawn
    rewards = (torch.tensor(made).flatten() * size).tolist()
    found = group_advantages(torch.tensor(rewards), group, scale, floor)
    counts = ("zero_groups", "floored_groups", "short_groups")
    near = {"rel": 1e-4, "abs": 1e-5 * (size if scale == "none" else 1)}
    wanted, *counted = slow_advantages(rewards, group, scale, floor)
    assert found.value.tolist() == pytest.approx(wanted, **near)
    assert [getattr(found, name).item() for name in counts] == counted and counted[2] == 0
    assert found.value.dtype == torch.float32

    valid = [data.draw(st.booleans()) for _ in rewards]
    wanted, *counted = slow_advantages(rewards, group, scale, floor, valid)
    spoiled = [x if good else data.draw(anything) for x, good in zip(rewards, valid, strict=True)]
    found = group_advantages(torch.tensor(spoiled), group, scale, floor, torch.tensor(valid))
    assert found.value.tolist() == pytest.approx(wanted, **near)
    assert all(x == 0.0 for x, good in zip(found.value.tolist(), valid, strict=True) if not good)
    assert [getattr(found, name).item() for name in counts] == counted
    assert bool(found.std.isfinite().all()) and found.value.dtype == torch.float32


def test_equal_rewards_are_not_divided_by_what_rounding_left():
    """0.1 in fp32 is not the mean of eight of them when added up naively; half precision in, fp32 out."""
    rewards = torch.full((8,), 0.1, dtype=torch.bfloat16)
    for scale in ("group", "batch", "none"):
        found = group_advantages(rewards, 8, scale)
        assert found.value.tolist() == [0.0] * 8 and found.zero_groups.item() == 1
        assert found.value.dtype == found.std.dtype == torch.float32
    nearly = torch.full((4,), 0.5)
    nearly[0] += 1e-7
    assert group_advantages(nearly, 4).value.abs().max() > 1
    floored = group_advantages(nearly, 4, floor=1e-3)
    assert floored.value.abs().max() < 1e-3 and floored.floored_groups.item() == 1


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("floor", [0.0, 1.0])
def test_a_reward_that_is_not_finite_spoils_its_group_and_no_other(bad, floor):
    rewards = torch.tensor([0.0, 1.0, 0.0, bad, bad, bad])
    found = group_advantages(rewards, 2, floor=floor)
    assert torch.isfinite(found.value).tolist() == [True, True, False, False, False, False]
    assert found.zero_groups.item() == 0
    valid = torch.tensor([True, True, False, True, True, True])
    found = group_advantages(rewards, 2, floor=floor, valid=valid)
    assert torch.isfinite(found.value).tolist() == [True, True, True, False, False, False], "also in a group that is too short"
    assert (found.zero_groups.item(), found.short_groups.item()) == (0, 1)


@pytest.mark.parametrize(
    ("rewards", "size", "kwargs", "said"),
    [
        (torch.ones(4), 1, {}, "a group of one"),
        (torch.ones(5), 2, {}, "5 rewards do not divide"),
        (torch.ones(4, 1), 2, {}, "one number per completion"),
        (torch.ones(4), 2, {"scale": "all"}, "'all'"),
        (torch.ones(4), 2, {"floor": -1.0}, "at least 0"),
        (torch.ones(4), 2, {"valid": torch.ones(2)}, r"not one of shape \[2\]"),
        (torch.ones(4), 2, {"valid": [1, 1, 1, 0]}, "not list"),
    ],
)
def test_what_cannot_be_right_is_refused(rewards, size, kwargs, said):
    with pytest.raises(UsageError, match=said):
        group_advantages(rewards, size, **kwargs)


def test_arguments_that_do_not_fit_are_named():
    x = torch.zeros(2, 3)
    with pytest.raises(UsageError, match=r"\[2, 4\] does not fit values of shape \[2, 3\]"):
        log_ratio(x, x, torch.ones(2, 4))
    with pytest.raises(UsageError, match="not list"):
        masked_mean(x, [1])
    with pytest.raises(UsageError, match="above 0"):
        ratio(x, x, torch.ones(2, 3), limit=0.0)
    for limit in (-1.0, NAN):
        with pytest.raises(UsageError, match=r"clamped_kl.*above 0"):
            clamped_kl(x, x, torch.ones(2, 3), limit)
    with pytest.raises(UsageError, match="k4"):
        kl(x, x, torch.ones(2, 3), "k4")


@settings(max_examples=60)
@given(tokens(), st.data())
def test_signals_are_those_of_a_loop(drawn, data):
    """Extremes and means of the tokens that count, before anything is clipped."""
    new, old, mask = drawn
    flags = torch.tensor(mask)
    sampler = [[data.draw(ordinary if keep else anything) for keep in row] for row in mask]
    if data.draw(st.booleans()):
        row = data.draw(st.integers(0, len(mask) - 1))
        sampler[row] = [data.draw(anything) for _ in sampler[row]]
    entropy = [[abs(x) for x in row] for row in old]
    signals = Signals.of_tokens(
        tensor(new), flags, old=tensor(old), ref=tensor(old), sampler=tensor(sampler), entropy=tensor(entropy)
    )
    found = signals.read()
    assert (
        set(found)
        == set(signals.present())
        == {
            *(
                "ratio_max",
                "ratio_min",
                "sampler_ratio_max",
                "sampler_ratio_min",
                "sampler_nonfinite",
                "kl_max",
                "kl_mean",
                "entropy",
                "masked_overflow",
            )
        }
    )
    kept = [
        (n, o, s, e)
        for rows in zip(new, old, sampler, entropy, mask, strict=True)
        for n, o, s, e, keep in zip(*rows, strict=True)
        if keep
    ]
    near = {"rel": 1e-3, "abs": 1e-4, "nan_ok": True}
    ratios, divergences = [math.exp(n - o) for n, o, _, _ in kept], [SLOW["k3"](n, o) for n, o, _, _ in kept]
    assert found["ratio_max"] == pytest.approx(max(ratios, default=NAN), **near)
    assert found["ratio_min"] == pytest.approx(min(ratios, default=NAN), **near)
    assert found["kl_max"] == pytest.approx(max(divergences, default=NAN), **near)
    assert found["kl_mean"] == pytest.approx(sum(divergences) / len(kept) if kept else 0.0, **near)
    assert found["entropy"] == pytest.approx(sum(e for *_, e in kept) / len(kept) if kept else 0.0, **near)
    beside = [(n, o) for rows in zip(new, old, mask, strict=True) for n, o, keep in zip(*rows, strict=True) if not keep]
    assert found["masked_overflow"] == sum(not (n - o < 88.72 and o - n < 88.72 and n - o > -INF) for n, o in beside)
    assert found["sampler_nonfinite"] == sum(not math.isfinite(s) for _, _, s, _ in kept)
    if kept and found["sampler_nonfinite"] == 0 and all(abs(s) < 61 for _, _, s, _ in kept):
        assert found["sampler_ratio_max"] == pytest.approx(max(math.exp(o - s) for _, o, s, _ in kept), **near)
        assert found["sampler_ratio_min"] == pytest.approx(min(math.exp(o - s) for _, o, s, _ in kept), **near)


def test_signals_of_rewards():
    """Two groups that differ, one that does not: the share of groups that teach nothing is a third."""
    rewards = torch.tensor([0.0, 1.0, 0.5, 0.5, 3.0, 1.0])
    found = Signals.of_rewards(rewards, 2).read()
    spread = math.sqrt(0.5)
    wanted = {"group_std_mean": (spread + 0 + 2 * spread) / 3, "group_std_min": 0.0, "zero_advantage_share": 1 / 3}
    assert found == pytest.approx(wanted | {"reward_nonfinite": 0})
    assert Signals().read() == {}


def test_a_reward_that_is_not_finite_is_counted_and_its_group_left_out():
    """One reward function that fails does not hide the other groups; where none is left, there is nothing to say."""
    found = Signals.of_rewards(torch.tensor([0.0, 2.0, INF, 1.0, 7.0, 7.0]), 2).read()
    assert found == pytest.approx(
        {"group_std_mean": math.sqrt(2) / 2, "group_std_min": 0.0, "zero_advantage_share": 0.5, "reward_nonfinite": 1}
    )
    valid = torch.tensor([True, True, False, True, True, True])
    found = Signals.of_rewards(torch.tensor([0.0, 2.0, INF, 1.0, 7.0, 7.0]), 2, valid).read()
    assert found == pytest.approx(
        {"group_std_mean": math.sqrt(2) / 2, "group_std_min": 0.0, "zero_advantage_share": 0.5, "reward_nonfinite": 0}
    ), "a row that is not valid is no fault of the rewards, and its group of one has no spread"
    found = Signals.of_rewards(torch.tensor([NAN, 2.0]), 2).read()
    assert found.pop("reward_nonfinite") == 1 and all(math.isnan(x) for x in found.values())


def test_ratios_of_sequences_are_by_the_mean_of_their_tokens():
    new, old, mask = (
        torch.tensor([[-1.0, -4.0], [-2.0, NAN]]),
        torch.tensor([[-2.0, -2.0], [-5.0, 0.0]]),
        torch.tensor([[1, 1], [1, 0]]),
    )
    found = Signals.of_tokens(new, mask, old=old, level="sequence").read()
    assert found == pytest.approx({"ratio_max": math.exp(3), "ratio_min": math.exp((1 - 2) / 2), "masked_overflow": 1})


def test_signals_without_an_old_policy_say_a_ratio_of_1():
    found = Signals.of_tokens(torch.tensor([[-3.0, NAN]]), torch.tensor([[1, 0]])).read()
    assert found == {"ratio_max": 1.0, "ratio_min": 1.0, "masked_overflow": 1.0}
    assert math.isnan(Signals.of_tokens(torch.tensor([[-3.0, NAN]]), torch.tensor([[1, 1]])).read()["ratio_max"])
