// Measures the latency of a channel between two ranks of tests/labs/rdma_lab, for a comparison with
// ib_write_lat. tests/labs/rdma_speed_rank.py runs it. Rank 0 prints one line:
//
//   rdma_measure SIZE COUNT SLOTS SLOT_BYTES
#include <algorithm>
#include <chrono>
#include <cstdio>

#include "tests/rdma_lab.h"

namespace {

using namespace adaptive;           // NOLINT: a test
using namespace adaptive::testing;  // NOLINT
using Clock = std::chrono::steady_clock;

constexpr int kWarmUp = 50;

// Reads the processor's counter, as perftest does. In the lab's virtual machines, reading the clock
// is a system call, which takes longer than a message.
std::uint64_t ticks() {
#if defined(__x86_64__)
  return __builtin_ia32_rdtsc();
#else
  return static_cast<std::uint64_t>(Clock::now().time_since_epoch().count());
#endif
}

double since_us(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

void latency(Lab& lab, End& end, std::size_t size, int count) {
  const Bytes data(size);
  // No owner is needed, because the memory lives until the program ends.
  const Keeper keeper{[](void*) { return std::shared_ptr<void>(); }, nullptr};
  std::vector<double> half_us;
  half_us.reserve(static_cast<std::size_t>(count));
  lab.meet();
  const auto began = Clock::now();
  const std::uint64_t began_ticks = ticks();
  for (int i = 0; i < count + kWarmUp; ++i) {
    const std::uint64_t start = ticks();
    if (lab.rank() == 1) {
      take_arrival(end);
    }
    end.sender->send(message_of(size, 0), data.data(), keeper);
    if (lab.rank() == 0) {
      take_arrival(end);
      if (i >= kWarmUp) {
        half_us.push_back(static_cast<double>(ticks() - start) / 2);
      }
    }
  }
  if (lab.rank() == 0) {
    const double us_per_tick = since_us(began) / static_cast<double>(ticks() - began_ticks);
    double sum = 0;
    for (double& us : half_us) {
      us *= us_per_tick;
      sum += us;
    }
    std::sort(half_us.begin(), half_us.end());
    const std::size_t n = half_us.size();
    std::printf("latency %zu B: min %.2f median %.2f mean %.2f p99 %.2f us\n", size, half_us[0],
                half_us[n / 2], sum / static_cast<double>(n), half_us[n * 99 / 100]);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr, "usage: rdma_measure SIZE COUNT SLOTS SLOT_BYTES\n");
    return 2;
  }
  Lab lab;
  RdmaOptions options;
  options.slots = static_cast<unsigned>(std::stoul(argv[3]));
  options.slot_bytes = std::stoul(argv[4]);
  End end = lab.open(options);
  latency(lab, end, std::stoul(argv[1]), std::stoi(argv[2]));
  close(end);
  lab.meet();
  return 0;
}
