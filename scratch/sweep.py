import itertools, torch, statistics
import nanproof.observe.kernels as K
dev=torch.device("cuda",0)
def timed(f,n=20):
    f(); f(); torch.cuda.synchronize(); r=[]
    for _ in range(3):
        a,b=torch.cuda.Event(enable_timing=True),torch.cuda.Event(enable_timing=True); a.record()
        for _ in range(n): f()
        b.record(); torch.cuda.synchronize(); r.append(a.elapsed_time(b)/n*1e3)
    return statistics.median(r)
for dt,n,count in ((torch.bfloat16, 8192*1024, 48),(torch.float32, 8192*1024, 24),(torch.bfloat16,8192*32000,1)):
    xs=[torch.empty(n,dtype=dt,device=dev).normal_() for _ in range(count)]
    total=sum(x.nbytes for x in xs); res=[]
    print(dt,count,"foreach inf us", round(timed(lambda: torch._foreach_norm(xs,torch.inf,dtype=torch.float32)),1), total/timed(lambda: torch._foreach_norm(xs,torch.inf,dtype=torch.float32))/1e6,"TB/s")
    for block,warps,progs in itertools.product((1024,2048,4096,8192),(4,8,16),(1056,2112,4224)):
        if block//(warps*32)>32 or block//(warps*32)<4: continue
        t=K.TritonTable(count,dev); t.full=True
        w=torch.tensor([*[x.data_ptr() for x in xs],*[0]*(64-count),*[n]*count,*[0]*(64-count),*range(count),*[0]*(64-count)],device=dev)
        p=max(32,min(256,progs//count))
        def go(): K._look[(p,count)](w,t._mode,t._table,K._NEAR[dt],min(K._NEAR[dt],0x57800000),K._DTYPES[dt],True,64,K.PROGRAMS,block,K.WIDTH,num_warps=warps)
        try: us=timed(go)
        except Exception as e: print(block,warps,repr(e)[:80]); continue
        res.append((us,block,warps,progs,round(total/us/1e6,2)))
    res.sort(); print(dt,count,res[:6],"...",[r for r in res if r[1:4]==(2048,8,2112)])
