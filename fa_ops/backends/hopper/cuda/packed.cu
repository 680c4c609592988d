// The run of keys that each token of a packed batch attends, in the packed keys. One thread a token; a token outside every sequence
// attends nothing.
extern "C" __global__ void __launch_bounds__(256) packed_runs(const int* ends_q, const int* ends_k, const int* kv_lens, int2* runs, int B,
                                                            int Tq, int Tk, int left, int right) {
  const bool sorted_q = are_sorted(ends_q, B), sorted_k = are_sorted(ends_k, B);
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i >= Tq) return;
  const int b = sequence_of(ends_q, B, i, sorted_q);
  int2 run = make_int2(0, 0);
  if (b >= 0 && b < B) {
    const int first = border_of(ends_k, b, Tk, sorted_k), end = border_of(ends_k, b + 1, Tk, sorted_k);
    const int last = kv_lens ? first + max(0, min(kv_lens[b], end - first)) : end;
    const int diagonal = i + last - border_of(ends_q, b + 1, Tq, sorted_q);
    run.x = max(first, diagonal - left);
    run.y = min(last, diagonal + right + 1);
    if (run.y <= run.x) run = make_int2(0, 0);
  }
  runs[i] = run;
}
