"""Resume as a hand-written script does: load FILE, which torch.save wrote, and make one step."""

import sys

import torch

from runner.models.gpt import GPT
from runner.models.loss import next_token_loss

saved = torch.load(sys.argv[1], map_location="cpu", weights_only=True)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = GPT(**saved["options"]).to(device)
model.load_state_dict(saved["model"])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
optimizer.load_state_dict(saved["optimizer"])
tokens = saved["tokens"].to(device)
with torch.autocast(device, torch.bfloat16):
    loss = next_token_loss(model, {"input_ids": tokens, "labels": tokens}).mean()
torch.autograd.backward(loss)
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
print(loss.item())
