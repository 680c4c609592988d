import collections, sys
from pathlib import Path
import pytest, torch
import fa_ops
from fa_ops import dispatch
from fa_ops.backends import hopper
PACKAGE = str(Path(fa_ops.__file__).parent)
TESTS = str(Path(PACKAGE).parent/"tests")
def skip(code):
    f=code.co_filename
    return f.startswith(TESTS) or f.startswith(PACKAGE+"/testing") or (f.endswith("hopper/launch.py") and code.co_qualname in ("kernel","kernels"))
class Frames:
    def __enter__(self):
        self.entered = collections.Counter(); self.order=[]; self.inside=0
        sys.setprofile(self._note); return self
    def __exit__(self,*_): sys.setprofile(None)
    def _note(self, frame, event, _):
        if event not in ("call","return"): return
        if event=="return":
            if self.inside: self.inside-=1
            return
        if self.inside or skip(frame.f_code): self.inside+=1; return
        c=frame.f_code
        if c.co_qualname=="Frames.__exit__": return
        self.entered[c.co_filename,c.co_qualname]+=1
        self.order.append(c.co_filename)
    def report(self,name):
        own={k:v for k,v in self.entered.items() if k[0].startswith(PACKAGE)}
        files={k[0] for k in own}
        fo=[f for f in self.order if f.startswith(PACKAGE)]
        nogen=sum(1 if "<" in k[1].split(".")[-1] else v for k,v in own.items())
        print(f"{name}: all {sum(self.entered.values())}, fa_ops {sum(own.values())} of {len(own)} functions in {len(files)} files, changes {sum(a!=b for a,b in zip(fo,fo[1:]))}; generators once {nogen}")
@pytest.fixture(autouse=True)
def on_cpu(driver, monkeypatch):
    monkeypatch.setattr(hopper, "support_error", lambda *call: None)
    monkeypatch.setattr(dispatch, "AUTO", {"cpu": ("hopper",)})
    monkeypatch.setattr(dispatch, "_available", {"hopper": None})
    try:
        from fa_ops.ops import prepared
        prepared._runs.clear(); prepared._ways.clear(); dispatch._selected.clear()
    except ImportError: pass
@pytest.mark.parametrize("options",[{}, {"return_lse":True},{"is_causal":True}])
@pytest.mark.parametrize("grad",[False,True])
def test_print(options,grad):
    x=torch.zeros(1,8,256,64,dtype=torch.bfloat16)
    fa_ops.attention(x[:,:,:128],x[:,:,:128],x[:,:,:128])  # imports
    q, k, v = (torch.zeros(1, 8, 256, 64, dtype=torch.bfloat16,requires_grad=grad) for _ in "qkv")
    for n in range(2):
        with Frames() as f: out=fa_ops.attention(q, k, v,**options)
        f.report(f"{options} grad={grad} call {n}")
        if grad:
            o=out[0] if isinstance(out,tuple) else out
            g=torch.zeros_like(o)
            # backward on this thread for CPU
            with Frames() as f: torch.autograd.grad(o,(q,k,v),g)
            f.report(f"   backward {n}")
        if n==1 or not (options or grad):
            for (file,name),c in f.entered.items(): print("     ",c,file.replace(PACKAGE,""),name)
