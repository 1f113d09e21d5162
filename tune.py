"""scratch"""
import itertools, sys, torch, time, json
from mdflash.recipe import read_recipe
from eval.random_models import random_pair
from mdflash.training.plan import target_config
import mdflash.decoding.fast.kernels as K
import mdflash.decoding.fast.head as H
from mdflash.decoding.build import *
from mdflash.target import grouped_attention
recipe,_=read_recipe(["--config","recipes/qwen3_8b.yaml"],"x")
t,d=random_pair(recipe,target_config(recipe,"tests/fixtures/qwen3_8b.json"),torch.device("cuda",0))
d=d.cast(torch.bfloat16)
place(t,d,"dspark","cuda:0")
def timed(f,n=100):
    for _ in range(5): f()
    a,b=(torch.cuda.Event(enable_timing=True) for _ in "ab"); a.record()
    for _ in range(n): f()
    b.record(); b.synchronize(); return a.elapsed_time(b)/n
def run(label, warps=None, q=(1,8)):
    out=[label]
    for method in ("autoregressive","dspark"):
        s=build_schedule(method,t,d if method=="dspark" else None,Sampling(),1,1500,Deployment("fast"))
        s.fill([0],[list(range(1024))],[0])
        g=s.target
        blk=s.block
        out.append(round(timed(lambda: g.verify(blk,None)),4))
        del s
    print(*out,flush=True)
with grouped_attention(t.model):
    run("base")
    for splits,keys in ((32,32),(16,64),(16,128),(8,128),(24,64),(32,128)):
        K.MOST_SPLITS,K.KEYS=splits,keys
        try: run(f"splits {splits} keys {keys}")
        except Exception as e: print(splits,keys,repr(e)[:200])
    K.MOST_SPLITS,K.KEYS=32,64
    s=build_schedule("autoregressive",t,None,Sampling(),1,1500,Deployment("fast")); s.fill([0],[list(range(1024))],[0])
    s.target.verify(s.block,None)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as p:
        s.target.verify(s.block,None); torch.cuda.synchronize()
    for e in sorted(p.key_averages(),key=lambda e:-e.self_device_time_total)[:24]: print(round(e.self_device_time_total,1),e.count,e.key[:90])
head=d.head
import triton
from mdflash.decoding.fast import head_kernels as HK
logits=torch.randn(1,7,151936,device="cuda",dtype=torch.bfloat16); first=torch.tensor([5],device="cuda")
from mdflash.decoding.fast.graphs import Graphed
orig=HK.score
class W:
    def __init__(s,w,st): s.w,s.st=w,st
    def __getitem__(s,g):
        def f(*a,**k):
            k["num_warps"]=s.w; k["num_stages"]=s.st; orig[g](*a,**k)
        return f
for block,w in itertools.product((32,64,128,256),(2,4,8)):
    H.BLOCK=block; HK.score=W(w,3)
    try:
        G=Graphed(lambda l,f: H.greedy_draft(l,f,head)); print("head",block,w,round(timed(lambda:G(logits,first)),4),flush=True)
    except Exception as e: print(block,w,repr(e)[:100])
