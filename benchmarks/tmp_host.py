"""Temporary: what the host needs."""
import contextlib, gc, json, sys, time, cProfile, pstats, io
import torch, echelon
from planner_gpu import *
from planner_gpu_models import Gpt
from torch.nn.functional import *
import torch.nn.functional as F
OUT = Path(sys.argv[1]); res = {}
def timed(f, n=8):
    for _ in range(3): f()
    torch.cuda.synchronize(); ts = []
    for _ in range(n):
        b = time.perf_counter(); f(); torch.cuda.synchronize(); ts.append(time.perf_counter() - b)
    ts.sort(); return round(1e3 * ts[0], 2), round(1e3 * ts[len(ts) // 2], 2), round(1e3*ts[-1], 2)
def put(k, v): res[k] = v; print(k, v, flush=True); OUT.write_text(json.dumps(res))
echelon.init()
W = gpt(64); rows = 4
def fresh():
    clean(); torch.manual_seed(0)
    with torch.device("cuda"): return W.model(), W.batch(rows)
def plain(amp, clear=True):
    m, (x, y) = fresh(); opt = torch.optim.Adam(m.parameters(), lr=1e-4)
    def f():
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=amp): l = W.loss(m(x), y)
        l.backward()
    put(f"torch fwd+bwd accumulating amp={amp}", timed(f))
    def g(): f(); opt.step(); opt.zero_grad()
    put(f"torch step foreach amp={amp}", timed(g))
plain(False); plain(True)
profiles = Profiles()
def engine(setting, name):
    m, b = fresh(); found = profiles.of(setting.work)
    saved = SavedPlan.of(setting.draft, found, model=m)
    opt = torch.optim.Adam(m.parameters(), lr=1e-4)
    e = echelon.distribute(m, loss=W.loss, optimizer=opt, plan=saved, log=echelon.Log(console=False))
    with contextlib.closing(e):
        f = lambda: e.step(*b)
        put(name, timed(f))
        gc.collect(); gc.freeze(); put(name + " frozen", timed(f)); gc.unfreeze()
        gc.disable(); put(name + " no gc", timed(f)); gc.enable()
        if "recompute" in name or "4 micro" in name:
            p = cProfile.Profile(); p.enable(); f(); torch.cuda.synchronize(); p.disable()
            s = io.StringIO(); pstats.Stats(p, stream=s).sort_stats("tottime").print_stats(22); res["prof " + name] = s.getvalue()
            print(s.getvalue()[:3500])
for amp in (None, "bf16"):
    engine(Setting(W, rows, amp), f"engine {amp}")
engine(Setting(W, rows, "bf16", False, 4), "engine bf16 4 micro")
engine(Setting(W, rows, "bf16", True, 1), "engine bf16 recompute")
engine(Setting(W, rows, "bf16", True, 4), "engine bf16 recompute 4")
f = profiles.of(W); sh = f.sheet(4, 1, None)
put("launches fp32", (sum(u.forward.launches for u in sh.units), sum(u.backward.launches for u in sh.units)))
sh = f.sheet(4, 1, "bf16")
put("launches bf16", (sum(u.forward.launches for u in sh.units), sum(u.backward.launches for u in sh.units)))
put("gc objects", len(gc.get_objects()))

# ---- kinds ----
from echelon.planner.bench.timing import Clock
c = Clock(torch.device("cuda"), 0.04)
import echelon.planner.bench.timing as tm; tm._HEAD_START = 20_000_000
def leaf(*s, dtype=torch.float32): return torch.randn(*s, device="cuda", dtype=dtype, requires_grad=True)
for dt in (torch.float32, torch.bfloat16):
    n = str(dt)[6:]; es = 4 if dt is torch.float32 else 2
    for ch, side in ((64, 112), (64, 56), (128, 28), (256, 56), (512, 28), (1024, 14), (2048, 7)):
        x = leaf(64 * 4 // es, ch, side, side, dtype=dt); w = leaf(ch); b = leaf(ch); m = torch.zeros(ch, device="cuda"); v = torch.ones(ch, device="cuda")
        dy = torch.randn_like(x); by = 5 * x.numel() * es
        fw = c.seconds(lambda: F.batch_norm(x.detach(), m, v, w.detach(), b.detach(), True))
        both = c.seconds(lambda: torch.autograd.grad(F.batch_norm(x, m, v, w, b, True), (x, w, b), dy))
        put(f"bn {n} {ch} {side}", (by / both / 1e9, 2 * x.numel() * es / fw / 1e9))
    x = leaf(16384, 1024, dtype=dt); w = leaf(1024, dtype=dt); b = leaf(1024, dtype=dt); dy = torch.randn_like(x)
    put(f"ln {n}", (5 * x.numel() * es / c.seconds(lambda: torch.autograd.grad(F.layer_norm(x, (1024,), w, b), (x, w, b), dy)) / 1e9, 2 * x.numel() * es / c.seconds(lambda: F.layer_norm(x.detach(), (1024,), w.detach(), b.detach())) / 1e9))
    x = leaf(16384, 4096, dtype=dt); dy = torch.randn_like(x); k = x.numel() * es
    d = x.detach()
    put(f"gelu {n}", (2 * k / c.seconds(lambda: F.gelu(d)) / 1e9, 5 * k / c.seconds(lambda: torch.autograd.grad(F.gelu(x), x, dy)) / 1e9))
    put(f"relu {n}", (2 * k / c.seconds(lambda: F.relu(d)) / 1e9,))
    put(f"dropout {n}", ((2 * k + x.numel()) / c.seconds(lambda: F.dropout(d, 0.1, True)) / 1e9,))
    put(f"sum0 {n}", (k / c.seconds(lambda: d.sum(0)) / 1e9,))
    put(f"sum0 small {n}", (k / 4 / c.seconds(lambda: d[:, :1024].contiguous().sum(0)) / 1e9,))
    e = torch.randn_like(d); put(f"add {n}", (3 * k / c.seconds(lambda: d + e) / 1e9,))
    q = torch.randn(16, 1024, 3, 16, 64, device="cuda", dtype=dt); kq = q.numel() * es
    put(f"permute {n}", (2 * kq / c.seconds(lambda: q.permute(2, 0, 3, 1, 4).contiguous()) / 1e9,))
    t = q[:, :, 0]; put(f"heads {n}", (2 * kq / 3 / c.seconds(lambda: t.transpose(1, 2).contiguous()) / 1e9,))
    p3 = torch.randn(3, 16, 16, 1024, 64, device="cuda", dtype=dt); put(f"back {n}", (2 * kq / c.seconds(lambda: p3.permute(1, 3, 0, 2, 4).contiguous()) / 1e9,))
    put(f"stack {n}", (2 * kq / c.seconds(lambda: torch.stack([p3[0].transpose(1, 2), p3[1].transpose(1, 2), p3[2].transpose(1, 2)])) / 1e9,))
    put(f"stack plain {n}", (2 * kq / c.seconds(lambda: torch.stack([p3[0], p3[1], p3[2]])) / 1e9,))
    put(f"fill {n}", (k / c.seconds(lambda: torch.zeros_like(d)) / 1e9,))
    put(f"cast {n}", (6 * d.numel() / c.seconds(lambda: d.to(torch.bfloat16 if es == 4 else torch.float32)) / 1e9,))
    l = leaf(8192, 32768, dtype=dt); dl = torch.randn_like(l)
    put(f"log_softmax {n}", (5 * l.numel() * es / c.seconds(lambda: torch.autograd.grad(F.log_softmax(l, -1), l, dl)) / 1e9,))
    del l, dl
    for s in ((256, 16, 128, 64), (32, 16, 512, 64), (16, 16, 1024, 64), (8, 16, 2048, 64), (8, 16, 1024, 128), (4, 16, 2048, 128), (2, 16, 4096, 128)):
        qq, kk, vv = (leaf(*s, dtype=dt) for _ in range(3)); dy = torch.randn(*s, device="cuda", dtype=dt)
        fl = 14.0 * s[0] * s[1] * s[2] ** 2 * s[3]
        put(f"attention {n} {s}", [round(fl / c.seconds(lambda: torch.autograd.grad(F.scaled_dot_product_attention(qq, kk, vv, **o), (qq, kk, vv), dy)) / 1e12, 1) for o in ({}, {"is_causal": True}, {"dropout_p": 0.1})])
    for s in ((64, 64, 56, 64, 1), (64, 64, 56, 256, 1), (64, 256, 56, 64, 1), (64, 512, 28, 128, 1), (64, 1024, 14, 256, 1), (64, 2048, 7, 512, 1), (64, 64, 56, 64, 3), (64, 128, 28, 128, 3), (64, 256, 14, 256, 3), (64, 512, 7, 512, 3), (64, 3, 224, 64, 7), (256, 256, 56, 64, 1), (256, 64, 56, 64, 3), (256, 1024, 14, 256, 1), (8, 256, 14, 256, 3)):
        n_, ch, side, out, size = s
        x = leaf(n_, ch, side, side, dtype=dt); x.requires_grad_(ch > 3); w = leaf(out, ch, size, size, dtype=dt); st = 2 if size == 7 else 1
        y = F.conv2d(x, w, padding=size // 2, stride=st).detach(); ins = (x, w) if ch > 3 else (w,)
        both = c.seconds(lambda: torch.autograd.grad(F.conv2d(x, w, padding=size // 2, stride=st), ins, y))
        fw = c.seconds(lambda: F.conv2d(x.detach(), w.detach(), padding=size // 2, stride=st))
        put(f"conv {n} {s}", {"fw_us": 1e6 * fw, "both_us": 1e6 * both, "flops": 2.0 * y.numel() * ch * size * size, "bytes": (x.numel() + y.numel() + w.numel()) * es, "ways": 1 + len(ins)})
ps = [torch.nn.Parameter(torch.randn(2**22, device="cuda")) for _ in range(16)]
for p in ps: p.grad = torch.randn_like(p)
for fused in (False, True):
    for name, o in (("adam", torch.optim.Adam(ps, lr=1e-4, fused=fused)), ("sgd", torch.optim.SGD(ps, lr=1e-4, momentum=0.9, fused=fused))):
        put(f"update {name} fused={fused}", (28 if name == "adam" else 20) * 2**26 / c.seconds(o.step) / 1e9)
