"""Mixed precision with autocast to bfloat16 and a GradScaler that is on only where CUDA is."""

import torch
import torch.nn as nn

import treadle

torch.manual_seed(29)
use_amp = True
device = "cuda" if torch.cuda.is_available() else "cpu"


def make_model(in_size, out_size, num_layers):
    layers = []
    for _ in range(num_layers - 1):
        layers += [nn.Linear(in_size, in_size), nn.ReLU()]
    layers.append(nn.Linear(in_size, out_size))
    return nn.Sequential(*layers).to(device)


net = make_model(12, 4, 3)
loss_fn = nn.MSELoss()
opt = torch.optim.SGD(net.parameters(), lr=0.01)
scaler = torch.amp.GradScaler(device, enabled=use_amp and device == "cuda")
data = [torch.randn(8, 12, device=device) for _ in range(3)]
targets = [torch.randn(8, 4, device=device) for _ in range(3)]


def step(input, target):
    with torch.autocast(device_type=device, dtype=torch.bfloat16, enabled=use_amp):
        output = net(input)
        loss = loss_fn(output, target)
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm=0.1)
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()
    return loss.detach()


step = treadle.compile(step, model=net, optimizer=opt)
losses = []
for epoch in range(2):
    for input, target in zip(data, targets):
        losses.append(step(input, target).item())
checkpoint = {"model": net.state_dict(), "scaler": scaler.state_dict()}
