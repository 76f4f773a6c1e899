// Counts the edges that GCC's -fsanitize-coverage=trace-pc reports: a table of 64 Ki byte counters,
// addressed by a hash of this block and the one before. Compiled without that flag itself.
#include <cstdint>

namespace {
constexpr unsigned kCounters = 1 << 16;
unsigned char counters[kCounters];
thread_local uintptr_t previous = 0;
}  // namespace

extern "C" {
__attribute__((visibility("default"))) unsigned char* fuzz_counters() { return counters; }
__attribute__((visibility("default"))) int fuzz_counter_count() { return kCounters; }

__attribute__((visibility("default"))) void __sanitizer_cov_trace_pc() {
  const auto here = reinterpret_cast<uintptr_t>(__builtin_return_address(0));
  const uintptr_t hash = (here ^ (previous * 0x9e3779b97f4a7c15u)) * 0xff51afd7ed558ccdu;
  unsigned char& counter = counters[hash >> 48];
  if (counter != 255) ++counter;  // threads may lose a count, never more
  previous = here;
}
}
