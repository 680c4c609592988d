import torch, sys, collections, traceback
torch.set_num_threads(1)
from fa_ops.testing import *
from fa_ops.testing.isolation import *
from fa_ops.testing.arena import Arena
bad=collections.Counter(); ex={}
for backend in ("reference","cpu"):
  for s in range(60):
    op=OPERANDS[s%7]; num=NUMBERS[s//7%3]
    fixed={"attn_mask":dict(mask="float",mask_shape=(1,1,1,1)),"sinks":dict(sinks=True),"alibi_slopes":dict(alibi="heads")}.get(op,{})
    fixed=dict(fixed,layout=("bhsd","bshd")[s%2])
    case=random_case(s,poison=f"{num} {op}",**fixed)
    if s%5==4:
        import dataclasses; case=PackedCase((5,0,17,33),(9,4,0,47),0,dataclasses.replace(case,mask=None,key_ranges=None,broken=False))
        if op=="attn_mask": continue
    try: assert_close_to_oracle(case,backend,arena=Arena())
    except AssertionError as e: bad[backend,num,op]+=1; ex[backend,num,op]=str(e)
    except Exception as e: traceback.print_exc(); print(case); sys.exit()
for k in bad: print(k,bad[k],ex[k][-150:])
