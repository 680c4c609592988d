// The run of keys that each token of a packed batch attends, in the packed keys. One thread a token; a token outside every sequence
// attends nothing.
extern "C" __global__ void __launch_bounds__(256) packed_runs(const int* ends_q, const int* ends_k, const int* kv_lens, int2* runs, int B,
                                                            int Tq, int Tk, int left, int right) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i >= Tq) return;
  const int b = sequence_of(ends_q, B, i);
  int2 run = make_int2(0, 0);
  if (b >= 0 && b < B) {
    const int first = max(0, ends_k[b]), end = min(Tk, ends_k[b + 1]);
    const int last = kv_lens && kv_lens[b] < end - first ? first + max(0, kv_lens[b]) : end;
    // ends may hold anything: only what is beyond every token differs from the exact difference
    const long long exact = (long long)i - ends_q[b + 1] + last;
    const int diagonal = (int)max((long long)-FAR, min((long long)FAR, exact));
    run.x = max(first, diagonal - left);
    run.y = min(last, diagonal + right + 1);
    if (run.y <= run.x) run = make_int2(0, 0);
  }
  runs[i] = run;
}
