"""Numbers in tables, points, graphs, and agents."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ordinary_steps.kit import Kit, Setup, mlp, row, trained


@row
def mlp_regression(kit: Kit) -> Setup:
    w = kit.size(16, 512)
    model = kit.put(mlp(8, w, w, 1))
    return trained(
        model, lambda x, y: F.mse_loss(model(x), y), lambda: (kit.randn(64, 8), kit.randn(64, 1))
    )


@row
def mlp_dropout(kit: Kit) -> Setup:
    w = kit.size(16, 512)
    model = kit.put(nn.Sequential(
        nn.BatchNorm1d(8), nn.Linear(8, w), nn.LayerNorm(w), nn.SELU(), nn.AlphaDropout(0.1),
        nn.Linear(w, w), nn.CELU(), nn.Dropout(0.5), nn.Linear(w, 3),
    ))  # fmt: skip

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y, weight=torch.tensor([1.0, 2.0, 0.5], device=x.device))

    return trained(model, loss_of, lambda: (kit.randn(64, 8), kit.randint(3, 64)))


@row
def quantile_regression(kit: Kit) -> Setup:
    model = kit.put(mlp(8, kit.size(16, 256), 3, act=nn.GELU))
    levels = torch.tensor([0.1, 0.5, 0.9], device=kit.device)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        error = y - model(x)
        return torch.maximum(levels * error, (levels - 1) * error).mean()

    # Of 64 as many may be above as below: AdamW makes a whole step of how that zero is rounded.
    return trained(model, loss_of, lambda: (kit.randn(63, 8), kit.randn(63, 1)))


@row
def matrix_factorization(kit: Kit) -> Setup:
    n, w = kit.size(30, 10000), kit.size(4, 64)
    users, items = nn.Embedding(n, w), nn.Embedding(n, w)
    biases = nn.ModuleList([nn.Embedding(n, 1), nn.Embedding(n, 1)])
    model = kit.put(nn.ModuleList([users, items, biases]))

    def loss_of(u: Tensor, i: Tensor, y: Tensor) -> Tensor:
        near = (model[0](u) * model[1](i)).sum(1)
        return F.mse_loss(near + model[2][0](u)[:, 0] + model[2][1](i)[:, 0], y)

    return trained(model, loss_of, lambda: (kit.randint(n, 32), kit.randint(n, 32), kit.randn(32)))


@row
def ranking_bpr(kit: Kit) -> Setup:
    n, w = kit.size(30, 10000), kit.size(4, 64)
    model = kit.put(nn.ModuleList([nn.Embedding(n, w), nn.Embedding(n, w)]))

    def loss_of(u: Tensor, good: Tensor, bad: Tensor) -> Tensor:
        h = model[0](u)
        margin = (h * (model[1](good) - model[1](bad))).sum(1)
        return -F.logsigmoid(margin).mean() + 1e-4 * h.square().sum()

    return trained(model, loss_of, lambda: tuple(kit.randint(n, 32) for _ in range(3)))


@row
def deep_fm(kit: Kit) -> Setup:
    fields, n, w = 5, kit.size(20, 1000), kit.size(4, 16)
    table, first = nn.Embedding(fields * n, w), nn.Embedding(fields * n, 1)
    model = kit.put(nn.ModuleList([table, first, mlp(fields * w, 32, 1)]))
    starts = torch.arange(fields, device=kit.device) * n

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        e = model[0](x + starts)
        pairs = 0.5 * (e.sum(1).square() - e.square().sum(1)).sum(1)
        out = model[1](x + starts).sum((1, 2)) + pairs + model[2](e.flatten(1))[:, 0]
        return F.binary_cross_entropy_with_logits(out, y)

    return trained(model, loss_of, lambda: (kit.randint(n, 32, fields), kit.randint(2, 32).float()))


@row
def wide_and_deep(kit: Kit) -> Setup:
    n = kit.size(20, 1000)
    wide, deep = nn.Linear(2 * n, 1), nn.ModuleList([nn.Embedding(n, 4), mlp(12, 16, 1)])
    model = kit.put(nn.ModuleList([wide, deep]))
    sgd = torch.optim.SGD(model[0].parameters(), lr=0.1)
    adagrad = torch.optim.Adagrad(model[1].parameters(), lr=0.05)

    def step(x: Tensor, dense: Tensor, y: Tensor) -> Tensor:
        hot = F.one_hot(x, n).flatten(1).float()
        inner = torch.cat([model[1][0](x).flatten(1), dense], 1)
        loss = F.binary_cross_entropy_with_logits((model[0](hot) + model[1][1](inner))[:, 0], y)
        sgd.zero_grad()
        adagrad.zero_grad()
        loss.backward()
        sgd.step()
        adagrad.step()
        return loss.detach()

    def batch() -> tuple[Tensor, Tensor, Tensor]:
        return kit.randint(n, 16, 2), kit.randn(16, 4), kit.randint(2, 16).float()

    return Setup(step, model, {"wide": sgd, "deep": adagrad}, batch)


@row
def multi_task(kit: Kit) -> Setup:
    """Two tasks, weighed by learned uncertainties."""
    w = kit.size(16, 256)
    body, heads = mlp(8, w, w), nn.ModuleList([nn.Linear(w, 1), nn.Linear(w, 3)])
    doubts = nn.ParameterList([nn.Parameter(torch.zeros(())) for _ in range(2)])
    model = kit.put(nn.ModuleList([body, heads, doubts]))

    def loss_of(x: Tensor, y: Tensor, c: Tensor) -> Tensor:
        h = model[0](x).relu()
        losses = [F.mse_loss(model[1][0](h)[:, 0], y), F.cross_entropy(model[1][1](h), c)]
        return sum(torch.exp(-s) * loss + s for s, loss in zip(model[2], losses, strict=True))

    return trained(model, loss_of, lambda: (kit.randn(32, 8), kit.randn(32), kit.randint(3, 32)))


@row
def gaussian_process(kit: Kit) -> Setup:
    """The marginal likelihood of an RBF kernel, by Cholesky."""
    n = kit.size(12, 256)
    logs = nn.ParameterList([nn.Parameter(torch.zeros(())) for _ in range(3)])
    model = kit.put(nn.ModuleList([logs]))

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        scale, size, noise = (each.exp() for each in model[0])
        gaps = (x[:, None] - x[None]).square().sum(-1)
        k = size * torch.exp(-0.5 * gaps / scale**2) + (noise + 1e-3) * torch.eye(
            n, device=x.device
        )
        root = torch.linalg.cholesky(k)
        alpha = torch.cholesky_solve(y[:, None], root)[:, 0]
        return 0.5 * (y * alpha).sum() + root.diagonal().log().sum() + 0.5 * n * math.log(6.2832)

    return trained(model, loss_of, lambda: (kit.randn(n, 2), kit.randn(n)))


@row
def siren(kit: Kit) -> Setup:
    """A picture as a function of its coordinates; sines, and its gradient in the loss."""
    w = kit.size(16, 256)
    model = kit.put(nn.ModuleList([nn.Linear(2, w), nn.Linear(w, w), nn.Linear(w, 1)]))

    def loss_of(x: Tensor, y: Tensor, slope: Tensor) -> Tensor:
        x = x.requires_grad_()
        h = torch.sin(30 * model[0](x))
        out = model[2](torch.sin(30 * model[1](h)))
        (found,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.mse_loss(out, y) + 1e-3 * F.mse_loss(found, slope)

    return trained(model, loss_of, lambda: (kit.rand(64, 2), kit.rand(64, 1), kit.randn(64, 2)))


@row
def radiance_field(kit: Kit) -> Setup:
    """Colours and densities along rays, composed."""
    w = kit.size(16, 128)
    model = kit.put(mlp(3 + 3 * 8, w, w, 4))

    def loss_of(origin: Tensor, toward: Tensor, colour: Tensor) -> Tensor:
        at = torch.linspace(0, 1, 8, device=origin.device)
        at = at + torch.rand(origin.shape[0], 8, device=origin.device) / 8
        points = origin[:, None] + toward[:, None] * at[..., None]
        waves = [f(2.0**k * points) for k in range(4) for f in (torch.sin, torch.cos)]
        out = model(torch.cat([points, *waves], -1))
        alpha = 1 - torch.exp(-F.relu(out[..., 3]) / 8)
        clear = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], 1), 1)
        return F.mse_loss(
            ((alpha * clear[:, :-1])[..., None] * out[..., :3].sigmoid()).sum(1), colour
        )

    return trained(model, loss_of, lambda: (kit.randn(32, 3), kit.randn(32, 3), kit.rand(32, 3)))


@row
def pointnet(kit: Kit) -> Setup:
    w, n = kit.size(16, 128), kit.size(32, 1024)
    model = kit.put(nn.Sequential(
        nn.Conv1d(3, w, 1), nn.BatchNorm1d(w), nn.ReLU(), nn.Conv1d(w, 2 * w, 1),
    ))  # fmt: skip
    head = kit.put(mlp(2 * w, w, 5))

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(head(model(x).amax(2)), y)

    return trained([model, head], loss_of, lambda: (kit.randn(4, 3, n), kit.randint(5, 4)))


@row
def graph_messages(kit: Kit) -> Setup:
    """Messages along edges, added up at nodes."""
    n, e, w = kit.size(20, 2000), kit.size(60, 10000), kit.size(8, 64)
    model = kit.put(nn.ModuleList([mlp(2 * w, w, w), nn.GRUCell(w, w), nn.Linear(w, 3)]))

    def loss_of(h: Tensor, edges: Tensor, y: Tensor) -> Tensor:
        for _ in range(2):
            sent = model[0](torch.cat([h[edges[0]], h[edges[1]]], 1))
            got = torch.zeros_like(h).index_add(0, edges[1], sent)
            count = torch.zeros(h.shape[0], device=h.device).index_add_(
                0, edges[1], torch.ones_like(sent[:, 0])
            )
            h = model[1](got / count.clamp(min=1)[:, None], h)
        return F.cross_entropy(model[2](h), y)

    return trained(
        model, loss_of, lambda: (kit.randn(n, w), kit.randint(n, 2, e), kit.randint(3, n))
    )


@row
def graph_attention(kit: Kit) -> Setup:
    n, e, w = kit.size(20, 2000), kit.size(60, 10000), kit.size(8, 64)
    model = kit.put(nn.ModuleList([nn.Linear(4, w), nn.Linear(2 * w, 1), nn.Linear(w, 3)]))

    def loss_of(x: Tensor, edges: Tensor, y: Tensor) -> Tensor:
        h, (a, b) = model[0](x), edges
        score = F.leaky_relu(model[1](torch.cat([h[a], h[b]], 1)))[:, 0]
        top = torch.full((n,), -1e9, device=x.device).scatter_reduce(0, b, score, "amax")
        weight = (score - top[b].detach()).exp()
        total = torch.zeros(n, device=x.device).scatter_add(0, b, weight)
        mixed = torch.zeros_like(h).index_add(0, b, h[a] * (weight / total[b])[:, None])
        return F.cross_entropy(model[2](F.elu(mixed)), y)

    return trained(
        model, loss_of, lambda: (kit.randn(n, 4), kit.randint(n, 2, e), kit.randint(3, n))
    )


@row
def neural_ode(kit: Kit) -> Setup:
    w = kit.size(4, 32)
    model = kit.put(mlp(w, 4 * w, w, act=nn.Tanh))

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        for _ in range(4):
            k1 = model(x)
            k2 = model(x + 0.125 * k1)
            x = x + 0.25 * k2
        return F.mse_loss(x, y)

    return trained(model, loss_of, lambda: (kit.randn(32, w), kit.randn(32, w)))


@row
def siamese(kit: Kit) -> Setup:
    model = kit.put(mlp(8, kit.size(16, 256), 4))

    def loss_of(a: Tensor, b: Tensor, same: Tensor) -> Tensor:
        d = F.pairwise_distance(model(a), model(b))
        return (same * d.square() + (1 - same) * F.relu(1 - d).square()).mean()

    return trained(
        model, loss_of, lambda: (kit.randn(16, 8), kit.randn(16, 8), kit.randint(2, 16).float())
    )


@row
def triplet(kit: Kit) -> Setup:
    model = kit.put(mlp(8, kit.size(16, 256), 4))

    def loss_of(a: Tensor, p: Tensor, n: Tensor) -> Tensor:
        return F.triplet_margin_loss(*(F.normalize(model(x)) for x in (a, p, n)), margin=0.3)

    return trained(model, loss_of, lambda: tuple(kit.randn(16, 8) for _ in range(3)))


@row
def arc_face(kit: Kit) -> Setup:
    model = kit.put(nn.ModuleList([mlp(8, kit.size(16, 256), 6), nn.Linear(6, 10, bias=False)]))

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        cos = F.linear(F.normalize(model[0](x)), F.normalize(model[1].weight))
        angle = torch.acos(cos.clamp(-1 + 1e-6, 1 - 1e-6))
        hot = F.one_hot(y, 10).bool()
        return F.cross_entropy(16 * torch.where(hot, torch.cos(angle + 0.3), cos), y)

    return trained(model, loss_of, lambda: (kit.randn(16, 8), kit.randint(10, 16)))


@row
def sim_clr(kit: Kit) -> Setup:
    model = kit.put(mlp(8, kit.size(16, 256), 4))

    def loss_of(a: Tensor, b: Tensor) -> Tensor:
        z = F.normalize(model(torch.cat([a, b])))
        odds = (z @ z.T / 0.5).masked_fill(torch.eye(len(z), device=z.device).bool(), -1e9)
        n = len(a)
        return F.cross_entropy(odds, (torch.arange(2 * n, device=z.device) + n) % (2 * n))

    return trained(model, loss_of, lambda: (kit.randn(16, 8), kit.randn(16, 8)))


@row
def deep_q(kit: Kit) -> Setup:
    """Double Q learning with a target network that follows."""
    w = kit.size(16, 256)
    net, target = kit.put(mlp(4, w, 3)), kit.put(mlp(4, w, 3))
    target.load_state_dict(net.state_dict())
    optimizer = torch.optim.RMSprop(net.parameters(), lr=1e-3)

    def step(s: Tensor, a: Tensor, r: Tensor, after: Tensor, over: Tensor) -> Tensor:
        q = net(s).gather(1, a[:, None])[:, 0]
        with torch.no_grad():
            best = net(after).argmax(1, keepdim=True)
            goal = r + 0.99 * (1 - over) * target(after).gather(1, best)[:, 0]
        loss = F.smooth_l1_loss(q, goal)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_value_(net.parameters(), 100)
        optimizer.step()
        with torch.no_grad():
            for mine, theirs in zip(target.parameters(), net.parameters(), strict=True):
                mine.mul_(0.995).add_(theirs, alpha=0.005)
        return loss.detach()

    def batch() -> tuple[Tensor, ...]:
        ends = kit.randint(2, 32).float()
        return kit.randn(32, 4), kit.randint(3, 32), kit.randn(32), kit.randn(32, 4), ends

    return Setup(step, [net, target], optimizer, batch)


@row
def reinforce(kit: Kit) -> Setup:
    model = kit.put(mlp(4, kit.size(16, 256), 3))

    def loss_of(s: Tensor, a: Tensor, returns: Tensor) -> Tensor:
        policy = torch.distributions.Categorical(logits=model(s), validate_args=False)
        gain = (returns - returns.mean()) / (returns.std() + 1e-6)
        return -(policy.log_prob(a) * gain).mean() - 0.01 * policy.entropy().mean()

    return trained(model, loss_of, lambda: (kit.randn(32, 4), kit.randint(3, 32), kit.randn(32)))


@row
def actor_critic(kit: Kit) -> Setup:
    """A continuous policy with a squashed sample, and its critic, with an optimizer each."""
    w = kit.size(16, 256)
    actor, critic = kit.put(mlp(4, w, 4)), kit.put(mlp(6, w, 1))
    opt_a, opt_c = (torch.optim.Adam(each.parameters(), 3e-4) for each in (actor, critic))

    def sample(s: Tensor) -> tuple[Tensor, Tensor]:
        mean, spread = actor(s).chunk(2, 1)
        spread = spread.clamp(-5, 2).exp()
        raw = mean + spread * torch.randn_like(mean)
        odds = -0.5 * ((raw - mean) / spread).square() - spread.log()
        return raw.tanh(), (odds - torch.log(1 - raw.tanh().square() + 1e-6)).sum(1)

    def step(s: Tensor, a: Tensor, goal: Tensor) -> tuple[Tensor, Tensor]:
        loss_c = F.mse_loss(critic(torch.cat([s, a], 1))[:, 0], goal)
        opt_c.zero_grad()
        loss_c.backward()
        opt_c.step()
        action, odds = sample(s)
        loss_a = (0.2 * odds - critic(torch.cat([s, action], 1))[:, 0]).mean()
        opt_a.zero_grad()
        loss_a.backward()
        opt_a.step()
        return loss_c.detach(), loss_a.detach()

    def batch() -> tuple[Tensor, ...]:
        return kit.randn(32, 4), kit.rand(32, 2) * 2 - 1, kit.randn(32)

    return Setup(step, {"actor": actor, "critic": critic}, {"actor": opt_a, "critic": opt_c}, batch)


@row
def ppo(kit: Kit) -> Setup:
    """Two epochs of clipped updates on one batch, an optimizer step for each."""
    w = kit.size(16, 256)
    body, policy, value = mlp(4, w, w, act=nn.Tanh), nn.Linear(w, 3), nn.Linear(w, 1)
    model = kit.put(nn.ModuleList([body, policy, value]))
    optimizer = torch.optim.Adam(model.parameters(), 3e-4, eps=1e-5)

    def step(s: Tensor, a: Tensor, old: Tensor, gain: Tensor, returns: Tensor) -> Tensor:
        loss = s.new_zeros(())
        for _ in range(2):
            h = model[0](s).tanh()
            odds = model[1](h).log_softmax(1)
            ratio = (odds.gather(1, a[:, None])[:, 0] - old).exp()
            clipped = torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
            spread = -(odds.exp() * odds).sum(1).mean()
            loss = 0.5 * F.mse_loss(model[2](h)[:, 0], returns) - clipped - 0.01 * spread
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        return loss.detach()

    def batch() -> tuple[Tensor, ...]:
        old = kit.randn(32, 3).log_softmax(1)[:, 0]
        return kit.randn(32, 4), kit.randint(3, 32), old, kit.randn(32), kit.randn(32)

    return Setup(step, model, optimizer, batch)
